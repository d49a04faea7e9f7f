/* Products with each head's part of a matrix: into the latent space (absorb: the matrix's rows are
 * summed over) and out of it (expand: its columns are), in fp32.
 *
 * Absorb: a block has one unit of columns of one head and up to TOKENS tokens; its warps share the
 * head's tiles of rows. Expand: a block has one tile of rows of one head; its warps share the units
 * of columns. A lane sums in the order of rows (columns), then a tree over lanes, then the warps in
 * turn: the same for every number of tokens. Error: fp32 sums, about 1e-6 of the largest magnitude
 * of a row. Bytes: the head's rows once per TOKENS tokens, the first time from memory. */
#include "kernels/cuda/cuda_mat.cuh"

enum { WARPS = 8, THREADS = WARPS * 32 };

/* Tokens of a block: as many as keep the sums in registers. */
template <Dtype F> constexpr int TOKENS = F == DT_NVFP4 ? 2 : F == DT_F8E4M3 ? 4 : 8;

/* The lane's numbers in rows g and g + 8 of a tile, e4m3 without the block's scale. */
template <Dtype F>
static __device__ __forceinline__ void load_unit(const CudaMat &w, int tile, int unit, int lane,
                                                 float v[2][MAT_OWN<F>]) {
    const uint8_t *at = block_at<F>(w, tile, unit / MAT_UNITS<F>);
    uint2 scale = make_uint2(0, 0);
    if constexpr (F == DT_NVFP4)
        scale = load8(at + MAT_UNIT + 8 * lane);
    at += unit % MAT_UNITS<F> * MAT_UNIT + 16 * lane;
    numbers_of<F>(load16(at), scale.x, v[0]);
    numbers_of<F>(load16(at + MAT_UNIT / 2), scale.y, v[1]);
}

template <Dtype F>
static __device__ __forceinline__ float scale_of(const CudaMat &w, int tile, int unit) {
    if constexpr (F == DT_F8E4M3)
        return __ldg(w.scale + (size_t)tile * (size_t)w.blocks + (size_t)(unit / MAT_UNITS<F>));
    return 1.0f;
}

/* The head's first row as packed. */
static __device__ __forceinline__ int first_row(const CudaHeads &a, int head) {
    return a.w.row_pad + head * a.step + a.first;
}

/* ---- absorb ---- */

template <Dtype F, int T>
static __device__ __forceinline__ void absorb_tiles(const CudaHeads &a, int unit, int head,
                                                    int token0, float sum[T][MAT_OWN<F>]) {
    int lane = (int)threadIdx.x % 32, first = first_row(a, head),
        tile = first / MAT_TILE + (int)threadIdx.x / 32, end = (first + a.n - 1) / MAT_TILE + 1;
    const float *x = a.x + (size_t)token0 * (size_t)a.x_ld + (size_t)head * (size_t)a.x_step;
    for (; tile < end; tile += WARPS) {
        float v[2][MAT_OWN<F>], scale = scale_of<F>(a.w, tile, unit);
        load_unit<F>(a.w, tile, unit, lane, v);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = tile * MAT_TILE + lane / 4 + 8 * half - first;
#pragma unroll
            for (int t = 0; t < T; t++) {
                bool real = i >= 0 && i < a.n && token0 + t < a.m;
                float q = real ? x[(size_t)t * (size_t)a.x_ld + (size_t)i] * scale : 0.0f;
#pragma unroll
                for (int k = 0; k < MAT_OWN<F>; k++)
                    sum[t][k] = fmaf(q, v[half][k], sum[t][k]);
            }
        }
    }
}

/* The numbers that follow the summed ones are copied behind the result. */
static __device__ void copy_tail(const CudaHeads &a, int head, int token0, int tokens) {
    for (int i = (int)threadIdx.x; i < tokens * a.tail; i += THREADS) {
        int t = token0 + i / a.tail, k = i % a.tail;
        if (t < a.m)
            a.out[(size_t)t * (size_t)a.out_ld + (size_t)(head * a.out_step + a.w.cols + k)] =
                a.x[(size_t)t * (size_t)a.x_ld + (size_t)(head * a.x_step + a.n + k)];
    }
}

/* Blocks (unit of columns, head, tokens). */
template <Dtype F, int T>
static __global__ void __launch_bounds__(THREADS) absorb_kernel(CudaHeads a) {
    __shared__ float part[WARPS][T][MAT_UNIT_COLS<F>];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, unit = (int)blockIdx.x,
        head = (int)blockIdx.y, token0 = (int)blockIdx.z * T;
    float sum[T][MAT_OWN<F>] = {};
    absorb_tiles<F, T>(a, unit, head, token0, sum);
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int k = 0; k < MAT_OWN<F>; k++) {
            float v = sum[t][k];
            for (int d = 4; d < 32; d *= 2)
                v += __shfl_xor_sync(~0u, v, d);
            if (lane < 4)
                part[warp][t][lane * MAT_OWN<F> + k] = v;
        }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < T * MAT_UNIT_COLS<F>; i += THREADS) {
        int t = i / MAT_UNIT_COLS<F>, k = i % MAT_UNIT_COLS<F>,
            col = unit * MAT_UNIT_COLS<F> + k - a.w.col_pad;
        float v = 0;
        for (int w = 0; w < WARPS; w++)
            v += part[w][t][k];
        if (col >= 0 && col < a.w.cols && token0 + t < a.m)
            a.out[(size_t)(token0 + t) * (size_t)a.out_ld + (size_t)(head * a.out_step + col)] =
                v * last_factor<F>(a.w);
    }
    if (unit == 0)
        copy_tail(a, head, token0, T);
}

