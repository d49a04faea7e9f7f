/* Numeric self-test at start: the dispatched kernels against the reference on random data of the
 * model's own shapes. Runs on the calling thread with two one-rank devices of its own; takes well
 * under a second. */
#include "model/selftest.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 3 };

typedef struct Side {
    const Ops *ops;
    Dev *dev;
} Side;

static float noise(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(int32_t)*seed / 2147483648.0f;
}

static uint8_t *noise_bytes(size_t n, uint8_t mask, uint32_t *seed) {
    uint8_t *p = xmalloc(n);
    for (size_t i = 0; i < n; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        p[i] = (uint8_t)(*seed >> 24) & mask;
    }
    return p;
}

/* A random stored matrix; *mem and *scale are the caller's to free. */
static MatView noise_mat(Dtype dtype, int rows, int cols, uint8_t **mem, float **scale,
                         uint32_t *seed) {
    size_t row = dtype_row_bytes(dtype, cols);
    MatView v = {.dtype = dtype, .rows = rows, .cols = cols, .row_bytes = row, .scale2 = 0.01f};
    int sr = (rows + F8_BLOCK - 1) / F8_BLOCK, sc = (cols + F8_BLOCK - 1) / F8_BLOCK;
    *scale = xmalloc((size_t)sr * (size_t)sc * sizeof(float) +
                     (size_t)rows * (size_t)(cols / NVFP4_GROUP + 1));
    if (dtype == DT_BF16) {
        *mem = xmalloc(row * (size_t)rows);
        for (size_t i = 0; i < (size_t)rows * (size_t)cols; i++)
            ((uint16_t *)*mem)[i] = f32_to_bf16(noise(seed));
    } else {
        *mem = noise_bytes(row * (size_t)rows, dtype == DT_F8E4M3 ? 0xbf : 0xff,
                           seed); /* no NaN codes */
    }
    if (dtype == DT_F8E4M3) {
        for (int i = 0; i < sr * sc; i++)
            (*scale)[i] = 0.01f + fabsf(noise(seed));
        v.scale_cols = sc;
    } else if (dtype == DT_NVFP4) {
        v.scale_cols = cols / NVFP4_GROUP;
        for (int i = 0; i < rows * v.scale_cols; i++)
            ((uint8_t *)*scale)[i] = (uint8_t)(0x30 + (i % 16));
    }
    v.data = *mem;
    v.scale = dtype == DT_BF16 ? NULL : *scale;
    return v;
}

/* Largest difference relative to the largest magnitude of the reference. */
static double distance(const float *ref, const float *got, int n) {
    double d = 0, m = 1e-30;
    for (int i = 0; i < n; i++) {
        d = fmax(d, fabs((double)ref[i] - got[i]));
        m = fmax(m, fabs((double)ref[i]));
        if (isnan(got[i]))
            return INFINITY;
    }
    return d / m;
}

static Tensor upload_noise(Side *s, int rows, int cols, uint32_t seed) {
    Tensor t;
    float *v = xmalloc((size_t)rows * (size_t)cols * sizeof *v);
    for (int i = 0; i < rows * cols; i++)
        v[i] = noise(&seed);
    CHECK(s->ops->tensor_new(s->dev, DT_F32, rows, cols, &t, NULL) == 0);
    s->ops->upload(s->dev, &t, v);
    free(v);
    return t;
}

static int run_linear(Side *s, const MatView *v, float *out, Err *err) {
    Tensor x = upload_noise(s, ROWS, v->cols, 7), y = {0};
    Mat *m = NULL;
    int rc = s->ops->mat_load(s->dev, v, &m, err);
    if (rc == 0)
        rc = s->ops->tensor_new(s->dev, DT_F32, ROWS, v->rows, &y, err);
    if (rc == 0) {
        s->ops->linear(s->dev, y, x, m);
        s->ops->download(s->dev, &y, out);
        s->ops->tensor_free(s->dev, &y);
    }
    if (m)
        s->ops->mat_free(s->dev, m);
    s->ops->tensor_free(s->dev, &x);
    return rc;
}

static int check_linear(Side side[2], Dtype dtype, int rows, int cols, Err *err) {
    uint32_t seed = 42;
    uint8_t *mem;
    float *scale, *out = xmalloc((size_t)ROWS * (size_t)rows * 2 * sizeof *out),
                  *other = out + (size_t)ROWS * (size_t)rows;
    MatView v = noise_mat(dtype, rows, cols, &mem, &scale, &seed);
    int rc = run_linear(&side[0], &v, out, err);
    if (rc == 0)
        rc = run_linear(&side[1], &v, other, err);
    double d = rc ? 0 : distance(out, other, ROWS * rows);
    if (rc == 0 && !(d < 1e-5))
        rc = err_set(err, E_MISMATCH,
                     "self-test: %s linear [%d, %d] in %s differs from the reference by %.1e of "
                     "its largest value",
                     side[1].ops->name, rows, cols, dtype_name(dtype), d);
    free(out);
    free(mem);
    free(scale);
    return rc;
}

