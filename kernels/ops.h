/* The border to the device: a table of operations on opaque device tensors.
 *
 * One Dev is one rank of a TP group; each rank has a thread of its own that makes all calls on its
 * Dev. Calls enqueue work in order; only download(), reach() and kv_hash() wait for it. Operations
 * marked COLLECTIVE are called by every rank of the group in the same order with the same
 * arguments; their results are bit-identical on all ranks and do not depend on timing. No operation
 * fails: what can fail is loading and allocation, before ready. A device that breaks ends the
 * process.
 *
 * Activations are fp32 [rows, cols] on host backends. n is the number of tokens of the current
 * batch, H the rank's heads. Row results do not depend on which other rows are in the batch (fixed
 * order of summation per output element).
 *
 * Tolerances, relative to ref/ on the same inputs and stored formats: 1e-5 of the largest magnitude
 * of the row for everything but top-k and routing, which are equal except where scores differ by
 * less than 1e-5 of the largest. */
#pragma once

#include "base/err.h"
#include "kernels/kv_layout.h"
#include "kernels/quant.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Dev Dev;         /* one rank's device */
typedef struct Mat Mat;         /* a weight matrix as the device keeps it */
typedef struct Experts Experts; /* the routed experts of one layer that this device holds */

/* Row-major [rows, cols], ld elements from row to row; `at` is a device address. Views borrow. */
typedef struct Tensor {
    void *at;
    Dtype dtype; /* DT_F32 or DT_I32 */
    int rows, cols, ld;
    bool borrowed; /* another rank owns the memory: tensor_free leaves it */
} Tensor;

/* Rows [0, rows) of t. */
static inline Tensor tensor_head(Tensor t, int rows) {
    t.rows = rows;
    return t;
}

/* Row `row` of t. */
static inline Tensor tensor_row(Tensor t, int row) {
    t.at = (char *)t.at + (size_t)row * (size_t)t.ld * 4;
    t.rows = 1;
    return t;
}

/* Columns [col, col + n) of t. */
static inline Tensor tensor_cols(Tensor t, int col, int n) {
    t.at = (char *)t.at + (size_t)col * 4;
    t.cols = n;
    return t;
}

/* What a step works on, in host memory, borrowed for the call of batch_set. */
typedef struct OpsBatch {
    int n_tok, n_seq;
    const int32_t *token;      /* [n_tok] */
    const int32_t *pos;        /* [n_tok] position in its sequence */
    const int32_t *seq;        /* [n_tok] index of its sequence, 0 .. n_seq - 1 */
    const int32_t *page_table; /* [n_seq, page_stride] page of each 64 positions; entries beyond a
                                  sequence's length are not read */
    int page_stride;
} OpsBatch;

typedef struct DevConf {
    int n_ranks;
    int threads;  /* host backends: threads per rank, 0 = physical cores / ranks, at least 1 */
    int max_rows; /* tokens in a batch */
    int max_seqs;
    int max_context; /* positions of one sequence */
    int index_topk;
} DevConf;

/* The routed experts of one layer, each sliced for this rank: gate, up [inner, hidden], down
 * [hidden, inner]. A view without data is an expert that this device does not hold. */
typedef struct ExpertsView {
    int n_experts;
    const MatView *gate, *up, *down; /* [n_experts] each */
} ExpertsView;

