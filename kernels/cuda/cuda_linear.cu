/* Products with stored matrices: out[m, rows] = x[m, cols] . W^T on the tensor cores, for one token
 * as for thousands.
 *
 * mma.m16n8k16 multiplies 16 weight rows by 8 columns, which are 4 tokens, each split into two
 * halves of bf16. Stored numbers become bf16 exactly (fp32 ones as two); the scales of e4m3 blocks
 * go to the sums of a block, those of NVFP4 matrices to the end. Error: fp32 sums and 2^-17 of each
 * product, about 2e-6 of the largest magnitude of a row.
 *
 * The columns are summed in MAT_SLICES slices, which are added in order. The small kernel (few
 * tokens: bound by memory) has a warp for each slice of two tiles of rows and streams the weights
 * past the caches, a stage ahead; its grid is (pairs of tiles, tokens / 16). The large kernel (many
 * tokens: bound by the tensor cores) has 128 rows by 32 tokens per block, goes through the slices
 * in turn and shares the tokens' halves in shared memory. Both sum in the same order: a token's
 * result has the same bits in every batch. Bytes: the stored matrix once per 16 (32) tokens. */
#include "kernels/cuda/cuda_mat.cuh"

enum {
    WARPS = MAT_SLICES,
    THREADS = WARPS * 32,
    GROUP = 4, /* tokens of a product */
    LARGE_GROUPS = 4,
    LARGE_TOKENS = 32, /* of a block: two halves of LARGE_GROUPS * GROUP */
    LARGE_PAIRS = 4,   /* pairs of tiles of a block */
    QUADS = MAT_BLOCK / 4,
    BLOCK_STEPS = MAT_BLOCK / 16,
    STEP_PITCH = LARGE_TOKENS / GROUP * 32 + 4, /* keeps quads on different banks */
};

/* Units of a stage, the weights that a warp loads at a time; stages of a block. */
template <Dtype F> constexpr int STAGE_UNITS = MAT_UNITS<F> < 2 ? 1 : 2;
template <Dtype F> constexpr int STAGES = MAT_UNITS<F> / STAGE_UNITS<F>;

/* A stage of two tiles. */
template <Dtype F> struct Raw {
    uint4 v[2][STAGE_UNITS<F>][2];
    uint2 scale[2];       /* NVFP4 */
    float block_scale[2]; /* e4m3 */
};

template <Dtype F>
static __device__ __forceinline__ void load_stage(Raw<F> *r, const CudaMat &w, int pair, int block,
                                                  int stage) {
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const uint8_t *at = block_at<F>(w, 2 * pair + tile, block);
#pragma unroll
        for (int u = 0; u < STAGE_UNITS<F>; u++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                r->v[tile][u][half] = load16_once(at + (stage * STAGE_UNITS<F> + u) * MAT_UNIT +
                                                  half * (MAT_UNIT / 2) + 16 * lane);
        if constexpr (F == DT_NVFP4)
            r->scale[tile] = load8_once(at + MAT_UNIT + 8 * lane);
        if constexpr (F == DT_F8E4M3)
            r->block_scale[tile] =
                __ldg(w.scale + (size_t)(2 * pair + tile) * (size_t)w.blocks + (size_t)block);
    }
}

/* Sums of two tiles and N groups of tokens: fragments C, whose columns are the groups' four high
 * halves and four low ones. */
template <int N> struct Sums { float v[2][N][4]; };

template <Dtype F, int N>
static __device__ __forceinline__ void multiply(Sums<N> *sums, const uint32_t a[2][MAT_TERMS<F>][4],
                                                int group, const uint2 &b) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int term = 0; term < MAT_TERMS<F>; term++)
            mma_bf16(sums->v[tile][group], a[tile][term], b.x, b.y);
}

/* After a block of columns: e4m3 sums come into the total by the block's scale. */
template <Dtype F, int N>
static __device__ __forceinline__ void end_block(Sums<N> *total, Sums<N> *block, const Raw<F> &r) {
    if constexpr (F == DT_F8E4M3) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    total->v[tile][n][i] =
                        __fmaf_rn(block->v[tile][n][i], r.block_scale[tile], total->v[tile][n][i]);
                    block->v[tile][n][i] = 0;
                }
    }
}

/* High and low halves together; lanes with c < 2 have tokens 2c and 2c + 1 of a group afterwards.
 */
