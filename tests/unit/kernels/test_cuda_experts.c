/* The CUDA backend's experts against the reference, in every stored format: whole matrices and
 * slices, experts that are not held, one expert for all. */
#include "tests/unit/kernels/cuda_side.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 300, MAX_EXPERTS = 40 };

typedef struct Layer {
    int n, hidden, inner; /* as sliced */
    Stored part[3][MAX_EXPERTS];
    MatView view[3][MAX_EXPERTS]; /* gate, up, down */
} Layer;

/* e4m3 and e2m1 numbers with the scales that checkpoints have: products near 1 / hidden. */
static void scale_down(Stored *s) {
    int blocks = ((s->view.rows + 127) / 128) * ((s->view.cols + 127) / 128);
    for (int i = 0; i < blocks && s->view.dtype == DT_F8E4M3; i++)
        ((float *)s->scale)[i] *= 1e-3f;
    for (int i = 0; i < s->view.rows * s->view.scale_cols && s->view.dtype == DT_NVFP4; i++)
        if (i % 11 == 3)
            ((uint8_t *)s->scale)[i] = (uint8_t)(i % 8); /* subnormal, 0 */
    s->view.scale2 = 0.013f;
}

/* Rank `rank` of `ranks`: rows of gate and up, columns of down. Of each five the last is not held.
 */
static Layer *layer_new(Dtype dtype, int n, int hidden, int inner, int rank, int ranks) {
    Layer *l = xcalloc(1, sizeof *l);
    l->n = n;
    l->hidden = hidden;
    l->inner = inner / ranks;
    for (int e = 0; e < n; e++)
        for (int p = 0; p < 3; p++) {
            Stored *s = &l->part[p][e];
            *s = stored(dtype, p == 2 ? hidden : inner, p == 2 ? inner : hidden);
            scale_down(s);
            l->view[p][e] = p == 2 ? mat_cols(&s->view, rank * l->inner, l->inner)
                                   : mat_rows(&s->view, rank * l->inner, l->inner);
            if (e % 5 == 4)
                l->view[p][e].data = NULL;
        }
    return l;
}

static void layer_free(Layer *l) {
    for (int e = 0; e < l->n; e++)
        for (int p = 0; p < 3; p++)
            stored_done(&l->part[p][e]);
    free(l);
}

static Experts *load(const Side *s, const Layer *l) {
    ExpertsView view = {l->n, l->view[0], l->view[1], l->view[2]};
    Experts *e;
    Err err;
    if (s->ops->experts_load(s->dev, &view, &e, &err))
        fail_msg("%s", err.text);
    return e;
}

typedef struct Input {
    Tensor x, id, weight, y;
} Input;

typedef enum Routing { SPREAD, ONE_FOR_ALL, NOBODY, N_ROUTINGS } Routing;

static Input input_new(const Layer *l, int rows, int k, Routing routing) {
    Input in = {noise_tensor(rows, l->hidden), tensor(rows, k), noise_tensor(rows, k),
                noise_tensor(rows, l->hidden)};
    in.id.dtype = DT_I32;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < k; i++)
            host_row_i32(in.id, r)[i] = routing == NOBODY        ? (i % 2 || l->n < 5 ? -1 : 4)
                                        : routing == ONE_FOR_ALL ? 2 % l->n
                                        : i == 1 && r % 5 == 4   ? -1
                                                                 : (r * 7 + i * (1 + r % 3)) % l->n;
    return in;
}

static void input_free(Input *in) {
    free(in->x.at), free(in->id.at), free(in->weight.at), free(in->y.at);
}

/* Rows [first, first + n) of the input on the GPU, in tensors that are wider by twice `shift`. */
static Tensor run(const Side *s, const Experts *e, const Input *in, int first, int n, int shift) {
    Tensor part[4] = {in->x, in->id, in->weight, in->y}, on[4];
    for (int i = 0; i < 4; i++) {
        part[i] = tensor_row(part[i], first);
        part[i].rows = n;
        on[i] = to_gpu(s, part[i], shift);
    }
    s->ops->experts(s->dev, on[3], on[0], on[1], on[2], e);
    Tensor y = from_gpu(s, on[3]);
    for (int i = 0; i < 4; i++)
        gpu_free(s, &on[i], shift);
    return y;
}

