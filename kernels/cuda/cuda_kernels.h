/* The launchers of the CUDA kernels that choose positions, attend and run experts: plain structs of
 * device addresses and shapes in, work on a stream out. They know no Dev, allocate nothing, never
 * wait and can be captured in a graph: what changes from step to step (positions, page tables,
 * lists, routing) is read on the device.
 *
 * Internal to kernels/cuda; every function runs on its rank's thread. */
#pragma once

#include "kernels/kv_layout.h"

#include <cuda_runtime.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ends the process with the reason when rc is an error. */
void cuda_must(cudaError_t rc, const char *what);

/* One slot of a pool: page p begins at base + p * page_bytes. */
typedef struct CudaPages {
    const uint8_t *base;
    size_t page_bytes;
    Dtype dtype; /* DT_F32, DT_BF16, DT_F8E4M3 */
} CudaPages;

/* The rows of a batch, on the device. */
typedef struct CudaRows {
    const int32_t *pos, *seq;  /* [rows] */
    const int32_t *page_table; /* [.., page_stride] */
    int page_stride;
    int rows;
} CudaRows;

/* ---- the k largest scores ---- */

enum { TOPK_MAX_PARTS = 64, TOPK_SHARED_ROWS = 128 };

/* score[rows, pitch] -> list[rows, list_ld]: of row r the k positions t <= pos[r] with the largest
 * scores, lowest position first among equals, ascending; all positions, then -1, when pos[r] < k.
 * Scores are not NaN. pitch and score are multiples of 4 numbers. */
typedef struct CudaTopk {
    const float *score;
    size_t pitch;
    const int32_t *pos;
    int32_t *list;
    int list_ld, rows, k;
    int max_len; /* no row is longer */
    int n_sm;
    void *work; /* cuda_topk_work_bytes(), zero at first; left as zero */
} CudaTopk;

size_t cuda_topk_work_bytes(void);
void cuda_topk(const CudaTopk *t, cudaStream_t stream);

/* ---- index scores ---- */

enum { INDEX_MAX_DIM = 128 };

/* score[rows, pitch]: of row r, for all positions t <= pos[r],
 *   sum_h w[h] * relu(q[h] . key[t]) * heads^-1/2 * dim^-1/2
 * Rows with pos < k are left out. dim is a multiple of 16, at most INDEX_MAX_DIM. */
typedef struct CudaIndex {
    CudaRows rows;
    CudaPages keys;
    const float *q; /* [rows, heads * dim], q_ld */
    const float *w; /* [rows, heads], w_ld */
    int q_ld, w_ld, heads, dim, k;
    float *score;
    size_t pitch; /* at least the context, rounded up to KV_PAGE_TOKENS */
    int n_sm;
} CudaIndex;

void cuda_index_scores(const CudaIndex *x, cudaStream_t stream);

/* ---- sparse attention ---- */

enum {
    ATTN_MAX_LORA = 512,
    ATTN_MAX_ROPE = 64,
    ATTN_SPLIT = 128, /* list entries that are summed by themselves */
    ATTN_HEADS = 16,  /* heads per block */
};

/* out[rows, heads * lora] = softmax(scale * q . kv[t]) . latent[t] over the positions t >= 0 of
 * list[rows, k]; 0 for rows without any. lora is a multiple of 16 (of 128 for e4m3) up to
 * ATTN_MAX_LORA, rope of 8 up to ATTN_MAX_ROPE. */
typedef struct CudaAttn {
    CudaRows rows;
    CudaPages kv;
    const float *q; /* [rows, heads * (lora + rope)], q_ld */
    const int32_t *list;
    float *out;
    int q_ld, list_ld, out_ld, heads, lora, rope, k;
    float scale;
    int n_sm;
    float *work; /* cuda_attn_work_floats(heads, lora, k, n_sm) */
} CudaAttn;

size_t cuda_attn_work_floats(int heads, int lora, int k, int n_sm);
void cuda_attn(const CudaAttn *a, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
