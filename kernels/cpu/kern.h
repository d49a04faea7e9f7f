/* The inner loops that differ by instruction set: one table per set, compiled from kern_body.h.
 * Pure functions; any thread.
 *
 * All tables give the same bits. A dot product runs in 16 fp32 lanes with fused multiply-add in the
 * order of k, and the lanes are added up in a fixed tree (8 apart, 4, 2, 1), whatever the width of
 * the registers and however many rows or tokens are computed at a time. */
#pragma once

#include "kernels/quant.h"

#include <stdbool.h>

enum { KERN_TILE = 4, KERN_LANES = 16 };

typedef struct Kern {
    /* Row r of m as fp32, bit for bit what mat_row_f32 gives (but for the sign of NaN). */
    void (*row)(const MatView *m, int r, float *out);
    /* out[t * ld_out + i] = w[i] . x[t * ld_x ...] for i < n_w <= KERN_TILE and t < n; vectors of k
     * numbers. */
    void (*dots)(const float *const *w, int n_w, const float *x, size_t ld_x, int n, int k,
                 float *out, size_t ld_out);
    /* out[i] = row r + i of m . x for i < n_w <= KERN_TILE: the bits of row and dots without the
     * way over memory, for one token. Only where row_dots_can(m). */
    void (*row_dots)(const MatView *m, int r, int n_w, const float *x, float *out);
    /* acc[i][c] = fma(p[i * ld_p + j], rows[j][c], acc[i][c]) for j = 0 .. n - 1 in this order,
     * i < n_acc, c < width */
    void (*accumulate)(float *const *acc, int n_acc, const float *p, size_t ld_p,
                       const float *const *rows, int n, int width);
    /* Sum of squares; largest magnitude (NaN ignored). */
    float (*square_sum)(const float *x, int n);
    float (*max_abs)(const float *x, int n);
    /* x *= factor */
    void (*scale)(float *x, float factor, int n);
    /* out = silu(gate) * up; out may be gate */
    void (*silu_mul)(float *out, const float *gate, const float *up, int n);
    /* Folds KERN_LANES raw scores into a running softmax: s := scale * s, *best := max(*best, s),
     * s := exp(s - *best), *total grows by them. Returns what older sums must be multiplied by; it
     * is already done to *total. Unused lanes: -INFINITY. */
    float (*softmax_fold)(float *s, float scale, float *best, float *total);
    /* score[c] = sum of w[h] * max(dot[h * ld + c], 0) over h = 0 .. heads - 1 in this order,
     * c < n; n rounded up to KERN_LANES numbers are read and written */
    void (*relu_sum)(float *score, const float *dot, size_t ld, const float *w, int heads, int n);
    /* n stored KV numbers as fp32, and back: the bits of bf16_to_f32, f8e4m3_to_f32 * scale,
     * f32_to_bf16, f32_to_f8e4m3(in / scale). */
    void (*from_bf16)(const uint8_t *in, int n, float *out);
    void (*from_f8)(const uint8_t *in, int n, float scale, float *out);
    void (*to_bf16)(const float *in, int n, uint8_t *out);
    void (*to_f8)(const float *in, int n, float scale, uint8_t *out);
} Kern;

/* Whether row_dots takes m: a stored format with its grid on borders of 16 columns. */
static inline bool row_dots_can(const MatView *m) {
    return m->dtype == DT_BF16 || m->dtype == DT_NVFP4 ||
           (m->dtype == DT_F8E4M3 && m->col0 % KERN_LANES == 0);
}

const Kern *kern_avx2(void);
const Kern *kern_avx512(void);
