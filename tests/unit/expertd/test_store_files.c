/* A store of expert files: what it refuses, what it holds, and what it computes. */
#include "expertd/speed.h"
#include "expertd/store.h"
#include "model/place.h"
#include "tests/unit/expertd/packed.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { HIDDEN = PACKED_HIDDEN, N = 70, K = 4 };

static Packed packed;

static int setup(void **state) {
    (void)state;
    packed_new(&packed, 8, 64);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    packed_free(&packed);
    return 0;
}

static StoreConf conf_of(int shard, int n_shards, const char *device) {
    return (StoreConf){.files = packed.dir,
                       .device = device,
                       .shard = shard,
                       .n_shards = n_shards,
                       .threads = 2,
                       .node = -1,
                       .max_rows = N};
}

typedef struct Call {
    float x[N * HIDDEN], weight[N * K], y[N * HIDDEN];
    int32_t id[N * K];
} Call;

static Call *call_new(void) {
    Call *c = calloc(1, sizeof *c);
    for (int i = 0; i < N * HIDDEN; i++)
        c->x[i] = sinf((float)i * 0.37f);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < K; i++) {
            c->id[t * K + i] = (t * 3 + i * 4) % 16;
            c->weight[t * K + i] = 0.25f + 0.1f * (float)i;
        }
    return c;
}

/* What a store of the checkpoint itself gives. */
static void exact(int layer, Call *c, float *y) {
    StoreConf conf = {
        .backend = "cpu", .device = "none", .n_shards = 1, .threads = 1, .node = -1, .max_rows = N};
    Store *s;
    assert_int_equal(store_open(&s, packed.weights, &conf, NULL), 0);
    store_compute(s, layer, N, K, c->x, c->id, c->weight, y, NULL, NULL);
    assert_string_equal(store_format(s), "checkpoint");
    assert_true(store_model_id(s) == weights_id(packed.weights));
    store_close(s);
}

static double relative_rms(const float *a, const float *b) {
    double e = 0, s = 0;
    for (int i = 0; i < N * HIDDEN; i++) {
        e += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        s += (double)b[i] * (double)b[i];
    }
    return sqrt(e / s);
}

static void test_shards_sum_to_the_checkpoint(void **state) {
    (void)state;
    Call *c = call_new();
    float *want = malloc(sizeof c->y), *sum = malloc(sizeof c->y);
    exact(8, c, want);
    for (int shards = 1; shards <= 2; shards++) {
        memset(sum, 0, sizeof c->y);
        for (int k = 0; k < shards; k++) {
            StoreConf conf = conf_of(k, shards, "none");
            Store *s;
            assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
            assert_int_equal(store_selftest(s, NULL), 0);
            assert_true(store_model_id(s) == weights_id(packed.weights));
            assert_int_equal(store_fingerprint(s), 0);
            assert_string_equal(store_format(s), "int8-g64-f16");
            assert_int_equal(store_n_experts(s), 8 * 16);
            assert_int_equal(store_shape(s)->n_active, 4);
            assert_true(store_shape(s)->layer_dense[0] && !store_shape(s)->layer_dense[1]);
            StoreWork w = store_compute(s, 8, N, K, c->x, c->id, c->weight, c->y, NULL, NULL);
            assert_int_equal(w.n_experts, 16);
            assert_int_equal(w.bytes, store_weight_bytes(s) / 8);
            for (int i = 0; i < N * HIDDEN; i++)
                sum[i] += c->y[i];
            store_close(s);
        }
        assert_true(relative_rms(sum, want) < 0.03); /* int8 weights and activations */
    }
    free(want);
    free(sum);
    free(c);
}

static void test_what_is_held(void **state) {
    (void)state;
    StoreConf conf = conf_of(0, 1, "6");
    Store *s;
    assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
    assert_int_equal(store_n_experts(s), 8 * 10);
    assert_false(store_holds(s, 1, 5));
    assert_true(store_holds(s, 1, 6) && store_holds(s, 8, 15));
    assert_false(store_holds(s, 0, 6) || store_holds(s, 9, 6) || store_holds(s, 1, 16) ||
                 store_holds(s, -1, 6) || store_holds(s, 1, -1));
    assert_true(node_mem_report(store_memory(s), -1).local_bytes >= store_weight_bytes(s) ||
                node_mem_report(store_memory(s), -1).node == -1);
    Speed v = speed_measure(s);
    assert_true(v.in_cache && v.memory_gb_per_s > 0 && v.kernel_gb_per_s > 0 && v.layer_us > 0);
    store_close(s);
}

