/* See doctor_better.h: the search. */
#include "deploy/baton/doctor_better_int.h"

#include "deploy/baton/gpu_types.h"
#include "model/place.h"

#include <stdio.h>
#include <string.h>

enum { MIN_CAPABILITY = 9, MAX_TP = 8 };

/* ---- the goal ---- */

BetterGoal better_goal(const Services *s, const View *v, const Shape *shape) {
    BetterGoal g = {.http_port = 8080, .max_running = 1, .context = shape->max_positions};
    const Service *router = services_get(s, SERVICE_ROUTER, 0),
                  *decode = services_get(s, SERVICE_DECODE, 0),
                  *any = decode ? decode : services_get(s, SERVICE_PREFILL, 0),
                  *x = services_get(s, SERVICE_EXPERTD, 0);
    snprintf(g.dir, sizeof g.dir, "GLM-5.2");
    snprintf(g.http_host, sizeof g.http_host, "127.0.0.1");
    if (any) {
        const EngineOpts *e = service_engine(any);
        snprintf(g.dir, sizeof g.dir, "%s", e->dir);
        snprintf(g.name, sizeof g.name, "%s", e->name);
        g.context = v->context;
        g.pool = v->pool;
        g.update = v->update;
    }
    if (router) {
        snprintf(g.http_host, sizeof g.http_host, "%s", router->router.http_host);
        g.http_port = (int)router->router.http_port;
    }
    if (decode)
        g.max_running = v->max_running;
    snprintf(g.files, sizeof g.files, "%.4080s-int4", g.dir);
    if (x && *x->expertd.files)
        snprintf(g.files, sizeof g.files, "%s", x->expertd.files);
    if (g.pool < g.context)
        g.pool = g.context;
    return g;
}

/* ---- GPUs ---- */

static double memory_gb(const CeilingCase *c, int gpu) {
    const FactsGpu *g = &c->facts->gpu[gpu];
    const GpuType *t = gpu_type_find(g->name);
    if (c->assume->gpu_memory_gb > 0)
        return c->assume->gpu_memory_gb;
    if (g->memory_mb > 0)
        return (double)g->memory_mb * 1048576 / 1e9;
    return t ? t->memory_gb : 0;
}

static bool usable(const CeilingCase *c, int gpu) {
    const GpuType *t = gpu_type_find(c->facts->gpu[gpu].name);
    return c->facts->gpu[gpu].present && memory_gb(c, gpu) > 0 &&
           ceiling_gpu_gb_per_s(c->facts, c->assume, gpu) > 0 &&
           (!t || t->capability >= MIN_CAPABILITY);
}

/* GPUs of the kind of which there are most. */
static int choose_kind(const CeilingCase *c, int *list) {
    int best = 0;
    for (int i = 0; i < c->facts->n_gpus; i++) {
        int same[FACTS_GPUS], n = 0;
        for (int j = 0; j < c->facts->n_gpus && usable(c, i); j++)
            if (usable(c, j) && strcmp(c->facts->gpu[i].name, c->facts->gpu[j].name) == 0)
                same[n++] = j;
        if (n > best) {
            best = n;
            memcpy(list, same, sizeof *list * (size_t)n);
        }
    }
    return best;
}

static FactsLink worst_with(const Facts *f, const int *group, int n, int gpu) {
    int all[MAX_TP + 1];
    memcpy(all, group, sizeof *all * (size_t)n);
    all[n] = gpu;
    return view_group(f, all, n + 1).worst;
}

/* Cuts the list into groups of tp, each grown from its first GPU by the nearest ones. What is left
 * goes to b->unused. Returns the number of groups. */
