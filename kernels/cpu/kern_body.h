/* The loops of kern.h, written once over V, a vector of 16 fp32 numbers. The including file defines
 * V, TILE_TOKENS and the v_ functions. Any thread. */

#include <float.h>

#define UNROLL _Pragma("GCC unroll 4")
#define INLINE static inline __attribute__((always_inline))

/* ---- dequantisation ---- */

static void k_from_bf16(const uint8_t *p, int n, float *out) {
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_store(out + c, v_from_bf16(p + 2 * c));
    for (; c < n; c++) {
        uint16_t v;
        memcpy(&v, p + 2 * c, 2);
        out[c] = bf16_to_f32(v);
    }
}

/* v_from_f8 gives 2^-8 of a code's value, and nonsense for the NaN codes. The missing power of two
 * goes into the scale, which is exact unless it overflows. */
INLINE bool f8_scale_fits(float scale) {
    return fabsf(scale) < 0x1p119f;
}

static void k_from_f8(const uint8_t *p, int n, float scale, float *out) {
    int c = 0, whole = n & ~15;
    if (f8_scale_fits(scale) && !f8_has_nan(&p, 1, whole)) {
        V s = v_set(scale * 256.0f);
        for (; c < whole; c += 16)
            v_store(out + c, v_mul(v_from_f8(p + c), s));
    }
    for (; c < n; c++)
        out[c] = f8e4m3_to_f32(p[c]) * scale;
}

static inline const uint8_t *row_data(const MatView *m, int r) {
    return m->data + (size_t)r * m->row_bytes;
}

/* Scales of the blocks that row r lies in, numbered by columns of the whole matrix. */
static inline const float *row_scales(const MatView *m, int r) {
    return (const float *)m->scale +
           (size_t)((unsigned)(m->row0 + r) / F8_BLOCK) * (size_t)m->scale_cols;
}

/* Columns from c to the next border of the quantisation grid. */
static inline int block_cols(const MatView *m, int c) {
    int n = F8_BLOCK - (int)((unsigned)(m->col0 + c) % F8_BLOCK);
    return n < m->cols - c ? n : m->cols - c;
}

static void row_f8(const MatView *m, int r, float *out) {
    const uint8_t *p = row_data(m, r);
    const float *scale = m->scale ? row_scales(m, r) : NULL;
    for (int c = 0, n; c < m->cols; c += n) {
        n = block_cols(m, c);
        k_from_f8(p + c, n, scale ? scale[(unsigned)(m->col0 + c) / F8_BLOCK] : 1.0f, out + c);
    }
}

enum { GROUPS = 64 }; /* scales of nvfp4 groups that are decoded at a time */

/* Scales of n groups of row r from group g on, with the matrix's own: out[n]. */
INLINE void group_scales(const MatView *m, int r, int g, int n, float *out) {
    const uint8_t *scale = (const uint8_t *)m->scale +
                           (size_t)(m->row0 + r) * (size_t)m->scale_cols + m->col0 / NVFP4_GROUP +
                           g;
    k_from_f8(scale, n, m->scale2, out);
}

static inline int groups_from(const MatView *m, int g) {
    int n = m->cols / NVFP4_GROUP - g;
    return n < GROUPS ? n : GROUPS;
}

static void row_nvfp4(const MatView *m, int r, float *out) {
    const uint8_t *p = row_data(m, r);
    float s[GROUPS];
    for (int g = 0, n; (n = groups_from(m, g)) > 0; g += n) {
        group_scales(m, r, g, n, s);
        for (int i = 0; i < n; i++)
            v_store(out + 16 * (g + i), v_mul(v_from_e2m1(p + 8 * (g + i)), v_set(s[i])));
    }
}

static void k_row(const MatView *m, int r, float *out) {
    switch (m->dtype) {
    case DT_BF16:
        k_from_bf16(row_data(m, r), m->cols, out);
        break;
    case DT_F8E4M3:
        row_f8(m, r, out);
        break;
    case DT_NVFP4:
        row_nvfp4(m, r, out);
        break;
    default:
        mat_row_f32(m, r, out);
    }
}

/* ---- dot products ---- */