static void refused(const StoreConf *conf, int code, const char *text) {
    Store *s = NULL;
    Err err = {0};
    assert_int_equal(store_open(&s, NULL, conf, &err), code);
    if (!strstr(err.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, err.text);
    assert_null(s);
}

static void test_files_that_do_not_fit(void **state) {
    (void)state;
    char path[128], other[136], one[128];
    StoreConf conf = conf_of(0, 3, "none");
    refused(&conf, E_UNSUPPORTED,
            "3 shards: an expert of 128 inner channels in groups of 64 has 2");
    conf = conf_of(2, 2, "none");
    refused(&conf, E_INVAL, "shard 2 of 2");
    conf = conf_of(0, 1, "all");
    refused(&conf, E_INVAL, "nothing is left");
    conf = conf_of(0, 1, "17");
    refused(&conf, E_INVAL, "17");
    conf = conf_of(0, 1, "none");
    conf.files = "/tmp";
    refused(&conf, E_NOTFOUND, "no expert files");
    conf.files = packed.dir;
    packed_path(&packed, PACKED_FIRST, path); /* the first one: no dense layer in its place */
    snprintf(other, sizeof other, "%s.away", path);
    assert_int_equal(rename(path, other), 0);
    refused(&conf, E_NOTFOUND, "layer-001.experts");
    assert_int_equal(rename(other, path), 0);
    packed_path(&packed, 4, path);
    snprintf(other, sizeof other, "%s.away", path);
    assert_int_equal(rename(path, other), 0); /* a gap */
    refused(&conf, E_NOTFOUND, "layer-004.experts");
    packed_path(&packed, 5, one);
    assert_int_equal(link(one, path), 0); /* another layer under its name */
    refused(&conf, E_MISMATCH, "the file of layer 4 holds layer 5");
    unlink(path);
    packed_write(&packed, 4, 4); /* another geometry */
    refused(&conf, E_MISMATCH, "layer 4 is of another geometry than layer 1");
    unlink(path);
    assert_int_equal(rename(other, path), 0);
    FILE *f = fopen(path, "r+"); /* one bit of the data of the last expert */
    assert_non_null(f);
    fseek(f, -9, SEEK_END);
    int byte = fgetc(f);
    fseek(f, -9, SEEK_END);
    fputc(byte ^ 1, f);
    fclose(f);
    refused(&conf, E_FORMAT, "expert 15, unit 1 is damaged");
    conf = conf_of(0, 2, "none"); /* the other shard does not read that unit */
    Store *s;
    assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
    store_close(s);
    f = fopen(path, "r+");
    fseek(f, -9, SEEK_END);
    fputc(byte, f);
    fclose(f);
}

typedef struct Nested {
    Store *s;
    Call *c;
    float want[HIDDEN];
    int n;
} Nested;

static void call_inside(void *arg) {
    Nested *d = arg;
    float y[HIDDEN];
    store_compute(d->s, 3, 1, K, d->c->x, d->c->id, d->c->weight, y, NULL, NULL);
    assert_memory_equal(y, d->want, sizeof y);
    d->n++;
}

static void test_small_calls_inside_of_large_ones(void **state) {
    (void)state;
    StoreConf conf = conf_of(0, 1, "none");
    Nested d = {.c = call_new()};
    assert_int_equal(store_open(&d.s, NULL, &conf, NULL), 0);
    store_compute(d.s, 3, 1, K, d.c->x, d.c->id, d.c->weight, d.want, NULL, NULL);
    float *alone = malloc(sizeof d.c->y);
    for (int round = 0; round < 50; round++) { /* and in turns */
        store_compute(d.s, 2, N, K, d.c->x, d.c->id, d.c->weight, alone, NULL, NULL);
        store_compute(d.s, 2, N, K, d.c->x, d.c->id, d.c->weight, d.c->y, call_inside, &d);
        assert_memory_equal(alone, d.c->y, sizeof d.c->y);
    }
    assert_true(d.n >= 50);
    store_close(d.s);
    free(alone);
    free(d.c);
}

/* Each row has the bits that it has alone, in calls of any size. */
static void test_one_to_130_rows(void **state) {
    (void)state;
    enum { MOST = 130 };
    StoreConf conf = conf_of(0, 1, "none");
    Store *s;
    conf.max_rows = MOST;
    assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
    float *x = malloc(sizeof(float[MOST * HIDDEN])), *alone = malloc(sizeof(float[MOST * HIDDEN])),
          *y = malloc(sizeof(float[MOST * HIDDEN])), weight[MOST * K];
    int32_t id[MOST * K];
    for (int i = 0; i < MOST * HIDDEN; i++)
        x[i] = sinf((float)i * 0.61f) * (i % 11 == 0 ? 30.0f : 0.3f);
    for (int i = 0; i < MOST * K; i++) {
        id[i] = i % 9 == 4 ? -1 : (i / K * 5 + i % K * 3) % 16;
        weight[i] = 0.05f * (float)(i % 13) - 0.2f;
    }
    for (int t = 0; t < MOST; t++)
        store_compute(s, 6, 1, K, x + t * HIDDEN, id + t * K, weight + t * K, alone + t * HIDDEN,
                      NULL, NULL);
    for (int n = 1; n <= MOST; n++) {
        int at = (n * 7) % (MOST - n + 1);
        memset(y, 0xff, sizeof(float[MOST * HIDDEN]));
        store_compute(s, 6, n, K, x + at * HIDDEN, id + at * K, weight + at * K, y, NULL, NULL);
        assert_memory_equal(y, alone + at * HIDDEN, (size_t)n * HIDDEN * sizeof *y);
        assert_true(n == MOST || isnan(y[n * HIDDEN])); /* nothing beyond the last row */
    }
    store_close(s);
    free(x);
    free(alone);
    free(y);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards_sum_to_the_checkpoint),
        cmocka_unit_test(test_what_is_held),
        cmocka_unit_test(test_files_that_do_not_fit),
        cmocka_unit_test(test_one_to_130_rows),
        cmocka_unit_test(test_small_calls_inside_of_large_ones),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
