/* The inner loops over integer-quantised weights that differ by instruction set: one table per set.
 * Pure functions; any thread. All tables give the same bits: products are exact in int32, and each
 * group's product is scaled and added by one fused multiply-add, in the order of the groups. */
#pragma once

#include "kernels/iq.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    IQ_MAX_PANELS = 4,   /* panels of one call */
    IQ_MAX_TOKENS = 192, /* tokens of one call: their sums stay in L1 */
    IQ_TILE_ROWS = 16,   /* the AMX table reads tokens in blocks of so many */
};

/* Panels of 16 rows of weights over the same columns: panel p, group g has its codes at code + p *
 * panel_step + g * group_step and its 16 scales at scale + p * scale_panel_step + g *
 * scale_group_step. */
typedef struct IqPanels {
    int bits, group, n_panels, n_groups;
    IqScale type;
    const uint8_t *code, *scale;
    size_t panel_step, group_step, scale_panel_step, scale_group_step;
} IqPanels;

/* Quantised activations of m tokens. */
typedef struct IqActs {
    const int8_t *q;    /* [m, ld_q]; for the AMX table m rounded up to IQ_TILE_ROWS rows exist */
    const float *scale; /* [m, ld_g] of each group */
    const int32_t *sum; /* [m, ld_g] of the codes of each group */
    size_t ld_q, ld_g;
} IqActs;

typedef struct IqKern {
    /* One token: k / group groups of x to int8, scale = largest magnitude / 127, half to even. A
     * group with a number that is not finite gets codes 0 and the scale NaN. */
    void (*quant)(const float *x, int k, int group, int8_t *q, float *scale, int32_t *sum);
    /* out[t, 16 * p + r] = sum over groups of (codes of row r . q[t]) * (weight scale * activation
     * scale); out[m, 16 * n_panels] densely packed. The AMX table takes an even n_panels. */
    void (*panels)(const IqPanels *w, const IqActs *a, int m, float *out);
    /* y += a * x, the product rounded before the sum */
    void (*add_scaled)(float *y, const float *x, float a, int n);
    /* out = silu(gate) * up of n numbers, n a multiple of 16; out may be gate */
    void (*silu_mul)(float *out, const float *gate, const float *up, int n);
} IqKern;

extern const IqKern IQ_KERN_SCALAR, IQ_KERN_AVX2, IQ_KERN_VNNI, IQ_KERN_AMX;
