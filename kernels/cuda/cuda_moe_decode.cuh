/* Packed expert matrices to fragments of mma.m16n8k16 in bf16, exactly, and split tokens to the
 * fragments they are multiplied with. See cuda_moe_pack.cu for the layout. */
#pragma once

#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/cuda_mma.cuh"

/* Of each format: a stage is BLOCKS times STEPS products long. */
template <Dtype F> constexpr int BLOCKS = F == DT_NVFP4 ? 4 : 1;
template <Dtype F>
constexpr int STEPS = F == DT_NVFP4    ? 4
                      : F == DT_F8E4M3 ? 8
                      : F == DT_BF16   ? 4
                                       : 2;
template <Dtype F> constexpr int TERMS = F == DT_F32 ? 2 : 1; /* fragments per step */

static __device__ __forceinline__ uint32_t word(const uint4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* A word of NVFP4, times the scales of rows g and g + 8, as a fragment of bf16 in units of 2^10.
 * The bits of e2m1, put where bf16 has the end of its exponent and the start of its mantissa, mean
 * 2^-126 times the number; the scale carries 2^116. */
static __device__ __forceinline__ void decode_nvfp4(uint32_t w, uint32_t s0, uint32_t s1,
                                                    uint32_t a[4]) {
    constexpr uint32_t SIGN = 0x80008000u, SIZE = 0x01c001c0u;
    a[0] = mul_bf16(w & (SIGN | SIZE), s0);
    a[1] = mul_bf16((w << 3) & (SIGN | SIZE), s1);
    a[2] = mul_bf16(((w << 1) & SIGN) | ((w << 6) & SIZE), s0);
    a[3] = mul_bf16(((w << 2) & SIGN) | ((w >> 3) & SIZE), s1);
}

/* The scale of byte `i` of codes in both halves, times 2^116. */
static __device__ __forceinline__ uint32_t decode_scale(uint32_t codes, int i) {
    return __byte_perm(codes, 0, 0x4040 | i << 8 | i) * 16 + 0x71807180u;
}

/* A word of e4m3: two columns of rows g (a[0]) and g + 8 (a[1]). As bf16 the bits mean 2^-120 times
 * the number. */
static __device__ __forceinline__ void decode_e4m3(uint32_t w, uint32_t *a0, uint32_t *a1) {
    constexpr uint32_t SIGN = 0x80008000u, GROW = 0x7b807b80u;
    *a0 = mul_bf16(w & (SIGN | 0x07f007f0u), GROW);
    *a1 = mul_bf16(((w << 1) & SIGN) | ((w >> 3) & 0x07000700u) | ((w << 4) & 0x00f000f0u), GROW);
}

/* Fragments of one tile for one block of a stage. */
template <Dtype F>
static __device__ __forceinline__ void decode(const uint4 v[MOE_QUARTERS], uint2 scale, int block,
                                              uint32_t a[STEPS<F>][TERMS<F>][4]) {
    if constexpr (F == DT_NVFP4) {
        uint32_t codes = block < 2 ? scale.x : scale.y;
        uint32_t s0 = decode_scale(codes, block % 2 * 2),
                 s1 = decode_scale(codes, block % 2 * 2 + 1);
#pragma unroll
        for (int s = 0; s < STEPS<F>; s++)
            decode_nvfp4(word(v[block], s), s0, s1, a[s][0]);
    } else if constexpr (F == DT_F8E4M3) {
#pragma unroll
        for (int s = 0; s < STEPS<F>; s++) {
            const uint4 &four = v[2 * block + s / 2];
            decode_e4m3(word(four, s % 2 * 2), &a[s][0][0], &a[s][0][1]);
            decode_e4m3(word(four, s % 2 * 2 + 1), &a[s][0][2], &a[s][0][3]);
        }
    } else {
#pragma unroll
        for (int s = 0; s < STEPS<F>; s++)
#pragma unroll
            for (int term = 0; term < TERMS<F>; term++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[s][term][i] = word(v[s * TERMS<F> + term], i);
    }
}

/* Fragments B of a block: the lane's token and half at the stage's first column; NULL: 0. */
template <Dtype F>
static __device__ __forceinline__ void load_tokens(const uint16_t *x, int block, int c,
                                                   uint32_t b[STEPS<F>][2]) {
    if constexpr (F == DT_NVFP4 || F == DT_F8E4M3) {
        constexpr int RUN = F == DT_NVFP4 ? 16 : 8; /* the lane's numbers in a quarter */
#pragma unroll
        for (int i = 0; i < STEPS<F> / 2; i++) {
            int at = F == DT_NVFP4 ? 64 * block + RUN * c + 8 * i : 64 * block + 32 * i + RUN * c;
            uint4 v = x ? load16(x + at) : make_uint4(0, 0, 0, 0);
            b[2 * i][0] = v.x, b[2 * i][1] = v.y;
            b[2 * i + 1][0] = v.z, b[2 * i + 1][1] = v.w;
        }
    } else {
#pragma unroll
        for (int s = 0; s < STEPS<F>; s++) {
            uint2 v = x ? load8(x + 16 * s + 4 * c) : make_uint2(0, 0);
            b[s][0] = v.x, b[s][1] = v.y;
        }
    }
}
