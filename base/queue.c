/* A bounded queue of pointers between threads: a ring under one lock. */
#include "base/queue.h"

#include "base/err.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>

struct Queue {
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t filled;
    void **ring; /* [capacity] */
    int capacity, head, length;
    bool closed;
};

Queue *queue_new(int capacity) {
    CHECK(capacity > 0);
    Queue *q = xcalloc(1, sizeof *q);
    q->ring = xcalloc((size_t)capacity, sizeof *q->ring);
    q->capacity = capacity;
    pthread_mutex_init(&q->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&q->filled, &attr);
    pthread_condattr_destroy(&attr);
    return q;
}

void queue_free(Queue *q) {
    if (!q)
        return;
    pthread_cond_destroy(&q->filled);
    pthread_mutex_destroy(&q->lock);
    free(q->ring);
    free(q);
}

bool queue_push(Queue *q, void *item) {
    CHECK(item);
    pthread_mutex_lock(&q->lock);
    bool ok = !q->closed && q->length < q->capacity;
    if (ok) {
        q->ring[(q->head + q->length) % q->capacity] = item;
        q->length++;
        pthread_cond_signal(&q->filled);
    }
    pthread_mutex_unlock(&q->lock);
    return ok;
}

static struct timespec deadline_in(int64_t ms) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

void *queue_pop(Queue *q, int64_t timeout_ms) {
    struct timespec deadline = timeout_ms > 0 ? deadline_in(timeout_ms) : (struct timespec){0};
    pthread_mutex_lock(&q->lock);
    while (q->length == 0 && !q->closed && timeout_ms != 0) {
        if (timeout_ms < 0)
            pthread_cond_wait(&q->filled, &q->lock);
        else if (pthread_cond_timedwait(&q->filled, &q->lock, &deadline) == ETIMEDOUT)
            break;
    }
    void *item = NULL;
    if (q->length > 0) {
        item = q->ring[q->head];
        q->head = (q->head + 1) % q->capacity;
        q->length--;
    }
    pthread_mutex_unlock(&q->lock);
    return item;
}

void queue_close(Queue *q) {
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_broadcast(&q->filled);
    pthread_mutex_unlock(&q->lock);
}

int queue_length(Queue *q) {
    pthread_mutex_lock(&q->lock);
    int n = q->length;
    pthread_mutex_unlock(&q->lock);
    return n;
}