/* One tile: KERN_TILE rows of weights times T tokens, all in registers. */
INLINE void tile(const float *const *w, const float *x, size_t ld_x, int T, int k, float *out,
                 size_t ld_out) {
    V acc[KERN_TILE][TILE_TOKENS];
    UNROLL for (int i = 0; i < KERN_TILE; i++) {
        UNROLL for (int t = 0; t < T; t++) acc[i][t] = v_zero();
    }
    int c = 0;
    for (; c + 16 <= k; c += 16) {
        V xs[TILE_TOKENS];
        UNROLL for (int t = 0; t < T; t++) xs[t] = v_load(x + (size_t)t * ld_x + c);
        UNROLL for (int i = 0; i < KERN_TILE; i++) {
            V ws = v_load(w[i] + c);
            UNROLL for (int t = 0; t < T; t++) acc[i][t] = v_fma(ws, xs[t], acc[i][t]);
        }
    }
    if (c < k) {
        UNROLL for (int i = 0; i < KERN_TILE; i++) {
            V ws = v_load_part(w[i] + c, k - c);
            UNROLL for (int t = 0; t < T; t++) acc[i][t] =
                v_fma(ws, v_load_part(x + (size_t)t * ld_x + c, k - c), acc[i][t]);
        }
    }
#if TILE_TOKENS == 4
    if (T == 4) {
        v_store_tile(out, ld_out, acc);
        return;
    }
#endif
    UNROLL for (int t = 0; t < T; t++)
        v_store_sums(out + (size_t)t * ld_out, acc[0][t], acc[1][t], acc[2][t], acc[3][t]);
}

static float dot(const float *a, const float *b, int k) {
    V acc = v_zero();
    int c = 0;
    for (; c + 16 <= k; c += 16)
        acc = v_fma(v_load(a + c), v_load(b + c), acc);
    if (c < k)
        acc = v_fma(v_load_part(a + c, k - c), v_load_part(b + c, k - c), acc);
    return v_sum(acc);
}

static void k_dots(const float *const *w, int n_w, const float *x, size_t ld_x, int n, int k,
                   float *out, size_t ld_out) {
    int t = 0;
    if (n_w < KERN_TILE) {
        for (; t < n; t++)
            for (int i = 0; i < n_w; i++)
                out[(size_t)t * ld_out + (size_t)i] = dot(w[i], x + (size_t)t * ld_x, k);
        return;
    }
#if TILE_TOKENS == 4
    for (; t + 4 <= n; t += 4)
        tile(w, x + (size_t)t * ld_x, ld_x, 4, k, out + (size_t)t * ld_out, ld_out);
    if (t + 2 <= n) {
        tile(w, x + (size_t)t * ld_x, ld_x, 2, k, out + (size_t)t * ld_out, ld_out);
        t += 2;
    }
#endif
    for (; t < n; t++)
        tile(w, x + (size_t)t * ld_x, ld_x, 1, k, out + (size_t)t * ld_out, ld_out);
}

enum { PREFETCH_BYTES = 1024 }; /* ahead in a row, or in the rows after it when they are short */

/* ---- dot products with stored rows: W rows, acc[W] ---- */

INLINE void bf16_dots(const MatView *m, int r, int W, const float *x, V *acc) {
    int c = 0, k = m->cols;
    for (; c + 16 <= k; c += 16) {
        V xs = v_load(x + c);
        UNROLL for (int i = 0; i < W; i++) acc[i] =
            v_fma(v_from_bf16(row_data(m, r + i) + 2 * c), xs, acc[i]);
    }
    if (c < k) {
        float rest[16];
        UNROLL for (int i = 0; i < W; i++) {
            k_from_bf16(row_data(m, r + i) + 2 * c, k - c, rest);
            acc[i] = v_fma(v_load_part(rest, k - c), v_load_part(x + c, k - c), acc[i]);
        }
    }
}

/* n columns of one row, with NaN codes, an extreme scale or a tail. */
static V f8_dot_slow(const uint8_t *p, int n, float scale, const float *x, V acc) {
    float w[F8_BLOCK];
    k_from_f8(p, n, scale, w);
    int c = 0;
    for (; c + 16 <= n; c += 16)
        acc = v_fma(v_load(w + c), v_load(x + c), acc);
    return c < n ? v_fma(v_load_part(w + c, n - c), v_load_part(x + c, n - c), acc) : acc;
}

