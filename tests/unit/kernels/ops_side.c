/* See ops_side.h. */
#include "tests/unit/kernels/ops_side.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const Dtype DTYPES[4] = {DT_F32, DT_BF16, DT_F8E4M3, DT_NVFP4};

static uint32_t seed = 1;

float noise(void) {
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

Side side_open(const Ops *ops, int threads, int max_rows, int max_context) {
    Side s = {.ops = ops};
    Err err = {0};
    DevConf c = {.n_ranks = 1,
                 .threads = threads,
                 .max_rows = max_rows,
                 .max_seqs = 4,
                 .max_context = max_context,
                 .index_topk = 256};
    if (ops->open(&c, &s.dev, &err))
        fail_msg("%s", err.text);
    return s;
}

void side_close(Side *s) {
    s->ops->close(&s->dev, 1);
}

int sides(Side *s, int max_rows, int max_context) {
    int n = 0;
    s[n++] = side_open(ops_ref(), 1, max_rows, max_context);
    if (ops_cpu("avx2"))
        s[n++] = side_open(ops_cpu("avx2"), 1, max_rows, max_context);
    if (ops_cpu("avx512"))
        s[n++] = side_open(ops_cpu("avx512"), 1, max_rows, max_context);
    if (ops_cpu(NULL))
        s[n++] = side_open(ops_cpu(NULL), 3, max_rows, max_context);
    return n;
}

Tensor tensor(int rows, int cols) {
    int ld = cols + 3;
    float *p = xmalloc((size_t)rows * (size_t)ld * sizeof *p);
    for (int i = 0; i < rows * ld; i++)
        p[i] = NAN;
    return (Tensor){p, DT_F32, rows, cols, ld, false};
}

Tensor noise_tensor(int rows, int cols) {
    Tensor t = tensor(rows, cols);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++)
            host_row(t, r)[c] = noise();
    return t;
}

Tensor copy_tensor(Tensor t) {
    Tensor c = tensor(t.rows, t.cols);
    for (int r = 0; r < t.rows; r++)
        memcpy(host_row(c, r), host_row(t, r), (size_t)t.cols * sizeof(float));
    return c;
}

void near(Tensor want, Tensor got, double tolerance) {
    double diff = 0, top = 1e-30;
    for (int r = 0; r < want.rows; r++)
        for (int c = 0; c < want.cols; c++) {
            assert_false(isnan(host_row(got, r)[c]));
            diff = fmax(diff, fabs((double)host_row(want, r)[c] - host_row(got, r)[c]));
            top = fmax(top, fabs((double)host_row(want, r)[c]));
        }
    if (diff > tolerance * top)
        fail_msg("differs by %g of %g", diff, top);
}

void same(Tensor a, Tensor b) {
    for (int r = 0; r < a.rows; r++)
        assert_memory_equal(host_row(a, r), host_row(b, r), (size_t)a.cols * sizeof(float));
}

/* ---- matrices ---- */

Stored stored(Dtype dtype, int rows, int cols) {
    Stored s = {.view = {.dtype = dtype,
                         .rows = rows,
                         .cols = cols,
                         .row_bytes = dtype_row_bytes(dtype, cols),
                         .scale2 = 0.013f}};
    size_t bytes = s.view.row_bytes * (size_t)rows, numbers = (size_t)rows * (size_t)cols;
    int sr = (rows + 127) / 128, sc = (cols + 127) / 128;
    s.data = xmalloc(bytes);
    s.scale = xmalloc((size_t)sr * (size_t)sc * 4 + (size_t)rows * (size_t)(cols / 16 + 1));
    for (size_t i = 0; i < bytes; i++)
        ((uint8_t *)s.data)[i] = (uint8_t)(int)(noise() * 127) & (dtype == DT_F8E4M3 ? 0xbf : 0xff);
    for (size_t i = 0; i < numbers && dtype == DT_F32; i++)
        ((float *)s.data)[i] = noise();
    for (size_t i = 0; i < numbers && dtype == DT_BF16; i++)
        ((uint16_t *)s.data)[i] = f32_to_bf16(noise());
    for (int i = 0; i < sr * sc && dtype == DT_F8E4M3; i++)
        ((float *)s.scale)[i] = 0.5f + 0.4f * noise();
    for (int i = 0; i < rows * (cols / 16) && dtype == DT_NVFP4; i++)
        ((uint8_t *)s.scale)[i] = (uint8_t)(0x28 + i % 32);
    s.view.data = s.data;
    s.view.scale = dtype == DT_F8E4M3 || dtype == DT_NVFP4 ? s.scale : NULL;
    s.view.scale_cols = dtype == DT_NVFP4 ? cols / 16 : sc;
    return s;
}

void stored_done(Stored *s) {
    free(s->data);
    free(s->scale);
}
