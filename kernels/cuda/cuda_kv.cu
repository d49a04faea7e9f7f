/* KV rows into the pool, with the bytes that the host backends write. One block per token; each
 * number is read and written once, so the time is a launch. */
#include "kernels/cuda/cuda_base.h"
#include "kernels/cuda/cuda_mma.cuh"
#include "kernels/kv_hash.h"

#include <float.h>
#include <math.h>

enum { THREADS = 256, WARPS = THREADS / 32, PER_LANE = KV_SCALE_GROUP / 32 };

/* Round to nearest even; a NaN keeps its upper bits, as on hosts. */
static __device__ __forceinline__ uint16_t to_bf16(float f) {
    uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/* Round to nearest even, saturating; NaN becomes 0x7f. */
static __device__ __forceinline__ uint8_t to_e4m3(float f) {
    return isnan(f) ? 0x7f : (uint8_t)__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3);
}

static __device__ __forceinline__ uint8_t *page_of(const CudaRows &rows, const CudaPages &to, int t,
                                                   int *row) {
    int pos = rows.pos[t];
    *row = pos % KV_PAGE_TOKENS;
    int32_t page = rows.page_table[(size_t)rows.seq[t] * (size_t)rows.page_stride +
                                   (size_t)(pos / KV_PAGE_TOKENS)];
    return const_cast<uint8_t *>(to.base) + (size_t)page * to.page_bytes;
}

/* Stores n numbers as fp32 or bf16. */
static __device__ void store_plain(Dtype dtype, uint8_t *to, const float *x, int n) {
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        if (dtype == DT_F32)
            reinterpret_cast<float *>(to)[i] = x[i];
        else
            reinterpret_cast<uint16_t *>(to)[i] = to_bf16(x[i]);
    }
}

static __device__ __forceinline__ float warp_max(float v) {
    for (int d = 16; d > 0; d /= 2)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
    return v;
}

/* A warp for each group of 128 numbers: e4m3 bytes, then the groups' scales, then bf16. */
static __device__ void store_fp8_row(uint8_t *to, const float *x, int lora, int rope) {
    int lane = (int)threadIdx.x % 32, groups = lora / KV_SCALE_GROUP;
    float *scales = reinterpret_cast<float *>(to + lora);
    for (int g = (int)threadIdx.x / 32; g < groups; g += WARPS) {
        const float *p = x + g * KV_SCALE_GROUP;
        float top = 0;
        for (int i = 0; i < PER_LANE; i++)
            top = fmaxf(top, fabsf(p[lane + 32 * i]));
        float scale = fmaxf(warp_max(top) / 448.0f, FLT_MIN);
        for (int i = 0; i < PER_LANE; i++)
            to[g * KV_SCALE_GROUP + lane + 32 * i] = to_e4m3(p[lane + 32 * i] / scale);
        if (lane == 0)
            scales[g] = scale;
    }
    store_plain(DT_BF16, to + lora + 4 * groups, x + lora, rope);
}

static __global__ void __launch_bounds__(THREADS)
    store_latent_kernel(CudaRows rows, CudaPages to, CudaView kv, int lora) {
    int t = (int)blockIdx.x, row;
    uint8_t *page = page_of(rows, to, t, &row),
            *at = page + (size_t)row * (to.page_bytes / KV_PAGE_TOKENS);
    const float *x = kv.at + (size_t)t * (size_t)kv.ld;
    if (to.dtype == DT_F8E4M3)
        store_fp8_row(at, x, lora, kv.cols - lora);
    else
        store_plain(to.dtype, at, x, kv.cols);
}

/* fp8: one scale per key, a power of two rounded up; the logarithm in double, so that it rounds as
 * on hosts. */
static __global__ void __launch_bounds__(THREADS)
    store_keys_kernel(CudaRows rows, CudaPages to, CudaView key) {
    int t = (int)blockIdx.x, row, dim = key.cols;
    uint8_t *page = page_of(rows, to, t, &row);
    const float *x = key.at + (size_t)t * (size_t)key.ld;
    if (to.dtype != DT_F8E4M3) {
        store_plain(to.dtype, page + (size_t)row * (size_t)dim * (to.dtype == DT_F32 ? 4 : 2), x,
                    dim);
        return;
    }
    if (threadIdx.x >= 32)
        return;
    float top = 1e-4f;
    for (int i = (int)threadIdx.x; i < dim; i += 32)
        top = fmaxf(top, fabsf(x[i]));
    top = warp_max(top);
    float scale = exp2f(ceilf((float)log2((double)(top / 448.0f))));
    for (int i = (int)threadIdx.x; i < dim; i += 32)
        page[(size_t)row * (size_t)dim + (size_t)i] = to_e4m3(x[i] / scale);
    if (threadIdx.x == 0)
        reinterpret_cast<float *>(page + (size_t)KV_PAGE_TOKENS * (size_t)dim)[row] = scale;
}

void cuda_store_latent(const CudaRows *rows, CudaPages to, CudaView kv, int lora,
                       cudaStream_t stream) {
    launch(store_latent_kernel, dim3((unsigned)rows->rows), THREADS, 0, stream, false, *rows, to,
           kv, lora);
}

void cuda_store_keys(const CudaRows *rows, CudaPages to, CudaView key, cudaStream_t stream) {
    launch(store_keys_kernel, dim3((unsigned)rows->rows), THREADS, 0, stream, false, *rows, to,
           key);
}

/* ---- what pages hash to ---- */

/* A block for each layer slot and page; each byte is read once. */
__global__ __launch_bounds__(THREADS) void page_sums(CudaPageSums s) {
    int slot = (int)blockIdx.x, at = (int)blockIdx.y;
    KvRange range[3];
    int n =
        kv_layout_ranges(&s.layout, slot, s.index_slot[slot], s.page[at], 0, s.n_rows[at], range);
    unsigned long long sum = 0;
    for (int r = 0; r < n; r++) {
        const uint32_t *w = reinterpret_cast<const uint32_t *>(s.pool + range[r].offset);
        uint32_t words = (uint32_t)(range[r].bytes / 4), key = kv_hash_key(slot, r);
        for (uint32_t i = threadIdx.x; 2 * i < words; i += THREADS)
            sum += kv_hash_pair(key, i, w[2 * i], 2 * i + 1 < words ? w[2 * i + 1] : 0);
    }
    for (int d = 16; d > 0; d /= 2)
        sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x % 32 == 0)
        atomicAdd(&s.sum[at], sum);
}

void cuda_page_sums(const CudaPageSums *s, cudaStream_t stream) {
    page_sums<<<dim3((unsigned)s->layout.n_slots, (unsigned)s->n), THREADS, 0, stream>>>(*s);
    cuda_must(cudaGetLastError(), "page sums");
}
