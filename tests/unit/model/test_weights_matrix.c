/* Matrices and vectors of checkpoints: those of the tiny ones, with values, and those that do not
 * fit what was asked for. */
#include "tests/unit/model/checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define TINY     "tests/models/tiny-glm52/"

/* ---- the tiny checkpoints ---- */

typedef struct Walk {
    const Weights *w;
    int n[DT_I32]; /* matrices by dtype */
} Walk;

static void want_matrix(Walk *k, int layer, const char *rest, int rows, int cols, Dtype dtype) {
    char name[160];
    MatView v;
    Err err = {0};
    if (layer < 0)
        snprintf(name, sizeof name, "%s", rest);
    else
        snprintf(name, sizeof name, "model.layers.%d.%s", layer, rest);
    if (weights_matrix(k->w, name, rows, cols, &v, &err))
        fail_msg("%s", err.text);
    assert_int_equal(v.dtype, dtype);
    assert_int_equal(v.rows, rows);
    assert_int_equal(v.cols, cols);
    k->n[v.dtype]++;
}

static void want_mlp(Walk *k, int layer, const char *prefix, int inner, int hidden, Dtype dtype) {
    char rest[96];
    snprintf(rest, sizeof rest, "%s.gate_proj", prefix);
    want_matrix(k, layer, rest, inner, hidden, dtype);
    snprintf(rest, sizeof rest, "%s.up_proj", prefix);
    want_matrix(k, layer, rest, inner, hidden, dtype);
    snprintf(rest, sizeof rest, "%s.down_proj", prefix);
    want_matrix(k, layer, rest, hidden, inner, dtype);
}

static void want_layer(Walk *k, int i, Dtype experts) {
    const Shape *s = weights_shape(k->w);
    float v[512];
    char name[160];
    Err err = {0};
    want_matrix(k, i, "self_attn.q_a_proj", s->q_lora, s->hidden, DT_F8E4M3);
    want_matrix(k, i, "self_attn.kv_a_proj_with_mqa", s->kv_lora + s->rope, s->hidden, DT_F8E4M3);
    want_matrix(k, i, "self_attn.o_proj", s->hidden, s->n_heads * s->v_dim, DT_F8E4M3);
    if (s->layer_has_index[i]) {
        want_matrix(k, i, "self_attn.indexer.wk", s->index_dim, s->hidden, DT_F8E4M3);
        want_matrix(k, i, "self_attn.indexer.weights_proj", s->index_heads, s->hidden, DT_BF16);
    }
    snprintf(name, sizeof name, "model.layers.%d.self_attn.kv_a_layernorm.weight", i);
    assert_int_equal(weights_vector(k->w, name, s->kv_lora, v, &err), 0);
    if (s->layer_dense[i]) {
        want_mlp(k, i, "mlp", s->dense_inner, s->hidden, DT_F8E4M3);
        return;
    }
    want_matrix(k, i, "mlp.gate", s->n_experts, s->hidden, DT_BF16);
    snprintf(name, sizeof name, "model.layers.%d.mlp.gate.e_score_correction_bias", i);
    assert_int_equal(weights_vector(k->w, name, s->n_experts, v, &err), 0);
    assert_true(v[0] > 10 && v[0] < 13);
    want_mlp(k, i, "mlp.shared_experts", s->moe_inner, s->hidden, DT_F8E4M3);
    for (int e = 0; e < s->n_experts; e++) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "mlp.experts.%d", e);
        want_mlp(k, i, prefix, s->moe_inner, s->hidden, experts);
    }
}

static void test_matrices_of_the_model(void **state) {
    (void)state;
    for (int mixed = 0; mixed < 2; mixed++) {
        Walk k = {.w = checkpoint_open(mixed ? TINY "mixed" : TINY "fp8")};
        for (int i = 0; i < 9; i++)
            want_layer(&k, i, mixed && i < 8 ? DT_NVFP4 : DT_F8E4M3);
        want_matrix(&k, -1, "lm_head", 4096, 256, DT_BF16);
        want_matrix(&k, 8, "eh_proj", 256, 512, DT_BF16);
        assert_int_equal(k.n[DT_NVFP4], mixed ? 7 * 16 * 3 : 0);
        weights_close((Weights *)k.w);
    }
}

