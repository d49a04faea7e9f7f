/* The inner loops that differ by instruction set: one table per set, compiled from kern_body.h.
 *
 * All tables give the same bits: a dot product runs in 16 fp32 lanes with fused multiply-add in the
 * order of k, and the lanes are added up in a fixed tree (8 apart, 4, 2, 1), whatever the width of
 * the registers. */
#pragma once

#include "kernels/quant.h"

enum { KERN_TILE = 4 }; /* rows of weights per call of dots */

typedef struct Kern {
    const char *name;
    /* Row r of m as fp32, bit for bit what mat_row_f32 gives. */
    void (*row)(const MatView *m, int r, float *out);
    /* out[t * ld_out + i] = w[i] . x[t * ld_x ...] for i < n_w <= KERN_TILE and t < n; vectors of k
     * numbers */
    void (*dots)(const float *const *w, int n_w, const float *x, size_t ld_x, int n, int k,
                 float *out, size_t ld_out);
    /* acc[c] = fma(p[j], rows[j][c], acc[c]) for j = 0 .. n - 1 in this order, c < width */
    void (*accumulate)(float *acc, const float *p, const float *const *rows, int n, int width);
    /* Sum of squares. */
    float (*square_sum)(const float *x, int n);
    /* n stored KV numbers as fp32 */
    void (*from_bf16)(const uint8_t *in, int n, float *out);
    void (*from_f8)(const uint8_t *in, int n, float scale, float *out);
} Kern;

const Kern *kern_avx2(void);
const Kern *kern_avx512(void);
