/* Rows of numbers: norms, rotation, activation, sums, routing, joining of ranks' parts. All of them
 * are bound by latency or by memory: each number is read once or twice and written once.
 *
 * Sums over a row run in fp32 in a fixed order: each thread its columns, then a tree over the
 * lanes, then the warps in turn. Tolerance: 1e-6 of the largest magnitude of the row. */
#include "kernels/cuda/cuda_base.h"
#include "kernels/cuda/cuda_mma.cuh"

#include <math.h>

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    ROWS_BY_VALUE = 512, /* rows of a gather that fit a launch's arguments */
    ROUTE_TOKENS = 4,    /* of a block: one warp each */
};

/* The sum over the block, the same in every thread. */
static __device__ float block_sum(float v) {
    __shared__ float part[WARPS];
    for (int d = 16; d > 0; d /= 2)
        v += __shfl_xor_sync(~0u, v, d);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0;
    for (int i = 0; i < WARPS; i++)
        v += part[i];
    __syncthreads();
    return v;
}

static __device__ __forceinline__ float *row_of(CudaView x, int r) {
    return x.at + (size_t)r * (size_t)x.ld;
}

/* A block per row. Rows are read twice: from memory, then from the L1. */
static __global__ void __launch_bounds__(THREADS)
    rms_norm_kernel(CudaView out, CudaView x, const float *w, float eps) {
    const float *in = row_of(x, (int)blockIdx.x);
    float *o = row_of(out, (int)blockIdx.x), sum = 0;
    for (int i = (int)threadIdx.x; i < x.cols; i += THREADS)
        sum = fmaf(in[i], in[i], sum);
    float inv = 1.0f / sqrtf(block_sum(sum) / (float)x.cols + eps);
    for (int i = (int)threadIdx.x; i < x.cols; i += THREADS)
        o[i] = in[i] * inv * w[i];
}

static __global__ void __launch_bounds__(THREADS)
    layer_norm_kernel(CudaView out, CudaView x, const float *w, const float *b, float eps) {
    const float *in = row_of(x, (int)blockIdx.x);
    float *o = row_of(out, (int)blockIdx.x), sum = 0, square = 0;
    for (int i = (int)threadIdx.x; i < x.cols; i += THREADS)
        sum += in[i];
    float mean = block_sum(sum) / (float)x.cols;
    for (int i = (int)threadIdx.x; i < x.cols; i += THREADS)
        square = fmaf(in[i] - mean, in[i] - mean, square);
    float inv = 1.0f / sqrtf(block_sum(square) / (float)x.cols + eps);
    for (int i = (int)threadIdx.x; i < x.cols; i += THREADS)
        o[i] = (in[i] - mean) * inv * w[i] + b[i];
}

void cuda_rms_norm(CudaView out, CudaView x, const float *w, float eps, cudaStream_t stream) {
    launch(rms_norm_kernel, dim3((unsigned)x.rows), THREADS, 0, stream, false, out, x, w, eps);
}

void cuda_layer_norm(CudaView out, CudaView x, const float *w, const float *b, float eps,
                     cudaStream_t stream) {
    launch(layer_norm_kernel, dim3((unsigned)x.rows), THREADS, 0, stream, false, out, x, w, b, eps);
}

/* ---- one number at a time: blocks (columns, row) ---- */

static dim3 by_columns(CudaView x) {
    return dim3((unsigned)((x.cols + THREADS - 1) / THREADS), (unsigned)x.rows);
}

static __device__ __forceinline__ int column() {
    return (int)(blockIdx.x * THREADS + threadIdx.x);
}

static __global__ void __launch_bounds__(THREADS) clear_kernel(CudaView x) {
    if (column() < x.cols)
        row_of(x, (int)blockIdx.y)[column()] = 0;
}

static __global__ void __launch_bounds__(THREADS) add_kernel(CudaView x, CudaView y) {
    if (column() < x.cols)
        row_of(x, (int)blockIdx.y)[column()] += row_of(y, (int)blockIdx.y)[column()];
}

