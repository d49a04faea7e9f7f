/* Expert files: packing, reading, and everything that may be wrong with one. */
#include "kernels/iq.h"
#include "model/expert_file_int.h"
#include "model/expert_pack.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL "tests/models/tiny-glm52/fp8"
#define MIXED "tests/models/tiny-glm52/mixed"

enum { LAYER = 3 };

static char dir[64], path[128];
static Weights *weights;

static ExpertPackConf conf_of(int bits, int group, int threads) {
    return (ExpertPackConf){.weights = weights,
                            .dir = dir,
                            .geom = {256, 128, bits, group, IQ_SCALE_F16},
                            .threads = threads};
}

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/baton-experts-XXXXXX");
    assert_non_null(mkdtemp(dir));
    expert_file_path(path, sizeof path, dir, LAYER);
    assert_int_equal(weights_open(&weights, MODEL, NULL), 0);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    weights_close(weights);
    unlink(path);
    rmdir(dir);
    return 0;
}

static uint8_t *slurp(size_t *n) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *b = malloc(*n);
    assert_int_equal(fread(b, 1, *n, f), *n);
    fclose(f);
    return b;
}

static void spill(const uint8_t *b, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b, 1, n, f), n);
    fclose(f);
}

static void pack_new(int bits, int group) {
    ExpertPackConf c = conf_of(bits, group, 2);
    ExpertPackResult r;
    unlink(path);
    assert_int_equal(expert_pack_layer(&c, LAYER, &r, NULL), 0);
    assert_false(r.kept);
}

static void test_pack_and_read(void **state) {
    (void)state;
    for (int bits = 4; bits <= 8; bits += 4)
        for (int group = 64; group <= 128; group += 64) {
            pack_new(bits, group);
            ExpertFile *f;
            assert_int_equal(expert_file_open(&f, path, NULL), 0);
            const ExpertHead *h = expert_file_head(f);
            assert_int_equal(h->layer, LAYER);
            assert_int_equal(h->n_experts, 16);
            assert_int_equal(h->n_layers, 9);
            assert_true(h->model_id == weights_id(weights));
            assert_true(h->source == weights_fingerprint(weights));
            assert_true(bits == 4 ? h->loss > 0.05 && h->loss < 0.12 : h->loss < 0.01);
            size_t bytes = iq_unit_bytes(&h->geom);
            uint8_t *unit = malloc(bytes);
            MatView up;
            float row[256];
            assert_int_equal(weights_matrix(weights, "model.layers.3.mlp.experts.7.up_proj", 128,
                                            256, &up, NULL),
                             0);
            double e = 0, s = 0;
            for (int u = 0; u < iq_units(&h->geom); u++) {
                assert_int_equal(expert_file_read(f, 7, u, 1, unit, NULL), 0);
                for (int r = 0; r < group; r++) {
                    mat_row_f32(&up, u * group + r, row);
                    for (int c = 0; c < 256; c++) {
                        double d = (double)iq_weight(&h->geom, unit, IQ_UP, r, c) - (double)row[c];
                        e += d * d;
                        s += (double)row[c] * (double)row[c];
                    }
                }
            }
            assert_true(e / s < (bits == 4 ? 0.0144 : 0.0001));
            uint64_t all = 0;
            assert_int_equal(expert_file_verify(f, 3, &all, NULL), 0);
            assert_int_equal(all, (size_t)(16 * iq_units(&h->geom)) * bytes);
            free(unit);
            expert_file_close(f);
        }
}

static void test_same_bytes_with_any_threads(void **state) {
    (void)state;
    size_t n, m;
    pack_new(4, 64);
    uint8_t *a = slurp(&n);
    for (int threads = 1; threads <= 5; threads += 2) {
        ExpertPackConf c = conf_of(4, 64, threads);
        ExpertPackResult r;
        unlink(path);
        assert_int_equal(expert_pack_layer(&c, LAYER, &r, NULL), 0);
        uint8_t *b = slurp(&m);
        assert_int_equal(n, m);
        assert_memory_equal(a, b, n);
        free(b);
    }
    free(a);
}

