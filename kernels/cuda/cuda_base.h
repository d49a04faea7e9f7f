/* The launchers of the CUDA kernels for matrices, rows of numbers, KV rows and ranks: plain structs
 * of device addresses and shapes in, work on a stream out. They know no Dev, allocate nothing,
 * never wait and can be captured in a graph.
 *
 * Internal to kernels/cuda; every function runs on its rank's thread. Results of a row have the
 * same bits whatever other rows are in the call. */
#pragma once

#include "kernels/cuda/cuda_kernels.h"

#include <stdbool.h>

enum { CUDA_BASE_RANKS = 16 };

#ifdef __cplusplus
extern "C" {
#endif

/* ---- matrices ---- */

enum {
    MAT_TILE = 16,   /* rows */
    MAT_BLOCK = 128, /* columns */
    MAT_UNIT = 1024, /* bytes: 16 of rows g and g + 8 for each lane 4 * g + c */
    MAT_SLICES = 8,  /* sums over columns are made in this many parts, which are added in order */
};

/* A stored matrix in tiles of 16 rows, each a sequence of blocks of 128 columns, each a sequence of
 * units. In a unit lane 4 * g + c has 16 bytes of row g (at 16 * lane) and of row g + 8 (at 512 +
 * 16
 * * lane): of the unit's columns the c-th quarter. Order within 16 bytes:
 *   f32, bf16  as stored
 *   e4m3       of each 4 columns 0, 2, 1, 3
 *   nvfp4      of each 8 columns 0, 2, 4, 6, 1, 3, 5, 7, the first in the low bits; behind the unit
 * 8 bytes for each lane: bf16 scales, times 2^116, of row g (first and second 16 columns), then of
 * row g + 8 Zero rows and columns stand in front so that tiles and blocks do not straddle blocks of
 * scales. */
typedef struct CudaMat {
    Dtype dtype;
    int rows, cols;       /* as used */
    int row_pad, col_pad; /* zeros in front */
    int tiles, blocks;    /* tiles is even */
    uint8_t *data;        /* [tiles, blocks] of mat_block_bytes */
    float *scale;         /* DT_F8E4M3: [tiles, blocks] */
    float scale2;         /* DT_NVFP4 */
} CudaMat;

static inline __host__ __device__ int mat_block_bytes(Dtype dtype) {
    switch (dtype) {
    case DT_F32:
        return 8 * MAT_UNIT;
    case DT_BF16:
        return 4 * MAT_UNIT;
    case DT_F8E4M3:
        return 2 * MAT_UNIT;
    default:
        return MAT_UNIT + 256;
    }
}

/* Packs rows [row, row + n) from raw [n, row_bytes], and for NVFP4 group_scale [n, cols / 16] e4m3,
 * both on the device. Rows and columns of padding become 0: all tiles that the rows touch must be
 * packed whole, so row_pad + row and row_pad + row + n are multiples of 16 or the matrix's ends. */
typedef struct CudaMatPack {
    CudaMat to;
    const uint8_t *raw, *group_scale;
    size_t row_bytes;
    int row, n;
} CudaMatPack;

void cuda_mat_pack(const CudaMatPack *p, cudaStream_t stream);

/* out[m, rows] = x[m, cols] . W^T */
typedef struct CudaLinear {
    CudaMat w;
    const float *x;
    float *out;
    int m, x_ld, out_ld, n_sm;
} CudaLinear;

void cuda_linear(const CudaLinear *l, cudaStream_t stream);

/* out[m, cols] = row token[i] of the table */
void cuda_embed(const CudaMat *table, const int32_t *token, float *out, int m, int out_ld,
                cudaStream_t stream);

/* Of each head h, with W the rows [h * step + first, + n) of w:
 *   absorb: out[m, h * out_step + c] = sum over i of x[m, h * x_step + i] * W[i, c]; then `tail`
 *           numbers of x, which follow the n summed ones, are copied behind them
 *   expand: out[m, h * out_step + i] = sum over c of W[i, c] * x[m, h * x_step + c] */
typedef struct CudaHeads {
    CudaMat w;
    const float *x;
    float *out;
    int m, x_ld, out_ld;
    int heads, step, first, n, x_step, out_step, tail;
} CudaHeads;

void cuda_heads_absorb(const CudaHeads *a, cudaStream_t stream);
void cuda_heads_expand(const CudaHeads *a, cudaStream_t stream);

/* ---- rows of numbers ---- */

/* [rows, cols] with ld */
typedef struct CudaView {
    float *at;
    int rows, cols, ld;
} CudaView;

void cuda_rms_norm(CudaView out, CudaView x, const float *w, float eps, cudaStream_t stream);
void cuda_layer_norm(CudaView out, CudaView x, const float *w, const float *b, float eps,
                     cudaStream_t stream);
void cuda_clear(CudaView x, cudaStream_t stream);
void cuda_add(CudaView x, CudaView y, cudaStream_t stream);
void cuda_silu_mul(CudaView out, CudaView gate, CudaView up, cudaStream_t stream);
/* out[i] = x[row[i]]; row[out.rows] in host memory, borrowed for the call */
void cuda_take_rows(CudaView out, CudaView x, const int32_t *row, cudaStream_t stream);
/* angle[rows, dim]: cos and sin of each pair, by the position */
void cuda_rope_angles(float *angle, const int32_t *pos, int rows, int dim, float theta,
                      cudaStream_t stream);
void cuda_rope(CudaView x, const float *angle, int heads, int stride, int at, int dim,
               cudaStream_t stream);
/* id[rows, k], weight[rows, k] of logits[rows, n]; see ops.h */
typedef struct CudaRoute {
    CudaView logits;
    const float *bias;
    int32_t *id;
    float *weight;
    int id_ld, weight_ld, k;
    bool norm;
    float scale;
} CudaRoute;

void cuda_route(const CudaRoute *r, cudaStream_t stream);

/* ---- KV rows ---- */

/* Stores rows of numbers at the batch's positions, in the pool's format and with the bytes that the
 * host backends write. */
void cuda_store_latent(const CudaRows *rows, CudaPages to, CudaView kv, int lora,
                       cudaStream_t stream);
void cuda_store_keys(const CudaRows *rows, CudaPages to, CudaView key, cudaStream_t stream);

/* sum[i] += the terms of kv_hash.h over rows [0, n_rows[i]) of page[i]; everything on the device.
 */
typedef struct CudaPageSums {
    KvLayout layout;
    const uint8_t *pool;
    const int32_t *index_slot; /* [layout.n_slots] */
    const int32_t *page, *n_rows;
    int n;
    unsigned long long *sum; /* [n] */
} CudaPageSums;

void cuda_page_sums(const CudaPageSums *s, cudaStream_t stream);

/* ---- ranks ---- */

/* What all ranks have published: part[r][rows, cols], dense. */
typedef struct CudaParts {
    const float *part[CUDA_BASE_RANKS];
    int n;
} CudaParts;

/* x = sum of the parts, in rank order */
void cuda_sum_parts(CudaView x, CudaParts parts, cudaStream_t stream);
/* out[rows, n * cols] = the parts [rows, cols] side by side */
void cuda_join_parts(CudaView out, int cols, CudaParts parts, cudaStream_t stream);

/* Whether the device runs this build's kernels: cudaSuccess or why not. */
cudaError_t cuda_base_probe(void);

#ifdef __cplusplus
}
#endif
