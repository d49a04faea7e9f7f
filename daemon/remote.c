/* See remote.h. */
#include "daemon/remote.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/stat.h"
#include "model/place.h"
#include "proto/service.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Remote {
    const Runtime *runtime;
    ExpertLink *link;
    uint64_t generation[EXPERTLINK_MAX];            /* checked, by shard */
    char path[EXPERTLINK_MAX][EXPERTLINK_PATH_MAX]; /* said in the log, by shard */
    bool reserved;                                  /* rows of the engine's steps */
    char misfit[sizeof((Err *)0)->text];            /* said in the log; "": all fit */
    int64_t posted_us;
    StatHist *call_s;
};

/* Daemons that are not connected are checked when they are. */
static int check(Remote *r, Err *err) {
    const Runtime *rt = r->runtime;
    for (int i = 0; i < expertlink_shards(r->link); i++) {
        const Baton__Hello *h = expertlink_hello(r->link, i);
        if (!h || h->generation == r->generation[i])
            continue;
        int rc = place_check_held(rt->shape, rt->kept, h->held.data, h->held.len, h->name, err);
        if (rc)
            return rc;
        if (r->generation[i])
            LOG_INFO("%s is back: shard %u, %s", h->name, h->shard, h->expert_format);
        r->generation[i] = h->generation;
    }
    return 0;
}

static void report(const Remote *r, const EngineOpts *o) {
    for (int i = 0; i < expertlink_shards(r->link); i++) {
        const Baton__Hello *h = expertlink_hello(r->link, i);
        if (h && o->update_ms > 0 && strcmp(h->expert_format, "checkpoint"))
            LOG_WARN("%s computes experts as %s: which ones are resident changes answers within "
                     "the error of that format, and [experts] update_ms lets it change",
                     h->name, h->expert_format);
    }
}

/* Says how calls travel, once and when it changes. */
static void report_paths(Remote *r) {
    for (int i = 0; i < expertlink_shards(r->link); i++) {
        const char *path = expertlink_path(r->link, i);
        if (!*path || strcmp(path, r->path[i]) == 0)
            continue;
        snprintf(r->path[i], sizeof r->path[i], "%s", path);
        LOG_INFO("calls of experts to shard %d go by %s", i, path);
    }
}

/* Passes rc on. Says, once, when a daemon that came back does not fit: that it was gone may be all
 * that is known otherwise. */
static int report_misfit(Remote *r, int rc, const Err *err) {
    if (rc == 0)
        r->misfit[0] = 0;
    if (rc == E_MISMATCH && err && strcmp(r->misfit, err->text) != 0) {
        snprintf(r->misfit, sizeof r->misfit, "%s", err->text);
        LOG_WARN("experts cannot be used: %s", err->text);
    }
    return rc;
}

/* Room for the largest step, once the engine says how large that is: a service probes before its
 * first request, as a rule. */
static void reserve(Remote *r) {
    if (!r->reserved && r->runtime->engine)
        expertlink_reserve(r->link, engine_max_rows(r->runtime->engine));
    r->reserved = r->runtime->engine != NULL;
}

static int post(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                const float *weight, Err *err) {
    Remote *r = arg;
    reserve(r);
    r->posted_us = clock_now_us();
    int rc = expertlink_post(r->link, layer, n, k, x, id, weight, err);
    return report_misfit(r, rc ? rc : check(r, err), err);
}

static int wait_sum(void *arg, float *y, Err *err) {
    Remote *r = arg;
    int rc = expertlink_wait(r->link, y, err);
    if (rc)
        return rc;
    stat_observe(r->call_s, (double)(clock_now_us() - r->posted_us) * 1e-6);
    report_paths(r);
    return 0;
}

int remote_probe(void *arg, Err *err) {
    Remote *r = arg;
    reserve(r);
    int rc = expertlink_probe(r->link, err);
    return report_misfit(r, rc ? rc : check(r, err), err);
}

void remote_on_place(void *arg, bool bad, const char *text) {
    (void)arg;
    if (bad)
        LOG_WARN("%s", text);
    else
        LOG_INFO("%s", text);
}

ExpertPort remote_port(Remote *r) {
    return (ExpertPort){r, post, wait_sum};
}

int remote_open(Remote **out, const Runtime *runtime, const EngineOpts *o, const Baton__Hello *self,
                Err *err) {
    Remote *r = xcalloc(1, sizeof *r);
    r->runtime = runtime;
    int rc = service_open_experts(&r->link, o->expert_endpoints, self, o->expert_timeout_ms,
                                  o->expert_start_ms, err);
    if (rc == 0)
        rc = check(r, err);
    r->call_s = stat_hist_seconds("baton_expert_call_seconds", "",
                                  "From a layer's call of remote experts to its added sums.");
    if (rc) {
        remote_close(r);
        return rc;
    }
    /* The choices of the configuration stand in the order of ExpertLinkTransport. */
    expertlink_transport(r->link, (ExpertLinkTransport)o->expert_transport);
    expertlink_spin(r->link, o->expert_spin_us);
    report(r, o);
    *out = r;
    return 0;
}

void remote_close(Remote *r) {
    if (!r)
        return;
    expertlink_close(r->link);
    free(r);
}
