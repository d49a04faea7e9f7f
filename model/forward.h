/* The forward pass of one rank: weights on the device, workspace, and the order of operations.
 *
 * forward.c is the only place where that order stands, for every device and for prefill and decode
 * alike. All ranks of a group make the same calls with the same batch, each on a thread of its own.
 * Everything is allocated by forward_open; a step allocates nothing.
 *
 * Source of the maths: GLM-5 (GlmMoeDsa): MLA in absorbed form, DSA indexer with index sharing,
 * sigmoid-routed experts. */
#pragma once

#include "base/err.h"
#include "kernels/ops.h"
#include "model/route_count.h"
#include "model/shape.h"
#include "model/weights.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Forward Forward;

/* Where a step's experts that the device does not hold are computed. Rank 0 calls it, in pairs:
 * post, then wait. A failure of either makes the step fail (forward_run reports it) but does not
 * end it early, so that all ranks stay in step. */
typedef struct ExpertPort {
    void *arg;
    /* x[n, hidden], id[n, k] (-1: not remote), weight[n, k]: borrowed until wait returns */
    int (*post)(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                const float *weight, Err *err);
    /* y[n, hidden] += the remote partial sums */
    int (*wait)(void *arg, float *y, Err *err);
} ExpertPort;

/* What tests and the KV push see while a step runs; called on the rank's thread. */
typedef enum ForwardPoint {
    FORWARD_KV,     /* the KV rows of `layer` are in the pool, for whoever reads it; comes while the
                       device computes the layer after it */
    FORWARD_HIDDEN, /* t [n, hidden]: the residual after `layer` */
    FORWARD_TOPK, /* t [n, K] i32: the positions that `layer` chose (layers with an indexer only) */
    FORWARD_ROUTE,  /* t [n, k] i32: the experts of `layer` */
    FORWARD_WEIGHT, /* t [n, k] f32: their weights */
    FORWARD_FINAL,  /* t [n, hidden]: after the final norm */
} ForwardPoint;

typedef struct ForwardProbe {
    void *arg;
    void (*on)(void *arg, ForwardPoint point, int layer, const Tensor *t);
} ForwardProbe;

typedef struct ForwardConf {
    const Ops *ops;
    Dev *dev;
    int rank, n_ranks;
    int max_rows;   /* tokens per step */
    int max_logits; /* rows with logits per step */
    bool mtp;       /* load the MTP layer */
    /* per layer [n_layers + n_mtp] and expert [n_experts]: held by the device? NULL: all. Borrowed
     * for the call. */
    const bool *resident;
    const ExpertPort *port; /* required when some are not; copied; used by rank 0 */
    /* Rank 0 adds up what it routes, of layers with remote experts; count_all: of every MoE layer,
     * which on a GPU means waiting for it once more in each. NULL: nothing is counted. */
    RouteCount *counts;
    bool count_all;
} ForwardConf;

/* Loads this rank's slices and allocates its workspace. COLLECTIVE over ranks, and every rank
 * returns whatever another one meets. w must outlive the Forward. */
int forward_open(Forward **out, const Weights *w, const ForwardConf *conf, Err *err);
void forward_close(Forward *f);

/* Changes which experts of a MoE layer the device holds, in two halves between steps: load makes
 * the new set beside the old one, swap puts it in place (take) or throws it away. resident
 * [n_experts] is copied. E_INVAL for remote experts without a port. Each rank on its own thread;
 * all of them before the next step. */
int forward_place_load(Forward *f, int layer, const bool *resident, Err *err);
void forward_place_swap(Forward *f, bool take);

/* The pool geometry that the model needs: dtype as given, n_pages 0. mtp adds the MTP layer's
 * slots. */
KvLayout forward_kv_layout(const Shape *s, Dtype dtype, bool mtp);

/* One step over a ragged batch: prefill chunks and decode tokens in any mixture, several new tokens
 * of one sequence included. Stores their KV; the caller rolls back by reusing positions.
 * logits[n_logits, vocab] (fp32, shared by the ranks, valid until the next step) belong to the
 * tokens logit_row[i]. probe may be NULL. Returns 0, or what the expert port reported: the step's
 * results are then void. COLLECTIVE. */
int forward_run(Forward *f, const OpsBatch *batch, const int32_t *logit_row, int n_logits,
                const ForwardProbe *probe, Tensor *logits, Err *err);

/* The MTP layer on a batch whose token[i] is the token after position pos[i] and whose row i of
 * hidden[n, hidden] is the target's output after its final norm at pos[i], or the previous draft
 * step's *state. Writes *state[n, hidden] (after shared_head.norm) and logits as above. COLLECTIVE.
 */
int mtp_run(Forward *f, const OpsBatch *batch, Tensor hidden, const int32_t *logit_row,
            int n_logits, Tensor *state, Tensor *logits, Err *err);

/* The last step's hidden states after the final norm, [n, hidden]: the input of mtp_run. Valid
 * until the next step. */
Tensor forward_final(const Forward *f);
