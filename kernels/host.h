/* What the host backends (ref and cpu) share: the rank group, its barrier, tensors, the current
 * batch, access to KV rows.
 *
 * Internal to kernels/. Each Dev belongs to its rank's thread; HostGroup is shared, its fields name
 * their rule. */
#pragma once

#include "kernels/ops.h"

#include <stdatomic.h>

typedef struct HostPool HostPool; /* worker threads of one rank; NULL for one thread */

typedef struct HostGroup {
    int n_ranks;
    int spin; /* rounds to spin at the barrier before sleeping; 0 when ranks outnumber cores */
    _Atomic uint32_t arrived; /* barrier: ranks that have come in this round */
    _Atomic uint32_t round;   /* barrier: changed by the last one to come; futex word */
    Tensor shared;            /* tensor_shared: written by rank 0 before a barrier */
    float *stage[2];  /* all_reduce: [n_ranks, stage_cap], written each by its rank, read by all;
                         alternate between calls */
    size_t stage_cap; /* fp32 numbers per rank */
    int n_open;       /* Devs left; the last one to close frees the group */
} HostGroup;

/* Rotation angles of the current batch, kept between operations of a step. */
typedef struct HostRope {
    float *cs; /* [max_rows, dim]: cos and sin of each pair */
    int n_tok; /* rows that are filled for the current batch; 0 after batch_set */
    int dim;
    float theta;
} HostRope;

struct Dev {
    const Ops *ops;
    HostGroup *group;
    int rank;
    DevConf conf;
    HostPool *pool; /* cpu/ only, like the next two */
    const struct Kern *kern;
    HostRope rope;
    unsigned n_reduced; /* all_reduce calls so far: picks the stage */
    KvLayout kv;
    uint8_t *kv_pool;
    OpsBatch batch; /* points into the arrays below */
    int32_t *token, *pos, *seq, *page_table;
    float *scratch; /* of the backend: scratch_len numbers for each thread */
    size_t scratch_len;
    float *work; /* cpu/ only: work_len numbers shared by the rank's threads */
    size_t work_len;
};

struct Mat {
    MatView view;
};

struct Experts {
    int n_experts;
    MatView *gate, *up, *down; /* [n_experts]; data NULL: not held */
};

/* The part of Ops that both backends take over unchanged: life, memory, batch, kv_write,
 * collectives. */
void host_ops_fill(Ops *ops);
/* For open: creates the group and its Devs with the given table. */
int host_open(const Ops *ops, const DevConf *conf, Dev **dev, Err *err);

/* All ranks of the group meet. */
void host_barrier(Dev *d);

static inline float *host_row(Tensor t, int r) {
    return (float *)t.at + (size_t)r * (size_t)t.ld;
}

static inline int32_t *host_row_i32(Tensor t, int r) {
    return (int32_t *)t.at + (size_t)r * (size_t)t.ld;
}

/* Page of position pos of batch sequence seq. */
static inline int64_t host_page(const Dev *d, int seq, int pos) {
    return d->batch
        .page_table[(size_t)seq * (size_t)d->batch.page_stride + (size_t)(pos / KV_PAGE_TOKENS)];
}

/* The latent row (kv_lora + rope numbers) or index key of a position as fp32, from whatever the
 * pool stores. */
void host_kv_latent(const Dev *d, int slot, int64_t page, int row, float *out);
void host_kv_key(const Dev *d, int index_slot, int64_t page, int row, float *out);
/* Stores them. */
void host_kv_put_latent(const Dev *d, int slot, int64_t page, int row, const float *in);
void host_kv_put_key(const Dev *d, int index_slot, int64_t page, int row, const float *in);
