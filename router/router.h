/* The router daemon: its parts tied together, from start to drain. Loop thread only. */
#pragma once

#include "base/loop.h"
#include "router/options.h"

typedef struct Router Router;

/* Reads the model's folder, starts listening and connecting. opt is borrowed until router_close. */
int router_open(Router **out, Loop *loop, const Options *opt, Err *err);
/* The port that clients connect to. */
int router_port(const Router *r);
/* Not ready from now on, refuses new requests, lets running ones finish within [limits] drain_ms,
 * ends the rest with an error and then stops the loop. A LoopFn. */
void router_stop(void *router);
/* After loop_run. NULL is a no-op. */
void router_close(Router *r);

/* After drain_ms, router_stop takes at most this long. */
enum { ROUTER_STOP_MS = 6000 };
