/* A store of files that are made here, of sizes that the tiny model does not have: one expert and
 * many, GLM-5.2's own hidden size, more than the memory; and what memory loading and calls take. */
#include "expertd/store.h"
#include "kernels/quant.h"
#include "model/expert_file_int.h"

#include <xxhash.h>

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[64], path[128];

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/baton-made-XXXXXX");
    assert_non_null(mkdtemp(dir));
    expert_file_path(path, sizeof path, dir, 0);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    unlink(path);
    rmdir(dir);
    return 0;
}

static ExpertHead head_of(int hidden, int inner, int bits, int group, int n_experts) {
    return (ExpertHead){.geom = {hidden, inner, bits, group, IQ_SCALE_F16},
                        .n_experts = n_experts,
                        .n_active = 1,
                        .n_layers = 1,
                        .model_id = 5,
                        .method = "made"};
}

static StoreConf conf_of(int shard, int n_shards, const char *device) {
    return (StoreConf){.files = dir,
                       .device = device,
                       .shard = shard,
                       .n_shards = n_shards,
                       .threads = 2,
                       .node = -1,
                       .max_rows = 4};
}

/* Header and hashes; then the data, or with NULL zeros, whose blocks the file system does not even
 * have. */
static void write_file(const ExpertHead *h, const uint8_t *data) {
    size_t unit = iq_unit_bytes(&h->geom), units = (size_t)iq_units(&h->geom),
           n = units * (size_t)h->n_experts, head = expert_header_bytes(h);
    uint8_t *zeros = calloc(1, unit), *header = malloc(head);
    uint64_t *hash = malloc(n * sizeof *hash), of_zeros = XXH3_64bits(zeros, unit);
    for (size_t i = 0; i < n; i++)
        hash[i] = data ? XXH3_64bits(data + i * unit, unit) : of_zeros;
    expert_header_write(h, hash, header);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(header, 1, head, f), head);
    if (data)
        assert_int_equal(fwrite(data, unit, n, f), n);
    fclose(f);
    if (!data)
        assert_int_equal(truncate(path, (off_t)(head + n * unit)), 0);
    free(zeros);
    free(header);
    free(hash);
}

static void refused(const StoreConf *conf, int code, const char *text) {
    Store *s = NULL;
    Err err = {0};
    assert_int_equal(store_open(&s, NULL, conf, &err), code);
    if (!strstr(err.text, text))
        fail_msg("\"%s\" is not in \"%s\"", text, err.text);
    assert_null(s);
}

/* One expert, one less than the usual number, and that; all, one and none of them held. */
static void test_numbers_of_experts(void **state) {
    (void)state;
    static const int numbers[] = {1, 255, 256};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        int n = numbers[i];
        ExpertHead h = head_of(64, 64, 4, 64, n);
        char most[16];
        write_file(&h, NULL);
        snprintf(most, sizeof most, "%d", n - 1);
        const char *const device[] = {"none", most};
        for (int d = 0; d < 2; d++) {
            StoreConf conf = conf_of(0, 1, device[d]);
            Store *s;
            float x[64], y[64], weight = 1;
            int32_t id = n - 1;
            memset(x, 0, sizeof x);
            memset(y, 0xff, sizeof y);
            assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
            assert_int_equal(store_n_experts(s), d ? 1 : n);
            assert_true(store_holds(s, 0, n - 1) && !store_holds(s, 0, n));
            assert_int_equal(store_holds(s, 0, 0), d == 0 || n == 1);
            assert_int_equal(store_selftest(s, NULL), 0);
            assert_int_equal(store_compute(s, 0, 1, 1, x, &id, &weight, y, NULL, NULL).n_experts,
                             1);
            for (int c = 0; c < 64; c++)
                assert_true(y[c] == 0);
            store_close(s);
        }
        snprintf(most, sizeof most, "%d", n);
        StoreConf conf = conf_of(0, 1, most);
        refused(&conf, E_INVAL, "nothing is left");
    }
}

