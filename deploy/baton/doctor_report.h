/* What the doctor says, for people and for programs. */
#pragma once

#include "deploy/baton/doctor_rules.h"
#include "deploy/baton/sglang.h"

typedef struct Report {
    const char *facts_from;  /* "this host", or a directory */
    const char *config_from; /* NULL: nothing is configured */
    const Facts *facts;
    const Assume *assume;
    const Shape *shape;
    bool shape_assumed; /* GLM-5.2's own, no config.json having been found */
    const View *view;
    const Ceiling *ceiling;
    const Findings *findings;
    const Better *better;
    const Sglang *sglang; /* NULL: no translation */
    int status;
} Report;

void report_text(const Report *r, FILE *to);
/* One JSON object. */
void report_json(const Report *r, FILE *to);
