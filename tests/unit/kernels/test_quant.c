/* Number formats bit by bit, slices of matrices, and rows against dequantisation written apart. */
#include "kernels/quant.h"

#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <cmocka.h>

static uint32_t bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float from_bits(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* xorshift: the same numbers in every run */
static uint32_t rnd(void) {
    static uint32_t x = 2463534242u;
    x ^= x << 13;
    x ^= x >> 17;
    return x ^= x << 5;
}

/* ---- single numbers ---- */

static void test_e4m3_values(void **state) {
    (void)state;
    assert_true(f8e4m3_to_f32(0x38) == 1.0f);
    assert_true(f8e4m3_to_f32(0x7e) == 448.0f);
    assert_true(f8e4m3_to_f32(0xfe) == -448.0f);
    assert_true(f8e4m3_to_f32(0x01) == 0x1p-9f);
    assert_true(f8e4m3_to_f32(0x07) == 0x7p-9f);
    assert_true(f8e4m3_to_f32(0x08) == 0x1p-6f);
    assert_true(isnan(f8e4m3_to_f32(0x7f)) && isnan(f8e4m3_to_f32(0xff)));
    assert_int_equal(bits(f8e4m3_to_f32(0x80)), 0x80000000u);
    for (int v = 0; v < 256; v++) {
        int e = (v >> 3) & 15, m = v & 7;
        double want = e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m / 8.0, -6);
        if ((v & 0x7f) != 0x7f)
            assert_true((double)f8e4m3_to_f32((uint8_t)v) == (v & 0x80 ? -want : want));
    }
}

static void test_e4m3_round_trip(void **state) {
    (void)state;
    for (int v = 0; v < 256; v++)
        if ((v & 0x7f) != 0x7f)
            assert_int_equal(f32_to_f8e4m3(f8e4m3_to_f32((uint8_t)v)), v);
    assert_int_equal(f32_to_f8e4m3(NAN) & 0x7f, 0x7f);
    assert_int_equal(f32_to_f8e4m3(INFINITY), 0x7e);
    assert_int_equal(f32_to_f8e4m3(-1e30f), 0xfe);
}

/* Between two neighbours the nearer one is taken, and in the middle the even one. */
static void test_e4m3_rounds_to_nearest_even(void **state) {
    (void)state;
    for (int v = 0; v < 0x7e; v++) {
        float lo = f8e4m3_to_f32((uint8_t)v), hi = f8e4m3_to_f32((uint8_t)(v + 1)),
              mid = (lo + hi) / 2;
        assert_int_equal(f32_to_f8e4m3(nextafterf(mid, lo)), v);
        assert_int_equal(f32_to_f8e4m3(mid), v & 1 ? v + 1 : v);
        assert_int_equal(f32_to_f8e4m3(nextafterf(mid, hi)), v + 1);
        assert_int_equal(f32_to_f8e4m3(-mid), (v & 1 ? v + 1 : v) | 0x80);
    }
    assert_int_equal(f32_to_f8e4m3(from_bits(1)), 0);
}

static void test_bf16(void **state) {
    (void)state;
    for (uint32_t v = 0; v < 65536; v++) {
        float f = bf16_to_f32((uint16_t)v);
        assert_int_equal(bits(f), v << 16);
        if (!isnan(f))
            assert_int_equal(f32_to_bf16(f), v);
    }
    assert_int_equal(f32_to_bf16(from_bits(0x3f808000)), 0x3f80); /* middle: down to even */
    assert_int_equal(f32_to_bf16(from_bits(0x3f818000)), 0x3f82); /* middle: up to even */
    assert_int_equal(f32_to_bf16(from_bits(0x3f808001)), 0x3f81);
    assert_int_equal(f32_to_bf16(from_bits(0x7f7fffff)), 0x7f80); /* to infinity */
    assert_true(isnan(bf16_to_f32(f32_to_bf16(from_bits(0x7f800001)))));
    assert_true(isnan(bf16_to_f32(f32_to_bf16(from_bits(0xffffffff)))));
}

