/* Listening sockets of the HTTP server. Start-up only. */
#include "base/http_listen.h"

#include <ctype.h>
#include <errno.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LISTEN_BACKLOG 1024

static int listen_failed(const char *host, int port, const char *why, Err *err) {
    bool v6 = strchr(host, ':') != NULL;
    return err_set(err, E_IO, "cannot listen on %s%s%s:%d: %c%s", v6 ? "[" : "", host,
                   v6 ? "]" : "", port, tolower((unsigned char)*why), why + 1);
}

int http_listen_open(const char *host, int port, int *out, Err *err) {
    if (port < 0 || port > 65535)
        return listen_failed(host, port, "no such port", err);
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *addr;
    int rc = getaddrinfo(host, service, &hints, &addr);
    if (rc)
        return listen_failed(host, port, gai_strerror(rc), err);
    int fd = socket(addr->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1,
        off = 0;
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0;
    if (ok && addr->ai_family == AF_INET6) /* "::" takes IPv4 as well */
        ok = setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0;
    ok = ok && bind(fd, addr->ai_addr, addr->ai_addrlen) == 0 && listen(fd, LISTEN_BACKLOG) == 0;
    int why = errno;
    freeaddrinfo(addr);
    if (ok) {
        *out = fd;
        return 0;
    }
    if (fd >= 0)
        close(fd);
    return listen_failed(host, port, strerror(why), err);
}

int http_listen_port(int fd) {
    union {
        struct sockaddr_storage any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } addr = {0};
    socklen_t len = sizeof addr;
    if (getsockname(fd, (struct sockaddr *)&addr, &len) < 0)
        return 0;
    return addr.any.ss_family == AF_INET    ? ntohs(addr.v4.sin_port)
           : addr.any.ss_family == AF_INET6 ? ntohs(addr.v6.sin6_port)
                                            : 0;
}
