/* iq_kern.h with AVX2 and FMA: half a line, eight rows of weights, at a time. The products of bytes
 * are summed in pairs of int16, which saturate: 15 * 127 * 2 and 128 * 127 * 2 stay below that. */
#include "kernels/cpu/iq_body.h"
#include "kernels/cpu/kern.h"

#include <immintrin.h>

enum { TOKENS = 2 };

static inline __m256i four(const int8_t *q) {
    int32_t word;
    memcpy(&word, q, 4);
    return _mm256_set1_epi32(word);
}

static inline __m256i add_products(__m256i sum, __m256i u8, __m256i s8) {
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(u8, s8), _mm256_set1_epi16(1)));
}

static inline __m256 scales(const IqPanels *w, const uint8_t *at) {
    __m128i raw = _mm_loadu_si128((const void *)at);
    return w->type == IQ_SCALE_F16
               ? _mm256_cvtph_ps(raw)
               : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

/* Half a block, 8 rows, times n <= TOKENS tokens: exact products. */
static inline __attribute__((always_inline)) void half_block(const uint8_t *code, int bits,
                                                             int group, const int8_t *const *row,
                                                             int n, __m256i dot[TOKENS]) {
    const __m256i low = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128);
    for (int i = 0; i < n; i++)
        dot[i] = _mm256_setzero_si256();
    for (int s = 0; s < group; s += IQ_SUB)
        for (int j = 0; j < (bits == 4 ? 8 : 16); j++, code += 64) {
            __m256i w = _mm256_loadu_si256((const void *)code);
            for (int i = 0; i < n; i++) {
                const int8_t *q = row[i] + s + 4 * j;
                if (bits == 4) {
                    dot[i] = add_products(dot[i], _mm256_and_si256(w, low), four(q));
                    dot[i] = add_products(dot[i], _mm256_and_si256(_mm256_srli_epi16(w, 4), low),
                                          four(q + 32));
                } else {
                    __m256i c = _mm256_xor_si256(w, flip);
                    dot[i] = add_products(dot[i], _mm256_abs_epi8(c), _mm256_sign_epi8(four(q), c));
                }
            }
        }
}

static inline __attribute__((always_inline)) void tokens(const IqPanels *w, const IqActs *a, int t,
                                                         int n, int bits, float *out) {
    size_t width = (size_t)w->n_panels * IQ_ROWS;
    for (int g = 0; g < w->n_groups; g++)
        for (int h = 0; h < 2 * w->n_panels; h++) {
            size_t p = (size_t)(h / 2), half = (size_t)(h % 2);
            const uint8_t *code = w->code + p * w->panel_step + (size_t)g * w->group_step;
            const uint8_t *scale =
                w->scale + p * w->scale_panel_step + (size_t)g * w->scale_group_step;
            const int8_t *row[TOKENS];
            __m256i dot[TOKENS];
            for (int i = 0; i < n; i++)
                row[i] = a->q + (size_t)(t + i) * a->ld_q + (size_t)g * (size_t)w->group;
            half_block(code + half * 32, bits, w->group, row, n, dot);
            for (int i = 0; i < n; i++) {
                size_t at = (size_t)(t + i) * a->ld_g + (size_t)g;
                if (bits == 4)
                    dot[i] = _mm256_sub_epi32(dot[i], _mm256_set1_epi32(8 * a->sum[at]));
                float *sum = out + (size_t)(t + i) * width + p * IQ_ROWS + half * 8;
                __m256 s =
                    _mm256_mul_ps(scales(w, scale + half * 16), _mm256_set1_ps(a->scale[at]));
                _mm256_storeu_ps(
                    sum, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[i]), s, _mm256_loadu_ps(sum)));
            }
        }
}

static inline __attribute__((always_inline)) void all(const IqPanels *w, const IqActs *a, int m,
                                                      int bits, float *out) {
    int t = 0;
    for (; t + TOKENS <= m; t += TOKENS)
        tokens(w, a, t, TOKENS, bits, out);
    if (t < m)
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
    kern_avx2()->silu_mul(out, gate, up, n);
}

const IqKern IQ_KERN_AVX2 = {
    .quant = iq_body_quant,
    .panels = panels,
    .add_scaled = iq_body_add_scaled,
    .silu_mul = silu_mul,
};
