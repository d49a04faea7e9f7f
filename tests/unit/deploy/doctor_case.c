/* See doctor_case.h. */
#include "doctor_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

Case *case_new(const char *facts_dir) {
    Case *c = xcalloc(1, sizeof *c);
    Err err = {0};
    facts_init(&c->facts);
    if (facts_dir && facts_read(&c->facts, facts_dir, &err))
        fail_msg("%s", err.text);
    assume_init(&c->assume);
    model_glm52(&c->shape);
    return c;
}

static void forget(Case *c) {
    findings_done(&c->findings);
    services_done(&c->services);
}

void case_free(Case *c) {
    forget(c);
    for (int i = 0; i < c->n; i++)
        conf_doc_done(&c->doc[i]);
    free(c);
}

void case_facts(Case *c, const char *name, const char *text) {
    Err err = {0};
    char *copy = xstrdup(text);
    if (facts_parse(&c->facts, name, copy, &err))
        fail_msg("%s", err.text);
    free(copy);
}

void case_conf(Case *c, ServiceKind kind, const char *name, ...) {
    ConfDoc *d = &c->doc[c->n++];
    va_list args;
    conf_doc_init(d, kind, name);
    va_start(args, name);
    for (const char *s; (s = va_arg(args, const char *));) {
        char *option = xstrdup(s), *equals = strchr(option, '=');
        *equals = 0;
        conf_doc_set(d, option, "%s", equals + 1);
        free(option);
    }
    va_end(args);
}

void case_usual(Case *c, const char *backend, int tp, const char *resident, int n_expertd) {
    char endpoints[512] = "";
    for (int i = 0; i < n_expertd; i++) {
        ConfDoc *d = &c->doc[c->n];
        size_t len = strlen(endpoints);
        case_conf(c, SERVICE_EXPERTD, "expertd", "experts.files=nowhere", NULL);
        conf_doc_set(d, "engine.node", "%d", i);
        conf_doc_set(d, "experts.shard", "%d", i);
        conf_doc_set(d, "experts.shards", "%d", n_expertd);
        snprintf(endpoints + len, sizeof endpoints - len, "%sipc://e%d", i ? "," : "", i);
    }
    for (int i = 0; i < 2; i++) {
        ConfDoc *d = &c->doc[c->n];
        case_conf(c, i ? SERVICE_DECODE : SERVICE_PREFILL, i ? "decode" : "prefill", "model.dir=m",
                  "engine.max_context=32768", "engine.pages=4096", "engine.kv_dtype=fp8", NULL);
        conf_doc_set(d, "engine.backend", "%s", backend);
        conf_doc_set(d, "engine.tp", "%d", tp);
        conf_doc_set(d, "experts.resident", "%s", resident);
        conf_doc_set(d, "experts.endpoints", "%s", endpoints);
        if (i)
            conf_doc_set(d, "sched.max_running", "8");
    }
}

void case_set(Case *c, int i, const char *option, const char *value) {
    conf_doc_set(&c->doc[i], option, "%s", value);
}

void case_run(Case *c) {
    Err err = {0};
    forget(c);
    int rc = facts_derive(&c->facts, (int)c->assume.sockets, &err);
    if (rc == 0)
        rc = services_add_docs(&c->services, c->doc, c->n, &err);
    if (rc == 0)
        rc = view_make(&c->view, &c->services, &c->facts, &c->assume, &c->shape, c->foreign, &err);
    if (rc)
        fail_msg("%s", err.text);
    c->view.spec_tokens = c->spec_tokens;
    CeilingCase ceiling = {&c->facts, &c->assume, &c->shape, &c->view};
    c->ceiling = ceiling_compute(&ceiling);
    RuleCase rule = {&c->facts, &c->assume, &c->shape, &c->services, &c->view, &c->ceiling};
    rules_run(&rule, &c->findings);
}

static const Finding *look(const Case *c, const char *id) {
    for (int i = 0; i < c->findings.n; i++)
        if (strcmp(c->findings.at[i].id, id) == 0)
            return &c->findings.at[i];
    return NULL;
}

bool case_has(const Case *c, const char *id) {
    return look(c, id) != NULL;
}

const Finding *case_find(const Case *c, const char *id) {
    const Finding *f = look(c, id);
    if (!f)
        fail_msg("no finding %s", id);
    return f;
}

void case_expect(const Case *c, const char *id, FindingLevel level, const char *what) {
    const Finding *f = case_find(c, id);
    if (f->level != level || !strstr(f->what, what))
        fail_msg("%s: %s: %s; expected %s: %s", id, finding_level_name(f->level), f->what,
                 finding_level_name(level), what);
}