/* ---- expand ---- */

template <Dtype F, int T>
static __device__ __forceinline__ void expand_units(const CudaHeads &a, int tile, int head,
                                                    int token0, bool aligned, float sum[T][2]) {
    int lane = (int)threadIdx.x % 32, units = a.w.blocks * MAT_UNITS<F>;
    const float *x = a.x + (size_t)token0 * (size_t)a.x_ld + (size_t)head * (size_t)a.x_step;
    for (int unit = (int)threadIdx.x / 32; unit < units; unit += WARPS) {
        float v[2][MAT_OWN<F>], scale = scale_of<F>(a.w, tile, unit);
        int col = unit * MAT_UNIT_COLS<F> + lane % 4 * MAT_OWN<F> - a.w.col_pad;
        load_unit<F>(a.w, tile, unit, lane, v);
#pragma unroll
        for (int t = 0; t < T; t++) {
            float dot[2] = {};
#pragma unroll
            for (int k = 0; k < MAT_OWN<F>; k += 4) {
                float4 q = make_float4(0, 0, 0, 0);
                if (token0 + t < a.m)
                    q = load_quad(x + (size_t)t * (size_t)a.x_ld, col + k, a.w.cols, aligned);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    dot[half] = fmaf(q.x, v[half][k], dot[half]);
                    dot[half] = fmaf(q.y, v[half][k + 1], dot[half]);
                    dot[half] = fmaf(q.z, v[half][k + 2], dot[half]);
                    dot[half] = fmaf(q.w, v[half][k + 3], dot[half]);
                }
            }
            sum[t][0] = fmaf(dot[0], scale, sum[t][0]);
            sum[t][1] = fmaf(dot[1], scale, sum[t][1]);
        }
    }
}

/* Blocks (tile of the head's rows, head, tokens). */
template <Dtype F, int T>
static __global__ void __launch_bounds__(THREADS) expand_kernel(CudaHeads a, bool aligned) {
    __shared__ float part[WARPS][T][MAT_TILE];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, head = (int)blockIdx.y,
        first = first_row(a, head), tile = first / MAT_TILE + (int)blockIdx.x,
        token0 = (int)blockIdx.z * T;
    if (tile * MAT_TILE >= first + a.n)
        return;
    float sum[T][2] = {};
    expand_units<F, T>(a, tile, head, token0, aligned, sum);
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float v = sum[t][half];
            v += __shfl_xor_sync(~0u, v, 1);
            v += __shfl_xor_sync(~0u, v, 2);
            if (lane % 4 == 0)
                part[warp][t][lane / 4 + 8 * half] = v;
        }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < T * MAT_TILE; i += THREADS) {
        int t = i / MAT_TILE, row = tile * MAT_TILE + i % MAT_TILE - first;
        float v = 0;
        for (int w = 0; w < WARPS; w++)
            v += part[w][t][i % MAT_TILE];
        if (row >= 0 && row < a.n && token0 + t < a.m)
            a.out[(size_t)(token0 + t) * (size_t)a.out_ld + (size_t)(head * a.out_step + row)] =
                v * last_factor<F>(a.w);
    }
}

/* ---- launches ---- */

template <Dtype F, int T> static void run_absorb(const CudaHeads *a, cudaStream_t stream) {
    dim3 grid((unsigned)(a->w.blocks * MAT_UNITS<F>), (unsigned)a->heads,
              (unsigned)((a->m + T - 1) / T));
    launch(absorb_kernel<F, T>, grid, THREADS, 0, stream, false, *a);
}

template <Dtype F, int T> static void run_expand(const CudaHeads *a, cudaStream_t stream) {
    bool aligned = (reinterpret_cast<uintptr_t>(a->x) & 15) == 0 && a->x_ld % 4 == 0 &&
                   a->x_step % 4 == 0 && a->w.col_pad % 4 == 0;
    int tiles = (a->n + MAT_TILE - 2) / MAT_TILE + 1; /* rows may begin within a tile */
    dim3 grid((unsigned)tiles, (unsigned)a->heads, (unsigned)((a->m + T - 1) / T));
    launch(expand_kernel<F, T>, grid, THREADS, 0, stream, false, *a, aligned);
}

void cuda_heads_absorb(const CudaHeads *a, cudaStream_t stream) {
    by_format(a->w.dtype, [&](auto f) {
        if (a->m == 1)
            run_absorb<f.value, 1>(a, stream);
        else
            run_absorb<f.value, TOKENS<f.value>>(a, stream);
    });
}

void cuda_heads_expand(const CudaHeads *a, cudaStream_t stream) {
    by_format(a->w.dtype, [&](auto f) {
        if (a->m == 1)
            run_expand<f.value, 1>(a, stream);
        else
            run_expand<f.value, TOKENS<f.value>>(a, stream);
    });
}