static bool stop_at_once(void *arg, int layer, int done, int total) {
    (void)layer;
    (void)done;
    (void)total;
    (*(int *)arg)++;
    return false;
}

static void test_kept_redone_refused_stopped(void **state) {
    (void)state;
    Err err = {0};
    ExpertPackResult r;
    size_t n;
    pack_new(4, 64);
    ExpertPackConf c = conf_of(4, 64, 2);
    assert_int_equal(expert_pack_layer(&c, LAYER, &r, NULL), 0);
    assert_true(r.kept && r.loss > 0.05);
    /* a partial one is redone */
    uint8_t *whole = slurp(&n), *again;
    spill(whole, n - 100);
    assert_int_equal(expert_pack_layer(&c, LAYER, &r, NULL), 0);
    assert_false(r.kept);
    again = slurp(&n);
    assert_memory_equal(whole, again, n);
    free(again);
    /* another geometry, another checkpoint */
    ExpertPackConf other = conf_of(8, 64, 2);
    assert_int_equal(expert_pack_layer(&other, LAYER, &r, &err), E_MISMATCH);
    assert_non_null(strstr(err.text, "int4-g64-f16"));
    Weights *mixed;
    assert_int_equal(weights_open(&mixed, MIXED, NULL), 0);
    assert_true(weights_id(mixed) == weights_id(weights));
    other = c;
    other.weights = mixed;
    assert_int_equal(expert_pack_layer(&other, LAYER, &r, &err), E_MISMATCH);
    assert_non_null(strstr(err.text, "another checkpoint"));
    weights_close(mixed);
    /* stopped: nothing is left behind */
    int calls = 0;
    unlink(path);
    c.progress = stop_at_once;
    c.arg = &calls;
    assert_int_equal(expert_pack_layer(&c, LAYER, &r, &err), E_CANCELED);
    assert_int_equal(calls, 1);
    assert_int_equal(access(path, F_OK), -1);
    c.progress = NULL;
    assert_int_equal(expert_pack_layer(&c, LAYER, &r, NULL), 0);
    again = slurp(&n);
    assert_memory_equal(whole, again, n);
    free(again);
    free(whole);
}

static void refused(int code, const char *text) {
    ExpertFile *f = NULL;
    Err err = {0};
    assert_int_equal(expert_file_open(&f, path, &err), code);
    assert_non_null(strstr(err.text, text));
    assert_non_null(strstr(err.text, path));
    assert_null(f);
}

static void test_damaged_files(void **state) {
    (void)state;
    size_t n;
    pack_new(4, 128);
    uint8_t *b = slurp(&n), old;
    unlink(path);
    refused(E_NOTFOUND, "No such file");
    for (size_t cut = 0; cut < n; cut += cut < 200 ? 1 : 4093) {
        spill(b, cut);
        refused(E_FORMAT, "");
    }
    spill(b, n - 1);
    refused(E_FORMAT, "truncated");
    uint8_t *longer = calloc(1, n + 1);
    memcpy(longer, b, n);
    spill(longer, n + 1);
    free(longer);
    refused(E_FORMAT, "something was added");
    /* any flipped byte of the header, hashes and padding included */
    for (size_t i = 0; i < 4096; i += i < 400 ? 1 : 97) {
        old = b[i];
        b[i] ^= 0x10;
        spill(b, n);
        refused(i >= 8 && i < 12 ? E_UNSUPPORTED : E_FORMAT, "");
        b[i] = old;
    }
    /* data are checked when they are read */
    b[n - 1000] ^= 1;
    spill(b, n);
    ExpertFile *f;
    Err err = {0};
    uint64_t bytes;
    assert_int_equal(expert_file_open(&f, path, NULL), 0);
    uint8_t *unit = malloc(iq_unit_bytes(&expert_file_head(f)->geom));
    assert_int_equal(expert_file_read(f, 0, 0, 1, unit, NULL), 0);
    assert_int_equal(expert_file_read(f, 15, 0, 1, unit, &err), E_FORMAT);
    assert_non_null(strstr(err.text, "expert 15, unit 0 is damaged"));
    assert_int_equal(expert_file_verify(f, 2, &bytes, &err), E_FORMAT);
    free(unit);
    expert_file_close(f);
    free(b);
}

