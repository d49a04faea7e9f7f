/* kern.h for AVX2 with FMA and F16C. Compiled with those flags; called only where the processor has
 * them. */
#include "kernels/cpu/kern.h"

#include <immintrin.h>

/* 16 lanes in two registers: lanes 0..7 and 8..15 */
typedef struct V {
    __m256 lo, hi;
} V;
enum { TILE_TOKENS = 1 }; /* four rows of two registers each, and as many to load */

static inline V v_zero(void) {
    return (V){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

static inline V v_set(float x) {
    return (V){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}

static inline V v_load(const float *p) {
    return (V){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

static inline V v_load_part(const float *p, int n) {
    float whole[16] = {0};
    memcpy(whole, p, (size_t)n * sizeof *p);
    return v_load(whole);
}

static inline void v_store(float *p, V v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}

static inline V v_mul(V a, V b) {
    return (V){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

static inline V v_fma(V a, V b, V c) {
    return (V){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

static inline float v_sum(V v) {
    __m256 a = _mm256_add_ps(v.lo, v.hi);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline __m256 bf16_8(const uint8_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

static inline V v_from_bf16(const uint8_t *p) {
    return (V){bf16_8(p), bf16_8(p + 16)};
}

/* An e4m3 byte moved into half precision has an exponent that is 8 too small; NaN codes need their
 * own value. */
static inline __m256 f8_8(const uint8_t *p) {
    __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)p));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(b, _mm_set1_epi16(0x80)), 8);
    __m128i mag = _mm_and_si128(b, _mm_set1_epi16(0x7f));
    __m256 v = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, _mm_slli_epi16(mag, 7))),
                             _mm256_set1_ps(256.0f));
    __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(mag, _mm_set1_epi16(0x7f)));
    return _mm256_blendv_ps(v, _mm256_set1_ps(NAN), _mm256_castsi256_ps(nan));
}

static inline V v_from_f8(const uint8_t *p) {
    return (V){f8_8(p), f8_8(p + 8)};
}

/* Eight codes, one per byte, as fp32: twice their value fits a signed byte. */
static inline __m256 e2m1_8(__m128i code) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m256 v =
        _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(twice, code))),
                      _mm256_set1_ps(0.5f));
    __m256i sign =
        _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_and_si128(code, _mm_set1_epi8(8))), 28);
    return _mm256_or_ps(v, _mm256_castsi256_ps(sign)); /* minus zero too */
}

/* 16 codes from 8 bytes, low nibble first. */
static inline V v_from_e2m1(const uint8_t *p) {
    __m128i b = _mm_loadl_epi64((const __m128i *)p);
    __m128i lo = _mm_and_si128(b, _mm_set1_epi8(15)),
            hi = _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi8(15));
    __m128i code = _mm_unpacklo_epi8(lo, hi);
    return (V){e2m1_8(code), e2m1_8(_mm_srli_si128(code, 8))};
}

#include "kernels/cpu/kern_body.h"

const Kern *kern_avx2(void) {
    return kern_table("cpu-avx2");
}
