/* The config files of a better layout; see doctor_better.h. */
#include "deploy/baton/doctor_better_int.h"

#include <stdio.h>
#include <string.h>

enum { PREFILL_PORT = 7200, DECODE_PORT = 7300, EXPERTD_PORT = 7400, ADMIN = 2000 };

static ConfDoc *add(Better *b, ServiceKind kind, int i) {
    char name[64];
    snprintf(name, sizeof name, "%s-%d", service_kind_name(kind), i);
    b->docs = xrealloc(b->docs, (size_t)(b->n_docs + 1) * sizeof *b->docs);
    ConfDoc *d = &b->docs[b->n_docs++];
    conf_doc_init(d, kind, kind == SERVICE_ROUTER ? "router" : name);
    return d;
}

static void put_ports(ConfDoc *d, int port) {
    conf_doc_set(d, "service.name", "%s", d->name);
    conf_doc_set(d, "service.endpoint", "tcp://127.0.0.1:%d", port);
    conf_doc_set(d, "admin.port", "%d", port + ADMIN);
}

static void list_endpoints(char *out, size_t n, int port, int count) {
    size_t len = 0;
    *out = 0;
    for (int i = 0; i < count && len < n; i++)
        len += (size_t)snprintf(out + len, n - len, "%stcp://127.0.0.1:%d", i ? "," : "", port + i);
}

static void put_router(Better *b, const BetterGoal *goal) {
    ConfDoc *d = add(b, SERVICE_ROUTER, 0);
    char list[2048];
    conf_doc_set(d, "http.host", "%s", goal->http_host);
    conf_doc_set(d, "http.port", "%d", goal->http_port);
    conf_doc_set(d, "model.dir", "%s", goal->dir);
    if (*goal->name)
        conf_doc_set(d, "model.name", "%s", goal->name);
    conf_doc_set(d, "model.max_context", "%lld", (long long)goal->context);
    list_endpoints(list, sizeof list, PREFILL_PORT, b->view.n_prefill);
    conf_doc_set(d, "peers.prefill", "%s", list);
    list_endpoints(list, sizeof list, DECODE_PORT, b->view.n_decode);
    conf_doc_set(d, "peers.decode", "%s", list);
}

static int host_threads(const CeilingCase *c) {
    int cores = 0;
    for (int i = 0; i < c->facts->n_nodes; i++)
        cores += c->facts->node[i].n_cores;
    return cores / 8 > 0 ? cores / 8 : 1; /* an eighth each for prefill and decode */
}

static void put_engine(Better *b, ConfDoc *d, const CeilingCase *c, const BetterGoal *goal,
                       int64_t tokens) {
    const View *v = &b->view;
    char list[2048];
    conf_doc_set(d, "model.dir", "%s", goal->dir);
    if (*goal->name)
        conf_doc_set(d, "model.name", "%s", goal->name);
    conf_doc_set(d, "engine.backend", "%s", v->cuda ? "cuda" : "cpu");
    conf_doc_set(d, "engine.tp", "%d", v->tp);
    if (!v->cuda)
        conf_doc_set(d, "engine.threads", "%d", host_threads(c));
    conf_doc_set(d, "engine.kv_dtype", "%s", v->kv == DT_F8E4M3 ? "fp8" : "bf16");
    conf_doc_set(d, "engine.max_context", "%lld", (long long)goal->context);
    conf_doc_set(d, "engine.pages", "%lld",
                 (long long)((tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS));
    if (v->n_expertd == 0)
        return;
    if (b->resident > 0)
        conf_doc_set(d, "experts.resident", "%d", b->resident);
    else
        conf_doc_set(d, "experts.resident", "none");
    if (v->update && b->resident > 0)
        conf_doc_set(d, "experts.update_ms", "30s");
    list_endpoints(list, sizeof list, EXPERTD_PORT, v->n_expertd);
    conf_doc_set(d, "experts.endpoints", "%s", list);
}

/* Ranks take the GPUs that the process sees. */
static void put_gpus(const Better *b, ConfDoc *d, int group) {
    char list[64];
    size_t len = 0;
    for (int i = 0; i < b->view.tp; i++)
        len += (size_t)snprintf(list + len, sizeof list - len, "%s%d", i ? "," : "",
                                b->group[group][i]);
    snprintf(d->before, sizeof d->before, "In the service's environment: CUDA_VISIBLE_DEVICES=%s",
             list);
}

static void put_expertd(Better *b, const BetterGoal *goal, int i) {
    const View *v = &b->view;
    ConfDoc *d = add(b, SERVICE_EXPERTD, i);
    put_ports(d, EXPERTD_PORT + i);
    conf_doc_set(d, "experts.files", "%s", goal->files);
    conf_doc_set(d, "experts.shard", "%d", i);
    conf_doc_set(d, "experts.shards", "%d", v->n_expertd);
    if (b->resident > 0 && !v->update)
        conf_doc_set(d, "experts.device", "%d", b->resident);
    if (v->expertd[i].node >= 0) {
        conf_doc_set(d, "engine.node", "%d", v->expertd[i].node);
        conf_doc_set(d, "engine.threads", "%d", v->expertd[i].threads);
    }
}

void better_write(Better *b, const CeilingCase *c, const BetterGoal *goal) {
    const View *v = &b->view;
    put_router(b, goal);
    for (int i = 0; i < v->n_prefill; i++) {
        ConfDoc *d = add(b, SERVICE_PREFILL, i);
        put_ports(d, PREFILL_PORT + i);
        put_engine(b, d, c, goal, v->prefill_pool);
        if (v->cuda)
            put_gpus(b, d, b->n_groups - 1);
    }
    for (int i = 0; i < v->n_decode; i++) {
        ConfDoc *d = add(b, SERVICE_DECODE, i);
        put_ports(d, DECODE_PORT + i);
        put_engine(b, d, c, goal, v->pool);
        conf_doc_set(d, "sched.max_running", "%d", goal->max_running);
        conf_doc_set(d, "sched.max_batch", "%d", goal->max_running);
        if (v->cuda)
            put_gpus(b, d, i);
    }
    for (int i = 0; i < v->n_expertd; i++)
        put_expertd(b, goal, i);
}
