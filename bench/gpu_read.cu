/* See gpu_read.h. Eight loads of 16 bytes per thread are on their way at a time. */
#include "bench/gpu_read.h"

#include <cstdint>

enum { THREADS = 512, BLOCKS = 132 * 8, AHEAD = 8 };

static __global__ void __launch_bounds__(THREADS)
    read_kernel(const uint4 *from, size_t n, uint32_t *out) {
    size_t step = (size_t)gridDim.x * THREADS, i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t x = 0;
    for (; i + (AHEAD - 1) * step < n; i += AHEAD * step) {
        uint4 v[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            v[k] = __ldcs(from + i + (size_t)k * step);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < n; i += step)
        x ^= from[i].x;
    if (x == 0x12345678u) /* keeps the loads */
        *out = x;
}

void gpu_read(const void *from, size_t bytes, void *out, cudaStream_t stream) {
    read_kernel<<<BLOCKS, THREADS, 0, stream>>>((const uint4 *)from, bytes / 16, (uint32_t *)out);
}
