/* The server that the HTTP tests talk to: its handlers by path, and the loop that serves a client
 * thread.
 *
 * /late answers after 50 ms, /never waits for ever, /stream sends three pieces, /broken the same
 * and then fails, /open sends "hello" and waits, /flood sends until the stream refuses, everything
 * else is echoed as "METHOD PATH X-TAG BODY". */
#pragma once

#include "base/httpd.h"

#include <stdatomic.h>
#include <stdint.h>

enum { BODY_MAX = 100000, STREAM_MAX = 200000 };

/* One test's server. The loop thread owns it; the client thread reads port and the atomics. */
typedef struct Server {
    Loop *loop;
    Httpd *h;
    int port;
    atomic_int n_waiting, n_gone;
    atomic_size_t n_accepted; /* bytes that the flood got rid of */
} Server;

extern Server srv;

HttpdConf server_conf(void);
int server_open(Httpd **out, const HttpdConf *conf, Err *err);
void server_start(const HttpdConf *conf);
/* Serves until the client function, which runs on its own thread and must not assert, returns. */
void server_serve(void (*client)(void));
void server_stop(void);
/* Start, serve, stop; conf NULL for the usual one. */
void server_run(const HttpdConf *conf, void (*client)(void));

/* Waits up to 5 s for *value to reach n and returns the milliseconds it took, or -1. */
int64_t wait_for(atomic_int *value, int n);
void sleep_ms(int ms);
