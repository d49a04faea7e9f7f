/* See bus_knock.h. Loop thread only; a knock owns its descriptor, or a timer when the outcome is
 * known at once, so that the caller always hears of it later. */
#include "proto/bus_knock.h"

#include <errno.h>
#include <netdb.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct BusKnock {
    int fd; /* -1: the outcome is known */
    LoopFd *watch;
    LoopTimer *timer;
    bool refused;
    BusKnockFn fn;
    void *arg;
};

static bool is_ipc(const char *endpoint) {
    return strncmp(endpoint, "ipc://", 6) == 0;
}

int bus_knock_ipc(const char *endpoint) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    const char *path = endpoint + 6;
    size_t n = strlen(path);
    if (!is_ipc(endpoint) || n == 0 || n >= sizeof addr.sun_path)
        return EINVAL;
    memcpy(addr.sun_path, path, n);
    if (path[0] == '@')
        addr.sun_path[0] = '\0'; /* a name without a file */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    socklen_t len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    int rc = connect(fd, (struct sockaddr *)&addr, len) == 0 ? 0 : errno;
    close(fd);
    return rc;
}

/* A descriptor on its way to connection in *fd, or the errno of its end. */
static int connect_tcp(const char *endpoint, const char *address, int *fd) {
    const char *colon = strrchr(endpoint, ':');
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
    struct addrinfo *info;
    if (!colon || getaddrinfo(address, colon + 1, &hints, &info) != 0)
        return EINVAL;
    *fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int rc = *fd >= 0 && connect(*fd, info->ai_addr, info->ai_addrlen) == 0 ? 0 : errno;
    freeaddrinfo(info);
    return rc;
}

static void on_known(void *arg) {
    BusKnock *k = arg;
    k->fn(k->arg, k->refused);
}

static void on_fd(void *arg, int events) {
    BusKnock *k = arg;
    (void)events; /* a refusal comes as an error of polling */
    int code = 0;
    socklen_t n = sizeof code;
    bool known = getsockopt(k->fd, SOL_SOCKET, SO_ERROR, &code, &n) == 0;
    loop_fd_events(k->watch, 0);
    k->fn(k->arg, known && code == ECONNREFUSED);
}

BusKnock *bus_knock_new(Loop *loop, const char *endpoint, const char *address, BusKnockFn fn,
                        void *arg) {
    BusKnock *k = xcalloc(1, sizeof *k);
    k->fd = -1;
    k->fn = fn;
    k->arg = arg;
    int rc;
    if (is_ipc(endpoint)) {
        rc = bus_knock_ipc(endpoint);
        k->refused = rc == ECONNREFUSED || rc == ENOENT; /* an orderly end removes the file */
    } else {
        rc = connect_tcp(endpoint, address, &k->fd);
        k->refused = rc == ECONNREFUSED;
    }
    if (rc == EINPROGRESS)
        k->watch = loop_fd_new(loop, k->fd, UV_WRITABLE, on_fd, k);
    if (!k->watch)
        k->timer = loop_timer_new(loop, 0, 0, on_known, k);
    return k;
}

void bus_knock_free(BusKnock *k) {
    if (!k)
        return;
    loop_fd_free(k->watch);
    loop_timer_free(k->timer);
    if (k->fd >= 0)
        close(k->fd);
    free(k);
}