template <int N> static __device__ __forceinline__ void join_halves(Sums<N> *s) {
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s->v[tile][n][i] += __shfl_xor_sync(~0u, s->v[tile][n][i], 2);
}

static __host__ __device__ __forceinline__ int slice_begin(int blocks, int slice) {
    return (int)((long long)blocks * slice / MAT_SLICES);
}

static __device__ __forceinline__ void store(const CudaLinear &l, int packed_row, int token,
                                             float v) {
    int row = packed_row - l.w.row_pad;
    if (row >= 0 && row < l.w.rows && token < l.m)
        l.out[(size_t)token * (size_t)l.out_ld + (size_t)row] = v;
}

/* ---- few tokens ---- */

/* Fragments B of one product, from fp32: the lane's token (or none: NULL) and half. */
static __device__ __forceinline__ uint2 split_quad(float4 v, bool low) {
    uint32_t h0, h1, l0, l1;
    split_bf16(v.x, v.y, &h0, &l0);
    split_bf16(v.z, v.w, &h1, &l1);
    return low ? make_uint2(l0, l1) : make_uint2(h0, h1);
}

template <Dtype F, int N>
static __device__ __forceinline__ void small_stage(const CudaLinear &l, const Raw<F> &r,
                                                   const float *const token[N], int col, bool low,
                                                   bool aligned, Sums<N> *sums) {
#pragma unroll
    for (int u = 0; u < STAGE_UNITS<F>; u++)
#pragma unroll
        for (int s = 0; s < MAT_STEPS<F>; s++) {
            uint32_t a[2][MAT_TERMS<F>][4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                fragment_a<F>(r.v[tile][u], r.scale[tile], s, a[tile]);
#pragma unroll
            for (int n = 0; n < N; n++) {
                float4 x = make_float4(0, 0, 0, 0);
                if (token[n])
                    x = load_quad(token[n], col + u * MAT_UNIT_COLS<F> + 4 * s, l.w.cols, aligned);
                multiply<F, N>(sums, a, n, split_quad(x, low));
            }
        }
}

/* One slice of two tiles: blocks [begin, end). */
template <Dtype F, int N>
static __device__ __forceinline__ void small_slice(const CudaLinear &l, int pair, int begin,
                                                   int end, int token0, bool aligned,
                                                   Sums<N> *total) {
    int lane = (int)threadIdx.x % 32, g = lane / 4, c = lane % 4;
    Raw<F> next = {};
    if (begin < end)
        load_stage<F>(&next, l.w, pair, begin, 0);
    grid_wait(); /* weights do not change, activations do */
    const float *token[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        int t = token0 + GROUP * n + g % GROUP;
        token[n] = t < l.m ? l.x + (size_t)t * (size_t)l.x_ld : NULL;
    }
    Sums<N> part = {};
    for (int block = begin; block < end; block++) {
#pragma unroll
        for (int stage = 0; stage < STAGES<F>; stage++) {
            Raw<F> r = next;
            int col = block * MAT_BLOCK + stage * STAGE_UNITS<F> * MAT_UNIT_COLS<F> +
                      c * MAT_OWN<F> - l.w.col_pad;
            if (stage + 1 < STAGES<F>)
                load_stage<F>(&next, l.w, pair, block, stage + 1);
            else if (block + 1 < end)
                load_stage<F>(&next, l.w, pair, block + 1, 0);
            small_stage<F, N>(l, r, token, col, g >= GROUP, aligned,
                              F == DT_F8E4M3 ? &part : total);
            if (stage + 1 == STAGES<F>)
                end_block<F, N>(total, &part, r);
        }
    }
}

template <Dtype F, int N>
static __global__ void __launch_bounds__(THREADS, N > 2 ? 1 : 2)
    small_kernel(CudaLinear l, bool aligned) {
    __shared__ float sum[WARPS][GROUP * N][2 * MAT_TILE];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, c = lane % 4,
        pair = (int)blockIdx.x, token0 = (int)blockIdx.y * GROUP * N;
    Sums<N> total = {};
    small_slice<F, N>(l, pair, slice_begin(l.w.blocks, warp), slice_begin(l.w.blocks, warp + 1),
                      token0, aligned, &total);
    join_halves<N>(&total);
    if (c < 2) {
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sum[warp][GROUP * n + 2 * c + i % 2][MAT_TILE * tile + g + i / 2 * 8] =
                        total.v[tile][n][i];
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < GROUP * N * 2 * MAT_TILE; i += THREADS) {
        int token = i / (2 * MAT_TILE), row = i % (2 * MAT_TILE);
        float v = 0;
        for (int s = 0; s < MAT_SLICES; s++)
            v += sum[s][token][row];
        store(l, 2 * MAT_TILE * pair + row, token0 + token, v * last_factor<F>(l.w));
    }
}

/* ---- many tokens ---- */

struct LargeSmem {
    uint2 x[2][BLOCK_STEPS][STEP_PITCH]; /* fragments B of a block of columns; blocks take turns */
    float4 sum[2 * LARGE_GROUPS][THREADS]; /* of finished slices, each thread's own */
};

static_assert(sizeof(LargeSmem) <= 101376, "every target has this much shared memory per block");

/* The thread's part of a block of columns: quad threadIdx % 32 of tokens threadIdx / 32 + 8i. */
static __device__ __forceinline__ void load_tokens(const CudaLinear &l, int block, int token0,
                                                   bool aligned, float4 x[LARGE_TOKENS / WARPS]) {
    int col = block * MAT_BLOCK + 4 * ((int)threadIdx.x % QUADS) - l.w.col_pad;
#pragma unroll
    for (int i = 0; i < LARGE_TOKENS / WARPS; i++) {
        int t = token0 + (int)threadIdx.x / QUADS + WARPS * i;
        x[i] = t < l.m && block < l.w.blocks
                   ? load_quad(l.x + (size_t)t * (size_t)l.x_ld, col, l.w.cols, aligned)
                   : make_float4(0, 0, 0, 0);
    }
}

/* Splits it to where the fragments' lanes read it. */
template <Dtype F>
static __device__ __forceinline__ void share_tokens(LargeSmem *m, int turn,
                                                    const float4 x[LARGE_TOKENS / WARPS]) {
    int q = (int)threadIdx.x % QUADS, u = q / (4 * MAT_STEPS<F>), c = q / MAT_STEPS<F> % 4,
        step = u * MAT_STEPS<F> + q % MAT_STEPS<F>;
#pragma unroll
    for (int i = 0; i < LARGE_TOKENS / WARPS; i++) {
        int t = (int)threadIdx.x / QUADS + WARPS * i;
        uint2 *to = &m->x[turn][step][t / GROUP * 32 + t % GROUP * 4 + c];
        to[0] = split_quad(x[i], false);
        to[GROUP * 4] = split_quad(x[i], true);
    }
}

/* A stage of two tiles times the warp's tokens. */
template <Dtype F>
static __device__ __forceinline__ void large_stage(const LargeSmem *m, int turn, int stage,
                                                   const Raw<F> &r, int group0,
                                                   Sums<LARGE_GROUPS> *sums) {
    int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < STAGE_UNITS<F>; u++)
#pragma unroll
        for (int s = 0; s < MAT_STEPS<F>; s++) {
            uint32_t a[2][MAT_TERMS<F>][4];
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
                fragment_a<F>(r.v[tile][u], r.scale[tile], s, a[tile]);
            const uint2 *b =
                m->x[turn][(stage * STAGE_UNITS<F> + u) * MAT_STEPS<F> + s] + group0 * 32 + lane;
#pragma unroll
            for (int n = 0; n < LARGE_GROUPS; n++)
                multiply<F, LARGE_GROUPS>(sums, a, n, b[32 * n]);
        }
}

