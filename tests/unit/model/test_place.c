/* Which experts are resident: every strategy with empty, full and all sizes in between, the file
 * with its errors, held sets, and the choice of a next set. */
#include "model/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { LAYERS = 5, N = 8, MTP = 1 };

/* Layer 0 is dense, 1 .. 4 are MoE, 5 is the MTP layer. */
static Shape shape(void) {
    Shape s = {.n_layers = LAYERS, .n_mtp = MTP, .n_experts = N, .n_active = 2};
    s.layer_dense[0] = true;
    return s;
}

static int n_of(const bool *resident, int layer) {
    int n = 0;
    for (int e = 0; e < N; e++)
        n += resident[layer * N + e];
    return n;
}

static bool *decide(const PlaceConf *c) {
    Shape s = shape();
    Err err = {0};
    bool *r = NULL;
    assert_int_equal(place_decide(c, &s, &r, &err), 0);
    assert_int_equal(n_of(r, 0), N);
    return r;
}

static void test_uniform(void **state) {
    (void)state;
    static const struct {
        const char *spec;
        int n;
    } cases[] = {{"0", 0}, {"none", 0}, {"1", 1}, {"7", 7}, {"8", 8}, {"all", 8}};
    Shape s = shape();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bool *r = decide(&(PlaceConf){.resident = cases[i].spec});
        for (int l = 1; l < LAYERS + MTP; l++)
            for (int e = 0; e < N; e++)
                assert_int_equal(r[l * N + e], e < cases[i].n);
        assert_int_equal(place_n_remote(&s, r), 5 * (N - cases[i].n));
        free(r);
    }
}

static void test_front(void **state) {
    (void)state;
    static const char *const spec[] = {"0", "1", "3", "7", "8"};
    static const int want[][4] = {
        {0, 0, 0, 0}, {4, 0, 0, 0}, {8, 4, 0, 0}, {8, 8, 8, 4}, {8, 8, 8, 8}};
    for (int i = 0; i < 5; i++) {
        bool *r = decide(&(PlaceConf){.strategy = PLACE_FRONT, .resident = spec[i]});
        for (int l = 1; l < LAYERS; l++)
            assert_int_equal(n_of(r, l), want[i][l - 1]);
        assert_int_equal(n_of(r, LAYERS), atoi(spec[i])); /* the MTP layer has its own */
        free(r);
    }
}

static void test_frequency(void **state) {
    (void)state;
    uint64_t counts[(LAYERS + MTP) * N] = {0};
    counts[0] = 1000; /* dense: never a candidate */
    counts[2 * N + 5] = 9, counts[3 * N + 1] = 8, counts[3 * N + 7] = 8, counts[1 * N + 6] = 7;
    counts[LAYERS * N + 4] = 50;
    PlaceConf c = {.strategy = PLACE_FREQUENCY, .resident = "1", .counts = counts};
    bool *r = decide(&c);
    assert_true(r[2 * N + 5] && r[3 * N + 1] && r[3 * N + 7] && r[1 * N + 6]);
    assert_int_equal(n_of(r, 1) + n_of(r, 2) + n_of(r, 3) + n_of(r, 4), 4);
    assert_true(r[LAYERS * N + 4] && n_of(r, LAYERS) == 1);
    free(r);
    counts[1 * N + 6] = 0; /* the fourth is now one of many with 0: the lowest (layer, id) */
    r = decide(&c);
    assert_true(r[1 * N + 0] && !r[1 * N + 6]);
    free(r);
    for (int n = 0; n <= N; n += n ? 7 : 1) { /* 0, 1, 8 */
        char spec[8] = {(char)('0' + n)};
        c.resident = spec;
        r = decide(&c);
        assert_int_equal(n_of(r, 1) + n_of(r, 2) + n_of(r, 3) + n_of(r, 4), 4 * n);
        free(r);
    }
}

static void refused(const PlaceConf *c, const char *part) {
    Shape s = shape();
    Err err = {0};
    bool *r = NULL;
    assert_true(place_decide(c, &s, &r, &err) < 0);
    assert_null(r);
    assert_non_null(strstr(err.text, part));
}

static void test_refusals(void **state) {
    (void)state;
    refused(&(PlaceConf){.resident = "9"}, "0 to 8, got \"9\"");
    refused(&(PlaceConf){.resident = "-1"}, "\"-1\"");
    refused(&(PlaceConf){.resident = ""}, "\"\"");
    refused(&(PlaceConf){.resident = "3x"}, "\"3x\"");
    refused(&(PlaceConf){.strategy = PLACE_FREQUENCY, .resident = "3"}, "recorded counts");
    refused(&(PlaceConf){.strategy = PLACE_FILE, .resident = "3"}, "path of a placement file");
    refused(&(PlaceConf){.strategy = PLACE_FILE, .file = "tests/no-such"}, "tests/no-such");
}

