/* A bounded queue of pointers between threads: many producers, many consumers. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

typedef struct Queue Queue;

Queue *queue_new(int capacity);
/* Drops what is left in it: whoever cares empties it first. */
void queue_free(Queue *q);

/* Appends item. False, at once, when the queue is full or closed. */
bool queue_push(Queue *q, void *item);

/* Takes the oldest item, waiting at most timeout_ms (0: not at all, negative: until an item comes
 * or the queue closes). NULL when none. */
void *queue_pop(Queue *q, int64_t timeout_ms);

/* No more items come in; waiting consumers wake up once it is empty. */
void queue_close(Queue *q);

int queue_length(Queue *q);
