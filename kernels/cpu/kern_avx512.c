/* kern.h for AVX-512 (F, BW, VL, DQ). Compiled with those flags; called only where the processor
 * has them. */
#include "kernels/cpu/kern.h"

#include <immintrin.h>

typedef __m512 V;
#define TILE_TOKENS 4
enum { ACC4_COLS = 4, ACC2_COLS = 4 };

static inline V v_zero(void) {
    return _mm512_setzero_ps();
}

static inline V v_set(float x) {
    return _mm512_set1_ps(x);
}

static inline V v_load(const float *p) {
    return _mm512_loadu_ps(p);
}

static inline V v_load_part(const float *p, int n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}

static inline void v_store(float *p, V v) {
    _mm512_storeu_ps(p, v);
}

static inline V v_add(V a, V b) {
    return _mm512_add_ps(a, b);
}

static inline V v_sub(V a, V b) {
    return _mm512_sub_ps(a, b);
}

static inline V v_mul(V a, V b) {
    return _mm512_mul_ps(a, b);
}

static inline V v_div(V a, V b) {
    return _mm512_div_ps(a, b);
}

static inline V v_fma(V a, V b, V c) {
    return _mm512_fmadd_ps(a, b, c);
}

/* b where a is NaN, like v_max. */
static inline V v_min(V a, V b) {
    return _mm512_min_ps(a, b);
}

static inline V v_max(V a, V b) {
    return _mm512_max_ps(a, b);
}

static inline V v_abs(V v) {
    return _mm512_abs_ps(v);
}

static inline V v_round(V v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* v * 2^n for whole n that keep the exponent in range */
static inline V v_times_2_to(V v, V n) {
    __m512i shift = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(v), shift));
}

static inline float v_sum(V v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline float v_max_all(V v) {
    return _mm512_reduce_max_ps(v);
}

/* The first two additions of v_sum on four vectors: four partial sums of each, in a quarter each.
 */
static inline V quarter_sums(V a, V b, V c, V d) {
    V ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    V cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

/* out[0..3] = v_sum of a, b, c, d */
static inline void v_store_sums(float *out, V a, V b, V c, V d) {
    V s = quarter_sums(a, b, c, d);
    s = _mm512_add_ps(s, _mm512_shuffle_ps(s, s, 0x4e));
    s = _mm512_add_ps(s, _mm512_shuffle_ps(s, s, 0xb1));
    s = _mm512_permutexvar_ps(_mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12)), s);
    _mm_storeu_ps(out, _mm512_castps512_ps128(s));
}

/* out[t * ld + i] = v_sum of acc[i][t]: all 16 sums come out of one tree. */
static inline void v_store_tile(float *out, size_t ld, V acc[KERN_TILE][TILE_TOKENS]) {
    V q0 = quarter_sums(acc[0][0], acc[0][1], acc[0][2], acc[0][3]),
      q1 = quarter_sums(acc[1][0], acc[1][1], acc[1][2], acc[1][3]),
      q2 = quarter_sums(acc[2][0], acc[2][1], acc[2][2], acc[2][3]),
      q3 = quarter_sums(acc[3][0], acc[3][1], acc[3][2], acc[3][3]);
    V h0 = _mm512_add_ps(_mm512_shuffle_ps(q0, q1, 0x44), _mm512_shuffle_ps(q0, q1, 0xee)),
      h1 = _mm512_add_ps(_mm512_shuffle_ps(q2, q3, 0x44), _mm512_shuffle_ps(q2, q3, 0xee));
    V s = _mm512_add_ps(_mm512_shuffle_ps(h0, h1, 0x88), _mm512_shuffle_ps(h0, h1, 0xdd));
    _mm_storeu_ps(out, _mm512_castps512_ps128(s));
    _mm_storeu_ps(out + ld, _mm512_extractf32x4_ps(s, 1));
    _mm_storeu_ps(out + 2 * ld, _mm512_extractf32x4_ps(s, 2));
    _mm_storeu_ps(out + 3 * ld, _mm512_extractf32x4_ps(s, 3));
}

/* ---- stored formats ---- */

static inline V v_from_bf16(const uint8_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void v_to_bf16(uint8_t *p, V v) {
    __m512i u = _mm512_castps_si512(v), odd = _mm512_srli_epi32(_mm512_slli_epi32(u, 15), 31);
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}

/* An e4m3 byte moved into half precision: its value times 2^-8. Sign extension copies the sign to
 * the bit above the exponent, from where it is removed. */
static inline V v_from_f8(const uint8_t *p) {
    __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtph_ps(
        _mm256_and_si256(_mm256_slli_epi16(b, 7), _mm256_set1_epi16((int16_t)0xbfff)));
}

/* Whether any of the first n codes of W rows is a NaN. */
static inline __attribute__((always_inline)) bool f8_has_nan(const uint8_t *const *p, int W,
                                                             int n) {
    const __m512i high = _mm512_set1_epi8((char)0x80);
    __m512i top = high;
    int c = 0;
    for (; c + 64 <= n; c += 64)
        for (int i = 0; i < W; i++)
            top = _mm512_max_epu8(top, _mm512_or_si512(high, _mm512_loadu_si512(p[i] + c)));
    for (int i = 0; i < W && c < n; i++)
        top = _mm512_max_epu8(
            top, _mm512_or_si512(high,
                                 _mm512_maskz_loadu_epi8(((__mmask64)1 << (n - c)) - 1, p[i] + c)));
    return _mm512_cmpeq_epi8_mask(top, _mm512_set1_epi8((char)0xff)) != 0;
}

/* Bit for bit f32_to_f8e4m3. */
static inline void v_to_f8(uint8_t *p, V v) {
    __m512i sign =
        _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 24), _mm512_set1_epi32(0x80));
    V a = _mm512_min_ps(_mm512_abs_ps(v), _mm512_set1_ps(448.0f));
    __m512i u = _mm512_castps_si512(a), odd = _mm512_srli_epi32(_mm512_slli_epi32(u, 11), 31);
    u = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7ffff)), odd);
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(u, 20), _mm512_set1_epi32(120 << 3));
    __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ),
              nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    code = _mm512_mask_cvtps_epi32(code, small, _mm512_mul_ps(a, _mm512_set1_ps(512.0f)));
    code = _mm512_mask_mov_epi32(_mm512_or_si512(code, sign), nan, _mm512_set1_epi32(0x7f));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(code));
}

/* 16 codes from 8 bytes, low nibble first. */
static inline V v_from_e2m1(const uint8_t *p) {
    __m128i b = _mm_loadl_epi64((const __m128i *)p);
    __m128i code = _mm_unpacklo_epi8(b, _mm_srli_epi16(b, 4)); /* the table looks at four bits */
    const __m512 value =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(code), value);
}

#include "kernels/cpu/kern_body.h"

const Kern *kern_avx512(void) {
    return &TABLE;
}
