/* See doctor_rules.h: the list of rules, findings and their order. */
#include "deploy/baton/doctor_rules.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *finding_level_name(FindingLevel l) {
    static const char *const names[] = {"ok", "unknown", "note", "warn", "fail"};
    return names[l];
}

static char *format(const char *fmt, va_list args) {
    char *s;
    int n = vasprintf(&s, fmt, args);
    CHECK(n >= 0);
    return s;
}

Finding *finding_add(Findings *f, const char *id, FindingLevel level, double gain, const char *fmt,
                     ...) {
    va_list args;
    va_start(args, fmt);
    f->at = xrealloc(f->at, (size_t)(f->n + 1) * sizeof *f->at);
    Finding *one = &f->at[f->n++];
    *one = (Finding){id, level, gain, format(fmt, args), xstrdup(""), xstrdup("")};
    va_end(args);
    return one;
}

static void replace(char **text, const char *fmt, va_list args) {
    char *s = format(fmt, args);
    free(*text);
    *text = s;
}

void finding_basis(Finding *f, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    replace(&f->basis, fmt, args);
    va_end(args);
}

void finding_change(Finding *f, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    replace(&f->change, fmt, args);
    va_end(args);
}

void findings_done(Findings *f) {
    for (int i = 0; i < f->n; i++) {
        free(f->at[i].what);
        free(f->at[i].basis);
        free(f->at[i].change);
    }
    free(f->at);
    *f = (Findings){0};
}

double rules_gain(const RuleCase *c, const View *changed) {
    CeilingCase mine = {c->facts, c->assume, c->shape, changed};
    double now = c->ceiling->tok_per_s, then = ceiling_compute(&mine).tok_per_s;
    return now > 0 && then > now ? then / now - 1 : 0;
}

static const RuleFn RULES[] = {
    rule_memory_nodes, rule_memory_unbound, rule_memory_fit, rule_sub_numa,      rule_threads,
    rule_huge_pages,   rule_numa_balancing, rule_shards,     rule_held,          rule_placement,
    rule_speculation,  rule_gpu_present,    rule_gpu_memory, rule_all_reduce,    rule_gpu_idle,
    rule_gpu_side,     rule_pcie,           rule_memlock,    rule_shared_memory, rule_amx,
    rule_cgroup,       rule_transport,      rule_pair,       rule_kv_pool,       rule_kv_dtype,
};

static int by_cost(const void *a, const void *b) {
    const Finding *x = a, *y = b;
    if (x->level != y->level)
        return (int)y->level - (int)x->level;
    if (x->gain != y->gain)
        return x->gain < y->gain ? 1 : -1;
    return strcmp(x->id, y->id);
}

void rules_run(const RuleCase *c, Findings *out) {
    for (size_t i = 0; i < sizeof RULES / sizeof *RULES; i++)
        RULES[i](c, out);
    if (out->n > 0)
        qsort(out->at, (size_t)out->n, sizeof *out->at, by_cost);
}

int rules_status(const Findings *f) {
    int status = 0;
    for (int i = 0; i < f->n; i++) {
        int one = f->at[i].level == FINDING_FAIL ? 2 : f->at[i].level == FINDING_WARN;
        status = one > status ? one : status;
    }
    return status;
}