static int cut_groups(const Facts *f, const int *list, int n, int tp, Better *b) {
    bool taken[FACTS_GPUS] = {false};
    int groups = 0;
    for (; (groups + 1) * tp <= n; groups++)
        for (int k = 0; k < tp; k++) {
            int best = -1;
            FactsLink least = FACTS_LINK_SYS;
            for (int i = 0; i < n; i++) {
                FactsLink link =
                    taken[i] ? FACTS_LINK_SYS : worst_with(f, b->group[groups], k, list[i]);
                if (!taken[i] && (best < 0 || link < least)) {
                    best = i;
                    least = link;
                }
            }
            taken[best] = true;
            b->group[groups][k] = list[best];
        }
    for (int i = 0; i < f->n_gpus; i++) {
        bool used = false;
        for (int j = 0; j < n; j++)
            used |= taken[j] && list[j] == i;
        if (f->gpu[i].present && !used)
            b->unused[b->n_unused++] = i;
    }
    return groups;
}

/* ---- experts ---- */

/* The largest number of daemons, a power of two, that has nodes and divides an expert. */
static int choose_shards(const Shape *s, int nodes) {
    int n = 1;
    while (n * 2 <= nodes && s->moe_inner / BETTER_GROUP % (n * 2) == 0)
        n *= 2;
    return n;
}

static void choose_expertd(const CeilingCase *c, View *v) {
    int list[FACTS_NODES], n = facts_usable_nodes(c->facts, list);
    v->n_expertd = v->n_shards = choose_shards(c->shape, n);
    v->expert_bits = c->assume->expert_bits + 16 / c->assume->expert_group;
    for (int i = 0; i < v->n_expertd; i++) {
        int node = n > 0 ? list[i] : -1;
        v->expertd[i] = (ViewExpertd){.node = node,
                                      .threads = node < 0 ? 0 : c->facts->node[node].n_cores,
                                      .shard = i,
                                      .packed = true};
    }
}

/* Experts of each layer that the group's memory holds beside everything else; negative: not even
 * that. A moving set needs room for one layer's experts more. */
static int fits_resident(const CeilingCase *c, const Better *b, const BetterGoal *goal) {
    const Shape *s = c->shape;
    int tp = b->view.tp, moe = model_moe_layers(s);
    double gpu = memory_gb(c, b->group[0][0]) * 1e9 * 0.97 - c->assume->gpu_reserve_gb * 1e9,
           expert = model_expert_weights(s) * c->assume->gpu_expert_bits / 8;
    if (b->shared)
        gpu /= 2;
    double left = gpu - model_rest_held_bytes(s, c->assume->gpu_rest_bits) / tp -
                  (double)goal->pool * model_kv_token_bytes(s, b->view.kv),
           each = expert * (moe + (goal->update ? 1 : 0)) / tp;
    if (left < 0)
        return -1;
    return left / each >= s->n_experts ? s->n_experts : (int)(left / each);
}

/* ---- layouts ---- */

static View base_view(const CeilingCase *c, const BetterGoal *goal, int tp, bool cuda) {
    View v = {.services = true,
              .cuda = cuda,
              .tp = tp,
              .n_prefill = 1,
              .n_decode = 1,
              .context = goal->context,
              .pool = goal->pool,
              .prefill_pool = goal->context,
              .max_running = goal->max_running,
              .kv = cuda ? DT_F8E4M3 : DT_BF16,
              .strategy = PLACE_UNIFORM,
              .update = goal->update,
              .spec_tokens = 0};
    choose_expertd(c, &v);
    return v;
}

/* Each rank's thread keeps a core busy; they are spread over the nodes. */
static void leave_cores(Better *b) {
    View *v = &b->view;
    int ranks = (v->n_prefill + v->n_decode) * v->tp;
    for (int i = 0; i < v->n_expertd; i++) {
        int taken = (ranks + v->n_expertd - 1) / v->n_expertd;
        if (v->expertd[i].threads > 2 * taken)
            v->expertd[i].threads -= taken;
    }
}

