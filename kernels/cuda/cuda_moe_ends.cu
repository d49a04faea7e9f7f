/* Before the passes over the experts' matrices and after them: the places of a step sorted by
 * expert, tokens split into two halves of bf16; the sum over a token's experts in their order.
 *
 * Grid: a block per expert, each of which counts the places before its own, and a block per token;
 * after, a thread per 4 columns of a token. Bytes: small beside the matrices'. */
#include "kernels/cuda/cuda_moe_work.h"
#include "kernels/cuda/cuda_mma.cuh"

enum { WARPS = 8, THREADS = WARPS * 32 };

/* The place among the held experts of token t's i-th, -1 for none; *expert: which. */
static __device__ __forceinline__ int held_place(const CudaMoe &m, int t, int i, int *expert) {
    *expert = m.id[(size_t)t * (size_t)m.id_ld + i];
    return *expert >= 0 && *expert < m.e.n_experts ? m.e.place[*expert] : -1;
}

/* Lists the pairs of one expert, ascending, behind those of the experts before it. */
static __device__ void list_pairs(const CudaMoe &m, const MoeWork &w, int expert) {
    int *below = dynamic_smem<int>(), *equal = below + WARPS;
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, pairs = m.rows * m.k,
        before = 0, n = 0;
    bool held = m.e.place[expert] >= 0;
    for (int p = (int)threadIdx.x; p < pairs; p += THREADS) {
        int e, place = held_place(m, p / m.k, p % m.k, &e);
        before += place >= 0 && e < expert;
    }
    before = __reduce_add_sync(~0u, before);
    if (lane == 0)
        below[warp] = before;
    __syncthreads();
    before = 0;
    for (int i = 0; i < WARPS; i++)
        before += below[i];
    for (int p0 = 0; held && p0 < pairs; p0 += THREADS) {
        int p = p0 + (int)threadIdx.x, e = -1;
        bool mine = p < pairs && held_place(m, p / m.k, p % m.k, &e) >= 0 && e == expert;
        unsigned votes = __ballot_sync(~0u, mine);
        if (lane == 0)
            equal[warp] = __popc(votes);
        __syncthreads();
        int at = n;
        for (int i = 0; i < WARPS; i++) {
            at += i < warp ? equal[i] : 0;
            n += equal[i];
        }
        if (mine)
            w.pair[before + at + __popc(votes & ((1u << lane) - 1))] = p;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        w.count[expert] = n;
        w.first[expert] = before;
    }
}

/* Splits a token's numbers; clears the padding of its places' activations, which no pass writes. */
static __device__ void split_token(const CudaMoe &m, const MoeWork &w, int t) {
    uint16_t *to = w.x + (size_t)t * 2 * (size_t)w.x_cols;
    const float *x = m.x + (size_t)t * (size_t)m.x_ld;
    for (int c = 2 * (int)threadIdx.x; c < w.x_cols; c += 2 * THREADS) {
        uint32_t hi, lo;
        split_bf16(c < m.e.hidden ? x[c] : 0.0f, c + 1 < m.e.hidden ? x[c + 1] : 0.0f, &hi, &lo);
        *reinterpret_cast<uint32_t *>(to + c) = hi;
        *reinterpret_cast<uint32_t *>(to + w.x_cols + c) = lo;
    }
    int written = m.e.gate_up.tiles / 2 * MOE_TILE;
    for (int i = 0; i < 2 * m.k; i++)
        for (int c = written + (int)threadIdx.x; c < w.act_cols; c += THREADS)
            w.act[((size_t)t * 2 * m.k + i) * (size_t)w.act_cols + c] = 0;
}

/* Blocks: one per expert, then one per token. */
static __global__ void __launch_bounds__(THREADS) prepare_kernel(CudaMoe m, MoeWork w) {
    grid_release();
    if ((int)blockIdx.x < m.e.n_experts)
        list_pairs(m, w, (int)blockIdx.x);
    else
        split_token(m, w, (int)blockIdx.x - m.e.n_experts);
}

/* Blocks (columns, token), a thread per 4 columns. */
static __global__ void __launch_bounds__(THREADS) sum_kernel(CudaMoe m, MoeWork w) {
    grid_wait();
    int t = (int)blockIdx.y, col = 4 * (int)(blockIdx.x * THREADS + threadIdx.x);
    if (col >= m.e.hidden)
        return;
    float *y = m.y + (size_t)t * (size_t)m.y_ld + col;
    float sum[4];
    for (int i = 0; i < 4; i++)
        sum[i] = col + i < m.e.hidden ? y[i] : 0.0f;
    for (int k = 0; k < m.k; k++) {
        int e;
        if (held_place(m, t, k, &e) < 0)
            continue;
        float weight = m.weight[(size_t)t * (size_t)m.weight_ld + k];
        float4 v = *reinterpret_cast<const float4 *>(
            w.part + ((size_t)t * m.k + k) * (size_t)w.part_cols + col);
        sum[0] = fmaf(weight, v.x, sum[0]);
        sum[1] = fmaf(weight, v.y, sum[1]);
        sum[2] = fmaf(weight, v.z, sum[2]);
        sum[3] = fmaf(weight, v.w, sum[3]);
    }
    for (int i = 0; i < 4; i++)
        if (col + i < m.e.hidden)
            y[i] = sum[i];
}

void moe_prepare(const CudaMoe *m, const MoeWork *w, cudaStream_t stream) {
    dim3 grid((unsigned)(m->e.n_experts + m->rows));
    launch(prepare_kernel, grid, THREADS, 2 * WARPS * sizeof(int), stream, false, *m, *w);
}

void moe_sum(const CudaMoe *m, const MoeWork *w, cudaStream_t stream) {
    unsigned wide = (unsigned)((m->e.hidden + 4 * THREADS - 1) / (4 * THREADS));
    launch(sum_kernel, dim3(wide, (unsigned)m->rows), THREADS, 0, stream, true, *m, *w);
}
