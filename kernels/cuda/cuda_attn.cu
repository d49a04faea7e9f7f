/* Sparse MLA: each head of a token attends to the positions of the token's list, in latent form, on
 * the tensor cores, straight from the pages.
 *
 * A block has 16 heads of one token. Warp w owns the latent's columns [64w, 64w + 64): it
 * multiplies them with the queries, and later sums them up with the probabilities; one more warp
 * owns the rotated columns. Of a row's 64 columns lane 4 * g + c loads [16c, 16c + 16), of 32 rows
 * at a time, and keeps them in registers as fragments for both products: the second needs them
 * transposed, which movmatrix does. Only scores and probabilities pass through shared memory.
 *
 * Products are of fp16. Queries and probabilities are split into two halves, 22 bits; rows are
 * exact: e4m3 unscaled, bf16 and fp32 (split, too) divided by a power of two per row and warp. The
 * row's scale goes to the score, and to the probability after division by a power of two that
 * follows the largest scale seen, so that fp16's range suffices. Error: that of fp32 sums.
 *
 * Every ATTN_SPLIT entries of the list are summed by themselves and the sums folded in order.
 * Either a block does that for its whole list (many tokens: no traffic) or each split has a block
 * and a second kernel folds (few tokens: all multiprocessors work); the bits are the same.
 *
 * Bytes: each row of the list once per 16 heads, 656 for e4m3; the folding of splits moves 32 KiB
 * per split twice, through the L2. */
#include "kernels/cuda/cuda_mma.cuh"

#include <math.h>

enum {
    BLOCK = 32, /* entries at a time: one per lane */
    TILES = BLOCK / 8,
    COLS = 64, /* of a warp */
    STEPS = COLS / 16,
    MAX_WARPS = ATTN_MAX_LORA / COLS + 1,
    PITCH = BLOCK + 8, /* of scores in shared memory: pairs fall on different banks */
    SPLIT_BLOCKS = ATTN_SPLIT / BLOCK,
};

struct Smem {
    float part[MAX_WARPS][ATTN_HEADS][PITCH]; /* each warp's share of the scores */
    float p[ATTN_HEADS][PITCH];               /* exponentials */
    float shrink[ATTN_HEADS];                 /* what earlier sums of the split are worth now */
    float best[ATTN_HEADS], sum[ATTN_HEADS];  /* of the split: maximum, sum of exponentials */
    /* sums over folded splits, each thread's own: heads g (first STEPS) and g + 8; columns
     * 16c + 4s and the next three */
    float4 total[2 * STEPS][(MAX_WARPS - 1) * 32];
};

static_assert(sizeof(Smem) <= 101376, "every target has this much shared memory per block");

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

struct Query {
    uint32_t hi[STEPS][4], lo[STEPS][4];
    float grow[2]; /* of heads g and g + 8 */
};

struct Warp {
    int lane, g, c, warp, n_warps, row, head0;
    const int32_t *list, *pages;
    const uint8_t *at; /* the warp's columns in row 0 of page 0 */
    const uint8_t *scale_at;
    size_t row_bytes;
    int cols; /* columns that exist, at most 64 */
    Smem *smem;
};

static __device__ __forceinline__ void block_meet(int n_warps) {
    named_barrier(1, n_warps * 32);
}

/* Row of the pool that entry `i` of the list means, -1 for none. */
static __device__ __forceinline__ int pool_row(const CudaAttn &a, const Warp &w, int i) {
    int pos = i < a.k ? w.list[i] : -1;
    unsigned at = (unsigned)pos;
    return pos < 0 ? -1
                   : w.pages[at / KV_PAGE_TOKENS] * KV_PAGE_TOKENS + (int)(at % KV_PAGE_TOKENS);
}

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

/* The warp's columns of 16 queries, each head's brought below 2^9. */
static __device__ __forceinline__ void load_query(Query *q, const CudaAttn &a, const Warp &w,
                                                  int col0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = w.head0 + 8 * half + w.g;
        const float *p = a.q + (size_t)w.row * (size_t)a.q_ld + (size_t)head * (a.lora + a.rope) +
                         col0 + 16 * w.c;
        float4 v[STEPS];
        uint32_t top = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            v[s] = head < a.heads && 16 * w.c + 4 * s < w.cols ? load4(p + 4 * s)
                                                               : make_float4(0, 0, 0, 0);
            float m =
                fmaxf(fmaxf(fabsf(v[s].x), fabsf(v[s].y)), fmaxf(fabsf(v[s].z), fabsf(v[s].w)));
            top = max(top, __float_as_uint(m));
        }
        top = max(top, __shfl_xor_sync(~0u, top, 1));
        top = max(top, __shfl_xor_sync(~0u, top, 2));
        int e = min(max((int)(top >> 23) - 127, -100), 120) - 8;
        float shrink = power_of_2(-e);
        q->grow[half] = power_of_2(e);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            split_f16(v[s].x * shrink, v[s].y * shrink, &q->hi[s][half], &q->lo[s][half]);
            split_f16(v[s].z * shrink, v[s].w * shrink, &q->hi[s][2 + half], &q->lo[s][2 + half]);
        }
    }
}

