/* Stored number formats, as seen by loaders and kernels: facts and inline conversions, no state.
 * Any thread. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum Dtype { DT_F32, DT_BF16, DT_F8E4M3, DT_NVFP4, DT_I32 } Dtype;

enum {
    F8_BLOCK = 128,   /* DT_F8E4M3: one F32 scale per 128 x 128 block */
    NVFP4_GROUP = 16, /* DT_NVFP4: one e4m3 scale per 16 columns of a row, one scale2 over all */
};

/* A matrix [rows, cols] in host memory in its stored format, or a slice of one. Everything is
 * borrowed.
 *
 * DT_F8E4M3: w[r, c] = e4m3[r, c] * scale[r / 128, c / 128]; without scale it is 1.
 * DT_NVFP4: w[r, c] = e2m1[r, c] * (scale[r, c / 16] * scale2); of two columns in a byte the even
 * one is the low nibble.
 *
 * Element (r, c) of a slice stands at (row0 + r, col0 + c) of the whole matrix, which is what the
 * scales are numbered by: `data` points at the slice's first element, `scale` at the first scale of
 * the whole matrix. */
typedef struct MatView {
    Dtype dtype;
    int rows, cols;
    const uint8_t *data;
    size_t row_bytes;  /* from one row to the next */
    const void *scale; /* DT_F8E4M3: float [.., scale_cols]; DT_NVFP4: e4m3 [.., scale_cols] */
    int scale_cols;    /* scales per row of scales */
    int row0, col0;
    float scale2; /* DT_NVFP4 */
} MatView;

static inline float bf16_to_f32(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

/* IEEE half. Exact. */
static inline float f16_to_f32(uint16_t v) {
    uint32_t sign = (uint32_t)(v & 0x8000) << 16, u = (uint32_t)(v & 0x7fff);
    float f;
    if (u >= 0x7c00) {
        u = 0x7f800000u | (u & 0x3ff) << 13;
    } else if (u >= 0x400) {
        u = (u << 13) + (112u << 23); /* exponents are biased by 127 instead of 15 */
    } else {
        f = (float)u * 0x1p-24f;
        memcpy(&u, &f, 4);
    }
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even; beyond the largest half infinity; NaN stays NaN. */
static inline uint16_t f32_to_f16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    u &= 0x7fffffff;
    if (u > 0x7f800000)
        return sign | 0x7e00;
    if (u >= 0x477ff000) /* 65520 rounds to 65536 */
        return sign | 0x7c00;
    if (u < 0x38800000) { /* below 2^-14 halves are multiples of 2^-24, as is this sum's last bit */
        float m;
        memcpy(&m, &u, 4);
        m += 0.5f;
        memcpy(&u, &m, 4);
        return sign | (uint16_t)(u - 0x3f000000);
    }
    u += 0xfff + (u >> 13 & 1);
    return sign | (uint16_t)((u >> 13) - (112 << 10));
}

/* e4m3 (fn): bias 7, no infinities, 0x7f and 0xff are NaN. Exact. */
static inline float f8e4m3_to_f32(uint8_t v) {
    uint32_t sign = (uint32_t)(v & 0x80) << 24, u = (uint32_t)(v & 0x7f);
    float f;
    if (u == 0x7f) {
        u = 0x7fc00000u;
    } else if (u >= 8) {
        u = (u << 20) + (120u << 23); /* exponents are biased by 127 instead of 7 */
    } else {
        f = (float)u * 0x1p-9f;
        memcpy(&u, &f, 4);
    }
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

/* Round to nearest even, saturating at +-448; NaN becomes 0x7f. */
uint8_t f32_to_f8e4m3(float f);

/* Magnitudes of e2m1 codes 0..7; bit 3 is the sign. */
extern const float E2M1[8];

/* Bytes of one stored row of `cols` elements; 0 for a dtype that has none. */
size_t dtype_row_bytes(Dtype dtype, int cols);
const char *dtype_name(Dtype dtype);

/* Rows [row, row + n) or columns [col, col + n) of m. Columns of DT_NVFP4 must start and end on a
 * group. CHECKs the range. */
MatView mat_rows(const MatView *m, int row, int n);
MatView mat_cols(const MatView *m, int col, int n);

/* Writes row r as fp32 to out[cols], bit for bit as published weights are dequantised in fp32: BF16
 * and F32 exactly, DT_F8E4M3 with the one rounding of its product, DT_NVFP4 with two, scale *
 * scale2 first and then the product with e2m1. (e2m1 * scale is exact, so multiplying it by scale2
 * last would round once and may differ in the last bit.) */
void mat_row_f32(const MatView *m, int r, float *out);
