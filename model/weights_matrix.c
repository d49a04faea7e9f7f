/* Matrices and vectors of a checkpoint: tensors put together with their scales, dtypes and shapes
 * checked. Pure; any thread. */
#include "model/weights.h"

#include <stdio.h>
#include <string.h>

static const WeightsTensor *find_suffixed(const Weights *w, const char *name, const char *suffix) {
    char full[600];
    if (snprintf(full, sizeof full, "%s%s", name, suffix) >= (int)sizeof full)
        return NULL;
    return weights_find(w, full);
}

static bool is_2d(const WeightsTensor *t, const char *dtype, int64_t rows, int64_t cols) {
    return t && !strcmp(t->dtype, dtype) && t->n_dims == 2 && t->dim[0] == rows &&
           t->dim[1] == cols;
}

/* "BF16 [256, 512]" */
static void describe(const WeightsTensor *t, char *out, size_t size) {
    int n = snprintf(out, size, "%s [", t->dtype);
    for (int i = 0; i < t->n_dims; i++)
        n += snprintf(out + n, size - (size_t)n, "%s%lld", i ? ", " : "", (long long)t->dim[i]);
    snprintf(out + n, size - (size_t)n, "]");
}

/* Says that name + suffix should be as `expected` says, but is t. */
static int refuse(Err *err, int code, const char *name, const char *suffix, const WeightsTensor *t,
                  const char *expected) {
    char found[128];
    if (!t)
        return err_set(err, E_NOTFOUND, "%s%s is not in the checkpoint, expected %s", name, suffix,
                       expected);
    describe(t, found, sizeof found);
    return err_set(err, code, "%s%s: expected %s, found %s", name, suffix, expected, found);
}

static int refuse_2d(Err *err, const char *name, const char *suffix, const WeightsTensor *t,
                     const char *dtype, int64_t rows, int64_t cols) {
    char expected[96];
    snprintf(expected, sizeof expected, "%s [%lld, %lld]", dtype, (long long)rows, (long long)cols);
    return refuse(err, E_MISMATCH, name, suffix, t, expected);
}

static int with_f8_scale(const Weights *w, const char *name, MatView *v, Err *err) {
    int64_t rows = ((int64_t)v->rows + F8_BLOCK - 1) / F8_BLOCK,
            cols = ((int64_t)v->cols + F8_BLOCK - 1) / F8_BLOCK;
    const WeightsTensor *s = find_suffixed(w, name, ".weight_scale_inv");
    if (!is_2d(s, "F32", rows, cols))
        return refuse_2d(err, name, ".weight_scale_inv", s, "F32", rows, cols);
    v->scale = s->data;
    v->scale_cols = (int)cols;
    return 0;
}

static int with_nvfp4_scale(const Weights *w, const char *name, MatView *v, Err *err) {
    const WeightsTensor *s = find_suffixed(w, name, ".weight_scale"),
                        *s2 = find_suffixed(w, name, ".weight_scale_2");
    int cols = v->cols / NVFP4_GROUP;
    if (v->cols % NVFP4_GROUP)
        return err_set(err, E_UNSUPPORTED, "%s.weight: %d packed columns do not fill groups of %d",
                       name, v->cols, NVFP4_GROUP);
    if (!is_2d(s, "F8_E4M3", v->rows, cols))
        return refuse_2d(err, name, ".weight_scale", s, "F8_E4M3", v->rows, cols);
    if (!s2 || strcmp(s2->dtype, "F32") || s2->n_dims > 1 || s2->bytes != 4)
        return refuse(err, E_MISMATCH, name, ".weight_scale_2", s2, "F32 [] or [1]");
    v->scale = s->data;
    v->scale_cols = cols;
    memcpy(&v->scale2, s2->data, 4);
    return 0;
}

/* Stored dtypes of matrices. */
static const struct {
    const char *name;
    Dtype dtype;
} MAT_DTYPE[] = {{"BF16", DT_BF16}, {"F32", DT_F32}, {"F8_E4M3", DT_F8E4M3}, {"U8", DT_NVFP4}};

static int mat_dtype(const WeightsTensor *t, Dtype *out) {
    for (size_t i = 0; i < sizeof MAT_DTYPE / sizeof *MAT_DTYPE; i++)
        if (!strcmp(MAT_DTYPE[i].name, t->dtype)) {
            *out = MAT_DTYPE[i].dtype;
            return 0;
        }
    return E_UNSUPPORTED;
}

int weights_matrix(const Weights *w, const char *name, int rows, int cols, MatView *out, Err *err) {
    const WeightsTensor *t = find_suffixed(w, name, ".weight");
    MatView v = {.rows = rows, .cols = cols};
    if (!t || mat_dtype(t, &v.dtype))
        return refuse(err, E_UNSUPPORTED, name, ".weight", t,
                      "BF16, F32, F8_E4M3 or (packed e2m1) U8");
    int stored_cols = v.dtype == DT_NVFP4 ? cols / 2 : cols;
    if (!is_2d(t, t->dtype, rows, stored_cols))
        return refuse_2d(err, name, ".weight", t, t->dtype, rows, stored_cols);
    v.data = t->data;
    v.row_bytes = dtype_row_bytes(v.dtype, cols);
    int rc = v.dtype == DT_F8E4M3  ? with_f8_scale(w, name, &v, err)
             : v.dtype == DT_NVFP4 ? with_nvfp4_scale(w, name, &v, err)
                                   : 0;
    if (rc == 0)
        *out = v;
    return rc;
}

int weights_vector(const Weights *w, const char *name, int n, float *out, Err *err) {
    const WeightsTensor *t = weights_find(w, name);
    bool bf16 = t && !strcmp(t->dtype, "BF16"), f32 = t && !strcmp(t->dtype, "F32");
    char expected[64];
    snprintf(expected, sizeof expected, "BF16 or F32 [%d]", n);
    if (!bf16 && !f32)
        return refuse(err, E_UNSUPPORTED, name, "", t, expected);
    if (t->n_dims != 1 || t->dim[0] != n)
        return refuse(err, E_MISMATCH, name, "", t, expected);
    MatView v = {.dtype = bf16 ? DT_BF16 : DT_F32, .rows = 1, .cols = n, .data = t->data};
    mat_row_f32(&v, 0, out);
    return 0;
}