/* A number of shards works when it divides the units; together they hold everything once. */
static void test_every_number_of_shards(void **state) {
    (void)state;
    ExpertHead h = head_of(128, 768, 8, 64, 2); /* 12 units */
    write_file(&h, NULL);
    for (int shards = 1; shards <= 64; shards++) {
        uint64_t bytes = 0;
        for (int k = 0; k < shards; k++) {
            StoreConf conf = conf_of(k, shards, "none");
            Store *s;
            if (12 % shards) {
                refused(&conf, E_UNSUPPORTED, "12 units, which do not divide into");
                continue;
            }
            assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
            bytes += store_weight_bytes(s);
            store_close(s);
        }
        assert_true(bytes == (12 % shards ? 0 : 2 * 12 * iq_unit_bytes(&h.geom)));
    }
}

/* ---- GLM-5.2's hidden size ---- */

enum { HIDDEN = 6144, INNER = 256, GROUP = 128, UNITS = INNER / GROUP };

static uint32_t rng = 1;

static float uniform(void) {
    rng = rng * 1664525u + 1013904223u;
    return (float)(rng >> 8) / (float)(1 << 23) - 1;
}

/* One expert whose groups of columns differ in size, so that one taken for another shows. */
static uint8_t *real_units(const IqGeom *g) {
    size_t n = (size_t)GROUP * HIDDEN, unit = iq_unit_bytes(g);
    uint8_t *data = malloc(UNITS * unit);
    float *w = malloc(3 * n * sizeof *w);
    for (int i = 0; i < UNITS; i++) {
        IqLoss loss = {0};
        for (size_t k = 0; k < 3 * n; k++)
            w[k] = uniform() * 0.02f * (float)(1 + (k / GROUP) % 5);
        assert_int_equal(iq_pack_unit(g, w, w + n, w + 2 * n, data + (size_t)i * unit, &loss, NULL),
                         0);
    }
    free(w);
    return data;
}

static void exact(const IqGeom *g, const uint8_t *expert, const float *x, double *y) {
    memset(y, 0, HIDDEN * sizeof *y);
    for (int u = 0; u < UNITS; u++) {
        const uint8_t *unit = expert + (size_t)u * iq_unit_bytes(g);
        for (int i = 0; i < GROUP; i++) {
            double gate = 0, up = 0;
            for (int c = 0; c < HIDDEN; c++) {
                gate += (double)iq_weight(g, unit, IQ_GATE, i, c) * (double)x[c];
                up += (double)iq_weight(g, unit, IQ_UP, i, c) * (double)x[c];
            }
            double act = gate / (1 + exp(-gate)) * up;
            for (int r = 0; r < HIDDEN; r++)
                y[r] += act * (double)iq_weight(g, unit, IQ_DOWN, r, i);
        }
    }
}

static void test_real_hidden_size_in_shards(void **state) {
    (void)state;
    ExpertHead h = head_of(HIDDEN, INNER, 4, GROUP, 1);
    uint8_t *data = real_units(&h.geom);
    write_file(&h, data);
    float *x = malloc(HIDDEN * sizeof *x), *y = malloc(HIDDEN * sizeof *y), weight = 1;
    double *want = malloc(HIDDEN * sizeof *want), *sum = malloc(HIDDEN * sizeof *sum);
    int32_t id = 0;
    for (int i = 0; i < HIDDEN; i++)
        x[i] = uniform();
    exact(&h.geom, data, x, want);
    for (int shards = 1; shards <= 2; shards++) {
        double error = 0, square = 0;
        memset(sum, 0, HIDDEN * sizeof *sum);
        for (int k = 0; k < shards; k++) {
            StoreConf conf = conf_of(k, shards, "none");
            Store *s;
            assert_int_equal(store_open(&s, NULL, &conf, NULL), 0);
            store_compute(s, 0, 1, 1, x, &id, &weight, y, NULL, NULL);
            for (int i = 0; i < HIDDEN; i++)
                sum[i] += (double)y[i];
            store_close(s);
        }
        for (int i = 0; i < HIDDEN; i++) {
            assert_true(isfinite(sum[i]));
            error += (sum[i] - want[i]) * (sum[i] - want[i]);
            square += want[i] * want[i];
        }
        assert_true(sqrt(error / square) < 0.02); /* int8 activations, twice */
    }
    free(data);
    free(x);
    free(y);
    free(want);
    free(sum);
}

