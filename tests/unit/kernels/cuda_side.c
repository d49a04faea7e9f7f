/* See cuda_side.h. */
#include "tests/unit/kernels/cuda_side.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE = 4096 /* bytes of a pool that travel as a row */ };

Side cuda_side(int max_rows, int max_context) {
    Err err = {0};
    Side s = {.ops = ops_cuda(&err)};
    DevConf c = {.n_ranks = 1,
                 .max_rows = max_rows,
                 .max_seqs = 4,
                 .max_context = max_context,
                 .index_topk = 256};
    if (!s.ops || s.ops->open(&c, &s.dev, &err)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        skip();
    }
    return s;
}

/* Rows without gaps; the caller frees. */
static float *dense(Tensor t) {
    float *p = xmalloc((size_t)t.rows * (size_t)t.cols * sizeof *p);
    for (int r = 0; r < t.rows; r++)
        memcpy(p + (size_t)r * (size_t)t.cols, host_row(t, r), (size_t)t.cols * sizeof *p);
    return p;
}

Tensor to_gpu(const Side *s, Tensor host, int shift) {
    Tensor whole, part;
    Err err;
    if (s->ops->tensor_new(s->dev, host.dtype, host.rows, host.cols + 2 * shift, &whole, &err))
        fail_msg("%s", err.text);
    part = tensor_cols(whole, shift, host.cols);
    float *p = dense(host);
    s->ops->upload(s->dev, &part, p);
    free(p);
    return part;
}

Tensor from_gpu(const Side *s, Tensor gpu) {
    Tensor host = tensor(gpu.rows, gpu.cols);
    float *p = xmalloc((size_t)gpu.rows * (size_t)gpu.cols * sizeof *p);
    s->ops->download(s->dev, &gpu, p);
    for (int r = 0; r < gpu.rows; r++)
        memcpy(host_row(host, r), p + (size_t)r * (size_t)gpu.cols, (size_t)gpu.cols * sizeof *p);
    host.dtype = gpu.dtype;
    free(p);
    return host;
}

void gpu_free(const Side *s, Tensor *gpu, int shift) {
    *gpu = tensor_cols(*gpu, -shift, gpu->cols + 2 * shift);
    s->ops->tensor_free(s->dev, gpu);
}

void *pool_to_gpu(const Side *s, const void *bytes, uint64_t n) {
    void *pool;
    Err err;
    if (s->ops->pool_new(s->dev, n, &pool, &err))
        fail_msg("%s", err.text);
    Tensor lines = {pool, DT_F32, (int)(n / LINE), LINE / 4, LINE / 4, false},
           rest = {(char *)pool + n / LINE * LINE,
                   DT_F32,
                   1,
                   (int)(n % LINE / 4),
                   (int)(n % LINE / 4),
                   false};
    s->ops->upload(s->dev, &lines, bytes);
    if (rest.cols > 0)
        s->ops->upload(s->dev, &rest, (const char *)bytes + n / LINE * LINE);
    return pool;
}
