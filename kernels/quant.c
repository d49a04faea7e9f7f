/* Stored number formats: slices of matrices and dequantisation of rows. Pure; any thread. */
#include "kernels/quant.h"

#include "base/err.h"

const float E2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

uint8_t f32_to_f8e4m3(float f) {
    uint8_t sign = signbit(f) ? 0x80 : 0;
    float a = fabsf(f);
    if (isnan(f))
        return 0x7f;
    if (a >= 464.0f) /* halfway to the next step and beyond */
        return sign | 0x7e;
    int e;
    frexpf(a, &e);                  /* a = m * 2^e, m in [0.5, 1) */
    int step = e < -5 ? -9 : e - 4; /* exponent of the last place; subnormals share the least */
    int units = (int)nearbyintf(ldexpf(a, -step));
    if (units == 0)
        return sign;
    if (units == 16) { /* rounded up to the next power of two */
        units = 8;
        step++;
    }
    int code = units < 8 ? units : ((step + 10) << 3) | (units - 8);
    return sign | (uint8_t)(code > 0x7e ? 0x7e : code);
}

size_t dtype_row_bytes(Dtype dtype, int cols) {
    switch (dtype) {
    case DT_F32:
    case DT_I32:
        return (size_t)cols * 4;
    case DT_BF16:
        return (size_t)cols * 2;
    case DT_F8E4M3:
        return (size_t)cols;
    case DT_NVFP4:
        return (size_t)cols / 2;
    }
    return 0;
}

const char *dtype_name(Dtype dtype) {
    static const char *const name[] = {"f32", "bf16", "fp8", "nvfp4", "i32"};
    return (unsigned)dtype < sizeof name / sizeof *name ? name[dtype] : "unknown";
}

MatView mat_rows(const MatView *m, int row, int n) {
    CHECK(row >= 0 && n >= 0 && row <= m->rows && n <= m->rows - row);
    MatView v = *m;
    v.data += (size_t)row * m->row_bytes;
    v.rows = n;
    v.row0 += row;
    return v;
}

MatView mat_cols(const MatView *m, int col, int n) {
    CHECK(col >= 0 && n >= 0 && col <= m->cols && n <= m->cols - col);
    CHECK(m->dtype != DT_NVFP4 || (col % NVFP4_GROUP == 0 && n % NVFP4_GROUP == 0));
    MatView v = *m;
    v.data += dtype_row_bytes(m->dtype, col);
    v.cols = n;
    v.col0 += col;
    return v;
}

static void row_bf16(const MatView *m, const uint8_t *p, float *out) {
    for (int c = 0; c < m->cols; c++) {
        uint16_t v;
        memcpy(&v, p + 2 * (size_t)c, 2);
        out[c] = bf16_to_f32(v);
    }
}

static void row_f8(const MatView *m, int r, const uint8_t *p, float *out) {
    const float *scale = m->scale;
    size_t first = (size_t)((m->row0 + r) / F8_BLOCK) * (size_t)m->scale_cols;
    for (int c = 0; c < m->cols; c++) {
        float w = f8e4m3_to_f32(p[c]);
        out[c] = scale ? w * scale[first + (size_t)((m->col0 + c) / F8_BLOCK)] : w;
    }
}

/* Slices begin on a group, so a group's columns stay together. */
static void row_nvfp4(const MatView *m, int r, const uint8_t *p, float *out) {
    const uint8_t *scale = (const uint8_t *)m->scale +
                           (size_t)(m->row0 + r) * (size_t)m->scale_cols + m->col0 / NVFP4_GROUP;
    for (int g = 0; g < m->cols / NVFP4_GROUP; g++) {
        float group = f8e4m3_to_f32(scale[g]) * m->scale2;
        for (int c = g * NVFP4_GROUP; c < (g + 1) * NVFP4_GROUP; c++) {
            int code = c & 1 ? p[c / 2] >> 4 : p[c / 2] & 15;
            float w = E2M1[code & 7] * group;
            out[c] = code & 8 ? -w : w;
        }
    }
}

void mat_row_f32(const MatView *m, int r, float *out) {
    CHECK(r >= 0 && r < m->rows);
    const uint8_t *p = m->data + (size_t)r * m->row_bytes;
    switch (m->dtype) {
    case DT_F32:
        memcpy(out, p, (size_t)m->cols * sizeof *out);
        break;
    case DT_BF16:
        row_bf16(m, p, out);
        break;
    case DT_F8E4M3:
        row_f8(m, r, p, out);
        break;
    case DT_NVFP4:
        row_nvfp4(m, r, p, out);
        break;
    case DT_I32:
        CHECK(!"a matrix of integers");
    }
}
