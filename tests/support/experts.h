/* Experts of a checkpoint or of expert files, computed in this process, as the port of a forward
 * pass. One thread at a time. */
#pragma once

#include "expertd/store.h"
#include "model/forward.h"

typedef struct LocalExperts {
    Store *store;
    bool *resident; /* for RigConf: none of the MoE layers' experts */
    ExpertPort port;
    int hidden, n; /* of the post under way */
    float *sum;    /* [n, hidden] */
    size_t bytes;
} LocalExperts;

/* All routed experts from the files of dir; shape is the model's. */
int local_experts_open(LocalExperts *out, const char *dir, const Shape *shape, Err *err);
void local_experts_close(LocalExperts *e);