/* A finished slice into the sums of the ones before it. */
static __device__ __forceinline__ void end_slice(LargeSmem *m, Sums<LARGE_GROUPS> *total,
                                                 bool first) {
    join_halves<LARGE_GROUPS>(total);
#pragma unroll
    for (int i = 0; i < 2 * LARGE_GROUPS; i++) {
        const float *v = total->v[i / LARGE_GROUPS][i % LARGE_GROUPS];
        float4 *to = &m->sum[i][threadIdx.x], old = first ? make_float4(0, 0, 0, 0) : *to;
        *to = make_float4(old.x + v[0], old.y + v[1], old.z + v[2], old.w + v[3]);
    }
    *total = {};
}

template <Dtype F>
static __device__ __forceinline__ void
large_block(const CudaLinear &l, const LargeSmem *m, int turn, int pair, int block, int group0,
            Raw<F> *next, Sums<LARGE_GROUPS> *part, Sums<LARGE_GROUPS> *total) {
#pragma unroll
    for (int stage = 0; stage < STAGES<F>; stage++) {
        Raw<F> r = *next;
        if (stage + 1 < STAGES<F>)
            load_stage<F>(next, l.w, pair, block, stage + 1);
        else if (block + 1 < l.w.blocks)
            load_stage<F>(next, l.w, pair, block + 1, 0);
        large_stage<F>(m, turn, stage, r, group0, F == DT_F8E4M3 ? part : total);
        if (stage + 1 == STAGES<F>)
            end_block<F, LARGE_GROUPS>(total, part, r);
    }
}