/* The warp's share of the scores of 16 heads and 32 rows, to shared memory. scale[t][j]: of row
 * 8t + 2c + j. */
template <Dtype K>
static __device__ __forceinline__ void score_rows(const Warp &w, const Query &q, const Rows<K> &f,
                                                  const float scale[TILES][2]) {
    float d[TILES][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            mma_f16(d[t], q.hi[s], f.hi[t][s][0], f.hi[t][s][1]);
            mma_f16(d[t], q.lo[s], f.hi[t][s][0], f.hi[t][s][1]);
            if constexpr (K == DT_F32) {
                mma_f16(d[t], q.hi[s], f.lo[t][s][0], f.lo[t][s][1]);
            }
        }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 v = make_float2(d[t][2 * half], d[t][2 * half + 1]);
            v = make_float2(v.x * scale[t][0] * q.grow[half], v.y * scale[t][1] * q.grow[half]);
            *reinterpret_cast<float2 *>(&w.smem->part[w.warp][8 * half + w.g][8 * t + 2 * w.c]) = v;
        }
}

/* Scores of the block's rows to exponentials, two rows of a head per thread. The first block of a
 * split that has rows starts anew. */
static __device__ __forceinline__ void softmax(const CudaAttn &a, const Warp &w, unsigned real,
                                               bool anew) {
    Smem *m = w.smem;
    for (int i = (int)threadIdx.x; i < ATTN_HEADS * BLOCK / 2; i += w.n_warps * 32) {
        int head = i / (BLOCK / 2), key = i % (BLOCK / 2) * 2;
        float2 s = make_float2(0, 0);
#pragma unroll
        for (int k = 0; k < MAX_WARPS; k++)
            if (k < w.n_warps) {
                float2 v = *reinterpret_cast<const float2 *>(&m->part[k][head][key]);
                s.x += v.x;
                s.y += v.y;
            }
        float factor = a.scale * 1.44269504f; /* log2(e) */
        s.x = real >> key & 1 ? s.x * factor : -INFINITY;
        s.y = real >> key & 2 ? s.y * factor : -INFINITY;
        float old = anew ? -INFINITY : m->best[head], best = fmaxf(old, fmaxf(s.x, s.y));
        for (int d = 1; d < BLOCK / 2; d *= 2)
            best = fmaxf(best, __shfl_xor_sync(~0u, best, d));
        float2 p = make_float2(exp2_fast(s.x - best), exp2_fast(s.y - best));
        float sum = p.x + p.y, shrink = exp2_fast(old - best);
        for (int d = 1; d < BLOCK / 2; d *= 2)
            sum += __shfl_xor_sync(~0u, sum, d);
        float before = anew ? 0.0f : m->sum[head];
        __syncwarp();
        *reinterpret_cast<float2 *>(&m->p[head][key]) = p;
        if (key == 0) {
            m->best[head] = best;
            m->sum[head] = fmaf(before, shrink, sum);
            m->shrink[head] = shrink;
        }
    }
}

/* acc[s][j]: columns 16c + 4s + 2j and the next, heads g and g + 8, in units of 2^unit. */
typedef float Acc[STEPS][2][4];

