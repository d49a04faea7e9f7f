/* Device-side words that the kernels are written in: launches, loads that pick a cache, the tensor
 * core's 16 x 8 x 16 product, numbers split into two 16-bit halves. No state. Everything here
 * exists on sm_80 and later, but for the waits on the grid before (sm_90).
 *
 * Fragments of mma.m16n8k16, lane = 4 * g + c (g 0..7, c 0..3):
 *   A [16, 16]  a0: row g, k 2c and 2c+1; a1: row g+8; a2: row g, k 2c+8 and 2c+9; a3: row g+8
 *   B [16, 8]   b0: column g, k 2c and 2c+1; b1: column g, k 2c+8 and 2c+9
 *   C [16, 8]   c0, c1: row g, columns 2c and 2c+1; c2, c3: row g+8
 * A sum over k may take k in any order as long as A and B agree, so a lane may own any 4 of 16. */
#pragma once

#include "kernels/cuda/cuda_kernels.h"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

/* The block's dynamic shared memory. */
template <class T> static __device__ __forceinline__ T *dynamic_smem() {
    extern __shared__ __align__(16) unsigned char smem_bytes[];
    return reinterpret_cast<T *>(smem_bytes);
}

/* Launches with `smem` bytes of dynamic shared memory. With `early` the blocks may start while the
 * kernel before still runs; they must call grid_wait() before they touch what it writes. */
template <class... Params, class... Args>
static void launch(void (*kernel)(Params...), dim3 grid, int threads, size_t smem,
                   cudaStream_t stream, bool early, Args... args) {
    if (smem > 48 * 1024)
        cuda_must(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem),
            "shared memory");
    cudaLaunchConfig_t conf = {};
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    conf.gridDim = grid;
    conf.blockDim = dim3((unsigned)threads);
    conf.dynamicSmemBytes = smem;
    conf.stream = stream;
    conf.attrs = &attr;
    conf.numAttrs = early ? 1 : 0;
    cuda_must(cudaLaunchKernelEx(&conf, kernel, Params(args)...), "launch");
}

/* Waits until all that the kernel before has written can be seen. */
static __device__ __forceinline__ void grid_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* Lets the blocks of an early next kernel start. */
static __device__ __forceinline__ void grid_release() {
    asm volatile("griddepcontrol.launch_dependents;");
}

/* 16 bytes that do not change while the kernel runs. */
static __device__ __forceinline__ uint4 load16(const void *p) {
    return __ldg(static_cast<const uint4 *>(p));
}

static __device__ __forceinline__ uint2 load8(const void *p) {
    return __ldg(static_cast<const uint2 *>(p));
}

/* 4 numbers of any alignment. */
static __device__ __forceinline__ float4 load4(const float *p) {
    if ((reinterpret_cast<uintptr_t>(p) & 15) == 0)
        return *reinterpret_cast<const float4 *>(p);
    return make_float4(p[0], p[1], p[2], p[3]);
}

static __device__ __forceinline__ void store4(float *p, float4 v) {
    if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
        *reinterpret_cast<float4 *>(p) = v;
    } else {
        p[0] = v.x;
        p[1] = v.y;
        p[2] = v.z;
        p[3] = v.w;
    }
}

/* As load16, for what is read once: leaves the L1 to others. */
static __device__ __forceinline__ uint4 load16_once(const void *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

static __device__ __forceinline__ uint2 load8_once(const void *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(p));
    return v;
}

static __device__ __forceinline__ unsigned load_acquire(const unsigned *p) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

/* Barrier `id` (1 to 15) of `threads` threads, from wherever in the kernel they come. */
static __device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Ends the kernel, and with it the process, when a wait between blocks lasts for seconds. */
static __device__ __forceinline__ void wait_until_at_least(const unsigned *p, unsigned value) {
    for (int i = 0; load_acquire(p) < value; i++) {
        __nanosleep(32);
        if (i > 1 << 26)
            __trap();
    }
}

/* d += a . b */
static __device__ __forceinline__ void mma_f16(float d[4], const uint32_t a[4], uint32_t b0,
                                               uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], uint32_t b0,
                                                uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Transposes an 8 x 8 matrix of 16-bit numbers: lane 4 * g + c holds row g, columns 2c and 2c+1. */
static __device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
    uint32_t t;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
    return t;
}

static __device__ __forceinline__ uint32_t pack_f16(float a, float b) {
    uint32_t v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
    return v;
}

static __device__ __forceinline__ uint32_t pack_bf16(float a, float b) {
    uint32_t v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(b), "f"(a));
    return v;
}

static __device__ __forceinline__ float2 unpack_f16(uint32_t v) {
    __half2 h;
    memcpy(&h, &v, 4);
    return __half22float2(h);
}

static __device__ __forceinline__ float2 unpack_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

/* a and b as the sum of two numbers each: 22 bits of precision within fp16's range. */
static __device__ __forceinline__ void split_f16(float a, float b, uint32_t *hi, uint32_t *lo) {
    *hi = pack_f16(a, b);
    float2 h = unpack_f16(*hi);
    *lo = pack_f16(a - h.x, b - h.y);
}

/* The same with 17 bits of precision and the range of fp32. */
static __device__ __forceinline__ void split_bf16(float a, float b, uint32_t *hi, uint32_t *lo) {
    *hi = pack_bf16(a, b);
    float2 h = unpack_bf16(*hi);
    *lo = pack_bf16(a - h.x, b - h.y);
}

/* Two e4m3 numbers (the low byte first) as fp16, exactly. */
static __device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t two) {
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

/* Products of pairs of bf16, rounded once; subnormals count. */
static __device__ __forceinline__ uint32_t mul_bf16(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 %0, %1, %2, z; }"
        : "=r"(v)
        : "r"(a), "r"(b));
    return v;
}

/* 2^x, within 2 units in the last place; 0 for x = -infinity. */
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 2^e for e in [-126, 127] */
static __device__ __forceinline__ float power_of_2(int e) {
    return __uint_as_float((uint32_t)(e + 127) << 23);
}
