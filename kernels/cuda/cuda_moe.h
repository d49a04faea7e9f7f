/* Routed experts on the device: how their matrices lie in memory, and the launchers that pack and
 * run them. Like cuda_kernels.h: no Dev, no waiting, no allocation.
 *
 * A matrix is cut into tiles of 16 rows and, along its columns, into stages of 2 KiB per tile
 * (NVFP4: 2304 bytes). Within a stage, 16 bytes belong to each lane and quarter, so that a warp
 * reads 512 bytes in one go and has fragments A of mma.m16n8k16 after a few bit operations (see
 * cuda_moe_pack.cu). Padding rows and columns are 0. Gate and up are one matrix, their tiles in
 * turn. */
#pragma once

#include "kernels/cuda/cuda_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MOE_TILE = 16,    /* rows */
    MOE_QUARTERS = 4, /* of a stage */
    MOE_QUARTER_BYTES = 512,
    MOE_SCALE_BYTES = 256, /* NVFP4: behind the quarters */
};

/* Columns of a stage. */
static inline __host__ __device__ int moe_stage_cols(Dtype dtype) {
    switch (dtype) {
    case DT_NVFP4:
        return 256;
    case DT_F8E4M3:
        return 128;
    case DT_BF16:
        return 64;
    default:
        return 32; /* F32, kept as two bf16 */
    }
}

static inline __host__ __device__ int moe_stage_bytes(Dtype dtype) {
    return MOE_QUARTERS * MOE_QUARTER_BYTES + (dtype == DT_NVFP4 ? MOE_SCALE_BYTES : 0);
}

/* One kind of matrix of all experts that a device holds. */
typedef struct MoeMat {
    uint8_t *data;      /* [held, tiles, stages] of moe_stage_bytes */
    float *block_scale; /* DT_F8E4M3: [held, tiles, stages] */
    float *scale2;      /* DT_NVFP4: [held, 2]: of even and odd tiles */
    int tiles, stages;  /* tiles is even */
} MoeMat;

typedef struct MoeExperts {
    Dtype dtype;
    int n_experts, n_held, hidden, inner;
    const int32_t *place; /* [n_experts] place among the held ones, -1: not held */
    MoeMat gate_up, down;
} MoeExperts;

static inline size_t moe_mat_bytes(const MoeMat *m, Dtype dtype) {
    return (size_t)m->tiles * (size_t)m->stages * (size_t)moe_stage_bytes(dtype);
}

/* Packs rows [0, rows) of a matrix as stored (raw [rows, row_bytes], NVFP4: scale [rows,
 * scale_cols] e4m3, both on the device) into tiles first, first + step, .. of `expert`. */
typedef struct MoePack {
    const uint8_t *raw, *scale;
    size_t row_bytes;
    int rows, cols, scale_cols;
    MoeMat to;
    int expert, first, step, tiles;
    Dtype dtype;
} MoePack;

void cuda_moe_pack(const MoePack *p, cudaStream_t stream);

/* y[rows, hidden] += sum over i, in order, of weight[rows, k] * expert id[rows, k] of x[rows,
 * hidden]; places with an id below 0 or an expert that is not held count nothing. */
typedef struct CudaMoe {
    MoeExperts e;
    const float *x, *weight;
    const int32_t *id;
    float *y;
    int x_ld, weight_ld, id_ld, y_ld;
    int rows, k, n_sm;
    void *work; /* cuda_moe_work_bytes() */
} CudaMoe;

size_t cuda_moe_work_bytes(const MoeExperts *e, int rows, int k);
void cuda_moe(const CudaMoe *m, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