static float at_f32(const WeightsTensor *t, size_t i) {
    float f;
    memcpy(&f, t->data + 4 * i, 4);
    return f;
}

static void test_values_of_fp8(void **state) {
    (void)state;
    Weights *w = checkpoint_open(TINY "fp8");
    const char *name = "model.layers.2.self_attn.kv_a_proj_with_mqa"; /* [576, 256] */
    const WeightsTensor *t = weights_find(w, "model.layers.2.self_attn.kv_a_proj_with_mqa.weight"),
                        *s = weights_find(
                            w, "model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_inv");
    MatView v;
    float row[256];
    assert_int_equal(weights_matrix(w, name, 576, 256, &v, NULL), 0);
    for (int r = 0; r < 576; r++) {
        mat_row_f32(&v, r, row);
        for (int c = 0; c < 256; c++) {
            float want =
                f8e4m3_to_f32(t->data[r * 256 + c]) * at_f32(s, (size_t)(r / 128 * 2 + c / 128));
            assert_memory_equal(&row[c], &want, 4);
        }
    }
    weights_close(w);
}

static void test_values_of_nvfp4(void **state) {
    (void)state;
    Weights *w = checkpoint_open(TINY "mixed");
    const char *name = "model.layers.3.mlp.experts.7.down_proj"; /* [256, 128] */
    const WeightsTensor *t = weights_find(w, "model.layers.3.mlp.experts.7.down_proj.weight"),
                        *s = weights_find(w, "model.layers.3.mlp.experts.7.down_proj.weight_scale"),
                        *s2 = weights_find(w,
                                           "model.layers.3.mlp.experts.7.down_proj.weight_scale_2");
    MatView v;
    float row[128];
    assert_int_equal(weights_matrix(w, name, 256, 128, &v, NULL), 0);
    for (int r = 0; r < 256; r++) {
        mat_row_f32(&v, r, row);
        for (int c = 0; c < 128; c++) {
            int code = t->data[r * 64 + c / 2] >> (c % 2 * 4) & 15;
            volatile float scale = f8e4m3_to_f32(s->data[r * 8 + c / 16]) * at_f32(s2, 0);
            float want = (code & 8 ? -E2M1[code & 7] : E2M1[code & 7]) * scale;
            assert_memory_equal(&row[c], &want, 4);
        }
    }
    weights_close(w);
}

/* ---- matrices and vectors that do not fit ---- */

#define T CHECKPOINT_ZEROS

static const WeightsTensor odd[] = {
    T("f16.weight", "F16", 2, 2, 32, 64),
    T("e5.weight", "F8_E5M2", 1, 2, 32, 64),
    T("bf16.weight", "BF16", 2, 2, 32, 64),
    T("f32.weight", "F32", 4, 2, 32, 64),
    T("flat.weight", "BF16", 2, 1, 2048, 0),
    T("f8.weight", "F8_E4M3", 1, 2, 130, 260),
    T("f8.weight_scale_inv", "F32", 4, 2, 2, 3),
    T("bare.weight", "F8_E4M3", 1, 2, 32, 64),
    T("f8low.weight", "F8_E4M3", 1, 2, 130, 260),
    T("f8low.weight_scale_inv", "F32", 4, 2, 1, 3),
    T("f8bf.weight", "F8_E4M3", 1, 2, 32, 64),
    T("f8bf.weight_scale_inv", "BF16", 2, 2, 1, 1),
    T("f8flat.weight", "F8_E4M3", 1, 2, 32, 64),
    T("f8flat.weight_scale_inv", "F32", 4, 1, 1, 0),
    T("fp4.weight", "U8", 1, 2, 32, 32),
    T("fp4.weight_scale", "F8_E4M3", 1, 2, 32, 4),
    T("fp4.weight_scale_2", "F32", 4, 0, 0, 0),
    T("fp4one.weight", "U8", 1, 2, 32, 32),
    T("fp4one.weight_scale", "F8_E4M3", 1, 2, 32, 4),
    T("fp4one.weight_scale_2", "F32", 4, 1, 1, 0),
    T("fp4two.weight", "U8", 1, 2, 32, 32),
    T("fp4two.weight_scale", "F8_E4M3", 1, 2, 32, 4),
    T("fp4two.weight_scale_2", "F32", 4, 1, 2, 0),
    T("fp4no2.weight", "U8", 1, 2, 32, 32),
    T("fp4no2.weight_scale", "F8_E4M3", 1, 2, 32, 4),
    T("fp4bare.weight", "U8", 1, 2, 32, 32),
    T("fp4bad.weight", "U8", 1, 2, 32, 32),
    T("fp4bad.weight_scale", "F8_E4M3", 1, 2, 32, 2),
    T("fp4bad.weight_scale_2", "F32", 4, 0, 0, 0),
    T("fp4u8.weight", "U8", 1, 2, 32, 32),
    T("fp4u8.weight_scale", "U8", 1, 2, 32, 4),
    T("fp4u8.weight_scale_2", "F32", 4, 0, 0, 0),
    T("fp4odd.weight", "U8", 1, 2, 32, 12),
    T("v.f32", "F32", 4, 1, 8, 0),
    T("v.bf16", "BF16", 2, 1, 8, 0),
    T("v.i32", "I32", 4, 1, 8, 0),
    T("v.2d", "F32", 4, 2, 1, 8),
};

