/* Index scores: the dot products of a token's index heads with the key of every position, on the
 * tensor cores, straight from the pages.
 *
 * A warp keeps one token's 32 heads as fragments in registers and streams keys past them, eight to
 * a tile. Of a key, lane 4 * g + c owns numbers [32c, 32c + 32): whole 16-byte loads, no shared
 * memory.
 *
 * Queries are split into two 16-bit halves and keys are exact in 16 bits (fp32 keys are
 * split too), so a score carries the error of fp32 sums and at most 2^-17 of each product.
 *
 * Grid: (blocks per row, rows) with the warps of a block on different keys of one token while
 * tokens are few; (.., rows / 8) with the warps on different tokens of the same keys when they are
 * many, so that the L1 serves seven of eight reads.
 *
 * Bytes: the keys of the context once per token, 132 each for e4m3 at 128 numbers. */
#include "kernels/cuda/cuda_mma.cuh"

#include <math.h>

enum {
    WARPS = 8,
    STEPS = INDEX_MAX_DIM / 16, /* products along a key */
    PASS_HEADS = 32,
    TILE = 8,  /* keys */
    UNIT = 32, /* keys that a warp takes at a time: half a page */
    MANY_ROWS = 32,
};

/* One key's numbers [32c, 32c + 32) as stored. */
template <Dtype D> struct Raw { uint4 v[D == DT_F32 ? 8 : D == DT_BF16 ? 4 : 2]; };

template <Dtype D> constexpr int TILES_AHEAD = D == DT_F8E4M3 ? 4 : 2;
template <Dtype D> constexpr int NUMBER_BYTES = D == DT_F32 ? 4 : D == DT_BF16 ? 2 : 1;

/* A token's heads: fragments A of both halves and the weights of rows g and g + 8. */
struct Heads {
    uint32_t hi[2][STEPS][4], lo[2][STEPS][4];
    float w[2][2];
};

template <Dtype D>
static __device__ __forceinline__ Raw<D> load_key(const uint8_t *key, int c, int dim) {
    Raw<D> r;
    constexpr int N = sizeof(r.v) / 16, NUMBERS = 32 / N;
#pragma unroll
    for (int i = 0; i < N; i++)
        r.v[i] = 32 * c + NUMBERS * i < dim ? load16(key + (32 * c + NUMBERS * i) * NUMBER_BYTES<D>)
                                            : make_uint4(0, 0, 0, 0);
    return r;
}

static __device__ __forceinline__ uint32_t word(const uint4 *v, int i) {
    const uint4 &x = v[i / 4];
    return i % 4 == 0 ? x.x : i % 4 == 1 ? x.y : i % 4 == 2 ? x.z : x.w;
}

/* Fragment B of step s, its second half in b[2], b[3] for fp32. */
template <Dtype D>
static __device__ __forceinline__ void key_fragment(const Raw<D> &r, int s, uint32_t b[4]) {
    if constexpr (D == DT_F8E4M3) {
        uint32_t four = word(r.v, s);
        b[0] = e4m3_to_f16(four & 0xffff);
        b[1] = e4m3_to_f16(four >> 16);
    } else if constexpr (D == DT_BF16) {
        b[0] = word(r.v, 2 * s);
        b[1] = word(r.v, 2 * s + 1);
    } else {
        split_bf16(__uint_as_float(word(r.v, 4 * s)), __uint_as_float(word(r.v, 4 * s + 1)), &b[0],
                   &b[2]);
        split_bf16(__uint_as_float(word(r.v, 4 * s + 2)), __uint_as_float(word(r.v, 4 * s + 3)),
                   &b[1], &b[3]);
    }
}

/* Step s of two tiles: products that do not wait for each other stand side by side. */
template <Dtype D>
static __device__ __forceinline__ void fold(float acc[2][2][4], const Heads &h, int s,
                                            const uint32_t b[2][4]) {
    auto mma = D == DT_F8E4M3 ? mma_f16 : mma_bf16;
#pragma unroll
    for (int i = 0; i < 4; i++)
        mma(acc[i / 2][i % 2], h.hi[i % 2][s], b[i / 2][0], b[i / 2][1]);
#pragma unroll
    for (int i = 0; i < 4; i++)
        mma(acc[i / 2][i % 2], h.lo[i % 2][s], b[i / 2][0], b[i / 2][1]);
    if constexpr (D == DT_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            mma(acc[i / 2][i % 2], h.hi[i % 2][s], b[i / 2][2], b[i / 2][3]);
#pragma unroll
        for (int i = 0; i < 4; i++)
            mma(acc[i / 2][i % 2], h.lo[i % 2][s], b[i / 2][2], b[i / 2][3]);
    }
}

