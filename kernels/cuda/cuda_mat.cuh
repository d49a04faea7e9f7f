/* The packed form of matrices (cuda_base.h) as kernels read it: geometry of each format, and stored
 * numbers turned into fragments of the tensor core or into fp32. No state. */
#pragma once

#include "kernels/cuda/cuda_base.h"
#include "kernels/cuda/cuda_mma.cuh"

#include <type_traits>

/* Columns of a lane in a unit, and what follows from them. */
template <Dtype F>
constexpr int MAT_OWN = F == DT_F32      ? 4
                        : F == DT_BF16   ? 8
                        : F == DT_F8E4M3 ? 16
                                         : 32;
template <Dtype F> constexpr int MAT_UNIT_COLS = 4 * MAT_OWN<F>;
template <Dtype F> constexpr int MAT_UNITS = MAT_BLOCK / MAT_UNIT_COLS<F>; /* of a block */
template <Dtype F> constexpr int MAT_STEPS = MAT_UNIT_COLS<F> / 16;        /* products of a unit */
template <Dtype F> constexpr int MAT_TERMS = F == DT_F32 ? 2 : 1; /* bf16 numbers per number */
template <Dtype F>
constexpr int MAT_BLOCK_BYTES = MAT_UNITS<F> *MAT_UNIT + (F == DT_NVFP4 ? 256 : 0);

/* Calls fn with the format as a constant. */
template <class Fn> static void by_format(Dtype dtype, Fn fn) {
    if (dtype == DT_F32)
        fn(std::integral_constant<Dtype, DT_F32>());
    else if (dtype == DT_BF16)
        fn(std::integral_constant<Dtype, DT_BF16>());
    else if (dtype == DT_F8E4M3)
        fn(std::integral_constant<Dtype, DT_F8E4M3>());
    else
        fn(std::integral_constant<Dtype, DT_NVFP4>());
}

static __device__ __forceinline__ uint32_t word_of(const uint4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* Where a block of a tile begins. */
template <Dtype F>
static __device__ __forceinline__ const uint8_t *block_at(const CudaMat &w, int tile, int block) {
    return w.data + ((size_t)tile * (size_t)w.blocks + (size_t)block) * MAT_BLOCK_BYTES<F>;
}

/* What sums must be multiplied with in the end. */
template <Dtype F> static __device__ __forceinline__ float last_factor(const CudaMat &w) {
    return F == DT_NVFP4 ? w.scale2 * 1024.0f : 1.0f;
}

/* Four e4m3 as two pairs of bf16, exactly: taken as bf16 their bits mean 2^-120 times the number.
 */
static __device__ __forceinline__ void decode_e4m3(uint32_t w, uint32_t *first, uint32_t *second) {
    constexpr uint32_t SIGN = 0x80008000u, SIZE = 0x07f007f0u, GROW = 0x7b807b80u;
    *first = mul_bf16(((w << 8) & SIGN) | ((w << 4) & SIZE), GROW);
    *second = mul_bf16((w & SIGN) | ((w >> 4) & SIZE), GROW);
}

/* Pair `i` of the eight e2m1 of a word as bf16, times the scale, in units of 2^10: their bits mean
 * 2^-126 times the number, the scale carries 2^116. Exact. */
static __device__ __forceinline__ uint32_t decode_e2m1(uint32_t w, int i, uint32_t scale) {
    constexpr uint32_t SIGN = 0x80008000u, SIZE = 0x01c001c0u;
    uint32_t t = w >> (4 * i);
    return mul_bf16(((t << 12) & SIGN) | ((t << 6) & SIZE), scale);
}

/* Fragment A of product `step` of a unit: v[0] is the lane's part of row g, v[1] of row g + 8.
 * scale: NVFP4 only, the lane's 8 bytes. fp32 gives two fragments whose sum it is. */
template <Dtype F>
static __device__ __forceinline__ void fragment_a(const uint4 v[2], uint2 scale, int step,
                                                  uint32_t a[MAT_TERMS<F>][4]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if constexpr (F == DT_F8E4M3) {
            decode_e4m3(word_of(v[half], step), &a[0][half], &a[0][2 + half]);
        } else if constexpr (F == DT_BF16) {
            a[0][half] = word_of(v[half], 2 * step);
            a[0][2 + half] = word_of(v[half], 2 * step + 1);
        } else if constexpr (F == DT_F32) {
            split_bf16(__uint_as_float(v[half].x), __uint_as_float(v[half].y), &a[0][half],
                       &a[1][half]);
            split_bf16(__uint_as_float(v[half].z), __uint_as_float(v[half].w), &a[0][2 + half],
                       &a[1][2 + half]);
        } else {
            uint32_t two = half == 0 ? scale.x : scale.y,
                     s = __byte_perm(two, 0, step < 4 ? 0x1010 : 0x3232),
                     w = word_of(v[half], step / 2);
            a[0][half] = decode_e2m1(w, step % 2 * 2, s);
            a[0][2 + half] = decode_e2m1(w, step % 2 * 2 + 1, s);
        }
    }
}

/* The lane's columns of one row as fp32, before last_factor; e4m3 still without its block's scale.
 * two: NVFP4 only, the row's two scales. */
template <Dtype F>
static __device__ __forceinline__ void numbers_of(const uint4 &v, uint32_t two,
                                                  float out[MAT_OWN<F>]) {
#pragma unroll
    for (int i = 0; i < MAT_OWN<F> / 2; i++) {
        float2 p;
        if constexpr (F == DT_F32) {
            p = make_float2(__uint_as_float(word_of(v, 2 * i)),
                            __uint_as_float(word_of(v, 2 * i + 1)));
        } else if constexpr (F == DT_BF16) {
            p = unpack_bf16(word_of(v, i));
        } else if constexpr (F == DT_F8E4M3) {
            uint32_t first, second;
            decode_e4m3(word_of(v, i / 2), &first, &second);
            p = unpack_bf16(i % 2 ? second : first);
        } else {
            uint32_t s = __byte_perm(two, 0, i < 8 ? 0x1010 : 0x3232);
            p = unpack_bf16(decode_e2m1(word_of(v, i / 4), i % 4, s));
        }
        out[2 * i] = p.x;
        out[2 * i + 1] = p.y;
    }
}

/* Columns [col, col + 4) of a token; 0 where there are none. aligned: rows begin on 16 bytes. */
static __device__ __forceinline__ float4 load_quad(const float *row, int col, int cols,
                                                   bool aligned) {
    if (aligned && col >= 0 && col + 4 <= cols)
        return *reinterpret_cast<const float4 *>(row + col);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = col + i >= 0 && col + i < cols ? row[col + i] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}
