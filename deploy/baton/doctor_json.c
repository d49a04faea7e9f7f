/* The report for programs. */
#include "deploy/baton/doctor_report.h"

#include <jansson.h>

#include <math.h>
#include <string.h>

static void put(json_t *o, const char *key, json_t *v) {
    CHECK(json_object_set_new(o, key, v) == 0);
}

/* Names from outside may be no UTF-8. */
static json_t *text(const char *s) {
    json_t *v = json_string(s);
    return v ? v : json_string("?");
}

static json_t *real(double v) {
    return json_real(isfinite(v) ? v : 0);
}

static json_t *list_of(const int *list, int n) {
    json_t *a = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(a, json_integer(list[i]));
    return a;
}

static json_t *host(const Report *r) {
    const Facts *f = r->facts;
    json_t *o = json_object(), *nodes = json_array(), *gpus = json_array();
    put(o, "from", text(r->facts_from));
    put(o, "sockets", json_integer(f->n_sockets));
    put(o, "sockets_how", text(f->sockets_how));
    for (int i = 0; i < f->n_nodes; i++) {
        const FactsNode *n = &f->node[i];
        if (n->present)
            json_array_append_new(nodes, json_pack("{s:i, s:i, s:i, s:I, s:f, s:b}", "node", i,
                                                   "socket", n->socket, "cores", n->n_cores,
                                                   "size_mb", (json_int_t)n->size_mb, "gb_per_s",
                                                   ceiling_node_gb_per_s(f, r->assume, i),
                                                   "measured", n->gb_per_s > 0));
    }
    for (int i = 0; i < f->n_gpus; i++) {
        json_t *g = json_object();
        if (!f->gpu[i].present) {
            json_decref(g);
            continue;
        }
        put(g, "gpu", json_integer(i));
        put(g, "name", text(f->gpu[i].name));
        put(g, "node", json_integer(f->gpu[i].node));
        put(g, "h2d_gb_per_s", real(f->gpu[i].h2d_gb_per_s));
        put(g, "d2h_gb_per_s", real(f->gpu[i].d2h_gb_per_s));
        json_array_append_new(gpus, g);
    }
    put(o, "nodes", nodes);
    put(o, "gpus", gpus);
    return o;
}

static json_t *ceiling(const Ceiling *c, const View *v) {
    json_t *o = json_object();
    put(o, "expert_bytes", real(c->cpu_bytes));
    put(o, "expert_gb_per_s", real(c->cpu_gb_per_s));
    put(o, "expert_ms", real(c->cpu_ms));
    put(o, "device_bytes", real(c->device_bytes));
    put(o, "device_gb_per_s", real(c->device_gb_per_s));
    put(o, "device_ms", real(c->device_ms));
    put(o, "all_reduce_ms", real(c->reduce_ms));
    put(o, "hand_over_ms", real(c->handover_ms));
    put(o, "total_ms", real(c->total_ms));
    put(o, "tok_per_s", real(c->tok_per_s));
    put(o, "memory_tok_per_s", real(c->memory_tok_per_s));
    put(o, "tp", json_integer(v->tp));
    put(o, "resident_share", real(v->resident));
    return o;
}

static json_t *findings(const Findings *f) {
    json_t *a = json_array();
    for (int i = 0; i < f->n; i++) {
        json_t *o = json_object();
        put(o, "id", text(f->at[i].id));
        put(o, "level", text(finding_level_name(f->at[i].level)));
        put(o, "gain", real(f->at[i].gain));
        put(o, "what", text(f->at[i].what));
        put(o, "numbers", text(f->at[i].basis));
        put(o, "change", text(f->at[i].change));
        json_array_append_new(a, o);
    }
    return a;
}

static json_t *better(const Better *b) {
    json_t *o = json_object(), *files = json_object();
    for (int i = 0; i < b->n_docs; i++) {
        char *s = NULL, name[80];
        size_t n;
        FILE *to = open_memstream(&s, &n);
        CHECK(to);
        conf_doc_print(&b->docs[i], to);
        fclose(to);
        snprintf(name, sizeof name, "%s.conf", b->docs[i].name);
        put(files, name, text(s));
        free(s);
    }
    put(o, "fits", json_boolean(b->fits));
    if (!b->fits)
        put(o, "why", text(b->why));
    put(o, "files", files);
    put(o, "unused_gpus", list_of(b->unused, b->n_unused));
    return o;
}

static json_t *translation(const Sglang *s) {
    json_t *a = json_array();
    for (int i = 0; i < s->n; i++) {
        const SglangRemark *m = &s->remark[i];
        json_t *o = json_object();
        put(o, "option", text(m->option));
        put(o, "value", text(m->value));
        put(o, "line", json_integer(m->line));
        put(o, "state", text(sglang_state_name(m->state)));
        put(o, "baton", text(m->baton));
        put(o, "why", text(m->why));
        json_array_append_new(a, o);
    }
    return a;
}

static json_t *assumptions(const Assume *a) {
    json_t *o = json_object();
    for (const AssumeRow *r = ASSUME_TABLE; r->name; r++)
        put(o, r->name, real(assume_get(a, r)));
    return o;
}

void report_json(const Report *r, FILE *to) {
    json_t *o = json_object(), *ceilings = json_object();
    put(o, "status", json_integer(r->status));
    put(o, "host", host(r));
    put(o, "config", r->config_from ? text(r->config_from) : json_null());
    put(o, "findings", findings(r->findings));
    if (r->config_from && r->view->n_decode > 0)
        put(ceilings, "given", ceiling(r->ceiling, r->view));
    if (r->better->fits)
        put(ceilings, "better", ceiling(&r->better->ceiling, &r->better->view));
    put(o, "ceilings", ceilings);
    put(o, "assumptions", assumptions(r->assume));
    put(o, "better", better(r->better));
    if (r->sglang)
        put(o, "options", translation(r->sglang));
    json_dumpf(o, to, JSON_INDENT(2));
    fputc('\n', to);
    json_decref(o);
}
