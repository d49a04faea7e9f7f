/* iq_kern.h with AVX-512 VNNI: one lane per row of weights; a line of 64 codes meets four broadcast
 * activations. */
#include "kernels/cpu/iq_body.h"
#include "kernels/cpu/iq_vec.h"
#include "kernels/cpu/kern.h"

enum {
    TOKENS = 4, /* that share a line in registers */
    CHAINS = 4,
    AHEAD = 2, /* blocks between asking memory for one and reading it */
};

static inline __m512i four(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return _mm512_set1_epi32(word);
}

/* dot[i] += one sub-block of 64 columns . q[i] for n tokens. Several sums per token keep the chains
 * of additions short. */
static inline __attribute__((always_inline)) void sub4(const uint8_t *code, const uint8_t *ahead,
                                                       const int8_t *const *q, int n,
                                                       __m512i dot[][CHAINS]) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        _mm_prefetch((const char *)ahead + 64 * j, _MM_HINT_T0);
        __m512i w = _mm512_loadu_si512(code + 64 * j), lo = _mm512_and_si512(w, low),
                hi = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            __m512i *d = &dot[i][j % 2 * 2];
            d[0] = _mm512_dpbusd_epi32(d[0], lo, four(q[i] + 4 * j));
            d[1] = _mm512_dpbusd_epi32(d[1], hi, four(q[i] + 32 + 4 * j));
        }
    }
}

static inline __attribute__((always_inline)) void sub8(const uint8_t *code, const uint8_t *ahead,
                                                       const int8_t *const *q, int n,
                                                       __m512i dot[][CHAINS]) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
        _mm_prefetch((const char *)ahead + 64 * j, _MM_HINT_T0);
        __m512i w = _mm512_loadu_si512(code + 64 * j);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++)
            dot[i][j % CHAINS] = _mm512_dpbusd_epi32(dot[i][j % CHAINS], w, four(q[i] + 4 * j));
    }
}

/* Adds one block's product with n <= TOKENS tokens to acc[i * width]. Inlined with constant n and
 * bits. */
static inline __attribute__((always_inline)) void
block(const uint8_t *code, const uint8_t *ahead, int bits, int group, __m512 scale,
      const int8_t *const *row, const IqActs *a, int t, int g, int n, float *acc, size_t width) {
    __m512i dot[TOKENS][CHAINS];
    const int8_t *q[TOKENS];
#pragma GCC unroll 4
    for (int i = 0; i < n; i++)
        dot[i][0] = dot[i][1] = dot[i][2] = dot[i][3] = _mm512_setzero_si512();
    for (int s = 0; s < group;
         s += IQ_SUB, code += IQ_SUB * IQ_ROWS * bits / 8, ahead += IQ_SUB * IQ_ROWS * bits / 8) {
#pragma GCC unroll 4
        for (int i = 0; i < n; i++)
            q[i] = row[i] + g * group + s;
        if (bits == 4)
            sub4(code, ahead, q, n, dot);
        else
            sub8(code, ahead, q, n, dot);
    }
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        size_t at = (size_t)(t + i) * a->ld_g + (size_t)g;
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(dot[i][0], dot[i][1]),
                                       _mm512_add_epi32(dot[i][2], dot[i][3])),
                exact = _mm512_sub_epi32(sum, _mm512_set1_epi32((1 << (bits - 1)) * a->sum[at]));
        __m512 s = _mm512_mul_ps(scale, _mm512_set1_ps(a->scale[at])),
               old = _mm512_loadu_ps(acc + (size_t)i * width);
        _mm512_storeu_ps(acc + (size_t)i * width,
                         _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), s, old));
    }
}

/* Block i in the order in which blocks are read. */
static inline const uint8_t *block_at(const IqPanels *w, int i) {
    return w->code + (size_t)(i % w->n_panels) * w->panel_step +
           (size_t)(i / w->n_panels) * w->group_step;
}

static inline __attribute__((always_inline)) void tokens(const IqPanels *w, const IqActs *a, int t,
                                                         int n, int bits, float *out) {
    size_t width = (size_t)w->n_panels * IQ_ROWS;
    const int8_t *row[TOKENS];
    for (int i = 0; i < n; i++)
        row[i] = a->q + (size_t)(t + i) * a->ld_q;
    int n_blocks = w->n_groups * w->n_panels;
    for (int i = 0; i < n_blocks; i++) {
        int p = i % w->n_panels, g = i / w->n_panels;
        /* One line is asked for with each line read: more at a time would wait for each other. */
        const uint8_t *ahead = block_at(w, i + AHEAD < n_blocks ? i + AHEAD : i);
        block(block_at(w, i), ahead, bits, w->group, iq_scales(w, p, g), row, a, t, g, n,
              out + (size_t)t * width + (size_t)p * IQ_ROWS, width);
    }
}

static inline __attribute__((always_inline)) void all(const IqPanels *w, const IqActs *a, int m,
                                                      int bits, float *out) {
    int t = 0;
    for (; t + TOKENS <= m; t += TOKENS)
        tokens(w, a, t, TOKENS, bits, out);
    if (m - t == 3)
        tokens(w, a, t, 3, bits, out);
    else if (m - t == 2)
        tokens(w, a, t, 2, bits, out);
    else if (m - t == 1)
        tokens(w, a, t, 1, bits, out);
}

static void panels(const IqPanels *w, const IqActs *a, int m, float *out) {
    memset(out, 0, (size_t)m * (size_t)w->n_panels * IQ_ROWS * sizeof *out);
    if (w->bits == 4)
        all(w, a, m, 4, out);
    else
        all(w, a, m, 8, out);
}

static void silu_mul(float *out, const float *gate, const float *up, int n) {
    kern_avx512()->silu_mul(out, gate, up, n);
}

const IqKern IQ_KERN_VNNI = {
    .quant = iq_body_quant,
    .panels = panels,
    .add_scaled = iq_body_add_scaled,
    .silu_mul = silu_mul,
};
