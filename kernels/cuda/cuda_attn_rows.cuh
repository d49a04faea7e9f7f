/* Rows of a latent cache as the sparse attention's warps take them: from their stored form in the
 * pages to fragments of fp16. Device code of cuda_attn.cu. */
#pragma once

#include "kernels/cuda/cuda_mma.cuh"

enum {
    BLOCK = 32, /* entries at a time: one per lane */
    TILES = BLOCK / 8,
    COLS = 64, /* of a warp */
    STEPS = COLS / 16,
    MAX_WARPS = ATTN_MAX_LORA / COLS + 1,
    PITCH = BLOCK + 8, /* of scores in shared memory: pairs fall on different banks */
    SPLIT_BLOCKS = ATTN_SPLIT / BLOCK,
};

/* What a warp's columns of the rows are stored as. */
template <Dtype K> struct Raw {
    uint4 v[TILES][K == DT_F32 ? 4 : K == DT_BF16 ? 2 : 1];
    float scale; /* of row `lane`: stored (e4m3), or the power of two that it is divided by */
};

/* The same as fragments of fp16: columns 16c + 4s + 2j and the next of row 8t + g. lo: fp32 only.
 */
template <Dtype K> struct Rows {
    uint32_t hi[TILES][STEPS][2], lo[K == DT_F32 ? TILES : 1][STEPS][2];
};

struct Smem; /* of the block */

/* What a warp knows of its place. */
struct Warp {
    int lane, g, c, warp, n_warps, row, head0;
    const int32_t *list, *pages;
    const uint8_t *at; /* the warp's columns in row 0 of page 0 */
    const uint8_t *scale_at;
    size_t row_bytes;
    int cols; /* columns that exist, at most 64 */
    Smem *smem;
};

template <bool ALIGNED> static __device__ __forceinline__ uint4 load_words(const uint8_t *p) {
    if constexpr (ALIGNED)
        return load16(p);
    const uint32_t *q = reinterpret_cast<const uint32_t *>(p);
    return make_uint4(__ldg(q), __ldg(q + 1), __ldg(q + 2), __ldg(q + 3));
}

/* The warp's columns of 32 rows, whose numbers the lanes hold; rows that do not exist are 0. */
template <Dtype K, bool ALIGNED>
static __device__ __forceinline__ void load_rows(Raw<K> *r, const Warp &w, int row) {
    constexpr int N = sizeof(r->v[0]) / 16, NUMBERS = 16 / N;
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int mine = __shfl_sync(~0u, row, 8 * t + w.g);
        const uint8_t *p = w.at + (size_t)max(mine, 0) * w.row_bytes + w.c * 16 * N;
#pragma unroll
        for (int i = 0; i < N; i++)
            r->v[t][i] = mine >= 0 && 16 * w.c + NUMBERS * i < w.cols
                             ? load_words<ALIGNED>(p + 16 * i)
                             : make_uint4(0, 0, 0, 0);
    }
    if constexpr (K == DT_F8E4M3)
        r->scale =
            row >= 0
                ? __ldg(reinterpret_cast<const float *>(w.scale_at + (size_t)row * w.row_bytes))
                : 0.0f;
}

static __device__ __forceinline__ uint32_t word(const uint4 &x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* Two neighbouring numbers of bf16 or fp32: the i-th pair of 16 bytes. */
template <Dtype K> static __device__ __forceinline__ float2 pair_of(const uint4 &v, int i) {
    if constexpr (K == DT_BF16)
        return unpack_bf16(word(v, i));
    else
        return make_float2(__uint_as_float(word(v, 2 * i)), __uint_as_float(word(v, 2 * i + 1)));
}

/* The exponent of the largest number of the lane's row of tile t; lanes of one g share the row. */
template <Dtype K> static __device__ __forceinline__ int row_exponent(const Raw<K> &r, int t) {
    constexpr int N = sizeof(r.v[0]) / 16, PAIRS = K == DT_BF16 ? 4 : 2;
    float top = 0;
#pragma unroll
    for (int i = 0; i < N * PAIRS; i++) {
        float2 v = pair_of<K>(r.v[t][i / PAIRS], i % PAIRS);
        top = fmaxf(top, fmaxf(fabsf(v.x), fabsf(v.y)));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    return min(max((int)(__float_as_uint(top) >> 23) - 127, -100), 100);
}

/* Makes fragments; sets the rows' scales where they are not stored. */
template <Dtype K>
static __device__ __forceinline__ void to_fragments(Rows<K> *f, Raw<K> *r, const Warp &w) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        float inverse = 1;
        if constexpr (K != DT_F8E4M3) {
            int e = row_exponent<K>(*r, t), mine = __shfl_sync(~0u, e, w.lane % 8 * 4);
            if (w.lane / 8 == t)
                r->scale = power_of_2(mine);
            inverse = power_of_2(-e);
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                if constexpr (K == DT_F8E4M3) {
                    f->hi[t][s][j] = e4m3_to_f16(word(r->v[t][0], s) >> 16 * j & 0xffff);
                } else if constexpr (K == DT_BF16) {
                    float2 v = pair_of<K>(r->v[t][s / 2], s % 2 * 2 + j);
                    f->hi[t][s][j] = pack_f16(v.x * inverse, v.y * inverse);
                } else {
                    float2 v = pair_of<K>(r->v[t][s], j);
                    split_f16(v.x * inverse, v.y * inverse, &f->hi[t][s][j], &f->lo[t][s][j]);
                }
            }
    }
}
