/* See place_live.h. `next`, `layer`, `status` and `err` belong to the engine thread while `busy`.
 */
#include "model/place_live.h"

#include "base/clock.h"
#include "base/stat.h"
#include "model/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    TICK_MS = 1000,
    RECORD_MS = 60000,
    LOOK_TOKENS = 64, /* fewer say too little: with thin traffic a look waits for the next one */
};
static const double DECAY = 0.5;     /* of heat, from one look to the next */
static const double MIN_GAIN = 0.01; /* of a layer's remote share: less is not worth loading */

struct PlaceLive {
    PlaceLiveConf conf;
    const Shape *shape;
    LoopTimer *tick, *look;
    StatCounter *remote_pairs, *resident_pairs, *changes;
    StatGauge *share;
    uint64_t told_pairs, told_remote; /* what the counters have */
    int64_t recorded_ms;
    uint64_t *seen; /* [layers, n_experts] counts at the last look */
    uint64_t seen_tokens;
    double *heat; /* [layers, n_experts] recent use */

    StepTask task;
    bool busy;
    bool *next; /* [n_experts] of `layer` */
    int layer, n_moved;
    double share_before, share_after;
    int status;
    Err err;
};

static void note(const PlaceLive *p, bool bad, const char *text) {
    p->conf.on_note(p->conf.arg, bad, text);
}

/* ---- metrics and record ---- */

static void tell_metrics(PlaceLive *p) {
    uint64_t remote = route_count_n_remote(p->conf.runtime->counts),
             pairs = route_count_n_pairs(p->conf.runtime->counts);
    uint64_t new_remote = remote - p->told_remote, new_pairs = pairs - p->told_pairs;
    if (new_pairs < new_remote) /* a step runs: the two were read apart */
        return;
    stat_add(p->remote_pairs, (double)new_remote);
    stat_add(p->resident_pairs, (double)(new_pairs - new_remote));
    p->told_remote = remote;
    p->told_pairs = pairs;
    stat_set(p->share, pairs > 0 ? (double)remote / (double)pairs : 0);
}

static void record(PlaceLive *p) {
    Err err = {0};
    const Runtime *r = p->conf.runtime;
    p->recorded_ms = clock_now_ms();
    if (*p->conf.record && route_count_save(r->counts, p->conf.record, r->model_id, &err))
        note(p, true, err.text);
}

static void on_tick(void *arg) {
    PlaceLive *p = arg;
    tell_metrics(p);
    if (clock_now_ms() - p->recorded_ms >= RECORD_MS)
        record(p);
}

/* ---- residents that follow use ---- */

static void run_change(StepTask *t) {
    PlaceLive *p = t->arg;
    p->err = (Err){0};
    p->status = engine_place(p->conf.runtime->engine, p->layer, p->next, &p->err);
}

/* Whether the layer's set should change; then next and the shares are filled. */
static bool decide(PlaceLive *p, int layer) {
    int n = p->shape->n_experts;
    const bool *now = p->conf.runtime->resident + (size_t)layer * (size_t)n;
    const double *heat = p->heat + (size_t)layer * (size_t)n;
    if (p->shape->layer_dense[layer])
        return false;
    p->n_moved = place_next(n, heat, now, p->next);
    p->share_before = place_remote_share(n, heat, now);
    p->share_after = place_remote_share(n, heat, p->next);
    return p->n_moved > 0 && p->share_before - p->share_after >= MIN_GAIN;
}

/* Puts the change of the first layer from `layer` on that needs one: one layer at a time, so that
 * steps come in between. */
static void change_from(PlaceLive *p, int layer) {
    for (; layer < p->shape->n_layers && !p->busy; layer++)
        if (decide(p, layer)) {
            p->layer = layer;
            p->busy = stepper_put(p->conf.stepper, &p->task);
            if (!p->busy)
                return; /* the next look comes back to it */
        }
}

static void on_changed(StepTask *t) {
    PlaceLive *p = t->arg;
    size_t n = (size_t)p->shape->n_experts;
    char text[sizeof p->err.text + 100];
    p->busy = false;
    if (p->status) {
        snprintf(text, sizeof text, "experts of layer %d stay as they are: %s", p->layer,
                 p->err.text);
        note(p, true, text);
        return;
    }
    memcpy(p->conf.runtime->resident + (size_t)p->layer * n, p->next, n * sizeof(bool));
    stat_add(p->changes, p->n_moved);
    snprintf(text, sizeof text,
             "experts of layer %d: %d came, %d went, in %.1f ms; remote share of recent use %.3f, "
             "now %.3f",
             p->layer, p->n_moved, p->n_moved, (double)(t->end_us - t->begin_us) * 1e-3,
             p->share_before, p->share_after);
    note(p, false, text);
    change_from(p, p->layer + 1);
}

static void on_look(void *arg) {
    PlaceLive *p = arg;
    int n = p->shape->n_layers * p->shape->n_experts;
    uint64_t tokens = route_count_n_tokens(p->conf.runtime->counts);
    if (p->busy || tokens - p->seen_tokens < LOOK_TOKENS)
        return; /* the changes of the last look still go on, or there is nothing to see */
    p->seen_tokens = tokens;
    for (int i = 0; i < n; i++) {
        uint64_t now = route_count_get(p->conf.runtime->counts, i / p->shape->n_experts,
                                       i % p->shape->n_experts);
        p->heat[i] = p->heat[i] * DECAY + (double)(now - p->seen[i]);
        p->seen[i] = now;
    }
    change_from(p, 0);
}

/* ---- life ---- */

PlaceLive *place_live_new(const PlaceLiveConf *conf) {
    PlaceLive *p = xcalloc(1, sizeof *p);
    const Shape *s = conf->runtime->shape;
    const char *pairs = "Pairs of a token and an expert that it was routed to.";
    p->conf = *conf;
    p->shape = s;
    p->seen = route_count_copy(conf->runtime->counts);
    p->seen_tokens = route_count_n_tokens(conf->runtime->counts);
    p->heat = xcalloc((size_t)s->n_layers * (size_t)s->n_experts, sizeof *p->heat);
    p->next = xcalloc((size_t)s->n_experts, sizeof *p->next);
    p->task = (StepTask){.run = run_change, .done = on_changed, .arg = p};
    p->remote_pairs = stat_counter("baton_expert_pairs_total", "where=\"remote\"", pairs);
    p->resident_pairs = stat_counter("baton_expert_pairs_total", "where=\"resident\"", pairs);
    p->share = stat_gauge("baton_expert_remote_share", "",
                          "Part of the pairs of token and expert that expertd computed.");
    p->changes = stat_counter("baton_expert_changes_total", "",
                              "Experts that became resident while the service ran.");
    p->recorded_ms = clock_now_ms();
    p->tick = loop_timer_new(conf->loop, TICK_MS, TICK_MS, on_tick, p);
    if (conf->update_ms > 0)
        p->look = loop_timer_new(conf->loop, conf->update_ms, conf->update_ms, on_look, p);
    return p;
}

void place_live_free(PlaceLive *p) {
    if (!p)
        return;
    record(p);
    loop_timer_free(p->tick);
    loop_timer_free(p->look);
    free(p->seen);
    free(p->heat);
    free(p->next);
    free(p);
}
