/* See kernels/link_speed.h. */
#include "kernels/link_speed.h"

#include <cuda_runtime_api.h>

#include <stdbool.h>

enum { LINK_BYTES = 256 << 20, LINK_TIMES = 5 };

typedef struct Copy {
    void *host, *device;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} Copy;

static cudaError_t open_copy(Copy *c) {
    cudaError_t rc = cudaHostAlloc(&c->host, LINK_BYTES, cudaHostAllocDefault);
    if (rc == cudaSuccess)
        rc = cudaMalloc(&c->device, LINK_BYTES);
    if (rc == cudaSuccess)
        rc = cudaStreamCreate(&c->stream);
    if (rc == cudaSuccess)
        rc = cudaEventCreate(&c->begin);
    if (rc == cudaSuccess)
        rc = cudaEventCreate(&c->end);
    return rc;
}

static void close_copy(Copy *c) {
    if (c->begin)
        cudaEventDestroy(c->begin);
    if (c->end)
        cudaEventDestroy(c->end);
    if (c->stream)
        cudaStreamDestroy(c->stream);
    cudaFree(c->device);
    cudaFreeHost(c->host);
}

/* The best of several, after one that is not counted. */
static cudaError_t time_copy(Copy *c, enum cudaMemcpyKind kind, double *gb_per_s) {
    bool to = kind == cudaMemcpyHostToDevice;
    cudaError_t rc = cudaSuccess;
    *gb_per_s = 0;
    for (int i = 0; i <= LINK_TIMES && rc == cudaSuccess; i++) {
        float ms = 0;
        rc = cudaEventRecord(c->begin, c->stream);
        if (rc == cudaSuccess)
            rc = cudaMemcpyAsync(to ? c->device : c->host, to ? c->host : c->device, LINK_BYTES,
                                 kind, c->stream);
        if (rc == cudaSuccess)
            rc = cudaEventRecord(c->end, c->stream);
        if (rc == cudaSuccess)
            rc = cudaEventSynchronize(c->end);
        if (rc == cudaSuccess)
            rc = cudaEventElapsedTime(&ms, c->begin, c->end);
        double v = ms > 0 ? LINK_BYTES / 1e6 / ms : 0;
        if (i > 0 && v > *gb_per_s)
            *gb_per_s = v;
    }
    return rc;
}

int link_speed(int gpu, double *to_gb_per_s, double *from_gb_per_s, Err *err) {
    Copy c = {0};
    int n = 0;
    double to = 0, from = 0;
    cudaError_t rc = cudaGetDeviceCount(&n);
    if (rc != cudaSuccess)
        return err_set(err, E_UNSUPPORTED, "cuda: no GPU can be used: %s", cudaGetErrorString(rc));
    if (gpu < 0 || gpu >= n)
        return err_set(err, E_UNSUPPORTED, "cuda: there is no GPU %d, this process sees %d", gpu,
                       n);
    rc = cudaSetDevice(gpu);
    if (rc == cudaSuccess)
        rc = open_copy(&c);
    if (rc == cudaSuccess)
        rc = time_copy(&c, cudaMemcpyHostToDevice, &to);
    if (rc == cudaSuccess)
        rc = time_copy(&c, cudaMemcpyDeviceToHost, &from);
    close_copy(&c);
    if (rc != cudaSuccess)
        return err_set(err, E_IO, "cuda: measuring GPU %d: %s", gpu, cudaGetErrorString(rc));
    *to_gb_per_s = to;
    *from_gb_per_s = from;
    return 0;
}
