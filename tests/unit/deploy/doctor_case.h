/* A host and a configuration put together by a test, and what the rules find. */
#pragma once

#include "deploy/baton/doctor_rules.h"

typedef struct Case {
    Facts facts;
    Assume assume;
    Shape shape;
    ConfDoc doc[16];
    int n;
    bool foreign;
    int spec_tokens;

    /* by case_run */
    Services services;
    View view;
    Ceiling ceiling;
    Findings findings;
} Case;

/* GLM-5.2 on the facts of a directory; NULL: of none. */
Case *case_new(const char *facts_dir);
void case_free(Case *c);
/* Takes one more text of facts. */
void case_facts(Case *c, const char *name, const char *text);
/* Adds a config file: "section.key=value" ..., NULL. */
void case_conf(Case *c, ServiceKind kind, const char *name, ...) __attribute__((sentinel));
/* A prefill and a decode that serve, with n expertd of n shards on nodes 0, 1, ... (node0) */
void case_usual(Case *c, const char *backend, int tp, const char *resident, int n_expertd);
/* Sets an option of file i, before case_run. */
void case_set(Case *c, int i, const char *option, const char *value);
/* Judges; again after changes. */
void case_run(Case *c);
/* The finding of a rule; fails the test when there is none. */
const Finding *case_find(const Case *c, const char *id);
bool case_has(const Case *c, const char *id);
void case_expect(const Case *c, const char *id, FindingLevel level, const char *what);
