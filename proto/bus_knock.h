/* Asks the system whether anybody still listens where a peer was: a refused connection is proof
 * that nobody does, any other failure (no route, no answer, no descriptor left here) proves
 * nothing. Loop thread only. */
#pragma once

#include "base/loop.h"

#include <stdbool.h>

typedef struct BusKnock BusKnock;
/* refused: nobody listens there. Called at most once, from the loop; it may free the knock. */
typedef void (*BusKnockFn)(void *arg, bool refused);

/* Starts one connection to endpoint and gives it up as soon as its outcome is known. For "tcp://"
 * the host is `address`, the numeric address that the peer had ("" answers false: nothing is known
 * of it); for "ipc://" it is not used. Both are borrowed for the call. The knock is the caller's.
 */
BusKnock *bus_knock_new(Loop *loop, const char *endpoint, const char *address, BusKnockFn fn,
                        void *arg);
/* No call happens after it returns. NULL is a no-op. */
void bus_knock_free(BusKnock *k);

/* Connects to an "ipc://" endpoint: 0 when somebody listens, else the system's errno. Never waits.
 */
int bus_knock_ipc(const char *endpoint);