template <Dtype K>
static __device__ __forceinline__ void add_rows(const Warp &w, const Rows<K> &f,
                                                const float scale[TILES][2], int unit,
                                                float regauge, Acc acc) {
    const Smem *m = w.smem;
    float shrink[2] = {m->shrink[w.g] * regauge, m->shrink[w.g + 8] * regauge};
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                acc[s][j][i] *= shrink[i / 2];
    float inverse = power_of_2(-unit);
#pragma unroll
    for (int k = 0; k < TILES / 2; k++) {
        uint32_t hi[4], lo[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { /* row g or g + 8; the first or second 8 of 16 keys */
            int t = 2 * k + i / 2;
            float2 p = *reinterpret_cast<const float2 *>(&m->p[w.g + i % 2 * 8][8 * t + 2 * w.c]);
            p = make_float2(p.x * (scale[t][0] * inverse), p.y * (scale[t][1] * inverse));
            split_f16(p.x, p.y, &hi[i], &lo[i]);
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                uint32_t b0 = transpose_8x8(f.hi[2 * k][s][j]),
                         b1 = transpose_8x8(f.hi[2 * k + 1][s][j]);
                mma_f16(acc[s][j], hi, b0, b1);
                mma_f16(acc[s][j], lo, b0, b1);
                if constexpr (K == DT_F32) {
                    b0 = transpose_8x8(f.lo[2 * k][s][j]),
                    b1 = transpose_8x8(f.lo[2 * k + 1][s][j]);
                    mma_f16(acc[s][j], hi, b0, b1);
                }
            }
    }
}

/* ---- folding of splits, in the order of the list ---- */

struct Folded {
    float best, sum; /* -infinity and 0 at first */
};

/* Weights of what is there and of what comes. */
static __device__ __forceinline__ float2 fold_weights(Folded *f, float best, float sum) {
    float top = fmaxf(f->best, best);
    float2 w = make_float2(exp2_fast(f->best - top), exp2_fast(best - top));
    f->best = top;
    f->sum = __fmaf_rn(sum, w.y, __fmul_rn(f->sum, w.x));
    return w;
}

static __device__ __forceinline__ float fold_number(float old, float v, float2 w) {
    return __fmaf_rn(v, w.y, __fmul_rn(old, w.x));
}

/* A split's place in the work: numbers [ATTN_HEADS, lora], then the heads' maxima and sums. */
static __host__ __device__ __forceinline__ size_t split_floats(int lora) {
    return (size_t)ATTN_HEADS * (size_t)(lora + 2);
}

/* The split's result of this warp's columns to the work; empty splits say so by their sum. */
static __device__ __forceinline__ void store_split(const CudaAttn &a, const Warp &w, float *out,
                                                   const Acc acc, int unit, bool empty) {
    float *best = out + ATTN_HEADS * a.lora, *sum = best + ATTN_HEADS;
    if (w.warp == 0 && w.lane < ATTN_HEADS) {
        best[w.lane] = empty ? -INFINITY : w.smem->best[w.lane];
        sum[w.lane] = empty ? 0.0f : w.smem->sum[w.lane];
    }
    if (empty)
        return;
    float gauge = power_of_2(unit);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float *p = out + (size_t)(8 * half + w.g) * a.lora + w.warp * COLS + 16 * w.c + 4 * s;
            if (16 * w.c + 4 * s < w.cols)
                *reinterpret_cast<float4 *>(p) =
                    make_float4(acc[s][0][2 * half] * gauge, acc[s][0][2 * half + 1] * gauge,
                                acc[s][1][2 * half] * gauge, acc[s][1][2 * half + 1] * gauge);
        }
}

static __device__ __forceinline__ void fold_split(const Warp &w, Folded f[2], const Acc acc,
                                                  int unit) {
    float gauge = power_of_2(unit);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 weight =
            fold_weights(&f[half], w.smem->best[8 * half + w.g], w.smem->sum[8 * half + w.g]);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float4 *t = &w.smem->total[half * STEPS + s][threadIdx.x], v = *t;
            v.x = fold_number(v.x, acc[s][0][2 * half] * gauge, weight);
            v.y = fold_number(v.y, acc[s][0][2 * half + 1] * gauge, weight);
            v.z = fold_number(v.z, acc[s][1][2 * half] * gauge, weight);
            v.w = fold_number(v.w, acc[s][1][2 * half + 1] * gauge, weight);
            *t = v;
        }
    }
}

static __device__ __forceinline__ void clear_total(const Warp &w) {
    for (int i = 0; i < 2 * STEPS; i++)
        w.smem->total[i][threadIdx.x] = make_float4(0, 0, 0, 0);
}

static __device__ __forceinline__ void store_out(const CudaAttn &a, const Warp &w,
                                                 const Folded f[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int head = w.head0 + 8 * half + w.g;
        float inverse = f[half].sum > 0 ? 1.0f / f[half].sum : 0.0f;
        float *p = a.out + (size_t)w.row * (size_t)a.out_ld + (size_t)head * a.lora +
                   w.warp * COLS + 16 * w.c;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            float4 v = w.smem->total[half * STEPS + s][threadIdx.x];
            if (head < a.heads && 16 * w.c + 4 * s < w.cols)
                store4(p + 4 * s,
                       make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse));
        }
    }
}

