/* Slices of experts: all shards together give what the reference gives with whole experts. */
#include "expertd/store.h"

#include "model/place.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 5, K = 4, LAYER = 3 };

static Weights *weights;

/* weight * down . (silu(gate . x) * (up . x)) of whole experts, in double */
static void whole(const float *x, const int32_t *id, const float *w, double *y) {
    const Shape *s = weights_shape(weights);
    float row[512];
    Err err = {0};
    memset(y, 0, sizeof(double) * N * (size_t)s->hidden);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < K; i++) {
            MatView v[3];
            double act[512];
            if (id[t * K + i] < 0)
                continue;
            for (int p = 0; p < 3; p++) {
                char name[128];
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj", LAYER,
                         id[t * K + i],
                         p == 0   ? "gate"
                         : p == 1 ? "up"
                                  : "down");
                assert_int_equal(weights_matrix(weights, name, p == 2 ? s->hidden : s->moe_inner,
                                                p == 2 ? s->moe_inner : s->hidden, &v[p], &err),
                                 0);
            }
            for (int r = 0; r < s->moe_inner; r++) {
                double g = 0, u = 0;
                mat_row_f32(&v[0], r, row);
                for (int c = 0; c < s->hidden; c++)
                    g += (double)row[c] * x[t * s->hidden + c];
                mat_row_f32(&v[1], r, row);
                for (int c = 0; c < s->hidden; c++)
                    u += (double)row[c] * x[t * s->hidden + c];
                act[r] = g / (1 + exp(-g)) * u;
            }
            for (int r = 0; r < s->hidden; r++) {
                mat_row_f32(&v[2], r, row);
                for (int c = 0; c < s->moe_inner; c++)
                    y[t * s->hidden + r] += (double)w[t * K + i] * row[c] * act[c];
            }
        }
}

static void test_shards_sum_to_the_whole(void **state) {
    (void)state;
    const Shape *s = weights_shape(weights);
    float *x = xcalloc((size_t)N * (size_t)s->hidden, sizeof *x),
          *y = xcalloc((size_t)N * (size_t)s->hidden, sizeof *y);
    double *want = xcalloc((size_t)N * (size_t)s->hidden, sizeof *want);
    int32_t id[N * K];
    float w[N * K];
    for (int i = 0; i < N * s->hidden; i++)
        x[i] = sinf((float)i * 0.37f);
    for (int i = 0; i < N * K; i++) {
        id[i] = i % K == 2 ? -1 : i % K * 4 + i / K % 4;
        w[i] = 0.2f + 0.1f * (float)i;
    }
    whole(x, id, w, want);
    for (int shards = 1; shards <= 4; shards *= 2) {
        double *sum = xcalloc((size_t)N * (size_t)s->hidden, sizeof *sum), diff = 0, top = 0;
        for (int k = 0; k < shards; k++) {
            Store *store;
            Err err = {0};
            StoreConf conf = {.backend = "cpu",
                              .device = "none",
                              .shard = k,
                              .n_shards = shards,
                              .threads = 1,
                              .max_rows = N};
            if (store_open(&store, weights, &conf, &err))
                fail_msg("%s", err.text);
            store_compute(store, LAYER, N, K, x, id, w, y, NULL, NULL);
            for (int i = 0; i < N * s->hidden; i++)
                sum[i] += y[i];
            store_close(store);
        }
        for (int i = 0; i < N * s->hidden; i++) {
            diff = fmax(diff, fabs(sum[i] - want[i]));
            top = fmax(top, fabs(want[i]));
        }
        assert_true(top > 0 && diff < 1e-5 * top);
        free(sum);
    }
    free(x), free(y), free(want);
}

static void test_holds_what_the_device_does_not(void **state) {
    (void)state;
    Store *store;
    Err err = {0};
    StoreConf conf = {
        .backend = "ref", .device = "6", .shard = 0, .n_shards = 1, .threads = 1, .max_rows = 4};
    assert_int_equal(store_open(&store, weights, &conf, &err), 0);
    assert_false(store_holds(store, LAYER, 5));
    assert_true(store_holds(store, LAYER, 6));
    assert_false(store_holds(store, 0, 6)); /* a dense layer */
    assert_false(store_holds(store, -1, 6));
    assert_false(store_holds(store, 99, 6));
    assert_false(store_holds(store, LAYER, 16));
    assert_false(store_holds(store, LAYER, -1));
    assert_int_equal(store_n_experts(store), 8 * 10); /* 7 layers and the MTP layer */
    assert_true(store_weight_bytes(store) > 0);
    store_close(store);
}

static void test_refusals(void **state) {
    (void)state;
    Store *store;
    Err err = {0};
    StoreConf conf = {.backend = "ref", .device = "none", .shard = 2, .n_shards = 2, .max_rows = 4};
    assert_int_equal(store_open(&store, weights, &conf, &err), E_INVAL);
    conf =
        (StoreConf){.backend = "ref", .device = "none", .shard = 0, .n_shards = 3, .max_rows = 4};
    assert_int_equal(store_open(&store, weights, &conf, &err), E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "moe_intermediate_size 128"));
    conf = (StoreConf){
        .backend = "ref", .device = "all", .shard = 0, .n_shards = 1, .threads = 1, .max_rows = 4};
    assert_int_equal(store_open(&store, weights, &conf, &err), E_INVAL);
    conf = (StoreConf){
        .backend = "ref", .device = "some", .shard = 0, .n_shards = 1, .threads = 1, .max_rows = 4};
    assert_int_equal(store_open(&store, weights, &conf, &err), E_INVAL);
    assert_non_null(strstr(err.text, "\"some\""));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards_sum_to_the_whole),
        cmocka_unit_test(test_holds_what_the_device_does_not),
        cmocka_unit_test(test_refusals),
    };
    Err err = {0};
    if (weights_open(&weights, "tests/models/tiny-glm52/mixed", &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    weights_close(weights);
    return rc;
}