/* Writes `n` positions of noise as latent rows and index keys, then selects and attends from the
 * last one. */
static int run_attention(Side *s, const Shape *sh, const KvLayout *l, int n, float *out,
                         int32_t *topk, Err *err) {
    const Ops *op = s->ops;
    void *pool;
    int rc = op->pool_new(s->dev, kv_pool_bytes(l), &pool, err);
    if (rc)
        return rc;
    int32_t *tok = xcalloc((size_t)n * 3, sizeof *tok), *pos = tok + n, *seq = pos + n, page[64];
    Tensor list, o, kv = upload_noise(s, n, sh->kv_lora + sh->rope, 11),
                    key = upload_noise(s, n, sh->index_dim, 12);
    Tensor q = upload_noise(s, 1, sh->kv_lora + sh->rope, 13),
           iq = upload_noise(s, 1, sh->index_heads * sh->index_dim, 14),
           iw = upload_noise(s, 1, sh->index_heads, 15);
    CHECK(op->tensor_shared(s->dev, DT_I32, 1, sh->index_topk, &list, NULL) == 0);
    CHECK(op->tensor_new(s->dev, DT_F32, 1, sh->kv_lora, &o, NULL) == 0);
    for (int i = 0; i < n; i++)
        pos[i] = i;
    for (int i = 0; i < 64; i++)
        page[i] = 63 - i;
    op->kv_bind(s->dev, l, pool);
    op->batch_set(s->dev, &(OpsBatch){n, 1, tok, pos, seq, page, 64});
    op->kv_write(s->dev, 0, kv, 0, key);
    op->batch_set(s->dev, &(OpsBatch){1, 1, tok, pos + n - 1, seq, page, 64});
    op->index_select(s->dev, list, iq, iw, sh->index_heads, 0);
    op->mla_attend(s->dev, o, q, list, 1, 0, 0.1f);
    op->download(s->dev, &list, topk);
    op->download(s->dev, &o, out);
    Tensor *all[] = {&list, &o, &kv, &key, &q, &iq, &iw};
    for (size_t i = 0; i < 7; i++)
        op->tensor_free(s->dev, all[i]);
    op->pool_free(s->dev, pool);
    free(tok);
    return 0;
}

static int check_attention(Side side[2], const Shape *sh, Dtype dtype, Err *err) {
    int n = sh->index_topk + 64 < 4096 ? sh->index_topk + 64 : 4096, K = sh->index_topk;
    KvLayout l = {.dtype = dtype,
                  .n_slots = 1,
                  .n_index = 1,
                  .kv_lora = sh->kv_lora,
                  .rope = sh->rope,
                  .index_dim = sh->index_dim,
                  .n_pages = 64};
    float *out = xcalloc((size_t)sh->kv_lora * 2, sizeof *out);
    int32_t *topk = xcalloc((size_t)K * 2, sizeof *topk);
    int rc = 0;
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = run_attention(&side[i], sh, &l, n, out + i * sh->kv_lora, topk + i * K, err);
    int other = 0;
    for (int i = 0; i < K; i++)
        other += topk[i] != topk[K + i];
    double d = distance(out, out + sh->kv_lora, sh->kv_lora);
    if (rc == 0 && (other > 2 || !(d < 1e-4)))
        rc = err_set(err, E_MISMATCH,
                     "self-test: %s attention over %s KV differs from the reference by %.1e, in %d "
                     "of %d positions",
                     side[1].ops->name, dtype_name(dtype), d, other, K);
    free(topk);
    free(out);
    return rc;
}

int selftest_run(const Ops *ops, const Shape *sh, Dtype kv_dtype, Err *err) {
    Side side[2] = {{ops_ref(), NULL}, {ops, NULL}};
    DevConf dc = {.n_ranks = 1,
                  .threads = 1,
                  .max_rows = 4096,
                  .max_seqs = 1,
                  .max_context = 4096,
                  .index_topk = sh->index_topk};
    int rc = side[0].ops->open(&dc, &side[0].dev, err);
    if (rc == 0)
        rc = side[1].ops->open(&dc, &side[1].dev, err);
    static const Dtype stored[] = {DT_BF16, DT_F8E4M3, DT_NVFP4};
    for (int i = 0; i < 3 && rc == 0; i++)
        rc = check_linear(side, stored[i], sh->kv_lora / 4 + 5, sh->hidden, err);
    if (rc == 0)
        rc = check_attention(side, sh, kv_dtype, err);
    side[0].ops->close(&side[0].dev, 1);
    side[1].ops->close(&side[1].dev, 1);
    return rc;
}
