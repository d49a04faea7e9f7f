/* See order.h: two rings under one lock. */
#include "expertd/order.h"

#include "base/err.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef struct Ring {
    void **item; /* [capacity] */
    int head, length;
} Ring;

enum { LARGE, SMALL };

struct Order {
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t filled;
    Ring ring[2];
    int capacity;
    int passed; /* small ones taken in a row while a large one waited */
    bool closed;
};

Order *order_new(int capacity) {
    CHECK(capacity > 0);
    Order *o = xcalloc(1, sizeof *o);
    o->capacity = capacity;
    for (int i = 0; i < 2; i++)
        o->ring[i].item = xcalloc((size_t)capacity, sizeof(void *));
    pthread_mutex_init(&o->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&o->filled, &attr);
    pthread_condattr_destroy(&attr);
    return o;
}

void order_free(Order *o) {
    if (!o)
        return;
    pthread_cond_destroy(&o->filled);
    pthread_mutex_destroy(&o->lock);
    for (int i = 0; i < 2; i++)
        free(o->ring[i].item);
    free(o);
}

bool order_push(Order *o, void *item, bool small) {
    CHECK(item);
    pthread_mutex_lock(&o->lock);
    bool ok = !o->closed && o->ring[SMALL].length + o->ring[LARGE].length < o->capacity;
    if (ok) {
        Ring *r = &o->ring[small ? SMALL : LARGE];
        r->item[(r->head + r->length++) % o->capacity] = item;
        pthread_cond_signal(&o->filled);
    }
    pthread_mutex_unlock(&o->lock);
    return ok;
}

/* Under the lock; NULL when the ring is empty. */
static void *take(Order *o, Ring *r) {
    if (r->length == 0)
        return NULL;
    void *item = r->item[r->head];
    r->head = (r->head + 1) % o->capacity;
    r->length--;
    return item;
}

static void *take_next(Order *o) {
    bool large_waits = o->ring[LARGE].length > 0;
    void *item = large_waits && o->passed >= ORDER_BURST ? NULL : take(o, &o->ring[SMALL]);
    o->passed = item && large_waits ? o->passed + 1 : 0;
    return item ? item : take(o, &o->ring[LARGE]);
}

static struct timespec moment_in(int64_t ms) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t ns = t.tv_nsec + ms % 1000 * 1000000;
    t.tv_sec += ms / 1000 + ns / 1000000000;
    t.tv_nsec = ns % 1000000000;
    return t;
}

void *order_pop(Order *o, int64_t timeout_ms) {
    struct timespec until = moment_in(timeout_ms < 0 ? 0 : timeout_ms);
    void *item = NULL;
    pthread_mutex_lock(&o->lock);
    while (!o->closed && !(item = take_next(o)) && timeout_ms != 0) {
        int rc = timeout_ms < 0 ? pthread_cond_wait(&o->filled, &o->lock)
                                : pthread_cond_timedwait(&o->filled, &o->lock, &until);
        if (rc == ETIMEDOUT) {
            item = o->closed ? NULL : take_next(o);
            break;
        }
    }
    pthread_mutex_unlock(&o->lock);
    return item;
}

void *order_pop_small(Order *o) {
    pthread_mutex_lock(&o->lock);
    void *item = o->closed ? NULL : take(o, &o->ring[SMALL]);
    pthread_mutex_unlock(&o->lock);
    return item;
}

void order_close(Order *o) {
    pthread_mutex_lock(&o->lock);
    o->closed = true;
    pthread_cond_broadcast(&o->filled);
    pthread_mutex_unlock(&o->lock);
}

int order_length(Order *o) {
    pthread_mutex_lock(&o->lock);
    int n = o->ring[SMALL].length + o->ring[LARGE].length;
    pthread_mutex_unlock(&o->lock);
    return n;
}
