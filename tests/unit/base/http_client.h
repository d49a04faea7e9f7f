/* A client for the HTTP tests: plain blocking sockets with a deadline, so that every byte on the
 * wire is the test's. */
#pragma once

#include "base/buf.h"

/* A connection to 127.0.0.1:port whose reads and writes give up after 10 s, or -1. */
int client_connect(int port);
/* False when the peer did not take all of it. */
int client_send(int fd, const void *bytes, size_t n);
/* Appends what comes until the peer closes (0) or something fails (-1). */
int client_read_all(int fd, Buf *out);
/* Appends one answer: head and body by Content-Length or chunks (decoded). 0; -1 when the
 * connection ended before the answer did. */
int client_read_answer(int fd, Buf *head, Buf *body);
/* Connects, sends the request line and headers ("Host" is added) with the body, reads the answer,
 * closes. */
int client_ask(int port, const char *request_line, const void *body, size_t n, Buf *head,
               Buf *answer);