static void test_dtypes(void **state) {
    (void)state;
    assert_int_equal(dtype_row_bytes(DT_F32, 48), 192);
    assert_int_equal(dtype_row_bytes(DT_I32, 48), 192);
    assert_int_equal(dtype_row_bytes(DT_BF16, 48), 96);
    assert_int_equal(dtype_row_bytes(DT_F8E4M3, 48), 48);
    assert_int_equal(dtype_row_bytes(DT_NVFP4, 48), 24);
    assert_true(dtype_row_bytes(DT_F32, 1 << 30) == (size_t)1 << 32);
    assert_string_equal(dtype_name(DT_F8E4M3), "fp8");
    assert_string_equal(dtype_name((Dtype)99), "unknown");
}

/* ---- matrices ---- */

/* Rows and columns end inside a block of 128. */
enum { ROWS = 300, COLS = 400, F8_COLS = (COLS + 127) / 128, GROUPS = COLS / 16 };

typedef struct Fixture {
    uint8_t data[ROWS * COLS * 4];
    float f8_scale[((ROWS + 127) / 128) * F8_COLS];
    uint8_t group_scale[ROWS * GROUPS];
    float whole[ROWS * COLS];
} Fixture;

static Fixture fx;

/* A finite e4m3 */
static uint8_t random_f8(void) {
    uint8_t v = (uint8_t)rnd();
    return (v & 0x7f) == 0x7f ? 0x38 : v;
}

static MatView random_mat(Dtype dtype) {
    MatView m = {.dtype = dtype, .rows = ROWS, .cols = COLS, .data = fx.data, .scale2 = 0x1.9p-12f};
    m.row_bytes = dtype_row_bytes(dtype, COLS);
    for (size_t i = 0; i < sizeof fx.data; i++)
        fx.data[i] = random_f8();
    for (size_t i = 0; i < sizeof fx.f8_scale / 4; i++)
        fx.f8_scale[i] = 1e-4f + (float)(rnd() >> 8) * 1e-9f;
    for (size_t i = 0; i < sizeof fx.group_scale; i++)
        fx.group_scale[i] = random_f8() & 0x7f;
    if (dtype == DT_F8E4M3) {
        m.scale = fx.f8_scale;
        m.scale_cols = F8_COLS;
    } else if (dtype == DT_NVFP4) {
        m.scale = fx.group_scale;
        m.scale_cols = GROUPS;
    }
    return m;
}

/* Element (r, c) of a fixture, written apart from quant.c. volatile keeps each rounding. */
static float expected(Dtype dtype, float scale2, int r, int c) {
    static const float magnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    size_t i = (size_t)r * COLS + (size_t)c;
    if (dtype == DT_F32)
        return from_bits((uint32_t)fx.data[4 * i] | (uint32_t)fx.data[4 * i + 1] << 8 |
                         (uint32_t)fx.data[4 * i + 2] << 16 | (uint32_t)fx.data[4 * i + 3] << 24);
    if (dtype == DT_BF16)
        return from_bits((uint32_t)fx.data[2 * i] << 16 | (uint32_t)fx.data[2 * i + 1] << 24);
    if (dtype == DT_F8E4M3)
        return f8e4m3_to_f32(fx.data[i]) * fx.f8_scale[(r / 128) * F8_COLS + c / 128];
    int code = fx.data[i / 2] >> (c % 2 ? 4 : 0) & 15;
    volatile float group = f8e4m3_to_f32(fx.group_scale[r * GROUPS + c / 16]) * scale2;
    return (code & 8 ? -magnitude[code & 7] : magnitude[code & 7]) * group;
}

static const Dtype mat_dtypes[] = {DT_F32, DT_BF16, DT_F8E4M3, DT_NVFP4};

static void test_rows(void **state) {
    (void)state;
    for (size_t d = 0; d < 4; d++) {
        MatView m = random_mat(mat_dtypes[d]);
        float out[COLS];
        for (int r = 0; r < ROWS; r++) {
            mat_row_f32(&m, r, out);
            for (int c = 0; c < COLS; c++)
                assert_int_equal(bits(out[c]), bits(expected(m.dtype, m.scale2, r, c)));
        }
    }
}

