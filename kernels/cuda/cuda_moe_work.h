/* What the kernels of cuda_moe.cu and cuda_moe_ends.cu hand to each other. Internal to
 * kernels/cuda. */
#pragma once

#include "kernels/cuda/cuda_moe.h"

/* Where things stand in the work. Rows of bf16: the high halves of x_cols numbers, then the low. */
struct MoeWork {
    int32_t *count, *first; /* [n_experts] places of an expert, where they begin in `pair` */
    int32_t *pair;          /* [rows * k] token * k + place, sorted by expert */
    uint16_t *x;            /* [rows, 2, x_cols] */
    uint16_t *act;          /* [rows * k, 2, act_cols] */
    float *part;            /* [rows * k, part_cols] */
    int x_cols, act_cols, part_cols;
};

/* Sorts the places of a step by expert and splits its tokens: count, first, pair, x; clears the
 * padding of act. */
void moe_prepare(const CudaMoe *m, const MoeWork *w, cudaStream_t stream);

/* Adds part to y, a token's experts in their order. */
void moe_sum(const CudaMoe *m, const MoeWork *w, cudaStream_t stream);
