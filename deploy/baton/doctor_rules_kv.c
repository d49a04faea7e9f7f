/* Rules about the KV pool and about what prefill and decode must have alike. Pure. */
#include "deploy/baton/doctor_rules.h"

#include <string.h>

static const char *format_name(Dtype d) {
    return d == DT_F32 ? "f32" : d == DT_BF16 ? "bf16" : "fp8";
}

/* Hellos refuse what differs; here it is said before. */
void rule_pair(const RuleCase *c, Findings *out) {
    const Service *first = NULL;
    for (int i = 0; i < c->services->n; i++) {
        const Service *s = &c->services->at[i];
        const EngineOpts *e = service_engine(s), *f = first ? service_engine(first) : NULL;
        if (!e)
            continue;
        if (!f) {
            first = s;
            continue;
        }
        const char *what = e->tp != f->tp                  ? "[engine] tp"
                           : e->kv_dtype != f->kv_dtype    ? "[engine] kv_dtype"
                           : strcmp(e->name, f->name) != 0 ? "[model] name"
                                                           : NULL;
        if (what) {
            Finding *one = finding_add(out, "pair", FINDING_FAIL, 0,
                                       "%s and %s differ in %s: they refuse each other",
                                       first->from, s->from, what);
            finding_change(one, "the same value in both");
            return;
        }
    }
    if (c->services->n > 0 && (c->view->n_prefill == 0 || c->view->n_decode == 0))
        finding_add(out, "pair", FINDING_NOTE, 0,
                    "%d prefill and %d decode are among the files looked at: requests need both",
                    c->view->n_prefill, c->view->n_decode);
    else if (first)
        finding_add(out, "pair", FINDING_OK, 0, "prefill and decode agree");
}

void rule_kv_pool(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    if (v->n_decode + v->n_prefill == 0)
        return;
    int64_t least = v->n_prefill > 0 && (v->n_decode == 0 || v->prefill_pool < v->pool)
                        ? v->prefill_pool
                        : v->pool;
    if (least < v->context) {
        Finding *f =
            finding_add(out, "kv-pool", v->foreign ? FINDING_WARN : FINDING_FAIL, 0,
                        "%s does not hold one request of the configured context: the "
                        "service does not start",
                        v->foreign ? "no pool was stated, and the translated one" : "a KV pool");
        finding_basis(f, "%lld tokens, max_context is %lld", (long long)least,
                      (long long)v->context);
        finding_change(f, "[engine] pages = %lld or a smaller max_context",
                       (long long)((v->context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS));
        return;
    }
    int64_t full = v->pool / v->context;
    double token = model_kv_token_bytes(c->shape, v->kv);
    if (v->n_decode > 0 && full < v->max_running) {
        Finding *f = finding_add(out, "kv-pool", FINDING_WARN, 0,
                                 "decode's pool holds %lld of %d requests at full context",
                                 (long long)full, v->max_running);
        finding_basis(f,
                      "%lld tokens x %.0f B = %.1f GB; %d x %lld tokens would be %.1f GB; "
                      "requests that state fewer tokens take fewer pages",
                      (long long)v->pool, token, (double)v->pool * token / 1e9, v->max_running,
                      (long long)v->context,
                      (double)v->max_running * (double)v->context * token / 1e9);
        finding_change(f, "[engine] pages = %lld, or [sched] max_running = %lld",
                       (long long)v->max_running * ((v->context + 63) / KV_PAGE_TOKENS),
                       (long long)full);
        return;
    }
    finding_add(out, "kv-pool", FINDING_OK, 0, "%lld tokens of KV (%.1f GB) for %d x %lld",
                (long long)v->pool, (double)v->pool * token / 1e9, v->max_running,
                (long long)v->context);
}

void rule_kv_dtype(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    if (v->n_decode + v->n_prefill == 0)
        return;
    double now = model_kv_token_bytes(c->shape, v->kv),
           fp8 = model_kv_token_bytes(c->shape, DT_F8E4M3);
    if (v->kv == DT_F8E4M3 || (v->kv == DT_BF16 && !v->cuda)) {
        finding_add(out, "kv-dtype", FINDING_OK, 0, "KV in %s, %.0f B per token",
                    format_name(v->kv), now);
        return;
    }
    Finding *f =
        finding_add(out, "kv-dtype", FINDING_WARN, 0, "KV is stored as %s", format_name(v->kv));
    finding_basis(f,
                  "%.0f B per token against %.0f in fp8: the same memory would hold %.2f times "
                  "as many tokens",
                  now, fp8, now / fp8);
    finding_change(f, "[engine] kv_dtype = fp8 in prefill and decode");
}
