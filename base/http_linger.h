/* Lingering close. Closing a socket with unread bytes resets the connection, and the peer may lose
 * an answer that is already on its way. A linger keeps the socket open for a bounded time and
 * throws away what still comes. Loop thread only. */
#pragma once

#include "base/loop.h"

typedef struct HttpLinger HttpLinger;

/* The lingering sockets of one server. Embedded; zero-initialise but for loop and max. */
typedef struct HttpLingers {
    Loop *loop;
    int max; /* sockets at a time */
    int n;
    HttpLinger *list;
} HttpLingers;

/* Lingers on a duplicate of fd, which stays the caller's to close. Does nothing when max sockets
 * linger already. */
void http_linger_start(HttpLingers *all, int fd);
/* Closes every one at once. */
void http_linger_stop_all(HttpLingers *all);
