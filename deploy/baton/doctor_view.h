/* What configured services come to on a host: the numbers that rules and ceilings take. Pure but
 * for reading a placement file and the head of expert files. */
#pragma once

#include "deploy/baton/doctor_assume.h"
#include "deploy/baton/doctor_model.h"
#include "deploy/baton/facts.h"
#include "deploy/baton/services.h"

enum { VIEW_EXPERTD = 64 };

typedef struct ViewExpertd {
    int node;    /* -1: bound to none */
    int threads; /* as configured, or the node's cores */
    int shard;
    bool packed; /* from expert files */
} ViewExpertd;

/* One tensor-parallel group: the GPUs that its ranks take. */
typedef struct ViewGroup {
    int gpu[8], n;
    FactsLink worst; /* between any two; FACTS_LINK_SELF for one GPU */
    bool some_nv;    /* NVLink joins some of its pairs */
} ViewGroup;

typedef struct View {
    bool foreign;  /* another system's options: one engine reads prompts and answers */
    bool services; /* anything is configured */
    bool cuda;
    int tp, n_prefill, n_decode, n_expertd;
    int64_t context;            /* most tokens of one request */
    int64_t pool, prefill_pool; /* tokens */
    int max_running;
    Dtype kv;
    double resident; /* share of the routed experts on the device, 0 to 1 */
    PlaceStrategy strategy;
    bool update; /* residents follow use */
    ViewExpertd expertd[VIEW_EXPERTD];
    int n_shards;       /* as configured; 0: no expertd */
    double expert_bits; /* of a weight in host memory, scales included */
    int spec_tokens;    /* drafted per step */
    ViewGroup group;    /* of the first decode */
} View;

/* E_INVAL: what no rule can judge, such as a resident that is no number. */
int view_make(View *out, const Services *s, const Facts *f, const Assume *a, const Shape *shape,
              bool foreign, Err *err);
/* The group of n GPUs, by what connects them. */
ViewGroup view_group(const Facts *f, const int *gpu, int n);
/* "0, 1" or "none" into out. */
const char *view_list(char *out, size_t n, const int *list, int count);
/* Distinct nodes that expertd are bound to, in order; returns their number. */
int view_nodes(const View *v, int *list);
/* Bytes of the experts that all expertd hold together. */
double view_expert_bytes(const View *v, const Services *s, const Shape *shape);