INLINE void f8_dots(const MatView *m, int r, int W, const float *x, V *acc) {
    const uint8_t *p[KERN_TILE];
    const float *scales[KERN_TILE];
    UNROLL for (int i = 0; i < W; i++) {
        p[i] = row_data(m, r + i);
        scales[i] = m->scale ? row_scales(m, r + i) : NULL;
    }
    for (int c = 0, n; c < m->cols; c += n, x += n) {
        float s[KERN_TILE];
        bool fits = true;
        n = block_cols(m, c);
        UNROLL for (int i = 0; i < W; i++) {
            s[i] = scales[i] ? scales[i][(unsigned)(m->col0 + c) / F8_BLOCK] : 1.0f;
            fits = fits && f8_scale_fits(s[i]);
        }
        if (fits && n % 16 == 0 && !f8_has_nan(p, W, n)) {
            V vs[KERN_TILE];
            UNROLL for (int i = 0; i < W; i++) {
                __builtin_prefetch(p[i] + PREFETCH_BYTES);
                __builtin_prefetch(p[i] + PREFETCH_BYTES + 64);
            }
            UNROLL for (int i = 0; i < W; i++) vs[i] = v_set(s[i] * 256.0f);
            for (int at = 0; at < n; at += 16) {
                V xs = v_load(x + at);
                UNROLL for (int i = 0; i < W; i++) acc[i] =
                    v_fma(v_mul(v_from_f8(p[i] + at), vs[i]), xs, acc[i]);
            }
        } else {
            UNROLL for (int i = 0; i < W; i++) acc[i] = f8_dot_slow(p[i], n, s[i], x, acc[i]);
        }
        UNROLL for (int i = 0; i < W; i++) p[i] += n;
    }
}

INLINE void nvfp4_dots(const MatView *m, int r, int W, const float *x, V *acc) {
    float s[KERN_TILE][GROUPS];
    for (int g = 0, n; (n = groups_from(m, g)) > 0; g += n) {
        UNROLL for (int i = 0; i < W; i++) group_scales(m, r + i, g, n, s[i]);
        for (int j = 0; j < n; j++) {
            V xs = v_load(x + 16 * (g + j));
            UNROLL for (int i = 0; i < W; i++) acc[i] = v_fma(
                v_mul(v_from_e2m1(row_data(m, r + i) + 8 * (g + j)), v_set(s[i][j])), xs, acc[i]);
        }
    }
}

INLINE void stored_dots(const MatView *m, int r, int W, const float *x, float *out) {
    V acc[KERN_TILE];
    UNROLL for (int i = 0; i < KERN_TILE; i++) acc[i] = v_zero();
    if (m->dtype == DT_BF16)
        bf16_dots(m, r, W, x, acc);
    else if (m->dtype == DT_F8E4M3)
        f8_dots(m, r, W, x, acc);
    else
        nvfp4_dots(m, r, W, x, acc);
    if (W == KERN_TILE)
        v_store_sums(out, acc[0], acc[1], acc[2], acc[3]);
    else
        *out = v_sum(acc[0]);
}

static void k_row_dots(const MatView *m, int r, int n_w, const float *x, float *out) {
    if (n_w == KERN_TILE) {
        stored_dots(m, r, KERN_TILE, x, out);
        return;
    }
    for (int i = 0; i < n_w; i++)
        stored_dots(m, r + i, 1, x, out + i);
}

/* ---- sums of scaled rows ---- */

/* A accumulators, columns [c, c + 16 * C), in registers while the rows go by. */
INLINE void accumulate(float *const *acc, int A, const float *p, size_t ld_p,
                       const float *const *rows, int n, int c, int C) {
    V a[KERN_TILE][4];
    UNROLL for (int i = 0; i < A; i++) {
        UNROLL for (int v = 0; v < C; v++) a[i][v] = v_load(acc[i] + c + 16 * v);
    }
    for (int j = 0; j < n; j++) {
        V row[4];
        UNROLL for (int v = 0; v < C; v++) row[v] = v_load(rows[j] + c + 16 * v);
        UNROLL for (int i = 0; i < A; i++) {
            V s = v_set(p[(size_t)i * ld_p + (size_t)j]);
            UNROLL for (int v = 0; v < C; v++) a[i][v] = v_fma(s, row[v], a[i][v]);
        }
    }
    UNROLL for (int i = 0; i < A; i++) {
        UNROLL for (int v = 0; v < C; v++) v_store(acc[i] + c + 16 * v, a[i][v]);
    }
}

static void k_accumulate(float *const *acc, int n_acc, const float *p, size_t ld_p,
                         const float *const *rows, int n, int width) {
    for (int i = 0, m; i < n_acc; i += m, p += (size_t)m * ld_p) {
        int c = 0;
        m = n_acc - i >= 4 ? 4 : n_acc - i >= 2 ? 2 : 1;
        if (m == 4)
            for (; c + 16 * ACC4_COLS <= width; c += 16 * ACC4_COLS)
                accumulate(acc + i, 4, p, ld_p, rows, n, c, ACC4_COLS);
        else if (m == 2)
            for (; c + 16 * ACC2_COLS <= width; c += 16 * ACC2_COLS)
                accumulate(acc + i, 2, p, ld_p, rows, n, c, ACC2_COLS);
        else
            for (; c + 64 <= width; c += 64)
                accumulate(acc + i, 1, p, ld_p, rows, n, c, 4);
        for (; c + 16 <= width; c += 16)
            for (int k = 0; k < m; k++)
                accumulate(acc + i + k, 1, p + (size_t)k * ld_p, ld_p, rows, n, c, 1);
        for (; c < width; c++)
            for (int k = 0; k < m; k++)
                for (int j = 0; j < n; j++)
                    acc[i + k][c] =
                        __builtin_fmaf(p[(size_t)k * ld_p + (size_t)j], rows[j][c], acc[i + k][c]);
    }
}