/* ---- memory ---- */

enum { BIG_EXPERTS = 128 };

static double peak_mib(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)u.ru_maxrss / 1024;
}

/* In a process of its own, since a peak does not go down again: what is held, once, and no more
 * than a little beside it. */
static void loads_only(const char *device, int held) {
    pid_t child = fork();
    if (child == 0) {
        StoreConf conf = conf_of(1, 2, device);
        double before = peak_mib();
        Store *s;
        if (store_open(&s, NULL, &conf, NULL) || store_n_experts(s) != held)
            _exit(1);
        double slice = (double)store_weight_bytes(s) / (1 << 20), grown = peak_mib() - before;
        _exit(grown > 0.95 * slice && grown < 1.05 * slice + 8 ? 0 : 2); /* 8: buffers, threads */
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void test_loading_takes_no_second_copy(void **state) {
    (void)state;
    ExpertHead h = head_of(1024, 512, 4, 64, BIG_EXPERTS);
    write_file(&h, NULL);
    loads_only("none", BIG_EXPERTS);
    loads_only("96", BIG_EXPERTS - 96);
}

/* Calls of as many rows as may be take what was said, and not far less. */
static void test_calls_take_what_was_said(void **state) {
    (void)state;
    enum { ROWS = 4096, WIDE = 1024, K = 16 };
    ExpertHead h = head_of(WIDE, 512, 4, 64, K);
    write_file(&h, NULL);
    pid_t child = fork();
    if (child == 0) {
        StoreConf conf = conf_of(0, 1, "none");
        conf.max_rows = ROWS;
        double before = peak_mib();
        Store *s;
        if (store_open(&s, NULL, &conf, NULL))
            _exit(1);
        float *x = calloc(ROWS * WIDE, sizeof *x), *y = calloc(ROWS * WIDE, sizeof *y),
              *weight = calloc(ROWS * K, sizeof *weight);
        int32_t *id = calloc(ROWS * K, sizeof *id);
        for (int i = 0; i < ROWS * K; i++)
            id[i] = i % K;
        for (int i = 0; i < ROWS * WIDE; i++)
            x[i] = 0.1f * (float)(i % 5);
        store_compute(s, 0, 64, K, x, id, weight, y, NULL, NULL);
        store_compute(s, 0, ROWS, K, x, id, weight, y, NULL, NULL);
        double said = (double)(store_weight_bytes(s) + store_work_bytes(s)) / (1 << 20),
               grown = peak_mib() - before;
        _exit(grown > said + 4 ? 2 : grown < said / 3 ? 3 : 0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
}

static void test_more_than_the_memory(void **state) {
    (void)state;
    ExpertHead h = head_of(HIDDEN, 1 << 15, 8, GROUP, 4096); /* 2.3 TiB */
    write_file(&h, NULL);
    StoreConf conf = conf_of(0, 1, "none");
    refused(&conf, E_NOMEM, "(4096 experts of 585");
}

/* Rows can need more than weights: they count as well. */
static void test_more_rows_than_the_memory(void **state) {
    (void)state;
    ExpertHead h = head_of(1 << 19, 64, 4, 64, 1);
    write_file(&h, NULL);
    StoreConf conf = conf_of(0, 1, "none");
    conf.max_rows = 1 << 20;
    refused(&conf, E_NOMEM, "calls of 1048576 rows need");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers_of_experts),
        cmocka_unit_test(test_every_number_of_shards),
        cmocka_unit_test(test_real_hidden_size_in_shards),
        cmocka_unit_test(test_loading_takes_no_second_copy),
        cmocka_unit_test(test_calls_take_what_was_said),
        cmocka_unit_test(test_more_than_the_memory),
        cmocka_unit_test(test_more_rows_than_the_memory),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
