/* See stepper.h. `begun_ms` is written by the engine thread and read by any. */
#include "model/stepper.h"

#include "base/clock.h"
#include "base/queue.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct Stepper {
    Loop *loop;
    Queue *queue;
    pthread_t thread;
    _Atomic int64_t begun_ms; /* of the task that runs, 0: idle */
};

static void on_done(void *arg) {
    StepTask *t = arg;
    t->done(t);
}

static void *thread_main(void *arg) {
    Stepper *s = arg;
    for (StepTask *t; (t = queue_pop(s->queue, -1));) {
        t->begin_us = clock_now_us();
        atomic_store(&s->begun_ms, t->begin_us / 1000 + 1);
        t->run(t);
        t->end_us = clock_now_us();
        atomic_store(&s->begun_ms, 0);
        CHECK(loop_post(s->loop, on_done, t)); /* there are few tasks, and the loop outlives us */
    }
    return NULL;
}

int stepper_open(Stepper **out, Loop *loop, Err *err) {
    Stepper *s = xcalloc(1, sizeof *s);
    s->loop = loop;
    s->queue = queue_new(STEPPER_QUEUE);
    int rc = pthread_create(&s->thread, NULL, thread_main, s);
    if (rc) {
        queue_free(s->queue);
        free(s);
        return err_set(err, E_IO, "cannot start the engine thread: %s", strerror(rc));
    }
    *out = s;
    return 0;
}

void stepper_close(Stepper *s) {
    if (!s)
        return;
    while (queue_pop(s->queue, 0))
        ;
    queue_close(s->queue);
    pthread_join(s->thread, NULL);
    queue_free(s->queue);
    free(s);
}

bool stepper_put(Stepper *s, StepTask *t) {
    t->put_us = clock_now_us();
    return queue_push(s->queue, t);
}

bool stepper_alive(const Stepper *s, int64_t limit_ms) {
    int64_t begun = atomic_load(&s->begun_ms);
    return begun == 0 || clock_now_ms() + 1 - begun < limit_ms;
}