/* The power of two that follows the largest scale: probabilities times scales stay below 1. */
static __device__ __forceinline__ int follow_scale(int unit, float scale, float *regauge) {
    int e = (int)(__reduce_max_sync(~0u, __float_as_uint(scale)) >> 23) - 126;
    int next = min(max(unit, e), 126);
    *regauge = power_of_2(max(unit - next, -126));
    return next;
}

/* One warp's walk over splits [split0, split1) of the list. ROTATED: the warp has a share in the
 * scores only. WHOLE: the splits are all there are and are folded here. */
template <Dtype K, bool ROTATED, bool WHOLE, bool ALIGNED>
static __device__ __forceinline__ void walk(const CudaAttn &a, const Warp &w, int split0,
                                            int split1, float *work) {
    Query q;
    Raw<K> raw;
    Rows<K> f;
    Acc acc;
    Folded folded[2] = {{-INFINITY, 0}, {-INFINITY, 0}};
    int row = pool_row(a, w, split0 * ATTN_SPLIT + w.lane),
        next = pool_row(a, w, split0 * ATTN_SPLIT + BLOCK + w.lane);
    load_rows<K, ALIGNED>(&raw, w, row);
    load_query(&q, a, w, ROTATED ? a.lora : w.warp * COLS);
    if constexpr (!ROTATED && WHOLE)
        clear_total(w);
    for (int split = split0; split < split1; split++) {
        bool empty = true;
        int unit = -126;
        memset(acc, 0, sizeof acc);
        for (int b = 0; b < SPLIT_BLOCKS; b++) {
            unsigned real = __ballot_sync(~0u, row >= 0);
            float scale[TILES][2], regauge = 1;
            if (real) {
                to_fragments<K>(&f, &raw, w);
                unit = follow_scale(unit, raw.scale, &regauge);
                for (int t = 0; t < TILES; t++)
                    for (int j = 0; j < 2; j++)
                        scale[t][j] = __shfl_sync(~0u, raw.scale, 8 * t + 2 * w.c + j);
            }
            row = next;
            load_rows<K, ALIGNED>(&raw, w, row);
            next = pool_row(a, w, split * ATTN_SPLIT + (b + 2) * BLOCK + w.lane);
            if (!real)
                continue;
            score_rows<K>(w, q, f, scale);
            block_meet(w.n_warps);
            softmax(a, w, real, empty);
            block_meet(w.n_warps);
            if constexpr (!ROTATED)
                add_rows<K>(w, f, scale, unit, regauge, acc);
            empty = false;
        }
        if constexpr (ROTATED)
            continue;
        else if constexpr (!WHOLE)
            store_split(a, w, work, acc, unit, empty);
        else if (!empty)
            fold_split(w, folded, acc, unit);
    }
    if constexpr (!ROTATED && WHOLE)
        store_out(a, w, folded);
}

/* Blocks (split or 0, group of heads, row). */
template <Dtype D, bool WHOLE, bool ALIGNED>
static __global__ void __launch_bounds__(MAX_WARPS * 32, 1) attn_kernel(CudaAttn a) {
    grid_release();
    Warp w;
    w.lane = (int)threadIdx.x % 32;
    w.g = w.lane / 4;
    w.c = w.lane % 4;
    w.warp = (int)threadIdx.x / 32;
    w.n_warps = (int)blockDim.x / 32;
    w.row = (int)blockIdx.z;
    w.head0 = (int)blockIdx.y * ATTN_HEADS;
    w.smem = dynamic_smem<Smem>();
    w.list = a.list + (size_t)w.row * (size_t)a.list_ld;
    w.pages = a.rows.page_table + (size_t)a.rows.seq[w.row] * (size_t)a.rows.page_stride;
    w.row_bytes = a.kv.page_bytes / KV_PAGE_TOKENS;
    int splits = (a.k + ATTN_SPLIT - 1) / ATTN_SPLIT, split0 = WHOLE ? 0 : (int)blockIdx.x;
    int split1 = WHOLE ? splits : split0 + 1;
    constexpr int BYTES = D == DT_F32 ? 4 : D == DT_BF16 ? 2 : 1;
    float *work = a.work + ((size_t)(blockIdx.z * gridDim.y + blockIdx.y) * splits + split0) *
                               split_floats(a.lora);
    if (w.warp == w.n_warps - 1) {
        w.cols = a.rope;
        w.at = a.kv.base + (D == DT_F8E4M3 ? a.lora + a.lora / KV_SCALE_GROUP * 4 : BYTES * a.lora);
        w.scale_at = NULL;
        walk<D == DT_F32 ? DT_F32 : DT_BF16, true, WHOLE, ALIGNED>(a, w, split0, split1, work);
    } else {
        w.cols = min(a.lora - w.warp * COLS, COLS);
        w.at = a.kv.base + BYTES * w.warp * COLS;
        w.scale_at = a.kv.base + a.lora + w.warp * COLS / KV_SCALE_GROUP * 4;
        walk<D, false, WHOLE, ALIGNED>(a, w, split0, split1, work);
    }
}

