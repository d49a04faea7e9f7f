/* Quantisation and layout of integer experts. */
#include "kernels/iq.h"
#include "kernels/quant.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint32_t rng = 7;

static float uniform(void) {
    rng = rng * 1664525u + 1013904223u;
    return (float)(rng >> 8) / (float)(1 << 23) - 1;
}

/* Near enough to a normal distribution. */
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 12; i++)
        s += uniform();
    return s / 2;
}

typedef struct Unit {
    IqGeom g;
    float *gate, *up, *down;
    uint8_t *out;
    IqLoss loss;
} Unit;

static Unit unit_new(int bits, int group, int hidden, IqScale scale) {
    Unit u = {.g = {hidden, group, bits, group, scale}};
    size_t n = (size_t)group * (size_t)hidden;
    u.gate = calloc(3 * n, sizeof(float));
    u.up = u.gate + n;
    u.down = u.up + n;
    u.out = malloc(iq_unit_bytes(&u.g) + 64);
    memset(u.out, 0xee, iq_unit_bytes(&u.g) + 64);
    return u;
}

static void unit_free(Unit *u) {
    free(u->gate);
    free(u->out);
}

static int pack(Unit *u, Err *err) {
    u->loss = (IqLoss){0};
    return iq_pack_unit(&u->g, u->gate, u->up, u->down, u->out, &u->loss, err);
}

static float stored(const Unit *u, IqMatrix m, int row, int col) {
    return iq_weight(&u->g, u->out, m, row, col);
}

static const float *given(const Unit *u, IqMatrix m) {
    return m == IQ_GATE ? u->gate : m == IQ_UP ? u->up : u->down;
}

/* Weights that are codes times a power of two are stored exactly, at every place of every matrix.
 */
static void test_every_place_comes_back(void **state) {
    (void)state;
    for (int bits = 4; bits <= 8; bits += 4)
        for (int group = 64; group <= 128; group += 64)
            for (int hidden = group; hidden <= 3 * group; hidden += group) {
                Unit u = unit_new(bits, group, hidden, bits == 4 ? IQ_SCALE_F16 : IQ_SCALE_BF16);
                size_t n = 3 * (size_t)group * (size_t)hidden;
                int most = bits == 4 ? 7 : 127;
                for (size_t i = 0; i < n; i++)
                    u.gate[i] = 0.25f * rintf(uniform() * (float)(most - 1));
                for (size_t i = 0; i < n; i += (size_t)group)
                    u.gate[i + i / (size_t)group % (size_t)group] = 0.25f * (float)most;
                assert_int_equal(pack(&u, NULL), 0);
                for (int m = IQ_GATE; m <= IQ_DOWN; m++) {
                    int rows = m == IQ_DOWN ? hidden : group, cols = m == IQ_DOWN ? group : hidden;
                    for (int r = 0; r < rows; r++)
                        for (int c = 0; c < cols; c++)
                            assert_true(stored(&u, (IqMatrix)m, r, c) ==
                                        given(&u, (IqMatrix)m)[r * cols + c]);
                }
                assert_true(u.loss.error_square == 0);
                assert_int_equal(u.out[iq_unit_bytes(&u.g)], 0xee);
                unit_free(&u);
            }
}

/* The layout is spelled out: one weight changes one nibble, at the place that the header names. */
static void test_place_of_a_code(void **state) {
    (void)state;
    Unit u = unit_new(4, 128, 256, IQ_SCALE_F16);
    int row = 37, col = 128 + 64 + 32 + 9; /* gate: panel 2, group 1, sub-block 1, high nibble */
    for (int c = 0; c < 256; c++)
        u.gate[row * 256 + c] = 1;
    u.gate[row * 256 + 128] = 7;
    u.gate[row * 256 + col] = 3;
    assert_int_equal(pack(&u, NULL), 0);
    size_t panel = 2 * 1024 + 64;
    assert_int_equal(iq_panel_bytes(&u.g), panel);
    const uint8_t *line = u.out + 4 * panel + 1024 + 512 + 2 * 64;
    assert_int_equal(line[4 * (row % 16) + 1] >> 4, 3 + 8);
    assert_int_equal(line[4 * (row % 16) + 1] & 15, 1 + 8);
    assert_int_equal(line[4 * (row % 16) + 2] >> 4, 1 + 8);
    assert_true(stored(&u, IQ_GATE, row, col) == 3);
    unit_free(&u);
}

static double relative_error(int bits, int group, float (*draw)(void)) {
    Unit u = unit_new(bits, group, 512, IQ_SCALE_F16);
    for (size_t i = 0; i < 3 * (size_t)group * 512; i++)
        u.gate[i] = 0.02f * draw();
    assert_int_equal(pack(&u, NULL), 0);
    double e = 0, s = 0;
    for (int m = IQ_GATE; m <= IQ_DOWN; m++) {
        int rows = m == IQ_DOWN ? 512 : group, cols = m == IQ_DOWN ? group : 512;
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < cols; c++) {
                double w = (double)given(&u, (IqMatrix)m)[r * cols + c],
                       d = (double)stored(&u, (IqMatrix)m, r, c) - w;
                e += d * d;
                s += w * w;
            }
    }
    assert_true(fabs(e - u.loss.error_square) <= 1e-5 * e);
    assert_true(fabs(s - u.loss.square) <= 1e-5 * s);
    unit_free(&u);
    return sqrt(e / s);
}