/* The exponent of the lane's and its neighbours' largest number; lanes of one g see the same head.
 */
static __device__ __forceinline__ int head_exponent(const float4 v[STEPS]) {
    float top = 0;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        top = fmaxf(
            top, fmaxf(fmaxf(fabsf(v[s].x), fabsf(v[s].y)), fmaxf(fabsf(v[s].z), fabsf(v[s].w))));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    return min(max((int)(__float_as_uint(top) >> 23) - 127, -100), 120);
}

/* Heads [head0, head0 + 32) of a token; those beyond the last count nothing. For fp16 a head's
 * numbers are brought below 2^9, where it has them to 22 bits; the inverse goes into the weight. */
template <Dtype D>
static __device__ __forceinline__ void load_heads(Heads *h, const CudaIndex &x, int row, int head0,
                                                  int g, int c) {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int head = head0 + 16 * m + 8 * half + g;
            bool real = head < x.heads;
            const float *q = x.q + (size_t)row * (size_t)x.q_ld + (size_t)(real ? head : 0) * x.dim;
            float4 v[STEPS];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                v[s] = real && 32 * c + 4 * s < x.dim ? load4(q + 32 * c + 4 * s)
                                                      : make_float4(0, 0, 0, 0);
            int e = D == DT_F8E4M3 ? head_exponent(v) - 8 : 0;
            float shrink = power_of_2(-e);
            h->w[m][half] = real ? x.w[(size_t)row * (size_t)x.w_ld + head] * power_of_2(e) : 0.0f;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                auto split = D == DT_F8E4M3 ? split_f16 : split_bf16;
                split(v[s].x * shrink, v[s].y * shrink, &h->hi[m][s][half], &h->lo[m][s][half]);
                split(v[s].z * shrink, v[s].w * shrink, &h->hi[m][s][2 + half],
                      &h->lo[m][s][2 + half]);
            }
        }
}

/* Weighted sums over heads of a tile's positive products: lanes of any g get those of keys 2c and
 * 2c + 1. The order is fixed. */
static __device__ __forceinline__ float2 head_sums(const float acc[2][4], const Heads &h) {
    float sum[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        float v = 0;
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                v = fmaf(h.w[m][half], fmaxf(acc[m][2 * half + j], 0.0f), v);
        for (int d = 4; d < 32; d *= 2)
            v += __shfl_xor_sync(~0u, v, d);
        sum[j] = v;
    }
    return make_float2(sum[0], sum[1]);
}

/* A warp's stream of keys. */
struct Stream {
    const int32_t *pages; /* of the sequence */
    int unit, step, units;
};

static __device__ __forceinline__ const uint8_t *unit_page(const CudaIndex &x, const Stream &s,
                                                           int unit) {
    int page = unit < s.units ? s.pages[unit * UNIT / KV_PAGE_TOKENS] : s.pages[0];
    return x.keys.base + (size_t)page * x.keys.page_bytes;
}

/* Scores of a unit's keys: two tiles at a time, each refilled from the next unit once it is used.
 */