static __global__ void __launch_bounds__(THREADS)
    silu_mul_kernel(CudaView out, CudaView gate, CudaView up) {
    if (column() >= gate.cols)
        return;
    float g = row_of(gate, (int)blockIdx.y)[column()], u = row_of(up, (int)blockIdx.y)[column()];
    row_of(out, (int)blockIdx.y)[column()] = g / (1.0f + expf(-g)) * u;
}

struct RowList {
    int32_t row[ROWS_BY_VALUE];
};

static __global__ void __launch_bounds__(THREADS)
    take_rows_kernel(CudaView out, CudaView x, const __grid_constant__ RowList list) {
    if (column() < out.cols)
        row_of(out, (int)blockIdx.y)[column()] = row_of(x, list.row[blockIdx.y])[column()];
}

static __global__ void __launch_bounds__(THREADS) sum_parts_kernel(CudaView x, CudaParts p) {
    if (column() >= x.cols)
        return;
    size_t at = (size_t)blockIdx.y * (size_t)x.cols + (size_t)column();
    float sum = p.part[0][at];
    for (int r = 1; r < p.n; r++)
        sum += p.part[r][at];
    row_of(x, (int)blockIdx.y)[column()] = sum;
}

static __global__ void __launch_bounds__(THREADS)
    join_parts_kernel(CudaView out, int cols, CudaParts p) {
    int c = column();
    if (c < cols * p.n)
        row_of(out, (int)blockIdx.y)[c] =
            p.part[c / cols][(size_t)blockIdx.y * (size_t)cols + (size_t)(c % cols)];
}

void cuda_clear(CudaView x, cudaStream_t stream) {
    launch(clear_kernel, by_columns(x), THREADS, 0, stream, false, x);
}

void cuda_add(CudaView x, CudaView y, cudaStream_t stream) {
    launch(add_kernel, by_columns(x), THREADS, 0, stream, false, x, y);
}

void cuda_silu_mul(CudaView out, CudaView gate, CudaView up, cudaStream_t stream) {
    launch(silu_mul_kernel, by_columns(gate), THREADS, 0, stream, false, out, gate, up);
}

/* The rows travel as arguments, so that nothing on the host has to outlive the call. */
void cuda_take_rows(CudaView out, CudaView x, const int32_t *row, cudaStream_t stream) {
    for (int r = 0; r < out.rows; r += ROWS_BY_VALUE) {
        RowList list = {};
        CudaView part = out;
        part.at += (size_t)r * (size_t)out.ld;
        part.rows = out.rows - r < ROWS_BY_VALUE ? out.rows - r : ROWS_BY_VALUE;
        for (int i = 0; i < part.rows; i++)
            list.row[i] = row[r + i];
        launch(take_rows_kernel, by_columns(part), THREADS, 0, stream, false, part, x, list);
    }
}

void cuda_sum_parts(CudaView x, CudaParts parts, cudaStream_t stream) {
    launch(sum_parts_kernel, by_columns(x), THREADS, 0, stream, false, x, parts);
}

void cuda_join_parts(CudaView out, int cols, CudaParts parts, cudaStream_t stream) {
    launch(join_parts_kernel, by_columns(out), THREADS, 0, stream, false, out, cols, parts);
}

/* ---- rotation ---- */

/* Blocks (pairs, row). Angles in double: at position 10^6 a float has none of their bits left. */
static __global__ void __launch_bounds__(THREADS)
    rope_angles_kernel(float *angle, const int32_t *pos, int dim, float theta) {
    int i = column();
    if (i >= dim / 2)
        return;
    double a = pos[blockIdx.y] * pow((double)theta, -2.0 * i / dim);
    float *to = angle + (size_t)blockIdx.y * (size_t)dim + 2 * i;
    to[0] = (float)cos(a);
    to[1] = (float)sin(a);
}

/* Blocks (pairs of all heads, row). */
static __global__ void __launch_bounds__(THREADS)
    rope_kernel(CudaView x, const float *angle, int heads, int stride, int at, int dim) {
    int pair = column(), head = pair / (dim / 2), i = pair % (dim / 2);
    if (head >= heads)
        return;
    const float *cs = angle + (size_t)blockIdx.y * (size_t)dim + 2 * i;
    float *p = row_of(x, (int)blockIdx.y) + head * stride + at + 2 * i, a = p[0], b = p[1];
    p[0] = __fsub_rn(__fmul_rn(a, cs[0]), __fmul_rn(b, cs[1]));
    p[1] = __fadd_rn(__fmul_rn(b, cs[0]), __fmul_rn(a, cs[1]));
}

