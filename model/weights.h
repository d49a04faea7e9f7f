/* A checkpoint directory: safetensors files, mapped read-only, found by tensor name.
 *
 * Opening reads config.json and every header and checks all of it: header length, JSON, dtypes,
 * shapes against byte counts, offsets inside the file, no overlap, names of the index present in
 * the files they name, no tensor twice. Nothing from a file is trusted before. Dtypes are taken per
 * tensor, never from lists in config.json. Immutable after opening; any thread may read. */
#pragma once

#include "base/err.h"
#include "kernels/quant.h"
#include "model/shape.h"

typedef struct Weights Weights;

/* One stored tensor, borrowed from the mapping. */
typedef struct WeightsTensor {
    const char *name;
    const char *dtype; /* as written: "BF16", "F8_E4M3", ...; static */
    int n_dims;
    int64_t dim[4];
    const uint8_t *data;
    size_t bytes;
} WeightsTensor;

/* Opens dir: model.safetensors.index.json with its shards, or a single model.safetensors. */
int weights_open(Weights **out, const char *dir, Err *err);
void weights_close(Weights *w);

const Shape *weights_shape(const Weights *w);
/* A 64-bit hash over config and over all tensor names, dtypes, shapes and sampled content: equal
 * for equal models whatever the sharding. */
uint64_t weights_fingerprint(const Weights *w);

/* A 64-bit hash of what no weight format changes: dimensions, norms, router biases and the first
 * router rows, as fp32. Equal for the BF16, FP8 and NVFP4 checkpoints of one model. */
uint64_t weights_id(const Weights *w);

/* NULL when there is none. */
const WeightsTensor *weights_find(const Weights *w, const char *name);

/* The matrix NAME.weight of exactly [rows, cols]: BF16, F32, F8_E4M3 with weight_scale_inv
 * F32 [ceil(rows / 128), ceil(cols / 128)], or NVFP4, that is U8 [rows, cols / 2] with weight_scale
 * F8_E4M3 [rows, cols / 16] and weight_scale_2 F32 [] or [1]. *out borrows from w. E_NOTFOUND,
 * E_MISMATCH (another shape) or E_UNSUPPORTED (another dtype) with the tensor's name, what was
 * expected and what is there. */
int weights_matrix(const Weights *w, const char *name, int rows, int cols, MatView *out, Err *err);

/* Copies the vector NAME (full tensor name, BF16 or F32) of n values as fp32 into out[n]. Fails as
 * weights_matrix does; out is then untouched. */
int weights_vector(const Weights *w, const char *name, int n, float *out, Err *err);

/* Parses one safetensors file of file_bytes bytes at base, calling each(ctx, tensor) in the order
 * of the data, once the whole header is found good: offsets inside the file, begins aligned to the
 * dtype within it, no overlaps. The tensor and its name live for the call, tensor->data is base +
 * offset. A call that does not return 0 ends it with that code. For weights_open, tools, tests and
 * fuzzing. */
int weights_parse(const uint8_t *base, size_t file_bytes,
                  int (*each)(void *ctx, const WeightsTensor *t, Err *err), void *ctx, Err *err);
