/* config.json: the published models and the tiny one by the same code. */
#include "tests/unit/model/configs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define TINY     "tests/models/tiny-glm52/"

static void must_read(Shape *s, json_t *root) {
    Err err = {0};
    if (config_shape(s, root, &err))
        fail_msg("%s", err.text);
    json_decref(root);
}

/* ---- the models ---- */

static void check_glm_geometry(const Shape *s) {
    assert_int_equal(s->n_layers, 78);
    assert_int_equal(s->n_mtp, 1);
    assert_int_equal(s->hidden, 6144);
    assert_int_equal(s->vocab, 154880);
    assert_true(s->eps == 1e-5f);
    assert_int_equal(s->n_heads, 64);
    assert_int_equal(s->q_lora, 2048);
    assert_int_equal(s->kv_lora, 512);
    assert_int_equal(s->nope, 192);
    assert_int_equal(s->rope, 64);
    assert_int_equal(s->v_dim, 256);
    assert_int_equal(s->dense_inner, 12288);
    assert_int_equal(s->moe_inner, 2048);
    assert_int_equal(s->n_experts, 256);
    assert_int_equal(s->n_active, 8);
    assert_int_equal(s->n_shared, 1);
    assert_true(s->routed_scale == 2.5f && s->norm_topk);
    assert_int_equal(s->index_heads, 32);
    assert_int_equal(s->index_dim, 128);
    assert_int_equal(s->index_topk, 2048);
    assert_int_equal(s->n_eos, 3);
    assert_int_equal(s->eos[0], 154820);
    assert_int_equal(s->eos[2], 154829);
    for (int i = 0; i < 79; i++)
        assert_int_equal(s->layer_dense[i], i < 3);
}

static void test_glm5(void **state) {
    (void)state;
    const char *const config[] = {CONFIG_GLM5, CONFIG_GLM51};
    for (size_t k = 0; k < COUNT(config); k++) {
        Shape s;
        must_read(&s, config_parse(config[k]));
        check_glm_geometry(&s);
        assert_int_equal(s.max_positions, 202752);
        assert_true(s.rope_theta == 1e6f);
        assert_int_equal(s.n_index_layers, 78);
        for (int i = 0; i < 79; i++) {
            assert_true(s.layer_has_index[i]);
            assert_int_equal(s.index_slot[i], i);
        }
    }
}

static void check_glm52(const Shape *s) {
    check_glm_geometry(s);
    assert_int_equal(s->max_positions, 1048576);
    assert_true(s->rope_theta == 8e6f);
    assert_int_equal(s->n_index_layers, 21);
    int slot = 0;
    for (int i = 0; i < 78; i++) {
        bool full = slot < 21 && CONFIG_GLM52_FULL[slot] == i;
        assert_int_equal(s->layer_has_index[i], full);
        assert_int_equal(s->index_slot[i], full ? slot : -1);
        slot += full;
    }
    assert_int_equal(slot, 21);
    assert_true(s->layer_has_index[78]);
    assert_int_equal(s->index_slot[78], 21);
}

/* By the formula, by the list, by the pattern. */
static void test_glm52(void **state) {
    (void)state;
    Shape s;
    must_read(&s, config_parse(CONFIG_GLM52));
    check_glm52(&s);

    json_t *root = config_parse(CONFIG_GLM52);
    config_set_names(root, "indexer_types", 78, config_glm52_indexer);
    config_set_names(root, "mlp_layer_types", 78, config_glm52_mlp);
    config_set(root, "first_k_dense_replace", NULL);
    config_set(root, "index_topk_freq", "7"); /* the list is the better authority */
    must_read(&s, root);
    check_glm52(&s);

    char pattern[96] = "'";
    for (int i = 0; i < 78; i++)
        strcat(pattern, *config_glm52_indexer(i) == 'f' ? "F" : "S");
    strcat(pattern, "'");
    root = config_parse(CONFIG_GLM52);
    config_set(root, "index_topk_pattern", pattern);
    config_set(root, "index_topk_freq", NULL);
    must_read(&s, root);
    check_glm52(&s);
}

/* What the NVFP4 release has besides. */
static void test_glm52_nvfp4(void **state) {
    (void)state;
    Shape s;
    json_t *root = config_parse(CONFIG_GLM52);
    config_set(root, "moe_router_dtype", NULL);
    config_set(root, "bos_token_id", "0");
    config_set(root, "mlp_bias", "false");
    config_set(root, "num_experts", "256");
    config_set(root, "quantization_config", "{'quant_algo':'NVFP4','ignore':['lm_head']}");
    config_set_names(root, "layer_types", 78, config_glm52_layer);
    must_read(&s, root);
    check_glm52(&s);
}

