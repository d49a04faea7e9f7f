/* Backends side by side for the tests of operations: devices, poisoned tensors, random matrices in
 * every stored format, comparisons that fail the test. One thread. */
#pragma once

#include "kernels/cpu/cpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

typedef struct Side {
    const Ops *ops;
    Dev *dev;
} Side;

/* Uniform in [-1, 1), the same sequence in every run. */
float noise(void);

Side side_open(const Ops *ops, int threads, int max_rows, int max_context);
void side_close(Side *s);
/* All backends that this processor runs, the reference first: at most 4. The last one has three
 * threads. */
int sides(Side *s, int max_rows, int max_context);

/* Filled with NaN, with ld wider than cols. The caller frees `at`. */
Tensor tensor(int rows, int cols);
Tensor noise_tensor(int rows, int cols);
Tensor copy_tensor(Tensor t);

/* Within tolerance times the largest magnitude of `want`; no NaN. */
void near(Tensor want, Tensor got, double tolerance);
/* Bit for bit. */
void same(Tensor a, Tensor b);

/* A matrix and its memory. */
typedef struct Stored {
    MatView view;
    void *data, *scale;
} Stored;

Stored stored(Dtype dtype, int rows, int cols);
void stored_done(Stored *s);

extern const Dtype DTYPES[4];