static const struct {
    const char *name;
    int rows, cols, rc;
    const char *error;
} fits[] = {
    {"bf16", 32, 64, 0, NULL},
    {"f32", 32, 64, 0, NULL},
    {"f8", 130, 260, 0, NULL},
    {"fp4", 32, 64, 0, NULL},
    {"fp4one", 32, 64, 0, NULL},
    {"none", 3, 4, E_NOTFOUND,
     "none.weight is not in the checkpoint, expected BF16, F32, F8_E4M3 or (packed e2m1) U8"},
    {"f16", 32, 64, E_UNSUPPORTED,
     "f16.weight: expected BF16, F32, F8_E4M3 or (packed e2m1) U8, found F16 [32, 64]"},
    {"e5", 32, 64, E_UNSUPPORTED,
     "e5.weight: expected BF16, F32, F8_E4M3 or (packed e2m1) U8, found F8_E5M2 [32, 64]"},
    {"bf16", 64, 32, E_MISMATCH, "bf16.weight: expected BF16 [64, 32], found BF16 [32, 64]"},
    {"bf16", 32, 128, E_MISMATCH, "bf16.weight: expected BF16 [32, 128], found BF16 [32, 64]"},
    {"flat", 32, 64, E_MISMATCH, "flat.weight: expected BF16 [32, 64], found BF16 [2048]"},
    {"f8", 130, 256, E_MISMATCH,
     "f8.weight: expected F8_E4M3 [130, 256], found F8_E4M3 [130, 260]"},
    {"bare", 32, 64, E_NOTFOUND,
     "bare.weight_scale_inv is not in the checkpoint, expected F32 [1, 1]"},
    {"f8low", 130, 260, E_MISMATCH,
     "f8low.weight_scale_inv: expected F32 [2, 3], found F32 [1, 3]"},
    {"f8bf", 32, 64, E_MISMATCH, "f8bf.weight_scale_inv: expected F32 [1, 1], found BF16 [1, 1]"},
    {"f8flat", 32, 64, E_MISMATCH, "f8flat.weight_scale_inv: expected F32 [1, 1], found F32 [1]"},
    {"fp4", 32, 32, E_MISMATCH, "fp4.weight: expected U8 [32, 16], found U8 [32, 32]"},
    {"fp4", 32, 65, E_UNSUPPORTED, "fp4.weight: 65 packed columns do not fill groups of 16"},
    {"fp4odd", 32, 24, E_UNSUPPORTED, "fp4odd.weight: 24 packed columns do not fill groups of 16"},
    {"fp4bare", 32, 64, E_NOTFOUND,
     "fp4bare.weight_scale is not in the checkpoint, expected F8_E4M3 [32, 4]"},
    {"fp4bad", 32, 64, E_MISMATCH,
     "fp4bad.weight_scale: expected F8_E4M3 [32, 4], found F8_E4M3 [32, 2]"},
    {"fp4u8", 32, 64, E_MISMATCH, "fp4u8.weight_scale: expected F8_E4M3 [32, 4], found U8 [32, 4]"},
    {"fp4no2", 32, 64, E_NOTFOUND,
     "fp4no2.weight_scale_2 is not in the checkpoint, expected F32 [] or [1]"},
    {"fp4two", 32, 64, E_MISMATCH, "fp4two.weight_scale_2: expected F32 [] or [1], found F32 [2]"},
};

