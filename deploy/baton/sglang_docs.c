/* From what foreign options ask for to config files of the four daemons. Pure but for what it
 * allocates. */
#include "deploy/baton/sglang_int.h"

#include "kernels/kv_layout.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
    PREFILL_PORT = 7200, /* plus the instance; admin ports lie ADMIN above */
    DECODE_PORT = 7300,
    EXPERTD_PORT = 7400,
    ADMIN = 2000,
    KT_POOLS = 2,      /* KTransformers' own default */
    EXPERT_UNITS = 16, /* of GLM-5.2 in groups of 128: shards must divide them */
    MODEL_EXPERTS = 256,
};

static void say(Sglang *s, const char *option, SglangState state, const char *baton,
                const char *fmt, ...) __attribute__((format(printf, 5, 6)));

static void say(Sglang *s, const char *option, SglangState state, const char *baton,
                const char *fmt, ...) {
    s->remark = xrealloc(s->remark, (size_t)(s->n + 1) * sizeof *s->remark);
    SglangRemark *r = &s->remark[s->n++];
    *r = (SglangRemark){.state = state, .baton = baton};
    snprintf(r->option, sizeof r->option, "%s", option);
    va_list args;
    va_start(args, fmt);
    vsnprintf(r->why, sizeof r->why, fmt, args);
    va_end(args);
}

typedef struct Draft {
    ConfDoc *doc;
    int n, n_expertd, n_replicas;
    int64_t pages;         /* 0: not said */
    int64_t context_pages; /* of one request; 0: not said */
    const char *resident;
    char resident_text[24], endpoints[64 * 32];
} Draft;

static ConfDoc *add(Draft *d, ServiceKind kind, int i) {
    char name[64];
    snprintf(name, sizeof name, "%s-%d", service_kind_name(kind), i);
    d->doc = xrealloc(d->doc, (size_t)(d->n + 1) * sizeof *d->doc);
    ConfDoc *doc = &d->doc[d->n++];
    conf_doc_init(doc, kind, kind == SERVICE_ROUTER ? "router" : name);
    snprintf(doc->about, sizeof doc->about, "Translated by `baton doctor --from-sglang`.");
    return doc;
}

static void set_text(ConfDoc *d, const char *option, const char *value) {
    if (*value)
        conf_doc_set(d, option, "%s", value);
}

static void set_number(ConfDoc *d, const char *option, int64_t value) {
    if (value > 0)
        conf_doc_set(d, option, "%lld", (long long)value);
}

/* ---- how many of what ---- */

static void count_expertd(Sglang *s, Draft *d) {
    const SglangWish *w = &s->wish;
    int n = w->n_nodes > 0 ? w->n_nodes : w->pools > 0 ? (int)w->pools : KT_POOLS;
    if (w->n_nodes > 0 && w->pools > 0 && w->pools != w->n_nodes)
        say(s, "kt-threadpool-count", SGLANG_LOST, "",
            "%d pools against %d nodes: one expertd per node is taken.", (int)w->pools, w->n_nodes);
    int fits = n;
    while (EXPERT_UNITS % fits != 0)
        fits--;
    if (fits != n)
        say(s, "(daemons)", SGLANG_CHANGED, "[experts] shards",
            "%d daemons do not divide an expert's %d units: the first %d nodes are taken.", n,
            EXPERT_UNITS, fits);
    d->n_expertd = fits;
}

