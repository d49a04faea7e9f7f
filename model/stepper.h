/* The engine thread of a daemon: runs tasks one after the other and hands each back to the loop.
 *
 * A task belongs to the engine thread from stepper_put until its done is called on the loop; the
 * loop does not touch what the task uses in between. */
#pragma once

#include "base/err.h"
#include "base/loop.h"

#include <stdbool.h>
#include <stdint.h>

enum { STEPPER_QUEUE = 64 };

typedef struct Stepper Stepper;

/* Embedded in what the task works on; zero-initialise, then set run and done. */
typedef struct StepTask StepTask;
struct StepTask {
    void (*run)(StepTask *t);  /* engine thread */
    void (*done)(StepTask *t); /* loop thread, once for each put */
    void *arg;
    int64_t put_us, begin_us, end_us; /* when it was put and run, for done */
};

int stepper_open(Stepper **out, Loop *loop, Err *err);
/* Waits for the task that runs; tasks that wait are dropped. Called when the loop has ended: what
 * it was still to call done for is not called any more. NULL is a no-op. */
void stepper_close(Stepper *s);

/* Loop thread. False when STEPPER_QUEUE tasks wait. */
bool stepper_put(Stepper *s, StepTask *t);

/* Whether the thread is idle or has begun its task less than limit_ms ago. Any thread. */
bool stepper_alive(const Stepper *s, int64_t limit_ms);
