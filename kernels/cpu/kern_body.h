/* The loops of kern.h, written once over V, a vector of 16 fp32 numbers. The including file defines
 * V and the v_ functions. Any thread. */

#define UNROLL _Pragma("GCC unroll 4")

/* ---- dequantisation ---- */

static void row_bf16(const uint8_t *p, int n, float *out) {
    int c = 0;
    for (; c + 16 <= n; c += 16)
        v_store(out + c, v_from_bf16(p + 2 * c));
    for (; c < n; c++) {
        uint16_t v;
        memcpy(&v, p + 2 * c, 2);
        out[c] = bf16_to_f32(v);
    }
}

static void row_f8(const uint8_t *p, int n, float scale, float *out) {
    int c = 0;
    V s = v_set(scale);
    for (; c + 16 <= n; c += 16)
        v_store(out + c, v_mul(v_from_f8(p + c), s));
    for (; c < n; c++)
        out[c] = f8e4m3_to_f32(p[c]) * scale;
}

/* Columns up to the next border of the quantisation grid share one scale. */
static void row_f8_blocks(const MatView *m, int r, float *out) {
    const uint8_t *p = m->data + (size_t)r * m->row_bytes;
    const float *scale = m->scale ? (const float *)m->scale +
                                        (size_t)((m->row0 + r) / F8_BLOCK) * (size_t)m->scale_cols
                                  : NULL;
    for (int c = 0; c < m->cols;) {
        int at = m->col0 + c, n = F8_BLOCK - at % F8_BLOCK;
        n = n < m->cols - c ? n : m->cols - c;
        row_f8(p + c, n, scale ? scale[at / F8_BLOCK] : 1.0f, out + c);
        c += n;
    }
}

/* Slices start on a group, so 16 columns share one scale. */
static void row_nvfp4(const MatView *m, int r, float *out) {
    const uint8_t *p = m->data + (size_t)r * m->row_bytes;
    const uint8_t *scale = (const uint8_t *)m->scale +
                           (size_t)(m->row0 + r) * (size_t)m->scale_cols + m->col0 / NVFP4_GROUP;
    for (int c = 0; c < m->cols; c += NVFP4_GROUP)
        v_store(out + c, v_mul(v_from_e2m1(p + c / 2),
                               v_set(f8e4m3_to_f32(scale[c / NVFP4_GROUP]) * m->scale2)));
}

static void k_row(const MatView *m, int r, float *out) {
    switch (m->dtype) {
    case DT_BF16:
        row_bf16(m->data + (size_t)r * m->row_bytes, m->cols, out);
        break;
    case DT_F8E4M3:
        row_f8_blocks(m, r, out);
        break;
    case DT_NVFP4:
        row_nvfp4(m, r, out);
        break;
    default:
        mat_row_f32(m, r, out);
    }
}

/* ---- dot products ---- */

/* One tile: W rows of weights times T tokens, all in registers. */
static inline __attribute__((always_inline)) void tile(const float *const *w, int W, const float *x,
                                                       size_t ld_x, int T, int k, float *out,
                                                       size_t ld_out) {
    V acc[KERN_TILE][TILE_TOKENS];
    UNROLL for (int i = 0; i < W; i++) {
        UNROLL for (int t = 0; t < T; t++) acc[i][t] = v_zero();
    }
    int c = 0;
    for (; c + 16 <= k; c += 16) {
        V xs[TILE_TOKENS];
        UNROLL for (int t = 0; t < T; t++) xs[t] = v_load(x + (size_t)t * ld_x + c);
        UNROLL for (int i = 0; i < W; i++) {
            V ws = v_load(w[i] + c);
            UNROLL for (int t = 0; t < T; t++) acc[i][t] = v_fma(ws, xs[t], acc[i][t]);
        }
    }
    if (c < k) {
        UNROLL for (int i = 0; i < W; i++) {
            V ws = v_load_part(w[i] + c, k - c);
            UNROLL for (int t = 0; t < T; t++) acc[i][t] =
                v_fma(ws, v_load_part(x + (size_t)t * ld_x + c, k - c), acc[i][t]);
        }
    }
    UNROLL for (int i = 0; i < W; i++) {
        UNROLL for (int t = 0; t < T; t++) out[(size_t)t * ld_out + (size_t)i] = v_sum(acc[i][t]);
    }
}

static void k_dots(const float *const *w, int n_w, const float *x, size_t ld_x, int n, int k,
                   float *out, size_t ld_out) {
    int t = 0;
    if (n_w == KERN_TILE) {
        for (; t + TILE_TOKENS <= n; t += TILE_TOKENS)
            tile(w, KERN_TILE, x + (size_t)t * ld_x, ld_x, TILE_TOKENS, k, out + (size_t)t * ld_out,
                 ld_out);
        for (; t < n; t++)
            tile(w, KERN_TILE, x + (size_t)t * ld_x, ld_x, 1, k, out + (size_t)t * ld_out, ld_out);
        return;
    }
    for (; t < n; t++)
        for (int i = 0; i < n_w; i++)
            tile(w + i, 1, x + (size_t)t * ld_x, ld_x, 1, k, out + (size_t)t * ld_out + i, ld_out);
}

static void k_accumulate(float *acc, const float *p, const float *const *rows, int n, int width) {
    int c = 0;
    for (; c + 64 <= width; c += 64) {
        V a[4];
        UNROLL for (int i = 0; i < 4; i++) a[i] = v_load(acc + c + 16 * i);
        for (int j = 0; j < n; j++) {
            V s = v_set(p[j]);
            UNROLL for (int i = 0; i < 4; i++) a[i] = v_fma(s, v_load(rows[j] + c + 16 * i), a[i]);
        }
        UNROLL for (int i = 0; i < 4; i++) v_store(acc + c + 16 * i, a[i]);
    }
    for (; c < width; c++)
        for (int j = 0; j < n; j++)
            acc[c] = __builtin_fmaf(p[j], rows[j][c], acc[c]);
}

static float k_square_sum(const float *x, int n) {
    V acc = v_zero();
    int c = 0;
    for (; c + 16 <= n; c += 16) {
        V v = v_load(x + c);
        acc = v_fma(v, v, acc);
    }
    if (c < n) {
        V v = v_load_part(x + c, n - c);
        acc = v_fma(v, v, acc);
    }
    return v_sum(acc);
}

static const Kern *kern_table(const char *name) {
    static Kern table;
    table = (Kern){name, k_row, k_dots, k_accumulate, k_square_sum, row_bf16, row_f8};
    return &table;
}