static void decide(Sglang *s, Draft *d) {
    const SglangWish *w = &s->wish;
    d->n_replicas = w->replicas > 0 ? (int)w->replicas : 1;
    d->context_pages = (w->context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    d->pages = (w->pool_tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    if (d->pages == 0 && d->context_pages > 0) {
        int64_t running = w->max_running > 0 ? w->max_running : 1;
        d->pages = d->context_pages * running;
        say(s, "(KV pool)", SGLANG_CHANGED, "prefill, decode [engine] pages",
            "No size was stated: pages for %lld x %lld tokens. `baton plan` says what fits.",
            (long long)running, (long long)w->context);
    } else if (d->pages == 0) {
        say(s, "(KV pool)", SGLANG_LOST, "",
            "Neither a context nor a pool was stated: set [model] and [engine] max_context, and "
            "[engine] pages or pool_bytes.");
    }
    if (!w->offload)
        return;
    count_expertd(s, d);
    if (w->resident >= 0 && w->resident < MODEL_EXPERTS)
        snprintf(d->resident_text, sizeof d->resident_text, "%lld", (long long)w->resident);
    d->resident = w->resident >= MODEL_EXPERTS ? "all"
                  : w->resident > 0            ? d->resident_text
                                               : "none";
    for (int i = 0; i < d->n_expertd; i++) {
        size_t len = strlen(d->endpoints);
        snprintf(d->endpoints + len, sizeof d->endpoints - len, "%stcp://127.0.0.1:%d",
                 i ? "," : "", EXPERTD_PORT + i);
    }
}

/* ---- the files ---- */

static void put_router(const SglangWish *w, Draft *d) {
    ConfDoc *doc = add(d, SERVICE_ROUTER, 0);
    char list[64 * 32];
    set_text(doc, "http.host", w->host);
    if (w->port >= 0)
        conf_doc_set(doc, "http.port", "%lld", (long long)w->port);
    set_text(doc, "model.dir", *w->model ? w->model : "GLM-5.2");
    set_text(doc, "model.name", w->name);
    set_number(doc, "model.max_context", w->context);
    for (int decode = 0; decode < 2; decode++) {
        size_t len = 0;
        for (int i = 0; i < d->n_replicas; i++)
            len += (size_t)snprintf(list + len, sizeof list - len, "%stcp://127.0.0.1:%d",
                                    i ? "," : "", (decode ? DECODE_PORT : PREFILL_PORT) + i);
        conf_doc_set(doc, decode ? "peers.decode" : "peers.prefill", "%s", list);
    }
    set_number(doc, "tokenize.threads", w->tokenize_threads);
    if (w->enable_thinking >= 0)
        conf_doc_set(doc, "chat.enable_thinking", "%s", w->enable_thinking ? "yes" : "no");
    set_text(doc, "log.level", w->log_level);
}

static void put_engine(const SglangWish *w, const Draft *d, ConfDoc *doc, int64_t pages) {
    static const char *const dtype[] = {"f32", "bf16", "fp8"};
    set_text(doc, "model.dir", *w->model ? w->model : "GLM-5.2");
    set_text(doc, "model.name", w->name);
    conf_doc_set(doc, "engine.backend", "cuda");
    set_number(doc, "engine.tp", w->tp);
    if (w->kv_dtype >= 0)
        conf_doc_set(doc, "engine.kv_dtype", "%s", dtype[w->kv_dtype]);
    set_number(doc, "engine.max_context", w->context);
    set_number(doc, "engine.pages", pages);
    set_text(doc, "kvlink.devices", w->kv_devices);
    set_text(doc, "log.level", w->log_level);
    if (w->step_ms > 0)
        conf_doc_set(doc, "limits.step_ms", "%llds", (long long)(w->step_ms / 1000));
    if (!d->resident)
        return;
    conf_doc_set(doc, "experts.strategy", "%s", w->strategy == PLACE_FRONT ? "front" : "uniform");
    conf_doc_set(doc, "experts.resident", "%s", d->resident);
    if (strcmp(d->resident, "all") != 0)
        conf_doc_set(doc, "experts.endpoints", "%s", d->endpoints);
    if (w->update)
        conf_doc_set(doc, "experts.update_ms", "30s");
}

static void put_ports(ConfDoc *doc, int port) {
    conf_doc_set(doc, "service.name", "%s", doc->name);
    conf_doc_set(doc, "service.endpoint", "tcp://127.0.0.1:%d", port);
    conf_doc_set(doc, "admin.port", "%d", port + ADMIN);
}

static void put_pair(const SglangWish *w, Draft *d, int i) {
    ConfDoc *doc = add(d, SERVICE_PREFILL, i);
    put_ports(doc, PREFILL_PORT + i);
    put_engine(w, d, doc, d->context_pages > 0 ? d->context_pages : d->pages);
    set_number(doc, "sched.step_tokens", w->step_tokens);
    set_number(doc, "sched.max_waiting", w->max_waiting);
    doc = add(d, SERVICE_DECODE, i);
    put_ports(doc, DECODE_PORT + i);
    put_engine(w, d, doc, d->pages);
    set_number(doc, "sched.max_running", w->max_running);
    set_number(doc, "sched.max_batch", w->max_running);
}

static void put_expertd(const SglangWish *w, Draft *d, int i) {
    ConfDoc *doc = add(d, SERVICE_EXPERTD, i);
    const char *model = *w->model ? w->model : "GLM-5.2";
    put_ports(doc, EXPERTD_PORT + i);
    if (w->bits == 0)
        set_text(doc, "model.dir", model);
    else if (*w->expert_files)
        set_text(doc, "experts.files", w->expert_files);
    else
        conf_doc_set(doc, "experts.files", "%s-int%d", model, w->bits);
    conf_doc_set(doc, "experts.shard", "%d", i);
    conf_doc_set(doc, "experts.shards", "%d", d->n_expertd);
    conf_doc_set(doc, "experts.device", "%s",
                 w->strategy == PLACE_UNIFORM && !w->update ? d->resident : "none");
    conf_doc_set(doc, "engine.node", "%d", w->n_nodes > 0 ? w->node[i] : i);
    set_number(doc, "engine.threads", w->cpu_threads / d->n_expertd);
    set_text(doc, "log.level", w->log_level);
}

static void say_packing(Sglang *s, const Draft *d) {
    const SglangWish *w = &s->wish;
    if (d->n_expertd == 0 || w->bits == 0)
        return;
    say(s, "(expert files)", SGLANG_CHANGED, "baton pack",
        "Make them once: baton pack --model %.80s --out %.80s --bits %d (BF16 loses least as a "
        "source).",
        *w->model ? w->model : "GLM-5.2", *w->expert_files ? w->expert_files : "DIR", w->bits);
}

void sglang_docs(Sglang *s, ConfDoc **docs, int *n) {
    Draft d = {0};
    decide(s, &d);
    put_router(&s->wish, &d);
    for (int i = 0; i < d.n_replicas; i++)
        put_pair(&s->wish, &d, i);
    for (int i = 0; i < d.n_expertd && d.resident && strcmp(d.resident, "all") != 0; i++)
        put_expertd(&s->wish, &d, i);
    say_packing(s, &d);
    *docs = d.doc;
    *n = d.n;
}
