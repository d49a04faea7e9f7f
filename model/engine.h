/* The engine: rank threads that run steps of the model, and sampling.
 *
 * The thread that opens an engine may be any; engine_step is called by one thread at a time (the
 * daemon's engine thread), which sleeps while the rank threads work. Between steps the rank threads
 * sleep. */
#pragma once

#include "base/err.h"
#include "kernels/ops.h"
#include "model/forward.h"
#include "model/sample.h"

typedef struct Engine Engine;

typedef struct EngineConf {
    const char *backend; /* "cpu", "ref", "cpu-avx2", "cpu-avx512", "cuda" */
    int tp;
    int threads; /* per rank, host backends; 0: cores / tp */
    int max_rows, max_seqs, max_context, max_logits;
    bool mtp;
    Dtype kv_dtype;
    const bool *resident;   /* as in ForwardConf */
    const ExpertPort *port; /* copied */
    RouteCount *counts;     /* as in ForwardConf, which only rank 0 gets; outlives the engine */
    bool count_all;
    const Ops *ops; /* NULL: by name; tests put a table of their own here */
} EngineConf;

/* One row whose logits are wanted. sampler NULL: none are sampled (the caller reads engine_logits).
 */
typedef struct EngineRow {
    int32_t row; /* of the batch */
    const Sampler *sampler;
    int draw;
    SampleOut out; /* filled by the step */
    int status;    /* 0, or why this row has no token: the request fails, the others go on */
} EngineRow;

/* Starts the rank threads and loads the weights; w must outlive the engine. The pool is bound
 * later. */
int engine_open(Engine **out, const Weights *w, const EngineConf *conf, Err *err);
void engine_close(Engine *e);
const char *engine_backend(const Engine *e); /* the table really taken: "cpu-avx512" */
const Shape *engine_shape(const Engine *e);
int engine_max_rows(const Engine *e); /* tokens of a step */

/* Geometry of the pool without its page count, memory for one where the backend wants it (the
 * caller's to give back before the engine closes; NULL is fine), and binding of kv_pool_bytes of
 * it. */
KvLayout engine_kv_layout(const Engine *e);
int engine_pool_new(Engine *e, uint64_t bytes, void **out, Err *err);
void engine_pool_free(Engine *e, void *pool);
void engine_kv_bind(Engine *e, const KvLayout *layout, void *pool);
/* Whether the pool is memory of the device that the host cannot address. */
bool engine_pool_on_device(const Engine *e);
/* Any thread; as pool_enter and pool_copy of ops.h. */
void engine_pool_enter(const Engine *e);
void engine_pool_copy(const Engine *e, void *to, const void *from, uint64_t bytes);
/* hash[n] = kv_hash_page of page[i], rows [0, n_rows[i]). On the thread that makes steps. */
void engine_kv_hash(Engine *e, const int32_t *page, const int32_t *n_rows, int n, uint64_t *hash);

/* One step. probe (may be NULL) is called on rank 0's thread. E_ codes of the expert port when the
 * step is void. */
int engine_step(Engine *e, const OpsBatch *batch, EngineRow *rows, int n_rows,
                const ForwardProbe *probe, Err *err);
/* One MTP step over the hidden states of the last engine_step (from_state false) or of the last MTP
 * step; samples like engine_step. hidden rows are taken as hidden_row[i] of that step for token i.
 */
int engine_mtp(Engine *e, const OpsBatch *batch, const int32_t *hidden_row, bool from_state,
               EngineRow *rows, int n_rows, Err *err);
/* Between steps, on the thread that makes them: from the next step on the devices hold the experts
 * of a MoE layer that resident[n_experts] names. The device holds both sets for a moment. E_NOMEM
 * and whatever else loading gives: nothing has changed. */
int engine_place(Engine *e, int layer, const bool *resident, Err *err);
/* Numbers of a tensor of rank 0 to host memory, densely packed, and back; between steps, or inside
 * of a probe. */
void engine_get(Engine *e, const Tensor *t, void *host);
void engine_put(Engine *e, Tensor *t, const void *host);
/* logits[n_rows, vocab] of the last step, in host memory. */
const float *engine_logits(const Engine *e, int row);

/* Compares the dispatched kernels with the reference on random data of the model's shapes:
 * E_MISMATCH names the operation and the difference. */
int engine_selftest(const Engine *e, Err *err);