static const struct {
    const char *name;
    int n, rc;
    const char *error;
} vectors[] = {
    {"v.f32", 8, 0, NULL},
    {"v.bf16", 8, 0, NULL},
    {"v", 8, E_NOTFOUND, "v is not in the checkpoint, expected BF16 or F32 [8]"},
    {"v.f32", 7, E_MISMATCH, "v.f32: expected BF16 or F32 [7], found F32 [8]"},
    {"v.i32", 8, E_UNSUPPORTED, "v.i32: expected BF16 or F32 [8], found I32 [8]"},
    {"v.2d", 8, E_MISMATCH, "v.2d: expected BF16 or F32 [8], found F32 [1, 8]"},
};

static void test_what_does_not_fit(void **state) {
    (void)state;
    Checkpoint c;
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    checkpoint_tensors(&c, "model.safetensors", odd, COUNT(odd));
    Weights *w = checkpoint_open(c.dir);
    for (size_t i = 0; i < COUNT(fits); i++) {
        MatView v = {.rows = -7};
        Err err = {0};
        int rc = weights_matrix(w, fits[i].name, fits[i].rows, fits[i].cols, &v, &err);
        if (rc != fits[i].rc || (rc && strcmp(err.text, fits[i].error)))
            fail_msg("%s: %d, %s", fits[i].name, rc, err.text);
        assert_int_equal(v.rows, rc ? -7 : fits[i].rows);
    }
    for (size_t i = 0; i < COUNT(vectors); i++) {
        float out[8] = {-7};
        Err err = {0};
        int rc = weights_vector(w, vectors[i].name, vectors[i].n, out, &err);
        if (rc != vectors[i].rc || (rc && strcmp(err.text, vectors[i].error)))
            fail_msg("%s: %d, %s", vectors[i].name, rc, err.text);
        assert_true(out[0] == (rc ? -7 : 0));
    }
    char *long_name = xcalloc(1, 1001);
    memset(long_name, 'x', 1000);
    MatView v;
    assert_int_equal(weights_matrix(w, long_name, 1, 1, &v, NULL), E_NOTFOUND);
    free(long_name);
    weights_close(w);
    checkpoint_free(&c);
}

static void test_vector_values(void **state) {
    (void)state;
    const float f32[4] = {1.5f, -0.0f, 1e-40f, 3e38f};
    const uint16_t bf16[4] = {0x3fc0, 0x8000, 0x0001, 0x7f7f};
    const WeightsTensor t[] = {{"f32", "F32", 1, {4}, (const uint8_t *)f32, 16},
                               {"bf16", "BF16", 1, {4}, (const uint8_t *)bf16, 8}};
    Checkpoint c;
    float out[4];
    checkpoint_new(&c);
    checkpoint_link(&c, "config.json", TINY "fp8/config.json");
    checkpoint_tensors(&c, "model.safetensors", t, 2);
    Weights *w = checkpoint_open(c.dir);
    assert_int_equal(weights_vector(w, "f32", 4, out, NULL), 0);
    assert_memory_equal(out, f32, 16);
    assert_int_equal(weights_vector(w, "bf16", 4, out, NULL), 0);
    for (int i = 0; i < 4; i++)
        assert_true(out[i] == bf16_to_f32(bf16[i]));
    weights_close(w);
    checkpoint_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matrices_of_the_model), cmocka_unit_test(test_values_of_fp8),
        cmocka_unit_test(test_values_of_nvfp4),       cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_vector_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
