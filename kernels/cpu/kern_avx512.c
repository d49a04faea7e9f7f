/* kern.h for AVX-512 (F, BW, VL, DQ). Compiled with those flags; called only where the processor
 * has them. */
#include "kernels/cpu/kern.h"

#include <immintrin.h>

typedef __m512 V;
enum { TILE_TOKENS = 4 };

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

static inline V v_mul(V a, V b) {
    return _mm512_mul_ps(a, b);
}

static inline V v_fma(V a, V b, V c) {
    return _mm512_fmadd_ps(a, b, c);
}

static inline float v_sum(V v) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline V v_from_bf16(const uint8_t *p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

/* An e4m3 byte moved into half precision has an exponent that is 8 too small; NaN codes need their
 * own value. */
static inline V v_from_f8(const uint8_t *p) {
    __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x80)), 8);
    __m256i mag = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
    V v = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, _mm256_slli_epi16(mag, 7))),
                        _mm512_set1_ps(256.0f));
    __mmask16 nan = _mm256_cmpeq_epi16_mask(mag, _mm256_set1_epi16(0x7f));
    return _mm512_mask_mov_ps(v, nan, _mm512_set1_ps(NAN));
}

/* 16 codes from 8 bytes, low nibble first. */
static inline V v_from_e2m1(const uint8_t *p) {
    __m128i b = _mm_loadl_epi64((const __m128i *)p);
    __m128i lo = _mm_and_si128(b, _mm_set1_epi8(15)),
            hi = _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi8(15));
    __m512i code = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(lo, hi));
    const __m512 value =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(code, value);
}

#include "kernels/cpu/kern_body.h"

const Kern *kern_avx512(void) {
    return kern_table("cpu-avx512");
}