/* Blocks (128 rows, 32 tokens); warps: four pairs of tiles, each with two halves of the tokens. */
template <Dtype F>
static __global__ void __launch_bounds__(THREADS, 1) large_kernel(CudaLinear l, bool aligned) {
    LargeSmem *m = dynamic_smem<LargeSmem>();
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, c = lane % 4,
        pair = (int)blockIdx.x * LARGE_PAIRS + warp / 2, group0 = warp % 2 * LARGE_GROUPS,
        token0 = (int)blockIdx.y * LARGE_TOKENS;
    bool has_rows = 2 * pair < l.w.tiles;
    Sums<LARGE_GROUPS> total = {}, part = {};
    float4 x[LARGE_TOKENS / WARPS];
    Raw<F> next = {};
    load_tokens(l, 0, token0, aligned, x);
    if (has_rows)
        load_stage<F>(&next, l.w, pair, 0, 0);
    for (int slice = 0, block = 0; slice < MAT_SLICES; slice++) {
        for (; block < slice_begin(l.w.blocks, slice + 1); block++) {
            share_tokens<F>(m, block % 2, x);
            __syncthreads();
            load_tokens(l, block + 1, token0, aligned, x);
            if (has_rows)
                large_block<F>(l, m, block % 2, pair, block, group0, &next, &part, &total);
        }
        end_slice(m, &total, slice == 0);
    }
    if (!has_rows || c >= 2)
        return;
#pragma unroll
    for (int i = 0; i < 2 * LARGE_GROUPS; i++) {
        const float4 v = m->sum[i][threadIdx.x];
        const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
            store(l, MAT_TILE * (2 * pair + i / LARGE_GROUPS) + g + k / 2 * 8,
                  token0 + GROUP * (group0 + i % LARGE_GROUPS) + 2 * c + k % 2,
                  f[k] * last_factor<F>(l.w));
    }
}

/* ---- launches ---- */

template <Dtype F, int N>
static void run_small(const CudaLinear *l, bool aligned, cudaStream_t stream) {
    dim3 grid((unsigned)(l->w.tiles / 2), (unsigned)((l->m + GROUP * N - 1) / (GROUP * N)));
    launch(small_kernel<F, N>, grid, THREADS, 0, stream, true, *l, aligned);
}

template <Dtype F> static void run_format(const CudaLinear *l, cudaStream_t stream) {
    bool aligned =
        (reinterpret_cast<uintptr_t>(l->x) & 15) == 0 && l->x_ld % 4 == 0 && l->w.col_pad % 4 == 0;
    int pairs = l->w.tiles / 2;
    dim3 large((unsigned)((pairs + LARGE_PAIRS - 1) / LARGE_PAIRS),
               (unsigned)((l->m + LARGE_TOKENS - 1) / LARGE_TOKENS));
    bool many = l->m > 32 || (l->m > 16 && (int)large.x >= l->n_sm);
    if (l->m <= GROUP)
        run_small<F, 1>(l, aligned, stream);
    else if (l->m <= 2 * GROUP)
        run_small<F, 2>(l, aligned, stream);
    else if (!many)
        run_small<F, 4>(l, aligned, stream);
    else
        launch(large_kernel<F>, large, THREADS, sizeof(LargeSmem), stream, false, *l, aligned);
}

void cuda_linear(const CudaLinear *l, cudaStream_t stream) {
    by_format(l->w.dtype, [&](auto f) { run_format<f.value>(l, stream); });
}
