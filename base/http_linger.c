/* Lingering close of refused uploads. Loop thread only. */
#include "base/http_linger.h"

#include "base/err.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINGER_MS        5000
#define LINGER_BYTES_MAX (64 << 20)
/* Read per event, so that a fast sender does not hold the loop. */
#define LINGER_BYTES_PER_EVENT (1 << 20)

struct HttpLinger {
    HttpLinger *prev, *next;
    HttpLingers *all;
    int fd; /* ours */
    int64_t n_bytes;
    LoopFd *watch;
    LoopTimer *deadline;
};

static void linger_end(void *arg) {
    HttpLinger *l = arg;
    loop_fd_free(l->watch);
    loop_timer_free(l->deadline);
    close(l->fd);
    if (l->prev)
        l->prev->next = l->next;
    else
        l->all->list = l->next;
    if (l->next)
        l->next->prev = l->prev;
    l->all->n--;
    free(l);
}

static void on_linger(void *arg, int events) {
    HttpLinger *l = arg;
    char scrap[65536];
    for (int64_t stop = l->n_bytes + LINGER_BYTES_PER_EVENT; events > 0 && l->n_bytes < stop;) {
        ssize_t n = recv(l->fd, scrap, sizeof scrap, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0 || (l->n_bytes += n) > LINGER_BYTES_MAX) {
            linger_end(l);
            return;
        }
    }
    if (events < 0)
        linger_end(l);
}

void http_linger_start(HttpLingers *all, int fd) {
    int mine = all->n < all->max ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (mine < 0)
        return;
    HttpLinger *l = xcalloc(1, sizeof *l);
    l->all = all;
    l->fd = mine;
    l->watch = loop_fd_new(all->loop, mine, UV_READABLE, on_linger, l);
    l->deadline = loop_timer_new(all->loop, LINGER_MS, 0, linger_end, l);
    l->next = all->list;
    if (l->next)
        l->next->prev = l;
    all->list = l;
    all->n++;
}

void http_linger_stop_all(HttpLingers *all) {
    while (all->list)
        linger_end(all->list);
}
