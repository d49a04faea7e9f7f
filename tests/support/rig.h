/* A model ready to run inside one test program: checkpoint, engine, a pool, sequences with pages.
 * One thread. */
#pragma once

#include "model/engine.h"
#include "model/kv_pool.h"

#include <stdbool.h>

typedef struct Rig {
    Weights *weights;
    Engine *engine;
    KvPool *pages;
    KvLayout layout;
    void *pool;
    int max_pages; /* of one sequence */
} Rig;

typedef struct RigConf {
    const char *dir, *backend;
    const Ops *ops; /* instead of backend, or NULL */
    int tp, threads, max_rows, max_seqs, max_context;
    Dtype kv_dtype;
    bool mtp;
    const bool *resident;
    const ExpertPort *port;
    RouteCount *counts; /* of every MoE layer */
} RigConf;

/* One sequence: its tokens so far are positions [0, n). */
typedef struct RigSeq {
    int32_t *page;
    int n;
} RigSeq;

/* Pages are filled with NaN bytes first, so that a read of an unwritten row shows. */
int rig_open(Rig *r, const RigConf *conf, Err *err);
void rig_close(Rig *r);

RigSeq rig_seq_new(Rig *r, int max_tokens);
void rig_seq_free(Rig *r, RigSeq *s, int max_tokens);

/* Appends token[0, n) in steps of at most chunk tokens; logits of the last `want` tokens (want <=
 * chunk) are at engine_logits(0 .. want - 1) afterwards. */
int rig_append(Rig *r, RigSeq *s, const int32_t *token, int n, int chunk, int want,
               const ForwardProbe *probe, Err *err);

/* The MTP layer over positions [pos, pos + n) with the given tokens; logits of the last one at
 * engine_logits(0). hidden_row0: the first of the n hidden rows of the last step. */
int rig_mtp(Rig *r, RigSeq *s, const int32_t *token, int pos, int n, int hidden_row0,
            bool from_state, Err *err);

int rig_argmax(const float *x, int n);
