/* A client for the HTTP tests. Any thread; no state. */
#include "http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

int client_connect(int port) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval limit = {.tv_sec = 10};
    addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&addr, sizeof addr) == 0)
        return fd;
    close(fd);
    return -1;
}

int client_send(int fd, const void *bytes, size_t n) {
    for (size_t done = 0; done < n;) {
        ssize_t w = send(fd, (const char *)bytes + done, n - done, MSG_NOSIGNAL);
        if (w <= 0)
            return 0;
        done += (size_t)w;
    }
    return 1;
}

int client_read_all(int fd, Buf *out) {
    char part[65536];
    for (;;) {
        ssize_t n = recv(fd, part, sizeof part, 0);
        if (n <= 0)
            return (int)n;
        buf_put(out, part, (size_t)n);
    }
}

/* Appends n bytes, or up to and with the first line end for n < 0. */
static int read_exactly(int fd, long n, Buf *out) {
    char c;
    for (long i = 0; n < 0 || i < n; i++) {
        if (recv(fd, &c, 1, 0) != 1)
            return -1;
        buf_put(out, &c, 1);
        if (n < 0 && c == '\n')
            return 0;
    }
    return 0;
}

static int read_chunks(int fd, Buf *body) {
    for (;;) {
        Buf line = {0};
        int rc = read_exactly(fd, -1, &line);
        long n = rc ? -1 : strtol(line.data, NULL, 16);
        buf_done(&line);
        if (n < 0 || read_exactly(fd, n, body) || read_exactly(fd, 2, &line)) {
            buf_done(&line);
            return -1;
        }
        buf_done(&line);
        if (n == 0)
            return 0;
    }
}

int client_read_answer(int fd, Buf *head, Buf *body) {
    for (size_t before = head->len; head->len - before != 2;) {
        before = head->len;
        if (read_exactly(fd, -1, head))
            return -1;
    }
    const char *length = strcasestr(head->data, "\r\nContent-Length:");
    if (strcasestr(head->data, "\r\nTransfer-Encoding: chunked"))
        return read_chunks(fd, body);
    return length ? read_exactly(fd, strtol(length + 17, NULL, 10), body) : 0;
}

int client_ask(int port, const char *request_line, const void *body, size_t n, Buf *head,
               Buf *answer) {
    Buf request = {0};
    buf_printf(&request, "%s HTTP/1.1\r\nHost: test\r\nContent-Length: %zu\r\n\r\n", request_line,
               n);
    buf_put(&request, body, n);
    int fd = client_connect(port);
    int rc = fd >= 0 && client_send(fd, request.data, request.len)
                 ? client_read_answer(fd, head, answer)
                 : -1;
    if (fd >= 0)
        close(fd);
    buf_done(&request);
    return rc;
}
