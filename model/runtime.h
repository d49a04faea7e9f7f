/* The model as a serving daemon holds it: weights, tokenizer facts, placement, engine, and the
 * geometry of its KV pool. Start-up and shutdown; but for resident and counts immutable in between,
 * so that any thread may read. */
#pragma once

#include "base/file_lock.h"
#include "model/engine.h"
#include "model/engine_conf.h"
#include "model/route_count.h"

typedef struct Runtime {
    Weights *weights;
    const Shape *shape;   /* borrowed from weights */
    uint64_t fingerprint; /* of the weights */
    Engine *engine;
    uint64_t model_id;       /* weights_id */
    bool *resident;          /* as place_decide gives it; place_live changes it, on the loop */
    bool *kept;              /* those of them that stay; expertd must hold all others */
    int n_remote;            /* experts that are not resident, over all layers */
    RouteCount *counts;      /* what has been routed */
    FileLock *record_lock;   /* no other service writes the record; NULL without one */
    int max_context;         /* tokens of one request */
    int n_tokens;            /* ids below it are tokens; the rest of the vocabulary is padding */
    uint64_t tokenizer_hash; /* XXH3-64 of tokenizer.json */
    const char *kv_dtype;    /* "f32", "bf16", "fp8" */
    KvLayout layout;
    void *pool; /* of the engine, when the pool is GPU memory; else NULL */
} Runtime;

/* Reads and checks what is in o->dir and where the experts are to be computed. On failure *out is
 * empty; the text names the file or option. */
int runtime_load(Runtime *out, const EngineOpts *o, Err *err);
/* Starts the engine for steps of at most max_rows tokens of max_seqs sequences, tests its kernels,
 * and decides the pool's geometry: E_INVAL with the numbers when a request of max_context tokens
 * does not fit. port: NULL when every expert is resident; copied. */
int runtime_start(Runtime *r, const EngineOpts *o, int max_rows, int max_seqs,
                  const ExpertPort *port, Err *err);
/* Safe on an empty or partly opened one. */
void runtime_close(Runtime *r);
