/* Expert calls: checked on the loop thread, computed by one worker thread, answered on the loop
 * thread.
 *
 * Calls of at most STORE_SMALL_ROWS go ahead of larger ones, and inside of a running larger one
 * where the store allows it; a larger one still gets its turn (order.h). At most SERVE_QUEUE calls
 * wait; a call beyond that is answered with FAIL_BUSY. A caller that is gone by the time its answer
 * is ready costs nothing more. */
#pragma once

#include "base/loop.h"
#include "expertd/store.h"
#include "proto/bus.h"

enum { SERVE_QUEUE = 256, SERVE_STUCK_MS = 30000 };

typedef struct Serve Serve;

/* Starts the worker. store must outlive it. */
int serve_open(Serve **out, Loop *loop, Store *store, const Shape *shape, int max_rows,
               uint64_t generation, const char *shm_name, Err *err);
/* Waits for the call being computed, drops the others. After the loop has ended: what it still
 * holds of the worker's posts is never run. */
void serve_close(Serve *s);

/* For BusCallbacks.on_message and on_event of the daemon's server. */
void serve_on_message(Serve *s, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                      size_t blob_len);
void serve_on_gone(Serve *s, BusPeer *peer);

/* Refuses every call that comes from now on; what was accepted is answered. */
void serve_drain(Serve *s);
/* Calls accepted and not yet answered. */
int serve_n_waiting(const Serve *s);
/* False when the worker has been at one call for more than SERVE_STUCK_MS. */
bool serve_alive(const Serve *s);