typedef struct Ops {
    const char *name;   /* "ref", "cpu-avx512", ... */
    bool device_memory; /* tensors and pools are not addressable by the host */

    /* -- life: open fills dev[n_ranks]; close ends the whole group and accepts NULLs -- */
    int (*open)(const DevConf *conf, Dev **dev, Err *err);
    void (*close)(Dev **dev, int n_ranks);

    /* -- memory, before ready; experts_load and experts_free also between steps, while no rank
       works. Host backends borrow the view's bytes; others copy -- */
    int (*mat_load)(Dev *d, const MatView *view, Mat **out, Err *err);
    void (*mat_free)(Dev *d, Mat *m);
    int (*experts_load)(Dev *d, const ExpertsView *view, Experts **out, Err *err);
    void (*experts_free)(Dev *d, Experts *e);
    int (*tensor_new)(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err);
    /* COLLECTIVE. Written by any rank, read by all: one memory on a host, one per rank elsewhere.
     */
    int (*tensor_shared)(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err);
    void (*tensor_free)(Dev *d, Tensor *t);
    void (*upload)(Dev *d, Tensor *t, const void *host); /* rows * cols numbers, densely packed */
    void (*download)(Dev *d, const Tensor *t, void *host);
    /* Memory for a pool, the caller's to give back: plain memory on a host, the GPU's otherwise.
     * E_NOMEM with what was needed and what is available. */
    int (*pool_new)(Dev *d, uint64_t bytes, void **out, Err *err);
    void (*pool_free)(Dev *d, void *pool); /* NULL is fine */
    /* The pool: memory of pool_new, kv_pool_bytes(layout), the same on every rank. */
    void (*kv_bind)(Dev *d, const KvLayout *layout, void *pool);
    /* Any thread: pool_enter readies it for a library that looks at the pool on its own; pool_copy
     * copies between the pool and host memory, or within the pool, and is done at return. */
    void (*pool_enter)(const Dev *d);
    void (*pool_copy)(const Dev *d, void *to, const void *from, uint64_t bytes);

    /* -- one step -- */
    void (*batch_set)(Dev *d, const OpsBatch *batch);

    /* out[n, hidden] = table[token, :] */
    void (*embed)(Dev *d, Tensor out, const Mat *table);
    /* out[m, c] = x[row[i], :]; row: host, borrowed for the call */
    void (*gather_rows)(Dev *d, Tensor out, Tensor x, const int32_t *row, int m);
    /* out = x / sqrt(mean(x^2) + eps) * w; x, out [n, c], w [1, c]; in place allowed */
    void (*rms_norm)(Dev *d, Tensor out, Tensor x, Tensor w, float eps);
    /* out = (x - mean) / sqrt(var + eps) * w + b; in place allowed */
    void (*layer_norm)(Dev *d, Tensor out, Tensor x, Tensor w, Tensor b, float eps);
    /* out[n, r] = x[n, c] . W[r, c]^T, weights dequantised to fp32, products and sums fp32 */
    void (*linear)(Dev *d, Tensor out, Tensor x, const Mat *w);
    /* Rotates, in place, numbers [at, at + dim) of each of `heads` groups of `stride` columns by
     * the token's position: pair (2i, 2i + 1) by the angle pos * theta^(-2i / dim). Angles in
     * double. */
    void (*rope)(Dev *d, Tensor x, int heads, int stride, int at, int dim, float theta);
    /* x = 0 */
    void (*clear)(Dev *d, Tensor x);
    /* x += y */
    void (*add)(Dev *d, Tensor x, Tensor y);
    /* out[n, i] = silu(gate) * up; out may be gate */
    void (*silu_mul)(Dev *d, Tensor out, Tensor gate, Tensor up);

    /* -- attention (MLA absorbed, DSA) -- */
    /* q[n, H * (nope + rope)] -> out[n, H * (kv_lora + rope)]: per head W_UK^T . q_nope, then
     * q_rope copied. kv_b[H * (nope + v), kv_lora] holds for each head nope rows of W_UK, then v
     * rows of W_UV. */
    void (*mla_absorb)(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v);
    /* x[n, H * kv_lora] -> out[n, H * v]: per head W_UV . x */
    void (*mla_expand)(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v);
    /* COLLECTIVE. Stores kv[n, kv_lora + rope] (normed latent, rotated key) at the batch's
     * positions of `slot`, and index keys key[n, index_dim] when index_slot >= 0. Afterwards every
     * rank sees them. */
    void (*kv_write)(Dev *d, int slot, Tensor kv, int index_slot, Tensor key);
    /* Of what is enqueued: mark remembers it under a number, 0 or 1, and reach waits until what the
     * number stands for is done. */
    void (*mark)(Dev *d, int number);
    void (*reach)(Dev *d, int number);
    /* hash[n] = kv_hash_page of the bound pool's pages, rows [0, n_rows[i]) of page[i], after all
     * that is enqueued; all in host memory */
    void (*kv_hash)(Dev *d, const int *index_slot, const int32_t *page, const int32_t *n_rows,
                    int n, uint64_t *hash);
    /* COLLECTIVE. topk[n, K] (shared, i32) = the positions t <= pos with the K largest scores
     *   sum_h w[h] * relu(q[h] . key[t]) * heads^-1/2 * dim^-1/2
     * lowest position first among equal scores; ascending, then -1 up to K. All positions when pos
     * < K. q[n, heads * dim], w[n, heads]. */
    void (*index_select)(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot);
    /* out[n, H * kv_lora] = softmax(scale * q . kv[t]) . latent[t] over the positions t of topk;
     * q[n, H * (kv_lora + rope)]. A row without positions gives 0. */
    void (*mla_attend)(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale);

    /* -- experts -- */
    /* s = sigmoid(logits[n, E]); the k experts with the largest s + bias[1, E] (lowest id first
     * among equals) -> id[n, k] ascending, weight[n, k] = s * scale, divided by (sum of s + 1e-20)
     * when norm. */
    void (*moe_route)(Dev *d, Tensor id, Tensor weight, Tensor logits, Tensor bias, bool norm,
                      float scale);
    /* y[n, hidden] += sum over k of weight * down . (silu(gate . x) * (up . x)), for the experts
     * that the device holds, in the order of id */
    void (*experts)(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e);

    /* -- ranks -- */
    /* COLLECTIVE. x := sum over ranks of x, added in rank order. */
    void (*all_reduce)(Dev *d, Tensor x);
    /* COLLECTIVE. out[m, ranks * c] (shared) = the ranks' parts [m, c] side by side. */
    void (*gather_cols)(Dev *d, Tensor out, Tensor part);
} Ops;

/* Plain C, one thread per rank: defines the numerics. */
const Ops *ops_ref(void);
/* The fastest host backend that this processor runs: "avx512", "avx2"; force (NULL: choose) names
 * one for tests. NULL when the processor cannot run what was forced, or runs neither. */
const Ops *ops_cpu(const char *force);
/* The CUDA backend; ranks take the GPUs in turn. NULL with E_UNSUPPORTED when this build has none;
 * what the machine lacks shows in open. */
const Ops *ops_cuda(Err *err);
