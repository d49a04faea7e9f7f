/* A configuration that uses the whole host: one expertd per memory node, tensor-parallel groups
 * within the fastest links, prefill and decode each with GPUs of their own where there are enough,
 * as many experts on the GPUs as fit. Of such layouts that fit, the one with the highest ceiling at
 * one stream. Pure but for what it allocates. */
#pragma once

#include "deploy/baton/doctor_ceiling.h"

/* What the deployment is for, whatever the host. */
typedef struct BetterGoal {
    char dir[4096], files[4096], name[256], http_host[256];
    int http_port;
    int64_t context, pool; /* tokens; 0: of the model; for max_running requests of it */
    int max_running;
    bool update;
} BetterGoal;

typedef struct Better {
    bool fits; /* else *why says what does not, and nothing else is set */
    char why[240];
    View view; /* of the configuration */
    Ceiling ceiling;
    int n_groups; /* of GPUs; 0: none are used */
    bool shared;  /* prefill and decode share one group */
    int group[FACTS_GPUS][8];
    int n_unused; /* GPUs that no group takes */
    int unused[FACTS_GPUS];
    int resident; /* experts of each layer on the device */
    ConfDoc *docs;
    int n_docs;
} Better;

/* The goal that services have, or that of GLM-5.2 with nothing configured. */
BetterGoal better_goal(const Services *s, const View *v, const Shape *shape);
Better better_find(const CeilingCase *given, const BetterGoal *goal);
void better_done(Better *b);
