/* kern.h for AVX2 with FMA and F16C. Compiled with those flags; called only where the processor has
 * them. */
#include "kernels/cpu/kern.h"

#include <immintrin.h>

/* 16 lanes in two registers: lanes 0..7 and 8..15 */
typedef struct V {
    __m256 lo, hi;
} V;
/* What fits 16 registers: four accumulators of two each, and as many to load. */
#define TILE_TOKENS 1
enum { ACC4_COLS = 1, ACC2_COLS = 2 };

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

static inline V v_add(V a, V b) {
    return (V){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

static inline V v_sub(V a, V b) {
    return (V){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

static inline V v_mul(V a, V b) {
    return (V){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

static inline V v_div(V a, V b) {
    return (V){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

static inline V v_fma(V a, V b, V c) {
    return (V){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

/* b where a is NaN, like v_max. */
static inline V v_min(V a, V b) {
    return (V){_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}

static inline V v_max(V a, V b) {
    return (V){_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}

static inline __m256 abs_8(__m256 v) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
}

static inline V v_abs(V v) {
    return (V){abs_8(v.lo), abs_8(v.hi)};
}

static inline V v_round(V v) {
    return (V){_mm256_round_ps(v.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
               _mm256_round_ps(v.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

static inline __m256 times_2_to_8(__m256 v, __m256 n) {
    __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), shift));
}

/* v * 2^n for whole n that keep the exponent in range */
static inline V v_times_2_to(V v, V n) {
    return (V){times_2_to_8(v.lo, n.lo), times_2_to_8(v.hi, n.hi)};
}

static inline float v_sum(V v) {
    __m256 a = _mm256_add_ps(v.lo, v.hi);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

static inline float v_max_all(V v) {
    __m256 a = _mm256_max_ps(v.lo, v.hi);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

/* The first two additions of v_sum on two vectors: four partial sums of each, in a half each. */
static inline __m256 half_sums(V a, V b) {
    __m256 x = _mm256_add_ps(a.lo, a.hi), y = _mm256_add_ps(b.lo, b.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

/* out[0..3] = v_sum of a, b, c, d */
static inline void v_store_sums(float *out, V a, V b, V c, V d) {
    __m256 ab = half_sums(a, b), cd = half_sums(c, d);
    __m256 s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    s = _mm256_add_ps(_mm256_shuffle_ps(s, s, 0x88), _mm256_shuffle_ps(s, s, 0xdd));
    _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

/* ---- stored formats ---- */

static inline __m256 bf16_8(const uint8_t *p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

static inline V v_from_bf16(const uint8_t *p) {
    return (V){bf16_8(p), bf16_8(p + 16)};
}

/* The 16 numbers of two registers, below 2^16 each, in order. */
static inline __m256i pack_16(__m256i lo, __m256i hi) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
}

static inline __m256i to_bf16_8(__m256 v) {
    __m256i u = _mm256_castps_si256(v), odd = _mm256_srli_epi32(_mm256_slli_epi32(u, 15), 31);
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    up = _mm256_blendv_epi8(up, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
    return _mm256_srli_epi32(up, 16);
}

static inline void v_to_bf16(uint8_t *p, V v) {
    _mm256_storeu_si256((__m256i *)p, pack_16(to_bf16_8(v.lo), to_bf16_8(v.hi)));
}

/* An e4m3 byte moved into half precision: its value times 2^-8. Sign extension copies the sign to
 * the bit above the exponent, from where it is removed. */
static inline V v_from_f8(const uint8_t *p) {
    __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    b = _mm256_and_si256(_mm256_slli_epi16(b, 7), _mm256_set1_epi16((int16_t)0xbfff));
    return (V){_mm256_cvtph_ps(_mm256_castsi256_si128(b)),
               _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1))};
}

/* Whether any of the first n codes of W rows is a NaN. */
static inline __attribute__((always_inline)) bool f8_has_nan(const uint8_t *const *p, int W,
                                                             int n) {
    const __m256i high = _mm256_set1_epi8((char)0x80);
    __m256i top = high;
    int c = 0;
    for (; c + 32 <= n; c += 32)
        for (int i = 0; i < W; i++)
            top = _mm256_max_epu8(
                top, _mm256_or_si256(high, _mm256_loadu_si256((const __m256i *)(p[i] + c))));
    __m256i nan = _mm256_cmpeq_epi8(top, _mm256_set1_epi8((char)0xff));
    bool any = _mm256_movemask_epi8(nan) != 0;
    for (; c < n; c++)
        for (int i = 0; i < W; i++)
            any |= (p[i][c] | 0x80) == 0xff;
    return any;
}

static inline __m256i to_f8_8(__m256 v) {
    __m256i sign =
        _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
    __m256 a = _mm256_min_ps(abs_8(v), _mm256_set1_ps(448.0f));
    __m256i u = _mm256_castps_si256(a), odd = _mm256_srli_epi32(_mm256_slli_epi32(u, 11), 31);
    u = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7ffff)), odd);
    __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(u, 20), _mm256_set1_epi32(120 << 3));
    __m256i few = _mm256_cvtps_epi32(_mm256_mul_ps(a, _mm256_set1_ps(512.0f)));
    __m256 small = _mm256_cmp_ps(a, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ),
           nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    code = _mm256_or_si256(_mm256_blendv_epi8(code, few, _mm256_castps_si256(small)), sign);
    return _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), _mm256_castps_si256(nan));
}

/* Bit for bit f32_to_f8e4m3. */
static inline void v_to_f8(uint8_t *p, V v) {
    __m256i words = pack_16(to_f8_8(v.lo), to_f8_8(v.hi));
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(words),
                                                    _mm256_extracti128_si256(words, 1)));
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
    return &TABLE;
}
