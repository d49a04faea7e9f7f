/* The AMX kernel: two panels of weights are unpacked to signed bytes in L1, once for all tokens of
 * a call; each tile of 16 tokens is then multiplied with both. Tiles are configured for each call
 * and released after it: another library in the thread may use them too. */
#pragma once

#include "kernels/cpu/iq_body.h"
#include "kernels/cpu/iq_tile.h"
#include "kernels/cpu/iq_vec.h"

/* Tiles: 0 and 1 the products with the two panels, 2 and 3 the activations of two sub-blocks, 4 to
 * 7 the weights: 4 + 2 * panel + sub-block. */

enum { AHEAD = 4 }; /* groups between asking memory for codes and reading them */

typedef struct AmxScratch {
    int8_t weight[2][IQ_MAX_GROUP / IQ_SUB][16][64];
    int32_t product[2][2][IQ_TILE_ROWS][16]; /* of the tile before, while the next one runs */
} AmxScratch;

typedef struct AmxConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxConfig;

static const AmxConfig AMX_CONFIG = {.palette = 1,
                                     .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                     .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* One sub-block of 64 columns to the order of tiles; one line of `ahead` is asked for with each
 * line read. */
static inline void unpack(const uint8_t *code, const uint8_t *ahead, int bits, int8_t out[16][64]) {
    if (bits == 8) {
        for (int j = 0; j < 16; j++) {
            _mm_prefetch((const char *)ahead + 64 * j, _MM_HINT_T1);
            __m512i w = _mm512_loadu_si512(code + 64 * j);
            _mm512_store_si512(out[j], _mm512_xor_si512(w, _mm512_set1_epi8(-128)));
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15), zero_point = _mm512_set1_epi8(8);
    for (int j = 0; j < 8; j++) {
        _mm_prefetch((const char *)ahead + 64 * j, _MM_HINT_T1);
        __m512i w = _mm512_loadu_si512(code + 64 * j);
        _mm512_store_si512(out[j], _mm512_sub_epi8(_mm512_and_si512(w, low), zero_point));
        _mm512_store_si512(
            out[8 + j],
            _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(w, 4), low), zero_point));
    }
}

/* Scales n rows of both products of a tile of tokens, and adds them to sum[n, width]. */
static inline void fold(int32_t product[2][IQ_TILE_ROWS][16], const __m512 scale[2],
                        const float *act_scale, size_t ld_g, int n, float *sum, size_t width) {
    for (int i = 0; i < n; i++, sum += width) {
        __m512 s = _mm512_set1_ps(act_scale[(size_t)i * ld_g]);
        for (int p = 0; p < 2; p++) {
            __m512 f = _mm512_cvtepi32_ps(_mm512_load_si512(product[p][i])),
                   old = _mm512_loadu_ps(sum + p * 16);
            _mm512_storeu_ps(sum + p * 16, _mm512_fmadd_ps(f, _mm512_mul_ps(scale[p], s), old));
        }
    }
}

/* The product of one tile of tokens, at q, with the unpacked group of both panels. */
static inline __attribute__((always_inline)) void multiply(const int8_t *q, size_t ld_q, int subs,
                                                           int32_t out[2][IQ_TILE_ROWS][16]) {
    tile_zero(0);
    tile_zero(1);
    tile_load(2, q, ld_q);
    tile_dot(0, 2, 4);
    tile_dot(1, 2, 6);
    if (subs == 2) {
        tile_load(3, q + IQ_SUB, ld_q);
        tile_dot(0, 3, 5);
        tile_dot(1, 3, 7);
    }
    tile_store(0, out[0], 64);
    tile_store(1, out[1], 64);
    tile_fence();
}

/* One group of panels p and p + 1. */
static inline void group_pair(const IqPanels *w, const IqActs *a, int m, int p, int g,
                              AmxScratch *s, float *out) {
    int subs = w->group / IQ_SUB;
    size_t width = (size_t)w->n_panels * IQ_ROWS, sub_bytes = (size_t)w->bits * 128;
    for (int i = 0; i < 2; i++)
        for (int sub = 0; sub < subs; sub++) {
            const uint8_t *code = w->code + (size_t)(p + i) * w->panel_step +
                                  (size_t)g * w->group_step + (size_t)sub * sub_bytes;
            const uint8_t *ahead = g + AHEAD < w->n_groups ? code + AHEAD * w->group_step : code;
            unpack(code, ahead, w->bits, s->weight[i][sub]);
        }
    tile_fence();
    tile_load(4, s->weight[0][0], 64);
    tile_load(6, s->weight[1][0], 64);
    if (subs == 2) {
        tile_load(5, s->weight[0][1], 64);
        tile_load(7, s->weight[1][1], 64);
    }
    __m512 scale[2] = {iq_scales(w, p, g), iq_scales(w, p + 1, g)};
    const int8_t *q = a->q + (size_t)g * (size_t)w->group;
    const float *act = a->scale + g;
    float *sum = out + (size_t)p * IQ_ROWS;
    multiply(q, a->ld_q, subs, s->product[0]);
    int tile = 0;
    for (int t = IQ_TILE_ROWS; t < m; t += IQ_TILE_ROWS, tile++) {
        q += IQ_TILE_ROWS * a->ld_q;
        multiply(q, a->ld_q, subs, s->product[(tile + 1) & 1]);
        fold(s->product[tile & 1], scale, act, a->ld_g, IQ_TILE_ROWS, sum, width);
        act += IQ_TILE_ROWS * a->ld_g;
        sum += IQ_TILE_ROWS * width;
    }
    fold(s->product[tile & 1], scale, act, a->ld_g, (m - 1) % IQ_TILE_ROWS + 1, sum, width);
}

/* See IqKern.panels. */
static void amx_panels(const IqPanels *w, const IqActs *a, int m, float *out) {
    _Alignas(64) AmxScratch scratch;
    memset(out, 0, (size_t)m * (size_t)w->n_panels * IQ_ROWS * sizeof *out);
    tile_config(&AMX_CONFIG);
    for (int p = 0; p < w->n_panels; p += 2)
        for (int g = 0; g < w->n_groups; g++)
            group_pair(w, a, m, p, g, &scratch, out);
    tile_release();
}