/* The order of the two factors shows: multiplying by scale2 last gives other bits somewhere. */
static void test_nvfp4_scales_first(void **state) {
    (void)state;
    MatView m = random_mat(DT_NVFP4);
    float out[COLS];
    int other = 0;
    m.scale2 = 0x1.123456p-12f;
    for (int r = 0; r < ROWS; r++) {
        mat_row_f32(&m, r, out);
        for (int c = 0; c < COLS; c++) {
            int code = m.data[((size_t)r * COLS + (size_t)c) / 2] >> (c % 2 ? 4 : 0) & 15;
            volatile float exact =
                E2M1[code & 7] * f8e4m3_to_f32(fx.group_scale[r * GROUPS + c / 16]);
            float last = (code & 8 ? -exact : exact) * m.scale2;
            assert_int_equal(bits(out[c]), bits(expected(DT_NVFP4, m.scale2, r, c)));
            other += bits(out[c]) != bits(last);
        }
    }
    assert_true(other > 0);
}

static void check_slice(const MatView *m, int row, int n_rows, int col, int n_cols) {
    MatView by_rows = mat_rows(m, row, n_rows), s = mat_cols(&by_rows, col, n_cols);
    MatView by_cols = mat_cols(m, col, n_cols), t = mat_rows(&by_cols, row, n_rows);
    float a[COLS], b[COLS];
    for (int r = 0; r < n_rows; r++) {
        mat_row_f32(&s, r, a);
        mat_row_f32(&t, r, b);
        assert_memory_equal(a, &fx.whole[(row + r) * COLS + col], (size_t)n_cols * 4);
        assert_memory_equal(b, a, (size_t)n_cols * 4);
    }
}

static void test_slices_equal_the_whole(void **state) {
    (void)state;
    static const struct {
        int row, n_rows, col, n_cols;
    } cut[] = {
        {0, ROWS, 0, COLS}, {128, 128, 128, 128}, {100, 60, 112, 160},
        {299, 1, 384, 16},  {37, 200, 16, 368},   {127, 2, 112, 32},
        {0, 1, 0, 16},      {256, 44, 256, 144},  {64, 64, 32, 32},
    };
    for (size_t d = 0; d < 4; d++) {
        MatView m = random_mat(mat_dtypes[d]);
        for (int r = 0; r < ROWS; r++)
            mat_row_f32(&m, r, &fx.whole[r * COLS]);
        for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
            check_slice(&m, cut[i].row, cut[i].n_rows, cut[i].col, cut[i].n_cols);
        if (m.dtype != DT_NVFP4)
            check_slice(&m, 3, 291, 1, 397); /* no group to respect */
    }
}

static void test_slices_of_slices(void **state) {
    (void)state;
    MatView m = random_mat(DT_F8E4M3);
    float a[COLS], b[COLS];
    MatView rows = mat_rows(&m, 90, 200), again = mat_rows(&rows, 60, 100),
            cols = mat_cols(&again, 30, 300), s = mat_cols(&cols, 90, 20);
    assert_int_equal(s.row0, 150);
    assert_int_equal(s.col0, 120);
    for (int r = 0; r < s.rows; r++) {
        mat_row_f32(&m, 150 + r, a);
        mat_row_f32(&s, r, b);
        assert_memory_equal(b, a + 120, 20 * 4);
    }
}

static void test_f8_without_scale(void **state) {
    (void)state;
    MatView m = random_mat(DT_F8E4M3);
    float out[COLS];
    m.scale = NULL;
    mat_row_f32(&m, 5, out);
    for (int c = 0; c < COLS; c++)
        assert_int_equal(bits(out[c]), bits(f8e4m3_to_f32(fx.data[5 * COLS + c])));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3_values),
        cmocka_unit_test(test_e4m3_round_trip),
        cmocka_unit_test(test_e4m3_rounds_to_nearest_even),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_dtypes),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_nvfp4_scales_first),
        cmocka_unit_test(test_slices_equal_the_whole),
        cmocka_unit_test(test_slices_of_slices),
        cmocka_unit_test(test_f8_without_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
