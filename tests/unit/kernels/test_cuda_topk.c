/* The CUDA backend's top-k against sorting: exact, lowest position first among equals, the same in
 * every division of the rows into parts. */
#include "kernels/cuda/cuda.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_ROWS = 200 };

static uint32_t seed = 1;

static float noise(void) {
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

typedef enum Kind {
    SPREAD,
    CLUSTERED, /* within a millionth of each other */
    FEW_VALUES,
    ZEROS, /* of both signs */
    HUGE_AND_INFINITE,
    STEPS, /* neighbours in fp32 */
    N_KINDS
} Kind;

static float score_of(Kind kind, int i) {
    switch (kind) {
    case SPREAD:
        return noise();
    case CLUSTERED:
        return 1.0f + noise() * 1e-6f;
    case FEW_VALUES:
        return (float)(i % 3) - 1;
    case ZEROS:
        return i % 2 ? 0.0f : -0.0f;
    case HUGE_AND_INFINITE:
        return i % 7 ? noise() * 1e30f : i % 2 ? INFINITY : -INFINITY;
    default: {
        uint32_t u = 0x3f800000u + (uint32_t)i * 2654435761u % 5000u;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    }
}

static Dev *open_dev(int max_context) {
    Err err = {0};
    Dev *d = NULL;
    const Ops *ops = ops_cuda(&err);
    DevConf c = {.n_ranks = 1,
                 .max_rows = MAX_ROWS,
                 .max_seqs = 1,
                 .max_context = max_context,
                 .index_topk = 2048};
    if (!ops || ops->open(&c, &d, &err)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        skip();
    }
    return d;
}

static int by_score(const void *a, const void *b, void *score) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    float sx = ((const float *)score)[x], sy = ((const float *)score)[y];
    return sx != sy ? (sx > sy ? -1 : 1) : x < y ? -1 : x > y;
}

static int by_pos(const void *a, const void *b) {
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

static void expected(const float *score, int n, int k, int32_t *list) {
    int32_t *all = xmalloc((size_t)n * sizeof *all);
    for (int i = 0; i < n; i++)
        all[i] = i;
    int found = n < k ? n : k;
    if (n > k)
        qsort_r(all, (size_t)n, sizeof *all, by_score, (void *)score);
    qsort(all, (size_t)found, sizeof *all, by_pos);
    memcpy(list, all, (size_t)found * sizeof *all);
    for (int i = found; i < k; i++)
        list[i] = -1;
    free(all);
}

/* Rows of falling lengths from `longest` on; what is beyond a row's length is NaN. */
static void check(Dev *d, Kind kind, int rows, int longest, int k, int n_sm) {
    size_t pitch = ((size_t)longest + 63) / 64 * 64;
    Tensor score, pos, list;
    float *s = xmalloc((size_t)rows * pitch * sizeof *s);
    int32_t *p = xmalloc((size_t)rows * sizeof *p), *want = xmalloc((size_t)k * sizeof *want),
            *got = xmalloc((size_t)rows * (size_t)k * sizeof *got);
    for (int r = 0; r < rows; r++) {
        p[r] = longest - 1 - (int)((int64_t)longest * r / (rows + 1));
        for (int i = 0; i < (int)pitch; i++)
            s[(size_t)r * pitch + (size_t)i] = i <= p[r] ? score_of(kind, i) : NAN;
    }
    assert_int_equal(cuda_tensor_new(d, DT_F32, rows, (int)pitch, &score, NULL), 0);
    assert_int_equal(cuda_tensor_new(d, DT_I32, 1, rows, &pos, NULL), 0);
    assert_int_equal(cuda_tensor_new(d, DT_I32, rows, k, &list, NULL), 0);
    cuda_upload(d, &score, s);
    cuda_upload(d, &pos, p);
    cuda_topk(&(CudaTopk){.score = score.at,
                          .pitch = pitch,
                          .pos = pos.at,
                          .list = list.at,
                          .list_ld = list.ld,
                          .rows = rows,
                          .k = k,
                          .max_len = longest,
                          .n_sm = n_sm,
                          .work = cuda_work(d, CUDA_WORK_TOPK, cuda_topk_work_bytes())},
              d->stream);
    cuda_download(d, &list, got);
    for (int r = 0; r < rows; r++) {
        expected(s + (size_t)r * pitch, p[r] + 1, k, want);
        if (memcmp(want, got + (size_t)r * (size_t)k, (size_t)k * sizeof *want))
            fail_msg("kind %d, row %d of %d, %d scores, top %d", kind, r, rows, p[r] + 1, k);
    }
    cuda_tensor_free(d, &score);
    cuda_tensor_free(d, &pos);
    cuda_tensor_free(d, &list);
    free(s), free(p), free(want), free(got);
}

static void test_every_kind_of_scores(void **state) {
    (void)state;
    static const int ks[] = {1, 100, 256, 2048};
    Dev *d = open_dev(20000);
    for (int kind = 0; kind < N_KINDS; kind++)
        for (int i = 0; i < 4; i++)
            for (int n_sm = 1; n_sm < 200; n_sm += 131) { /* one part per row, and several */
                check(d, (Kind)kind, 3, 20000, ks[i], n_sm);
                check(d, (Kind)kind, 65, 4097, ks[i], n_sm);
                check(d, (Kind)kind, 1, ks[i], ks[i], n_sm);
                check(d, (Kind)kind, 1, ks[i] + 1, ks[i], n_sm);
            }
    cuda_close(&d, 1);
}

static void test_a_million_scores(void **state) {
    (void)state;
    Dev *d = open_dev(1 << 20);
    check(d, SPREAD, 1, 1 << 20, 2048, d->n_sm);
    check(d, CLUSTERED, 2, (1 << 20) - 3, 2048, d->n_sm);
    check(d, ZEROS, 1, 1 << 20, 2048, d->n_sm);
    cuda_close(&d, 1);
}

static void test_many_rows(void **state) {
    (void)state;
    Dev *d = open_dev(8192);
    check(d, CLUSTERED, MAX_ROWS, 8192, 2048, d->n_sm);
    check(d, STEPS, 130, 8192, 256, 1000); /* more rows than can be shared */
    cuda_close(&d, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_kind_of_scores),
        cmocka_unit_test(test_a_million_scores),
        cmocka_unit_test(test_many_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
