/* What the files of the CUDA backend share: a rank's device with its stream, batch, workspace and
 * staging, and matrices as the device keeps them.
 *
 * Host code of the backend is C: it turns operations into launches of kernels (cuda_base.h,
 * cuda_kernels.h, cuda_moe.h), which know no Dev. Internal to kernels/cuda. A Dev belongs to its
 * rank's thread; the group is shared, its fields name their rule.
 *
 * Work is enqueued on d->stream in order and never waited for, except in download(). Everything
 * that changes from step to step is read on the device, so that a step can be captured in a graph.
 * Memory is taken before ready: workspace grows when an operation first asks for more than it has,
 * so a step of the largest size belongs to the start. */
#pragma once

#include "kernels/cuda/cuda_base.h"
#include "kernels/ops.h"

enum {
    CUDA_MAX_RANKS = CUDA_BASE_RANKS,
    CUDA_STAGE_BYTES = 16 << 20, /* of one staging buffer */
    CUDA_RING = 4,               /* batches that may be on their way to the device */
    CUDA_EXIT = 70,              /* exit status after a device error */
};

/* Device memory for the inside of one operation; contents do not outlive it, except where the
 * owner of a use says so. */
typedef enum CudaUse {
    CUDA_WORK_ROPE,  /* angles of the current batch, kept between operations */
    CUDA_WORK_SCORE, /* index scores */
    CUDA_WORK_TOPK,  /* zero at first */
    CUDA_WORK_ATTN,
    CUDA_WORK_MOE,
    CUDA_WORK_HASH,
    CUDA_N_WORK
} CudaUse;

typedef struct CudaBuf {
    void *at;
    size_t bytes;
} CudaBuf;

/* Pinned memory on its way to the device, and the event after which it may be written again. */
typedef struct CudaPinned {
    void *at;
    cudaEvent_t free;
} CudaPinned;

typedef struct CudaGroup CudaGroup; /* cuda_comm.c */

struct Dev {
    int rank, device, n_sm;
    DevConf conf;
    CudaGroup *group;
    cudaStream_t stream;
    cudaEvent_t done; /* of cuda_finish */
    cudaEvent_t mark[2];
    CudaBuf work[CUDA_N_WORK];

    /* the current batch: `rows` has the device's addresses, pos and seq [max_rows], page_table
     * [max_seqs, page_stride] */
    CudaRows rows;
    int32_t *token; /* device [max_rows] */
    int32_t *pos, *seq, *page_table;
    int n_seq, max_pos; /* on the host */
    CudaPinned ring[CUDA_RING];
    unsigned n_batches;

    bool rope_valid;                 /* CUDA_WORK_ROPE holds the batch's angles for the next two */
    unsigned long long rope_capture; /* the capture that computes them, 0 for none */
    int rope_dim;
    float rope_theta;

    CudaPinned stage[2]; /* loading, upload and download: CUDA_STAGE_BYTES each */
    uint8_t *stage_dev[2];
    unsigned n_staged;

    KvLayout kv;
    uint8_t *pool;
};

struct Mat {
    CudaMat m;
};

/* Makes the rank's GPU the calling thread's. Every operation begins with it. */
void cuda_enter(const Dev *d);

/* Ends the process: one line in the log, exit status CUDA_EXIT. */
_Noreturn void cuda_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Device memory, not zeroed. E_NOMEM with what was needed and what is available. */
int cuda_alloc(Dev *d, size_t bytes, const char *what, void **out, Err *err);
void cuda_free(Dev *d, void *at);

/* At least `bytes` of workspace; what is new is zero. Grows, waiting for the device, when it has
 * less; ends the process when memory is out. */
void *cuda_work(Dev *d, CudaUse use, size_t bytes);

/* Brings `rows` rows of host memory, `pitch` bytes apart, row_bytes each, to the device, densely
 * packed, at most CUDA_STAGE_BYTES. Returns the device's address: kernels that are enqueued before
 * the next but one call may read it. The host memory is free at return. */
const uint8_t *cuda_stage(Dev *d, const void *host, size_t pitch, size_t row_bytes, int rows);

/* Host memory of any size to device memory, through staging. The host memory is free at return. */
void cuda_put(Dev *d, void *to, const void *from, size_t bytes);

/* Waits until all enqueued work, or what precedes the event, is done; ends the process when that
 * fails or takes a minute. */
void cuda_finish(Dev *d);
void cuda_wait_event(cudaEvent_t event);

/* Slot `slot` of the pool's latent part, and of its index keys. */
CudaPages cuda_latent_pages(const Dev *d, int slot);
CudaPages cuda_key_pages(const Dev *d, int index_slot);

static inline CudaView cuda_view(Tensor t) {
    return (CudaView){(float *)t.at, t.rows, t.cols, t.ld};
}

static inline int cuda_n_ranks(const Dev *d) {
    return d->conf.n_ranks;
}

/* ---- ranks: cuda_comm.c ---- */

int cuda_group_open(Dev **dev, int n_ranks, Err *err);
void cuda_group_close(Dev *d);
/* COLLECTIVE. Work that this rank enqueues from here on begins when what all ranks have enqueued so
 * far is done. */
void cuda_group_meet(Dev *d);
void cuda_kv_write(Dev *d, int slot, Tensor kv, int index_slot, Tensor key);
void cuda_all_reduce(Dev *d, Tensor x);
void cuda_gather_cols(Dev *d, Tensor out, Tensor part);

/* ---- life and memory: cuda_dev.c, cuda_mem.c ---- */

int cuda_open(const DevConf *conf, Dev **dev, Err *err);
void cuda_close(Dev **dev, int n_ranks);
int cuda_mat_load(Dev *d, const MatView *view, Mat **out, Err *err);
void cuda_mat_free(Dev *d, Mat *m);
int cuda_tensor_new(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err);
void cuda_tensor_free(Dev *d, Tensor *t);
void cuda_upload(Dev *d, Tensor *t, const void *host);
void cuda_download(Dev *d, const Tensor *t, void *host);
int cuda_pool_new(Dev *d, uint64_t bytes, void **out, Err *err);
void cuda_pool_free(Dev *d, void *pool);
void cuda_kv_bind(Dev *d, const KvLayout *layout, void *pool);
void cuda_pool_enter(const Dev *d);
void cuda_pool_copy(const Dev *d, void *to, const void *from, uint64_t bytes);
void cuda_mark(Dev *d, int number);
void cuda_reach(Dev *d, int number);
void cuda_kv_hash(Dev *d, const int *index_slot, const int32_t *page, const int32_t *n_rows, int n,
                  uint64_t *hash);
void cuda_batch_set(Dev *d, const OpsBatch *batch);

/* ---- attention and experts: cuda_attend.c, cuda_experts.c ---- */

void cuda_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot);
void cuda_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale);
int cuda_experts_load(Dev *d, const ExpertsView *view, Experts **out, Err *err);
void cuda_experts_free(Dev *d, Experts *e);
void cuda_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e);