void cuda_rope_angles(float *angle, const int32_t *pos, int rows, int dim, float theta,
                      cudaStream_t stream) {
    dim3 grid((unsigned)((dim / 2 + THREADS - 1) / THREADS), (unsigned)rows);
    launch(rope_angles_kernel, grid, THREADS, 0, stream, false, angle, pos, dim, theta);
}

void cuda_rope(CudaView x, const float *angle, int heads, int stride, int at, int dim,
               cudaStream_t stream) {
    dim3 grid((unsigned)((heads * (dim / 2) + THREADS - 1) / THREADS), (unsigned)x.rows);
    launch(rope_kernel, grid, THREADS, 0, stream, false, x, angle, heads, stride, at, dim);
}

/* ---- routing ---- */

/* The lane's best choice and then the warp's: the largest, the lowest id among equals. NaN counts
 * as the least. */
static __device__ int pick_expert(const float *choice, const uint8_t *taken, int n, int lane) {
    float best = -INFINITY;
    int at = INT_MAX;
    for (int e = lane; e < n; e += 32) {
        float c = fmaxf(choice[e], -INFINITY);
        if (!taken[e] && (at == INT_MAX || c > best)) {
            best = c;
            at = e;
        }
    }
    for (int d = 16; d > 0; d /= 2) {
        float other = __shfl_xor_sync(~0u, best, d);
        int other_at = __shfl_xor_sync(~0u, at, d);
        if (other > best || (other == best && other_at < at)) {
            best = other;
            at = other_at;
        }
    }
    return at;
}

/* A warp per token. Scores in double and rounded once, as the reference has them, so that choices
 * agree; the rest costs less than a launch. */
static __global__ void __launch_bounds__(ROUTE_TOKENS * 32) route_kernel(CudaRoute r) {
    int n = r.logits.cols, lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32,
        t = (int)blockIdx.x * ROUTE_TOKENS + warp;
    float *score = dynamic_smem<float>() + (size_t)warp * 2 * n, *choice = score + n;
    uint8_t *taken =
        reinterpret_cast<uint8_t *>(dynamic_smem<float>() + (size_t)ROUTE_TOKENS * 2 * n) +
        (size_t)warp * n;
    if (t >= r.logits.rows)
        return;
    for (int e = lane; e < n; e += 32) {
        score[e] = (float)(1.0 / (1.0 + exp(-(double)row_of(r.logits, t)[e])));
        choice[e] = score[e] + r.bias[e];
        taken[e] = 0;
    }
    __syncwarp();
    for (int i = 0; i < r.k; i++) {
        int e = pick_expert(choice, taken, n, lane);
        if (lane == 0)
            taken[e] = 1;
        __syncwarp();
    }
    if (lane > 0)
        return;
    int32_t *id = r.id + (size_t)t * (size_t)r.id_ld;
    float *weight = r.weight + (size_t)t * (size_t)r.weight_ld, sum = 0;
    int found = 0;
    for (int e = 0; e < n && found < r.k; e++)
        if (taken[e]) {
            id[found++] = e;
            sum += score[e];
        }
    float factor = r.norm ? r.scale / (sum + 1e-20f) : r.scale;
    for (int i = 0; i < found; i++)
        weight[i] = score[id[i]] * factor;
}

void cuda_route(const CudaRoute *r, cudaStream_t stream) {
    size_t n = (size_t)r->logits.cols,
           smem = ROUTE_TOKENS * (n * 2 * sizeof(float) + n * sizeof(uint8_t));
    dim3 grid((unsigned)((r->logits.rows + ROUTE_TOKENS - 1) / ROUTE_TOKENS));
    launch(route_kernel, grid, ROUTE_TOKENS * 32, smem, stream, false, *r);
}

cudaError_t cuda_base_probe(void) {
    cudaFuncAttributes a;
    return cudaFuncGetAttributes(&a, clear_kernel);
}
