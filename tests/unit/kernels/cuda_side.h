/* The CUDA backend beside the reference, for the tests of its operations: tensors and pools to the
 * GPU and back. Without a GPU the tests are skipped. One thread. */
#pragma once

#include "tests/unit/kernels/ops_side.h"

/* The backend with one rank; skips the test when the machine has no GPU. */
Side cuda_side(int max_rows, int max_context);

/* A copy of a host tensor on the GPU, in a wider tensor from column `shift` on. */
Tensor to_gpu(const Side *s, Tensor host, int shift);
/* A host tensor with the numbers of a GPU's; poisoned where there are none. */
Tensor from_gpu(const Side *s, Tensor gpu);
/* Frees what to_gpu made. */
void gpu_free(const Side *s, Tensor *gpu, int shift);
/* A copy of a host pool on the GPU. */
void *pool_to_gpu(const Side *s, const void *bytes, uint64_t n);