template <Dtype D>
static __device__ __forceinline__ void
score_unit(const CudaIndex &x, const Heads &h, Raw<D> *raw, const uint8_t *page,
           const uint8_t *next, int unit, int next_unit, int lane, float *score, bool add) {
    constexpr int AHEAD = TILES_AHEAD<D>;
    int g = lane / 4, c = lane % 4, first = unit * UNIT % KV_PAGE_TOKENS,
        next_first = next_unit * UNIT % KV_PAGE_TOKENS;
    size_t key = (size_t)x.dim * NUMBER_BYTES<D>;
    float scale = 1;
    if constexpr (D == DT_F8E4M3)
        scale =
            reinterpret_cast<const float *>(page + KV_PAGE_TOKENS * (size_t)x.dim)[first + lane];
    float factor = rsqrtf((float)(x.heads * x.dim));
#pragma unroll
    for (int t = 0; t < UNIT / TILE; t += 2) {
        float acc[2][2][4] = {};
        Raw<D> *r = raw + t % AHEAD;
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t b[2][4];
            key_fragment<D>(r[0], s, b[0]);
            key_fragment<D>(r[1], s, b[1]);
            fold<D>(acc, h, s, b);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int to = t + j + AHEAD; /* the tile that takes this one's place */
            const uint8_t *from =
                to < UNIT / TILE
                    ? page + (size_t)(first + to * TILE + g) * key
                    : next + (size_t)(next_first + (to - UNIT / TILE) * TILE + g) * key;
            r[j] = load_key<D>(from, c, x.dim);
            float2 v = head_sums(acc[j], h);
            v.x *= __shfl_sync(~0u, scale, (t + j) * TILE + 2 * c) * factor;
            v.y *= __shfl_sync(~0u, scale, (t + j) * TILE + 2 * c + 1) * factor;
            float2 *out = reinterpret_cast<float2 *>(score + unit * UNIT + (t + j) * TILE) + c;
            if (g == 0) {
                float2 old = add ? *out : make_float2(0, 0);
                *out = make_float2(old.x + v.x, old.y + v.y);
            }
        }
    }
}

/* Pages hold whole units, so that keys beyond the token's position can be read and their scores
 * written: nobody looks at them. */
template <Dtype D>
static __global__ void __launch_bounds__(WARPS * 32, 1)
    index_kernel(CudaIndex x, int head0, bool many) {
    grid_release();
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32,
        row = many ? (int)blockIdx.y * WARPS + warp : (int)blockIdx.y;
    if (row >= x.rows.rows || x.rows.pos[row] < x.k)
        return;
    constexpr int AHEAD = TILES_AHEAD<D>;
    Stream s;
    s.pages = x.rows.page_table + (size_t)x.rows.seq[row] * (size_t)x.rows.page_stride;
    s.units = x.rows.pos[row] / UNIT + 1;
    s.unit = many ? (int)blockIdx.x : (int)blockIdx.x * WARPS + warp;
    s.step = many ? (int)gridDim.x : (int)gridDim.x * WARPS;
    if (s.unit >= s.units)
        return;
    const uint8_t *page = unit_page(x, s, s.unit), *next = unit_page(x, s, s.unit + s.step);
    size_t key = (size_t)x.dim * NUMBER_BYTES<D>;
    Raw<D> raw[AHEAD];
#pragma unroll
    for (int t = 0; t < AHEAD; t++)
        raw[t] =
            load_key<D>(page + (size_t)(s.unit * UNIT % KV_PAGE_TOKENS + t * TILE + lane / 4) * key,
                        lane % 4, x.dim);
    Heads h;
    load_heads<D>(&h, x, row, head0, lane / 4, lane % 4);
    for (; s.unit < s.units; s.unit += s.step) {
        const uint8_t *after = unit_page(x, s, s.unit + 2 * s.step);
        score_unit<D>(x, h, raw, page, next, s.unit,
                      s.unit + s.step < s.units ? s.unit + s.step : 0, lane,
                      x.score + (size_t)row * x.pitch, head0 > 0);
        page = next;
        next = after;
    }
}

void cuda_index_scores(const CudaIndex *x, cudaStream_t stream) {
    bool many = x->rows.rows >= MANY_ROWS;
    int groups = many ? (x->rows.rows + WARPS - 1) / WARPS : x->rows.rows,
        units = (int)(x->pitch / UNIT),
        wide = many ? (4 * x->n_sm + groups - 1) / groups : x->n_sm / groups, /* one block each */
        most = many ? units : (units + WARPS - 1) / WARPS;
    wide = wide < 1 ? 1 : wide < most ? wide : most;
    dim3 grid((unsigned)wide, (unsigned)groups);
    for (int head0 = 0; head0 < x->heads; head0 += PASS_HEADS) {
        if (x->keys.dtype == DT_F8E4M3)
            launch(index_kernel<DT_F8E4M3>, grid, WARPS * 32, 0, stream, false, *x, head0, many);
        else if (x->keys.dtype == DT_BF16)
            launch(index_kernel<DT_BF16>, grid, WARPS * 32, 0, stream, false, *x, head0, many);
        else
            launch(index_kernel<DT_F32>, grid, WARPS * 32, 0, stream, false, *x, head0, many);
    }
}