static void test_what_quantisation_loses(void **state) {
    (void)state;
    assert_true(relative_error(4, 128, normal) < 0.105);
    assert_true(relative_error(4, 64, normal) < 0.097);
    assert_true(relative_error(8, 128, normal) < 0.008);
    assert_true(relative_error(4, 128, uniform) < 0.075);
}

/* A lone large positive weight may take the longer end of the range. */
static void test_odd_weights(void **state) {
    (void)state;
    Unit u = unit_new(4, 64, 64, IQ_SCALE_F16);
    assert_int_equal(pack(&u, NULL), 0); /* all zero */
    assert_true(stored(&u, IQ_UP, 3, 3) == 0 && u.loss.error_square == 0);
    u.gate[0] = 1e-9f; /* below the smallest half */
    u.up[64] = 60000;
    u.up[65] = -60000;
    assert_int_equal(pack(&u, NULL), 0);
    assert_true(fabsf(stored(&u, IQ_UP, 1, 0) / 60000 - 1) < 0.08f);
    assert_true(fabsf(stored(&u, IQ_UP, 1, 1) / -60000 - 1) < 0.08f);
    unit_free(&u);
}

static void refused(Unit *u, int code, const char *text) {
    Err err = {0};
    assert_int_equal(pack(u, &err), code);
    assert_non_null(strstr(err.text, text));
}

static void test_weights_that_cannot_be_stored(void **state) {
    (void)state;
    Unit u = unit_new(8, 64, 128, IQ_SCALE_F16);
    u.up[5 * 128 + 70] = NAN;
    refused(&u, E_INVAL, "up_proj: weight [5, 70] is not finite");
    u.up[5 * 128 + 70] = INFINITY;
    refused(&u, E_INVAL, "up_proj: weight [5, 70] is not finite");
    u.up[5 * 128 + 70] = 0;
    u.down[9 * 64 + 1] = 1e30f;
    refused(&u, E_INVAL, "down_proj: weights [9, 0] and on need a scale that f16 does not have");
    u.g.scale = IQ_SCALE_BF16;
    assert_int_equal(pack(&u, NULL), 0);
    unit_free(&u);
}

static void test_geometries(void **state) {
    (void)state;
    for (int group = 64; group <= 128; group += 64)
        for (int hidden = 32; hidden <= 640; hidden += 32)
            for (int inner = 32; inner <= 640; inner += 32) {
                IqGeom g = {hidden, inner, 4, group, IQ_SCALE_F16};
                bool fits = hidden % group == 0 && inner % group == 0;
                assert_int_equal(iq_check(&g, NULL), fits ? 0 : E_UNSUPPORTED);
                if (fits) {
                    assert_int_equal(iq_unit_bytes(&g) % 64, 0);
                    assert_true(iq_down_at(&g) + iq_down_scales_at(&g) + (size_t)hidden * 2 <=
                                iq_unit_bytes(&g));
                }
            }
    Err err = {0};
    assert_int_equal(iq_check(&(IqGeom){128, 128, 5, 128, IQ_SCALE_F16}, &err), E_INVAL);
    assert_non_null(strstr(err.text, "5 bits"));
    assert_int_equal(iq_check(&(IqGeom){128, 128, 4, 32, IQ_SCALE_F16}, &err), E_INVAL);
    assert_non_null(strstr(err.text, "groups of 32"));
    assert_int_equal(iq_check(&(IqGeom){128, 128, 4, 64, (IqScale)9}, &err), E_INVAL);
    assert_int_equal(iq_check(&(IqGeom){0, 128, 4, 64, IQ_SCALE_F16}, &err), E_UNSUPPORTED);
    /* GLM-5.2: 18.87 M bytes of codes and 1/64 of that in scales */
    IqGeom glm = {6144, 2048, 4, 128, IQ_SCALE_F16};
    assert_int_equal(iq_units(&glm), 16);
    assert_int_equal(16 * iq_unit_bytes(&glm), 3 * 6144 * 2048 / 2 / 32 * 33);
}

/* Every half and back; ties to even; what is too large or too small. */
static void test_halves(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        float f = f16_to_f32((uint16_t)i);
        if (isnan(f))
            assert_true((i & 0x7c00) == 0x7c00 && (i & 0x3ff));
        else
            assert_int_equal(f32_to_f16(f), i);
    }
    assert_int_equal(f32_to_f16(1 + 0x1p-11f), 0x3c00);
    assert_int_equal(f32_to_f16(1 + 3 * 0x1p-11f), 0x3c02);
    assert_int_equal(f32_to_f16(65519), 0x7bff);
    assert_int_equal(f32_to_f16(65520), 0x7c00);
    assert_int_equal(f32_to_f16(0x1p-25f), 0);
    assert_int_equal(f32_to_f16(0x1.8p-25f), 1);
    assert_int_equal(f32_to_f16(-0x1p-24f), 0x8001);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_place_comes_back),
        cmocka_unit_test(test_place_of_a_code),
        cmocka_unit_test(test_what_quantisation_loses),
        cmocka_unit_test(test_odd_weights),
        cmocka_unit_test(test_weights_that_cannot_be_stored),
        cmocka_unit_test(test_geometries),
        cmocka_unit_test(test_halves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
