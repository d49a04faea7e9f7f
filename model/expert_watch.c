/* See expert_watch.h. `err` and `status` belong to the engine thread while the probe runs. */
#include "model/expert_watch.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>

struct ExpertWatch {
    ExpertWatchConf conf;
    LoopTimer *timer;
    StepTask task;
    bool probing, up;
    int64_t heard_ms; /* last success of a step or probe */
    int status;       /* of the last probe */
    Err err;
    char reason[sizeof((Err *)0)->text];
};

static void change(ExpertWatch *w, bool up, const char *reason) {
    bool changed = up != w->up;
    w->up = up;
    snprintf(w->reason, sizeof w->reason, "%s", reason);
    if (changed)
        w->conf.on_change(w->conf.arg);
}

static void run_probe(StepTask *t) {
    ExpertWatch *w = t->arg;
    w->err = (Err){0};
    w->status = w->conf.probe(w->conf.probe_arg, &w->err);
}

static void on_probed(StepTask *t) {
    ExpertWatch *w = t->arg;
    w->probing = false;
    if (w->status)
        expert_watch_failed(w, w->err.text);
    else
        expert_watch_worked(w);
}

static void on_timer(void *arg) {
    ExpertWatch *w = arg;
    bool idle = clock_now_ms() - w->heard_ms >= EXPERT_WATCH_MS;
    if (!w->probing && (idle || !w->up))
        w->probing = stepper_put(w->conf.stepper, &w->task);
}

ExpertWatch *expert_watch_new(const ExpertWatchConf *conf) {
    ExpertWatch *w = xcalloc(1, sizeof *w);
    w->conf = *conf;
    w->task = (StepTask){.run = run_probe, .done = on_probed, .arg = w};
    w->up = !conf->probe;
    if (conf->probe) {
        snprintf(w->reason, sizeof w->reason, "experts have not answered yet");
        w->timer = loop_timer_new(conf->loop, 0, EXPERT_WATCH_MS, on_timer, w);
    }
    return w;
}

void expert_watch_free(ExpertWatch *w) {
    if (!w)
        return;
    loop_timer_free(w->timer);
    free(w);
}

void expert_watch_worked(ExpertWatch *w) {
    w->heard_ms = clock_now_ms();
    change(w, true, "");
}

void expert_watch_failed(ExpertWatch *w, const char *reason) {
    if (w->conf.probe)
        change(w, false, reason);
}

bool expert_watch_up(const ExpertWatch *w) {
    return w->up;
}

const char *expert_watch_reason(const ExpertWatch *w) {
    return w->reason;
}
