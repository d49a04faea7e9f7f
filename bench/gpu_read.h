/* Reading of GPU memory as fast as it goes, to compare kernels with. Any thread. */
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads `bytes` (a multiple of 16) from device memory; may write a word to `out`. */
void gpu_read(const void *from, size_t bytes, void *out, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
