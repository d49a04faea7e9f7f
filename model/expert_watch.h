/* Whether the remote experts answer: told by the steps, and by a probe on the engine thread each
 * second in which no step ran. Loop thread; probe runs on the engine thread. */
#pragma once

#include "model/stepper.h"

typedef struct ExpertWatch ExpertWatch;

enum { EXPERT_WATCH_MS = 1000 };

typedef struct ExpertWatchConf {
    Loop *loop;
    Stepper *stepper;
    /* 0 when every remote expert answers; bounded in time. NULL: there are none, always up. */
    int (*probe)(void *arg, Err *err);
    void *probe_arg;
    LoopFn on_change; /* up became down or the other way round */
    void *arg;
} ExpertWatchConf;

/* Down until the first probe has succeeded. */
ExpertWatch *expert_watch_new(const ExpertWatchConf *conf);
/* After stepper_close. NULL is a no-op. */
void expert_watch_free(ExpertWatch *w);

/* What a step found. */
void expert_watch_worked(ExpertWatch *w);
void expert_watch_failed(ExpertWatch *w, const char *reason);

bool expert_watch_up(const ExpertWatch *w);
/* Why it is down; "" while up. */
const char *expert_watch_reason(const ExpertWatch *w);