static void test_file(void **state) {
    (void)state;
    Shape s = shape();
    Err err = {0};
    bool *r;
    const char *text = "# by hand\n\n1: 0-2, 7 # hot\r\n  3 :4\n4:\n5: 0-7";
    assert_int_equal(place_parse_file("p", text, &s, &r, &err), 0);
    assert_true(r[N] && r[N + 1] && r[N + 2] && r[N + 7] && r[3 * N + 4]);
    assert_int_equal(n_of(r, 0), N);
    assert_int_equal(n_of(r, 1), 4);
    assert_int_equal(n_of(r, 2), 0);
    assert_int_equal(n_of(r, 3), 1);
    assert_int_equal(n_of(r, 4), 0);
    assert_int_equal(n_of(r, 5), N);
    free(r);
    assert_int_equal(place_parse_file("p", "", &s, &r, &err), 0);
    assert_int_equal(place_n_remote(&s, r), 5 * N);
    free(r);
}

static void test_file_errors(void **state) {
    (void)state;
    static const struct {
        const char *text, *part;
    } cases[] = {
        {"1: 0\n6: 0", "p:2: layer 6: expected 0 to 5"},
        {"0: 1", "p:1: layer 0 is dense"},
        {"1: 8", "p:1: expert 8: expected 0 to 7"},
        {"1: 99999999999999999999", "expected 0 to 7"},
        {"1: 3-1", "p:1: experts 3-1"},
        {"1: 3-", "p:1: expected expert"},
        {"1: 3,", "p:1: expected expert"},
        {"1: 3,\n2: 1", "p:1: expected expert"},
        {"1: 3 4", "p:1: layer 1: expected \",\""},
        {"1 3", "p:1: expected \":\""},
        {"\n1: 3\n1: 4", "p:3: layer 1 a second time"},
        {"all", "p:1: expected layer, got \"all\""},
        {"1: -3", "p:1: expected expert, got \"-3\""},
    };
    Shape s = shape();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Err err = {0};
        bool *r = NULL;
        assert_int_equal(place_parse_file("p", cases[i].text, &s, &r, &err), E_INVAL);
        assert_null(r);
        if (!strstr(err.text, cases[i].part))
            fail_msg("\"%s\" gives \"%s\"", cases[i].text, err.text);
    }
}

static void test_held(void **state) {
    (void)state;
    Shape s = shape();
    Err err = {0};
    uint8_t held[LAYERS * N / 8];
    bool *r = decide(&(PlaceConf){.resident = "2"});
    memset(held, 0xfc, sizeof held); /* 2 .. 7 of each layer: just what is not resident */
    held[0] = 0;
    assert_int_equal(place_check_held(&s, r, held, sizeof held, "e", &err), 0);
    held[3] &= 0x7f;
    assert_int_equal(place_check_held(&s, r, held, sizeof held, "expertd-0", &err), E_MISMATCH);
    assert_string_equal(err.text,
                        "expertd-0 does not hold expert 7 of layer 3, which is not resident here");
    held[3] |= 0x80;
    assert_int_equal(place_check_held(&s, r, held, sizeof held - 1, "e", &err), E_MISMATCH);
    assert_non_null(strstr(err.text, "expert 2 of layer 4"));
    assert_int_equal(place_check_held(&s, r, NULL, 0, "e", &err), E_MISMATCH);
    free(r);
    r = decide(&(PlaceConf){.resident = "all"});
    assert_int_equal(place_check_held(&s, r, NULL, 0, "e", &err), 0);
    free(r);
}

static void test_next(void **state) {
    (void)state;
    bool now[N] = {true, true, true}, next[N], again[N];
    double heat[N] = {1, 100, 0, 50, 0, 300, 2, 0};
    assert_int_equal(place_next(N, heat, now, next), 2);
    assert_true(next[1] && next[3] && next[5]);
    assert_int_equal(n_of(next, 0), 3);
    assert_true(place_remote_share(N, heat, now) > 0.7);
    assert_true(place_remote_share(N, heat, next) < 0.01);
    assert_int_equal(place_next(N, heat, next, again), 0);
    assert_memory_equal(again, next, sizeof next);
}

/* Noise around equal use moves nothing, whichever set is resident; nor do empty and full sets. */
static void test_next_does_not_flap(void **state) {
    (void)state;
    bool now[N] = {true, true, true}, none[N] = {0}, all[N], next[N];
    double heat[N] = {100, 96, 104, 110, 99, 108, 95, 101}, few[N] = {0, 0, 0, 3, 3, 3, 3, 3},
           zero[N] = {0};
    memset(all, 1, sizeof all);
    assert_int_equal(place_next(N, heat, now, next), 0);
    assert_int_equal(place_next(N, few, now, next), 0);
    assert_int_equal(place_next(N, zero, now, next), 0);
    heat[5] = 1e6;
    assert_int_equal(place_next(N, heat, none, next), 0);
    assert_int_equal(place_next(N, heat, all, next), 0);
    assert_int_equal(place_next(N, heat, now, next), 1);
    assert_true(place_remote_share(N, zero, none) == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_uniform),
        cmocka_unit_test(test_front),
        cmocka_unit_test(test_frequency),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_file_errors),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_next),
        cmocka_unit_test(test_next_does_not_flap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
