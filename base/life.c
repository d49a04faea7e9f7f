/* See life.h. */
#include "base/life.h"

#include "base/log.h"

#include <stdlib.h>

enum { LAST_WORDS_MS = 3000 }; /* for what abort causes, before the process ends by force */

struct Life {
    LifeConf conf;
    Admin *admin;
    LoopTimer *drain_timer;
    bool draining, said, was_ready;
    int status;
};

static void on_drain_timeout(void *arg) {
    Life *l = arg;
    LOG_WARN("not all work ended within %lld ms, ending it", (long long)l->conf.drain_ms);
    l->conf.abort(l->conf.arg);
}

static void drain(Life *l) {
    if (l->draining)
        return;
    l->draining = true;
    l->drain_timer = loop_timer_new(l->conf.loop, l->conf.drain_ms, 0, on_drain_timeout, l);
    l->conf.drain(l->conf.arg);
}

static void on_stop(void *arg) {
    LOG_INFO("stopping: what runs may go on for a while");
    drain(arg);
}

int life_open(Life **out, const LifeConf *conf, Err *err) {
    Life *l = xcalloc(1, sizeof *l);
    l->conf = *conf;
    int rc = admin_open(&l->admin, conf->loop, conf->admin_host, conf->admin_port, conf->ready,
                        conf->arg, err);
    if (rc) {
        free(l);
        return rc;
    }
    loop_on_stop(conf->loop, on_stop, l, conf->drain_ms + LAST_WORDS_MS);
    loop_notify_watchdog(conf->loop, conf->alive, conf->arg);
    LOG_INFO("admin on port %d", admin_port(l->admin));
    loop_notify_ready(conf->loop, "started");
    life_changed(l);
    *out = l;
    return 0;
}

void life_close(Life *l) {
    if (!l)
        return;
    loop_timer_free(l->drain_timer);
    admin_close(l->admin);
    free(l);
}

void life_changed(Life *l) {
    char why[300] = "";
    bool ready = l->conf.ready(l->conf.arg, why, sizeof why);
    if (l->said && ready == l->was_ready)
        return;
    l->said = true;
    l->was_ready = ready;
    loop_notify_status(l->conf.loop, ready ? "ready" : why);
    if (ready)
        LOG_INFO("ready");
    else
        LOG_WARN("not ready: %s", why);
}

void life_restart(Life *l, int status) {
    if (l->status == 0)
        l->status = status;
    drain(l);
}

void life_idle(Life *l) {
    loop_stop(l->conf.loop);
}

int life_status(const Life *l) {
    return l->status;
}
