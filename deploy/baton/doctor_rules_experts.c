/* Rules about shards, placement of experts and drafting. Pure. */
#include "deploy/baton/doctor_rules.h"

#include <stdio.h>
#include <string.h>

/* All shards of one cut are there, once each. */
void rule_shards(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    bool seen[VIEW_EXPERTD] = {false};
    int units = c->shape->moe_inner / 128;
    if (v->n_expertd == 0)
        return;
    for (int i = 0; i < v->n_expertd; i++) {
        const ExpertdOpts *o = &services_get(c->services, SERVICE_EXPERTD, i)->expertd;
        const char *from = services_get(c->services, SERVICE_EXPERTD, i)->from;
        if (o->n_shards != v->n_expertd || o->shard >= o->n_shards || seen[o->shard]) {
            Finding *f = finding_add(out, "shards", FINDING_FAIL, 0,
                                     "%s is shard %lld of %lld, among %d expertd", from,
                                     (long long)o->shard, (long long)o->n_shards, v->n_expertd);
            finding_change(f, "[experts] shards = %d in each, shard = 0 to %d, each once",
                           v->n_expertd, v->n_expertd - 1);
            return;
        }
        seen[o->shard] = true;
    }
    if (v->expertd[0].packed && units > 0 && units % v->n_expertd != 0) {
        Finding *f = finding_add(out, "shards", FINDING_FAIL, 0,
                                 "%d expertd do not divide an expert of %d channels", v->n_expertd,
                                 c->shape->moe_inner);
        finding_basis(f, "groups of 128 make %d units", units);
        finding_change(f, "1, 2, 4, 8 or 16 expertd");
        return;
    }
    finding_add(out, "shards", FINDING_OK, 0, "%d shards fit together", v->n_expertd);
}

static int n_endpoints(const char *list) {
    int n = *list != 0;
    for (; *list; list++)
        n += *list == ',';
    return n;
}

/* Every expert is somewhere. */
void rule_held(const RuleCase *c, Findings *out) {
    const Service *x = services_get(c->services, SERVICE_EXPERTD, 0);
    const View *v = c->view;
    for (int i = 0; i < c->services->n; i++) {
        const Service *s = &c->services->at[i];
        const EngineOpts *e = service_engine(s);
        bool all = e && strcmp(e->resident, "all") == 0 && e->strategy != PLACE_FILE;
        int n = e ? n_endpoints(e->expert_endpoints) : 0;
        if (!e || all || n == v->n_expertd)
            continue;
        if (v->n_expertd == 0 && n > 0) {
            finding_add(out, "experts-held", FINDING_NOTE, 0,
                        "%s names %d expertd, whose files are not among those looked at", s->from,
                        n);
            return;
        }
        Finding *f = finding_add(out, "experts-held", FINDING_FAIL, 0,
                                 "%s keeps %s experts of a layer and names %d expertd; %d are "
                                 "configured",
                                 s->from, e->resident, n, v->n_expertd);
        finding_change(f, "[experts] endpoints = all of them, or resident = all");
        return;
    }
    if (!x)
        return;
    bool changing = v->update || v->strategy != PLACE_UNIFORM;
    if (strcmp(x->expertd.device, "none") != 0 && v->n_decode + v->n_prefill > 0) {
        double device = strcmp(x->expertd.device, "all") == 0 ? c->shape->n_experts
                                                              : strtod(x->expertd.device, NULL);
        if (changing || device > v->resident * c->shape->n_experts + 0.5) {
            Finding *f = finding_add(out, "experts-held", FINDING_FAIL, 0,
                                     "expertd leave out %s experts of each layer that prefill and "
                                     "decode do not all keep",
                                     x->expertd.device);
            finding_basis(f, "they keep %.0f of %d%s", v->resident * c->shape->n_experts,
                          c->shape->n_experts, changing ? ", which ones changes" : "");
            finding_change(f, "[experts] device = none");
            return;
        }
    }
    finding_add(out, "experts-held", FINDING_OK, 0, "every expert is held somewhere");
}

void rule_placement(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    if (v->n_expertd == 0 || v->resident <= 0 || v->resident >= 1)
        return;
    if (v->update || v->strategy != PLACE_UNIFORM) {
        finding_add(out, "placement", FINDING_OK, 0, "resident experts follow use");
        return;
    }
    Finding *f = finding_add(out, "placement", FINDING_WARN, c->assume->placement_gain,
                             "the first %.0f experts of each layer are resident, whether they are "
                             "used or not",
                             v->resident * c->shape->n_experts);
    finding_basis(f, "assumed placement_gain; published: 3 to 10 %% with 4 to 30 %% resident "
                     "experts by frequency, more when they follow use");
    finding_change(f, "[experts] update_ms = 30s (expertd: device = none), or record counts and "
                      "strategy = frequency");
}

/* The number of drafted tokens that gives most, from 1 to 3. */
static int best_draft(const RuleCase *c, Ceiling *best) {
    CeilingCase mine = {c->facts, c->assume, c->shape, c->view};
    int k_best = 1;
    for (int k = 1; k <= 3; k++) {
        Ceiling one = ceiling_compute_draft(&mine, k);
        if (k == 1 || one.tok_per_s > best->tok_per_s) {
            *best = one;
            k_best = k;
        }
    }
    return k_best;
}

void rule_speculation(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    Ceiling best;
    if (v->n_decode == 0 || c->ceiling->tok_per_s <= 0)
        return;
    int k = best_draft(c, &best);
    double gain = best.tok_per_s / c->ceiling->tok_per_s - 1;
    if (v->spec_tokens > 0) {
        finding_add(out, "speculation", FINDING_OK, 0, "%d tokens are drafted per step",
                    v->spec_tokens);
        return;
    }
    Finding *f = finding_add(out, "speculation", gain > 0.01 ? FINDING_WARN : FINDING_NOTE,
                             gain > 0 ? gain : 0, "no speculative decoding is configured");
    finding_basis(
        f,
        "with %d drafted token%s a step gives %.2f on average and reads %.1f instead of %d "
        "experts per layer: %.1f ms for %.1f tok/s against %.1f ms for %.1f",
        k, k > 1 ? "s" : "", ceiling_accepted(k),
        c->shape->n_active + (model_distinct_experts(c->shape, k + 1) - c->shape->n_active) *
                                 (1 - c->assume->draft_overlap),
        c->shape->n_active, best.total_ms, best.tok_per_s, c->ceiling->total_ms,
        c->ceiling->tok_per_s);
    finding_change(f,
                   "this version has no option for it: the checkpoint's MTP layer stays unused%s",
                   gain > 0.01 ? ""
                               : "; with experts in host memory it would gain little, since "
                                 "verification reads the experts of every drafted token");
}