static void compare(const Side *ref, const Side *gpu, const Layer *l, int rows, int k,
                    Routing routing) {
    Input in = input_new(l, rows, k, routing);
    Experts *host = load(ref, l), *device = load(gpu, l);
    Tensor got = run(gpu, device, &in, 0, rows, 0), again = run(gpu, device, &in, 0, rows, 3),
           want = copy_tensor(in.y);
    ref->ops->experts(ref->dev, want, in.x, in.id, in.weight, host);
    near(want, got, 1e-5);
    same(got, again);
    if (routing == NOBODY)
        same(in.y, got);
    for (int r = 0; r < rows; r += 31) { /* alone: chunks of another size */
        Tensor one = run(gpu, device, &in, r, 1, 0);
        same(tensor_row(got, r), one);
        free(one.at);
    }
    free(want.at), free(got.at), free(again.at);
    ref->ops->experts_free(ref->dev, host);
    gpu->ops->experts_free(gpu->dev, device);
    input_free(&in);
}

typedef struct Case {
    int n, hidden, inner, rank, ranks, k;
} Case;

static void every_format(const Case *c, const int *rows, int n_rows) {
    Side gpu = cuda_side(MAX_ROWS, 64), ref = side_open(ops_ref(), 1, MAX_ROWS, 64);
    for (int d = 0; d < 4; d++) {
        Layer *l = layer_new(DTYPES[d], c->n, c->hidden, c->inner, c->rank, c->ranks);
        for (int r = 0; r < n_rows; r++)
            for (int routing = 0; routing < N_ROUTINGS; routing++)
                compare(&ref, &gpu, l, rows[r], c->k, (Routing)routing);
        layer_free(l);
    }
    side_close(&ref);
    side_close(&gpu);
}

static void test_small_experts(void **state) {
    (void)state;
    static const int rows[] = {1, 3, 65, MAX_ROWS};
    every_format(&(Case){6, 80, 48, 0, 1, 3}, rows, 4);
    every_format(&(Case){6, 80, 48, 0, 1, 1}, rows, 3);
}

static void test_sizes_between_tiles(void **state) {
    (void)state;
    static const int rows[] = {1, 9, 40};
    every_format(&(Case){10, 304, 272, 0, 1, 4}, rows, 3);
}

static void test_slices(void **state) {
    (void)state;
    static const int rows[] = {1, 17};
    every_format(&(Case){MAX_EXPERTS, 256, 128, 1, 4, 8}, rows, 2);
    every_format(&(Case){7, 256, 512, 1, 2, 4}, rows, 2);
}

static void test_full_width(void **state) {
    (void)state;
    static const int rows[] = {2};
    every_format(&(Case){3, 6144, 2048, 0, 1, 2}, rows, 1);
}

static void refused(const Side *s, const Layer *l, const char *word) {
    ExpertsView view = {l->n, l->view[0], l->view[1], l->view[2]};
    Experts *e;
    Err err = {0};
    assert_int_equal(s->ops->experts_load(s->dev, &view, &e, &err), E_UNSUPPORTED);
    assert_non_null(strstr(err.text, word));
}

static void test_what_does_not_fit_is_refused(void **state) {
    (void)state;
    Side gpu = cuda_side(MAX_ROWS, 64);
    Layer *l = layer_new(DT_F8E4M3, 3, 256, 256, 0, 1);
    Stored other = stored(DT_BF16, 256, 256);
    MatView kept = l->view[1][2];
    l->view[1][2] = other.view;
    refused(&gpu, l, "expert 2");
    l->view[1][2] = mat_rows(&kept, 0, 128);
    refused(&gpu, l, "[128, 256]");
    l->view[1][2] = kept;
    for (int e = 0; e < 3; e++) { /* columns over a border of blocks */
        l->view[2][e] = mat_cols(&l->view[2][e], 64, 128);
        l->view[0][e] = mat_rows(&l->view[0][e], 0, 128);
        l->view[1][e] = mat_rows(&l->view[1][e], 0, 128);
    }
    refused(&gpu, l, "column 64");
    stored_done(&other);
    layer_free(l);
    side_close(&gpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_experts),
        cmocka_unit_test(test_sizes_between_tiles),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_full_width),
        cmocka_unit_test(test_what_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
