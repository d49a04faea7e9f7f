/* A checkpoint directory: safetensors files, mapped read-only, found by tensor name.
 *
 * Opening reads config.json and every header and checks all of it: header length, JSON, dtypes, shapes against byte counts, offsets inside
 * the file, no overlap, names of the index present in the files they name, no tensor twice. Nothing from a file is trusted before. Dtypes
 * are taken per tensor, never from lists in config.json. Immutable after opening; any thread may read. */
#pragma once

#include "base/err.h"
#include "kernels/quant.h"
#include "model/shape.h"

typedef struct Weights Weights;

/* One stored tensor, borrowed from the mapping. */
typedef struct WeightsTensor {
    const char *name;
    const char *dtype; /* as written: "BF16", "F8_E4M3", ... */
    int n_dims;
    int64_t dim[4];
    const uint8_t *data;
    size_t bytes;
} WeightsTensor;

/* Opens dir: model.safetensors.index.json with its shards, or a single model.safetensors. */
int weights_open(Weights **out, const char *dir, Err *err);
void weights_close(Weights *w);

const Shape *weights_shape(const Weights *w);
/* A 64-bit hash over config and over all tensor names, dtypes, shapes and sampled content: equal for equal models whatever the sharding. */
uint64_t weights_fingerprint(const Weights *w);

/* NULL when there is none. */
const WeightsTensor *weights_find(const Weights *w, const char *name);

/* The matrix NAME.weight of exactly [rows, cols], with its scales found by their names (weight_scale_inv; weight_scale and weight_scale_2).
 * E_NOTFOUND, E_MISMATCH or E_UNSUPPORTED with the tensor's name, what was expected and what is there. */
int weights_matrix(const Weights *w, const char *name, int rows, int cols, MatView *out, Err *err);

/* Copies the vector NAME (full tensor name, BF16 or F32) of n values as fp32 into out[n]. */
int weights_vector(const Weights *w, const char *name, int n, float *out, Err *err);

/* Parses one safetensors header of file_bytes total, calling each(ctx, tensor) with data offsets already checked against file_bytes; tensor->data
 * is base + offset. For weights_open, tools, tests and fuzzing. */
int weights_parse(const uint8_t *base, size_t file_bytes, int (*each)(void *ctx, const WeightsTensor *t, Err *err), void *ctx, Err *err);