/* Blocks (head of the group, group, row), a thread per 4 columns. */
static __global__ void __launch_bounds__(ATTN_MAX_LORA / 4) fold_kernel(CudaAttn a, int splits) {
    grid_wait();
    int head = (int)blockIdx.x, col = 4 * (int)threadIdx.x;
    size_t pitch = split_floats(a.lora);
    const float *work = a.work + (size_t)(blockIdx.z * gridDim.y + blockIdx.y) * splits * pitch;
    Folded f = {-INFINITY, 0};
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int i = 0; i < splits; i++) {
        const float *s = work + i * pitch, *best = s + ATTN_HEADS * a.lora;
        float4 v = *reinterpret_cast<const float4 *>(s + (size_t)head * a.lora + col);
        float sum = best[ATTN_HEADS + head];
        if (sum > 0) {
            float2 w = fold_weights(&f, best[head], sum);
            total.x = fold_number(total.x, v.x, w);
            total.y = fold_number(total.y, v.y, w);
            total.z = fold_number(total.z, v.z, w);
            total.w = fold_number(total.w, v.w, w);
        }
    }
    float inverse = f.sum > 0 ? 1.0f / f.sum : 0.0f;
    int to = (int)blockIdx.y * ATTN_HEADS + head;
    if (to < a.heads)
        store4(a.out + (size_t)blockIdx.z * (size_t)a.out_ld + (size_t)to * a.lora + col,
               make_float4(total.x * inverse, total.y * inverse, total.z * inverse,
                           total.w * inverse));
}

static int head_groups(int heads) {
    return (heads + ATTN_HEADS - 1) / ATTN_HEADS;
}

/* From this many (token, group) pairs on, each block takes a whole list. */
static int whole_from(int n_sm) {
    return n_sm / 2;
}

size_t cuda_attn_work_floats(int heads, int lora, int k, int n_sm) {
    size_t pairs = (size_t)(whole_from(n_sm) + head_groups(heads));
    return pairs * (size_t)((k + ATTN_SPLIT - 1) / ATTN_SPLIT) * split_floats(lora);
}

/* ALIGNED: rows begin on 16 bytes, else on 4. */
template <Dtype D, bool ALIGNED> static void attend(const CudaAttn *a, cudaStream_t stream) {
    int groups = head_groups(a->heads), splits = (a->k + ATTN_SPLIT - 1) / ATTN_SPLIT;
    int threads = ((a->lora + COLS - 1) / COLS + 1) * 32;
    dim3 grid(1, (unsigned)groups, (unsigned)a->rows.rows);
    if (a->rows.rows * groups >= whole_from(a->n_sm)) {
        launch(attn_kernel<D, true, ALIGNED>, grid, threads, sizeof(Smem), stream, false, *a);
        return;
    }
    grid.x = (unsigned)splits;
    launch(attn_kernel<D, false, ALIGNED>, grid, threads, offsetof(Smem, total), stream, false, *a);
    grid.x = ATTN_HEADS;
    launch(fold_kernel, grid, a->lora / 4, 0, stream, true, *a, splits);
}

void cuda_attn(const CudaAttn *a, cudaStream_t stream) {
    if (a->kv.dtype == DT_F8E4M3 && a->kv.page_bytes / KV_PAGE_TOKENS % 16)
        attend<DT_F8E4M3, false>(a, stream);
    else if (a->kv.dtype == DT_F8E4M3)
        attend<DT_F8E4M3, true>(a, stream);
    else if (a->kv.dtype == DT_BF16)
        attend<DT_BF16, true>(a, stream);
    else
        attend<DT_F32, true>(a, stream);
}