static void test_tiny(void **state) {
    (void)state;
    static const bool full[9] = {1, 1, 1, 0, 0, 1, 0, 0, 1};
    static const char *const path[] = {TINY "fp8/config.json", TINY "mixed/config.json"};
    for (size_t k = 0; k < COUNT(path); k++) {
        Shape s;
        Err err = {0};
        if (shape_load(&s, path[k], &err))
            fail_msg("%s", err.text);
        assert_int_equal(s.n_layers, 8);
        assert_int_equal(s.hidden, 256);
        assert_int_equal(s.n_index_layers, 4);
        for (int i = 0; i < 9; i++) {
            assert_int_equal(s.layer_has_index[i], full[i]);
            assert_int_equal(s.layer_dense[i], i == 0);
        }
        assert_int_equal(s.eos[1], 4043);
    }
}

/* ---- other forms ---- */

static void test_forms(void **state) {
    (void)state;
    Shape s;
    json_t *root = config_parse(CONFIG_GLM52);
    config_set(root, "eos_token_id", "7");
    config_set(root, "n_shared_experts", NULL);
    config_set(root, "num_nextn_predict_layers", NULL);
    config_set(root, "qk_head_dim", NULL);
    config_set(root, "head_dim", "'anything'");
    config_set(root, "moe_layer_freq", "2");
    config_set(root, "norm_topk_prob", "false");
    config_set(root, "rope_parameters", "{'rope_type':'default','partial_rotary_factor':1.0}");
    config_set(root, "rope_theta", "5e5");
    must_read(&s, root);
    assert_int_equal(s.n_eos, 1);
    assert_int_equal(s.eos[0], 7);
    assert_int_equal(s.n_shared, 0);
    assert_int_equal(s.n_mtp, 0);
    assert_false(s.norm_topk);
    assert_true(s.rope_theta == 5e5f);
    assert_int_equal(s.n_index_layers, 21);
    assert_true(s.layer_dense[2] && s.layer_dense[3] && !s.layer_dense[4]);
}

/* Lists may name the MTP layer too; it owns an indexer whatever they say. */
static void test_lists_with_mtp(void **state) {
    (void)state;
    Shape s;
    json_t *root = config_parse(CONFIG_GLM52);
    config_set_names(root, "indexer_types", 79, config_glm52_indexer);
    config_set_names(root, "mlp_layer_types", 79, config_glm52_mlp);
    config_set_names(root, "layer_types", 79, config_glm52_layer);
    must_read(&s, root);
    check_glm52(&s);
}

static void test_limits(void **state) {
    (void)state;
    Shape s;
    json_t *root = config_parse(CONFIG_GLM52);
    config_set(root, "num_hidden_layers", "127");
    must_read(&s, root);
    assert_int_equal(s.n_layers + s.n_mtp, SHAPE_MAX_LAYERS);
    root = config_parse(CONFIG_GLM52);
    config_set(root, "num_hidden_layers", "128");
    config_set(root, "num_nextn_predict_layers", "0");
    must_read(&s, root);
    root = config_parse(CONFIG_GLM52);
    config_set(root, "num_hidden_layers", "1");
    config_set(root, "first_k_dense_replace", "0");
    must_read(&s, root);
    assert_int_equal(s.n_index_layers, 1);
    assert_int_equal(s.index_slot[1], 1);
}

/* json need not end in NUL */
static void test_length_counts(void **state) {
    (void)state;
    Shape s;
    Err err = {0};
    json_t *root = config_parse(CONFIG_GLM52);
    char *text = json_dumps(root, 0);
    size_t len = strlen(text);
    text[len] = '}';
    assert_int_equal(shape_parse(&s, text, len, &err), 0);
    assert_int_equal(shape_parse(&s, text, len - 1, &err), E_FORMAT);
    free(text);
    json_decref(root);
}

/* ---- ranks ---- */

static void test_ranks(void **state) {
    (void)state;
    Shape s;
    Err err = {0};
    must_read(&s, config_parse(CONFIG_GLM52));
    for (int tp = 1; tp <= 64; tp *= 2)
        assert_int_equal(shape_check_tp(&s, tp, &err), 0);
    assert_int_equal(shape_check_tp(&s, 0, &err), E_INVAL);
    assert_int_equal(shape_check_tp(&s, 3, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, "tp 3 does not divide num_attention_heads 64");
    Shape t = s;
    t.vocab = 154881;
    assert_int_equal(shape_check_tp(&t, 4, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, "tp 4 does not divide vocab_size 154881");
    t = s;
    t.moe_inner = 2048 + 32;
    assert_int_equal(shape_check_tp(&t, 2, &err), 0);
    assert_int_equal(shape_check_tp(&t, 4, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, "tp 4 cuts moe_intermediate_size 2080 into 520, which is no "
                                  "multiple of 16");
    t = s;
    t.dense_inner = 12290;
    assert_int_equal(shape_check_tp(&t, 4, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, "tp 4 does not divide intermediate_size 12290");
    t = s;
    t.v_dim = 8;
    assert_int_equal(shape_check_tp(&t, 64, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, "tp 64 cuts num_attention_heads * v_head_dim 512 into 8, which "
                                  "is no multiple of 16");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_glm5),        cmocka_unit_test(test_glm52),
        cmocka_unit_test(test_glm52_nvfp4), cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_forms),       cmocka_unit_test(test_lists_with_mtp),
        cmocka_unit_test(test_limits),      cmocka_unit_test(test_length_counts),
        cmocka_unit_test(test_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
