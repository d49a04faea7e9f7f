/* What limits a service: rules, each a pure function from facts and configuration to findings. */
#pragma once

#include "deploy/baton/doctor_better.h"

typedef enum FindingLevel {
    FINDING_OK,      /* looked at, and good */
    FINDING_UNKNOWN, /* no facts to look at */
    FINDING_NOTE,    /* to know, nothing to change */
    FINDING_WARN,    /* works, but less well than it could */
    FINDING_FAIL,    /* will not work */
} FindingLevel;

const char *finding_level_name(FindingLevel l); /* "ok", "unknown", "note", "warn", "fail" */

typedef struct Finding {
    const char *id; /* static: "memory-nodes" */
    FindingLevel level;
    double gain;  /* of tokens per second at one stream if it is changed, 0.5 for half as many more;
                     0: not estimated */
    char *what;   /* one sentence; of OK and UNKNOWN a few words */
    char *basis;  /* the numbers it rests on; may be empty */
    char *change; /* what to change; may be empty */
} Finding;

typedef struct Findings {
    Finding *at;
    int n;
} Findings;

/* What rules see. */
typedef struct RuleCase {
    const Facts *facts;
    const Assume *assume;
    const Shape *shape;
    const Services *services;
    const View *view;
    const Ceiling *ceiling; /* of the view */
} RuleCase;

/* Adds; basis and change are the next two texts, both with the same arguments as printf. */
Finding *finding_add(Findings *f, const char *id, FindingLevel level, double gain, const char *fmt,
                     ...) __attribute__((format(printf, 5, 6)));
void finding_basis(Finding *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void finding_change(Finding *f, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void findings_done(Findings *f);

/* The gain that a changed view has over the case's. */
double rules_gain(const RuleCase *c, const View *changed);

typedef void (*RuleFn)(const RuleCase *c, Findings *out);

/* All rules, then sorted: what will not work, then by gain, the most costly first. */
void rules_run(const RuleCase *c, Findings *out);
/* 0 good, 1 warnings, 2 will not work. */
int rules_status(const Findings *f);

/* doctor_rules_memory.c */
void rule_memory_nodes(const RuleCase *c, Findings *out);
void rule_memory_unbound(const RuleCase *c, Findings *out);
void rule_memory_fit(const RuleCase *c, Findings *out);
void rule_sub_numa(const RuleCase *c, Findings *out);
void rule_threads(const RuleCase *c, Findings *out);
void rule_huge_pages(const RuleCase *c, Findings *out);
void rule_numa_balancing(const RuleCase *c, Findings *out);

/* doctor_rules_experts.c */
void rule_shards(const RuleCase *c, Findings *out);
void rule_held(const RuleCase *c, Findings *out);
void rule_placement(const RuleCase *c, Findings *out);
void rule_speculation(const RuleCase *c, Findings *out);

/* doctor_rules_gpu.c */
void rule_gpu_present(const RuleCase *c, Findings *out);
void rule_gpu_memory(const RuleCase *c, Findings *out);
void rule_all_reduce(const RuleCase *c, Findings *out);
void rule_gpu_idle(const RuleCase *c, Findings *out);
void rule_gpu_side(const RuleCase *c, Findings *out);
void rule_pcie(const RuleCase *c, Findings *out);

/* doctor_rules_host.c */
void rule_memlock(const RuleCase *c, Findings *out);
void rule_shared_memory(const RuleCase *c, Findings *out);
void rule_amx(const RuleCase *c, Findings *out);
void rule_cgroup(const RuleCase *c, Findings *out);
void rule_transport(const RuleCase *c, Findings *out);

/* doctor_rules_kv.c */
void rule_pair(const RuleCase *c, Findings *out);
void rule_kv_pool(const RuleCase *c, Findings *out);
void rule_kv_dtype(const RuleCase *c, Findings *out);