static bool try_layout(const CeilingCase *c, const BetterGoal *goal, const int *list, int n, int tp,
                       Better *out) {
    Better b = {.fits = true, .view = base_view(c, goal, tp, true)};
    b.n_groups = cut_groups(c->facts, list, n, tp, &b);
    if (b.n_groups == 0 || shape_check_tp(c->shape, tp, NULL))
        return false;
    b.shared = b.n_groups == 1;
    b.view.n_decode = b.shared ? 1 : b.n_groups - 1;
    b.view.group = view_group(c->facts, b.group[0], tp);
    b.resident = fits_resident(c, &b, goal);
    if (b.resident < 0)
        return false;
    b.view.resident = (double)b.resident / c->shape->n_experts;
    if (b.resident == c->shape->n_experts)
        b.view.n_expertd = b.view.n_shards = 0;
    leave_cores(&b);
    CeilingCase mine = {c->facts, c->assume, c->shape, &b.view};
    b.ceiling = ceiling_compute(&mine);
    *out = b;
    return true;
}

/* Everything on the host. */
static Better host_layout(const CeilingCase *c, const BetterGoal *goal) {
    Better b = {.fits = true, .view = base_view(c, goal, 1, false)};
    /* Prefill and decode take a quarter of the cores, expertd the others. */
    for (int i = 0; i < b.view.n_expertd; i++)
        b.view.expertd[i].threads -= b.view.expertd[i].threads / 4;
    CeilingCase mine = {c->facts, c->assume, c->shape, &b.view};
    b.ceiling = ceiling_compute(&mine);
    for (int i = 0; i < c->facts->n_gpus; i++)
        if (c->facts->gpu[i].present)
            b.unused[b.n_unused++] = i;
    return b;
}

/* Memory for the experts that are not on the device, all nodes together. */
static bool host_holds(const CeilingCase *c, const Better *b, char *why, size_t n) {
    double need = b->view.n_expertd == 0
                      ? 0
                      : (b->view.update ? 1 : 1 - b->view.resident) * c->shape->n_experts *
                            (model_moe_layers(c->shape) + c->shape->n_mtp) *
                            model_expert_weights(c->shape) * b->view.expert_bits / 8;
    for (int i = 0; i < b->view.n_expertd; i++) {
        int node = b->view.expertd[i].node;
        double has = node < 0 || c->facts->node[node].size_mb < 0
                         ? -1
                         : (double)c->facts->node[node].size_mb * 1048576;
        if (has < 0 || need / b->view.n_expertd <= has * 0.95)
            continue;
        snprintf(why, n, "node %d has %.1f GB, its part of the experts takes %.1f GB", node,
                 has / 1e9, need / b->view.n_expertd / 1e9);
        return false;
    }
    return true;
}

/* Prefill on decode's own GPUs disturbs it: only where there is no other way. */
static bool preferred(const Better *a, const Better *b) {
    if (a->shared != b->shared)
        return b->shared;
    return a->ceiling.tok_per_s > b->ceiling.tok_per_s;
}

Better better_find(const CeilingCase *given, const BetterGoal *goal) {
    int list[FACTS_GPUS], n = choose_kind(given, list);
    Better best = {0};
    snprintf(best.why, sizeof best.why, "no layout fits");
    for (int tp = MAX_TP; tp >= 1; tp /= 2) {
        Better b;
        if (!try_layout(given, goal, list, n, tp, &b))
            continue;
        if (!host_holds(given, &b, best.why, sizeof best.why))
            continue;
        if (!best.fits || preferred(&b, &best))
            best = b;
    }
    if (!best.fits && n == 0) {
        Better b = host_layout(given, goal);
        if (host_holds(given, &b, best.why, sizeof best.why))
            best = b;
    } else if (!best.fits && strcmp(best.why, "no layout fits") == 0) {
        snprintf(best.why, sizeof best.why,
                 "the GPUs' memory does not hold weights and a KV pool of %lld tokens in any "
                 "layout",
                 (long long)goal->pool);
    }
    if (best.fits)
        better_write(&best, given, goal);
    return best;
}

void better_done(Better *b) {
    for (int i = 0; i < b->n_docs; i++)
        conf_doc_done(&b->docs[i]);
    free(b->docs);
    b->docs = NULL;
    b->n_docs = 0;
}
