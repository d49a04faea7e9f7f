/* See remote.h. */
#include "daemon/remote.h"

#include "base/log.h"
#include "model/place.h"
#include "proto/service.h"

#include <stdlib.h>
#include <string.h>

struct Remote {
    const Runtime *runtime;
    ExpertLink *link;
    uint64_t generation[EXPERTLINK_MAX]; /* checked, by shard */
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

static int post(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                const float *weight, Err *err) {
    Remote *r = arg;
    int rc = expertlink_post(r->link, layer, n, k, x, id, weight, err);
    return rc ? rc : check(r, err);
}

static int wait_sum(void *arg, float *y, Err *err) {
    Remote *r = arg;
    return expertlink_wait(r->link, y, err);
}

int remote_probe(void *arg, Err *err) {
    Remote *r = arg;
    int rc = expertlink_probe(r->link, err);
    return rc ? rc : check(r, err);
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
    if (rc) {
        remote_close(r);
        return rc;
    }
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
