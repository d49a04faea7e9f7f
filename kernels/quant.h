/* Stored number formats, as seen by loaders and kernels: facts and inline conversions, no state.
 * Any thread. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum Dtype { DT_F32, DT_BF16, DT_F8E4M3, DT_NVFP4, DT_I32 } Dtype;

enum {
    F8_BLOCK = 128, /* one F32 scale per 128 x 128 block: w = e4m3 * scale_inv[r / 128, c / 128] */
    NVFP4_GROUP = 16, /* one e4m3 scale per 16 columns: w = e2m1 * scale[r, c / 16] * scale2; even
                         column = low nibble */
};

/* A matrix [rows, cols] in host memory in its stored format, or a slice of one. Everything is
 * borrowed.
 *
 * Element (r, c) of the slice stands at (row0 + r, col0 + c) of the quantisation grid; `data`
 * points at the slice's first element, while `scale` points at the grid's first scale. DT_F8E4M3
 * without scale means scale 1. */
typedef struct MatView {
    Dtype dtype;
    int rows, cols;
    const uint8_t *data;
    size_t row_bytes; /* from one row to the next */
    const void
        *scale;     /* DT_F8E4M3: float [.., scale_cols]; DT_NVFP4: e4m3 bytes [.., scale_cols] */
    int scale_cols; /* scales per grid row */
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

/* e4m3 (fn): bias 7, no infinities, 0x7f and 0xff are NaN. Exact. */
static inline float f8e4m3_to_f32(uint8_t v) {
    int e = (v >> 3) & 15, m = v & 7;
    float f = e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    if ((v & 0x7f) == 0x7f)
        f = NAN;
    return v & 0x80 ? -f : f;
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
/* Writes row r as fp32 to out[cols]: one rounding per multiplication, exactly as the reference
 * dequantises. */
void mat_row_f32(const MatView *m, int r, float *out);