/* ---- element-wise ---- */

static float k_square_sum(const float *x, int n) {
    return dot(x, x, n);
}

static float k_max_abs(const float *x, int n) {
    V top = v_zero();
    int c = 0;
    for (; c + 16 <= n; c += 16)
        top = v_max(v_abs(v_load(x + c)), top);
    float best = v_max_all(top);
    for (; c < n; c++)
        best = fmaxf(best, fabsf(x[c]));
    return best;
}

static void k_scale(float *x, float factor, int n) {
    V f = v_set(factor);
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_store(x + c, v_mul(v_load(x + c), f));
    for (; c < n; c++)
        x[c] *= factor;
}

/* e^x within 2e-7 of its value for x in [-86.5, 88.3]; beyond, the value at that end. NaN stays.
 * 2^n times the Taylor series of the rest, |rest| <= ln(2) / 2. */
static inline V v_exp(V x) {
    x = v_max(v_set(-86.5f), v_min(v_set(88.3f), x));
    V n = v_round(v_mul(x, v_set(0x1.715476p+0f)));
    V r = v_fma(n, v_set(-0x1.62e4p-1f), x); /* ln 2 in two parts, the first of few bits */
    r = v_fma(n, v_set(-0x1.7f7d1cp-20f), r);
    V p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return v_times_2_to(p, n);
}

static inline V silu_mul_16(V gate, V up) {
    V e = v_exp(v_mul(gate, v_set(-1.0f)));
    return v_mul(v_div(gate, v_add(v_set(1.0f), e)), up);
}

static void k_silu_mul(float *out, const float *gate, const float *up, int n) {
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_store(out + c, silu_mul_16(v_load(gate + c), v_load(up + c)));
    if (c < n) {
        float rest[16];
        v_store(rest, silu_mul_16(v_load_part(gate + c, n - c), v_load_part(up + c, n - c)));
        memcpy(out + c, rest, (size_t)(n - c) * sizeof *out);
    }
}

static float k_softmax_fold(float *s, float scale, float *best, float *total) {
    V x = v_mul(v_load(s), v_set(scale));
    float top = fmaxf(*best, v_max_all(x)), shrink = 1.0f;
    if (top > *best) {
        float lanes[16];
        v_store(lanes, v_exp(v_set(*best - top)));
        shrink = lanes[0];
        *best = top;
    }
    V e = v_exp(v_sub(x, v_set(top)));
    v_store(s, e);
    *total = *total * shrink + v_sum(e);
    return shrink;
}

static void k_relu_sum(float *score, const float *d, size_t ld, const float *w, int heads, int n) {
    for (int c = 0; c < n; c += 16) {
        V sum = v_zero();
        for (int h = 0; h < heads; h++)
            sum = v_fma(v_set(w[h]), v_max(v_load(d + (size_t)h * ld + c), v_zero()), sum);
        v_store(score + c, sum);
    }
}

/* ---- to stored formats ---- */

static void k_to_bf16(const float *in, int n, uint8_t *out) {
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_to_bf16(out + 2 * c, v_load(in + c));
    for (; c < n; c++) {
        uint16_t v = f32_to_bf16(in[c]);
        memcpy(out + 2 * c, &v, 2);
    }
}

static void k_to_f8(const float *in, int n, float scale, uint8_t *out) {
    V s = v_set(scale);
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_to_f8(out + c, v_div(v_load(in + c), s));
    for (; c < n; c++)
        out[c] = f32_to_f8e4m3(in[c] / scale);
}

static const Kern TABLE = {.row = k_row,
                           .dots = k_dots,
                           .row_dots = k_row_dots,
                           .accumulate = k_accumulate,
                           .square_sum = k_square_sum,
                           .max_abs = k_max_abs,
                           .scale = k_scale,
                           .silu_mul = k_silu_mul,
                           .softmax_fold = k_softmax_fold,
                           .relu_sum = k_relu_sum,
                           .from_bf16 = k_from_bf16,
                           .from_f8 = k_from_f8,
                           .to_bf16 = k_to_bf16,
                           .to_f8 = k_to_f8};
