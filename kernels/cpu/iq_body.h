/* Parts of a table of iq_kern.h that are plain C, for a source file of one instruction set to
 * compile with its options. Contraction is off, so all of them round alike. */
#pragma once

#include "kernels/cpu/iq_kern.h"
#include "kernels/quant.h"

#include <math.h>
#include <string.h>

/* v to the nearest integer, half to even, for |v| < 2^22: the sum with 1.5 * 2^23 leaves no room
 * for a fraction, and its low bits are the integer. */
static inline int32_t iq_round(float v) {
    const float magic = 12582912.0f;
    float sum = v + magic;
    int32_t bits;
    memcpy(&bits, &sum, 4);
    return bits - 0x4b400000;
}

/* n is a multiple of IQ_SUB. */
static inline void iq_quant_group(const float *x, size_t n, int8_t *q, float *scale, int32_t *sum) {
    int32_t most = 0, total = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], 4);
        bits &= 0x7fffffff; /* orders magnitudes, infinities and NaN above all numbers */
        most = bits > most ? bits : most;
    }
    float amax;
    memcpy(&amax, &most, 4);
    if (!(amax > 0x1p-100f && amax < INFINITY)) { /* 127 / amax stays finite above it */
        memset(q, 0, n);
        *scale = most >= 0x7f800000 ? NAN : 0;
        *sum = 0;
        return;
    }
    float inv = 127 / amax;
    for (size_t i = 0; i < n; i++) {
        int32_t code = iq_round(x[i] * inv);
        q[i] = (int8_t)code;
        total += code;
    }
    *scale = amax / 127;
    *sum = total;
}

static void iq_body_quant(const float *x, int k, int group, int8_t *q, float *scale, int32_t *sum) {
    for (int g = 0; g < k / group; g++)
        iq_quant_group(x + g * group, (size_t)group, q + g * group, &scale[g], &sum[g]);
}

static void iq_body_add_scaled(float *y, const float *x, float a, int n) {
    for (int i = 0; i < n; i++)
        y[i] += a * x[i];
}