/* Headers whose hash is right but whose numbers are not. */
static void test_hostile_headers(void **state) {
    (void)state;
    const ExpertHead good = {.geom = {256, 128, 4, 64, IQ_SCALE_F16},
                             .layer = 3,
                             .n_experts = 16,
                             .n_active = 4,
                             .n_layers = 9,
                             .first_layer = 1,
                             .method = "rtn"};
    const struct {
        ExpertHead h;
        const char *text;
    } cases[] = {
        {{.geom = {0, 128, 4, 64, IQ_SCALE_F16}, .layer = 3, .n_experts = 16, .n_layers = 9},
         "hidden is 0"},
        {{.geom = {256, -128, 4, 64, IQ_SCALE_F16}, .layer = 3, .n_experts = 16, .n_layers = 9},
         "inner is -128"},
        {{.geom = {256, 128, 4, 64, IQ_SCALE_F16}, .layer = 9, .n_experts = 16, .n_layers = 9},
         "layer is 9"},
        {{.geom = {256, 128, 4, 64, IQ_SCALE_F16}, .layer = 3, .n_experts = 0, .n_layers = 9},
         "n_experts is 0"},
        {{.geom = {256, 128, 4, 64, IQ_SCALE_F16}, .layer = 3, .n_experts = 5000, .n_layers = 9},
         "n_experts is 5000"},
        {{.geom = {256, 128, 4, 64, IQ_SCALE_F16},
          .layer = 3,
          .n_experts = 16,
          .n_layers = INT32_MIN},
         "n_layers is -2147483648"},
        {{.geom = {256, 128, 4, 64, IQ_SCALE_F16},
          .layer = 3,
          .n_experts = 16,
          .n_layers = 9,
          .first_layer = 4},
         "first_layer is 4"},
        {{.geom = {256, 128, 3, 64, IQ_SCALE_F16}, .layer = 3, .n_experts = 16, .n_layers = 9},
         "3 bits"},
        {{.geom = {320, 128, 4, 128, IQ_SCALE_F16}, .layer = 3, .n_experts = 16, .n_layers = 9},
         "hidden size 320"},
    };
    size_t n = expert_header_bytes(&good);
    uint64_t *hash = calloc(16 * 2, sizeof *hash);
    uint8_t *bytes = calloc(1, n);
    ExpertHead out;
    uint64_t file = n + 16 * 2 * iq_unit_bytes(&good.geom);
    expert_header_write(&good, hash, bytes);
    assert_int_equal(expert_header_parse(bytes, n, file, &out, NULL), 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Err err = {0};
        ExpertDisk d;
        memcpy(&d, bytes, sizeof d);
        d.hidden = cases[i].h.geom.hidden;
        d.inner = cases[i].h.geom.inner;
        d.bits = cases[i].h.geom.bits;
        d.group = cases[i].h.geom.group;
        d.layer = cases[i].h.layer;
        d.n_experts = cases[i].h.n_experts;
        d.n_layers = cases[i].h.n_layers;
        d.first_layer = cases[i].h.first_layer;
        uint8_t *bad = malloc(n);
        memcpy(bad, bytes, n);
        memcpy(bad, &d, sizeof d);
        expert_header_seal(bad, n);
        assert_true(expert_header_parse(bad, n, file, &out, &err) != 0);
        assert_non_null(strstr(err.text, cases[i].text));
        free(bad);
    }
    free(bytes);
    free(hash);
}

static void test_names(void **state) {
    (void)state;
    char name[64];
    expert_file_path(name, sizeof name, "/x", 7);
    assert_string_equal(name, "/x/layer-007.experts");
    expert_file_format(name, sizeof name, &(IqGeom){256, 128, 8, 128, IQ_SCALE_BF16});
    assert_string_equal(name, "int8-g128-bf16");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pack_and_read),
        cmocka_unit_test(test_same_bytes_with_any_threads),
        cmocka_unit_test(test_kept_redone_refused_stopped),
        cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_hostile_headers),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
