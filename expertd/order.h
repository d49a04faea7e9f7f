/* The order in which a worker takes what waits: small things before large ones, each kind by
 * arrival.
 *
 * A large thing that waits is passed by at most ORDER_BURST small ones in a row; so neither kind
 * keeps the other from its turn. Any threads push, one thread pops. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct Order Order;

enum { ORDER_BURST = 64 };

/* capacity: of both kinds together. */
Order *order_new(int capacity);
/* Forgets what is left in it; the things belong to whoever pushed them. NULL is a no-op. */
void order_free(Order *o);

/* False, at once, when capacity things wait or the order is closed. */
bool order_push(Order *o, void *item, bool small);
/* Takes the next thing, waiting at most timeout_ms (negative: until there is one or the order is
 * closed). NULL when none; at once when closed, whatever still waits. */
void *order_pop(Order *o, int64_t timeout_ms);
/* Takes the next small thing if there is one, for work inside of a large thing: this does not count
 * as passing by. Never waits. */
void *order_pop_small(Order *o);
/* Nothing more goes in or comes out; a waiting pop returns. */
void order_close(Order *o);
int order_length(Order *o);
