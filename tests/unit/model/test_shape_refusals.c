/* config.json: what is refused, and with which words. */
#include "tests/unit/model/configs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define TINY     "tests/models/tiny-glm52/"

static const char *const required[] = {
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "norm_topk_prob",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "first_k_dense_replace",
    "eos_token_id",
    "rope_parameters/rope_theta",
};

static void test_missing_fields(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(required); i++)
        for (int null = 0; null < 2; null++) {
            Shape s;
            Err err = {0};
            char want[128];
            const char *slash = strchr(required[i], '/');
            json_t *root = config_parse(CONFIG_GLM52);
            config_set(root, required[i], null ? "null" : NULL);
            snprintf(want, sizeof want, "config.json: %s is missing",
                     slash ? slash + 1 : required[i]);
            assert_int_equal(config_shape(&s, root, &err), E_FORMAT);
            assert_string_equal(err.text, want);
            json_decref(root);
        }
}

static const struct {
    const char *path, *value;
    int code;
    const char *error; /* after "config.json: " */
} bad[] = {
    {"model_type", "'llama'", E_UNSUPPORTED,
     "model_type: expected \"glm_moe_dsa\", found \"llama\""},
    {"model_type", "7", E_UNSUPPORTED, "model_type: expected \"glm_moe_dsa\", found 7"},
    {"hidden_act", "'gelu'", E_UNSUPPORTED, "hidden_act: expected \"silu\", found \"gelu\""},
    {"scoring_func", "'softmax'", E_UNSUPPORTED,
     "scoring_func: expected \"sigmoid\", found \"softmax\""},
    {"topk_method", "'greedy'", E_UNSUPPORTED,
     "topk_method: expected \"noaux_tc\", found \"greedy\""},
    {"moe_router_dtype", "'bfloat16'", E_UNSUPPORTED,
     "moe_router_dtype: expected \"float32\", found \"bfloat16\""},
    {"n_group", "8", E_UNSUPPORTED, "n_group: expected 1, found 8"},
    {"topk_group", "4", E_UNSUPPORTED, "topk_group: expected 1, found 4"},
    {"attention_bias", "true", E_UNSUPPORTED, "attention_bias: expected false, found true"},
    {"mlp_bias", "true", E_UNSUPPORTED, "mlp_bias: expected false, found true"},
    {"tie_word_embeddings", "true", E_UNSUPPORTED,
     "tie_word_embeddings: expected false, found true"},
    {"rope_interleave", "false", E_UNSUPPORTED, "rope_interleave: expected true, found false"},
    {"indexer_rope_interleave", "0", E_UNSUPPORTED,
     "indexer_rope_interleave: expected true, found 0"},
    {"rope_parameters", "'default'", E_FORMAT,
     "rope_parameters: expected an object, found \"default\""},
    {"rope_parameters/rope_type", "'yarn'", E_UNSUPPORTED,
     "rope_type: expected \"default\", found \"yarn\""},
    {"rope_parameters/partial_rotary_factor", "0.5", E_UNSUPPORTED,
     "partial_rotary_factor: expected 1, found 0.5"},
    {"rope_parameters/rope_theta", "0", E_UNSUPPORTED,
     "rope_theta: expected a number from 1 to 1e+12, found 0"},
    {"rope_scaling", "{'type':'yarn'}", E_UNSUPPORTED,
     "rope_scaling: expected null, found {\"type\":\"yarn\"}"},
    {"hidden_size", "'6144'", E_FORMAT,
     "hidden_size: expected an integer from 16 to 65536, found \"6144\""},
    {"hidden_size", "6144.0", E_FORMAT,
     "hidden_size: expected an integer from 16 to 65536, found 6144.0"},
    {"hidden_size", "-1", E_UNSUPPORTED,
     "hidden_size: expected an integer from 16 to 65536, found -1"},
    {"vocab_size", "9223372036854775807", E_UNSUPPORTED,
     "vocab_size: expected an integer from 1 to 4194304, found 9223372036854775807"},
    {"num_hidden_layers", "129", E_UNSUPPORTED,
     "num_hidden_layers: expected an integer from 1 to 128, found 129"},
    {"num_hidden_layers", "128", E_UNSUPPORTED,
     "num_hidden_layers 128 + num_nextn_predict_layers 1: expected at most 128 layers"},
    {"num_nextn_predict_layers", "2", E_UNSUPPORTED,
     "num_nextn_predict_layers: expected an integer from 0 to 1, found 2"},
    {"rms_norm_eps", "0", E_UNSUPPORTED,
     "rms_norm_eps: expected a number from 1e-12 to 0.1, found 0"},
    {"rms_norm_eps", "true", E_FORMAT,
     "rms_norm_eps: expected a number from 1e-12 to 0.1, found true"},
    {"kv_lora_rank", "500", E_UNSUPPORTED, "kv_lora_rank 500: expected a multiple of 128"},
    {"kv_lora_rank", "1024", E_UNSUPPORTED,
     "kv_lora_rank 1024 + qk_rope_head_dim 64: expected at most 1024"},
    {"qk_rope_head_dim", "63", E_UNSUPPORTED, "qk_rope_head_dim 63: expected an even number"},
    {"index_head_dim", "32", E_UNSUPPORTED,
     "index_head_dim 32: expected at least qk_rope_head_dim 64"},
    {"num_experts_per_tok", "17", E_UNSUPPORTED,
     "num_experts_per_tok: expected an integer from 1 to 16, found 17"},
    {"n_routed_experts", "7", E_UNSUPPORTED,
     "num_experts_per_tok 8: expected at most n_routed_experts 7"},
    {"num_experts", "128", E_UNSUPPORTED, "num_experts: expected 256, found 128"},
    {"qk_head_dim", "192", E_UNSUPPORTED, "qk_head_dim: expected 256, found 192"},
    {"num_key_value_heads", "8", E_UNSUPPORTED, "num_key_value_heads: expected 64, found 8"},
    {"vocab_size", "4000000", E_UNSUPPORTED,
     "vocab_size * hidden_size is 24576000000: expected at most 2147483647"},
    {"intermediate_size", "1000000", E_UNSUPPORTED,
     "intermediate_size * hidden_size is 6144000000: expected at most 2147483647"},
    {"moe_intermediate_size", "1000000", E_UNSUPPORTED,
     "n_shared_experts * moe_intermediate_size * hidden_size is 6144000000: expected at most "
     "2147483647"},
    {"norm_topk_prob", "1", E_FORMAT, "norm_topk_prob: expected true or false, found 1"},
    {"first_k_dense_replace", "79", E_UNSUPPORTED,
     "first_k_dense_replace: expected an integer from 0 to 78, found 79"},
    {"moe_layer_freq", "0", E_UNSUPPORTED,
     "moe_layer_freq: expected an integer from 1 to 128, found 0"},
    {"index_topk_freq", "0", E_UNSUPPORTED,
     "index_topk_freq: expected an integer from 1 to 128, found 0"},
    {"index_skip_topk_offset", "0", E_UNSUPPORTED,
     "index_skip_topk_offset: expected an integer from 1 to 128, found 0"},
    {"index_topk_pattern", "'FS'", E_FORMAT,
     "index_topk_pattern: expected 78 letters F or S, found \"FS\""},
    {"index_topk_pattern", "[1]", E_FORMAT,
     "index_topk_pattern: expected 78 letters F or S, found [1]"},
    {"mlp_layer_types", "['dense']", E_FORMAT,
     "mlp_layer_types: expected 78 names, one per layer, found 1"},
    {"indexer_types", "'full'", E_FORMAT,
     "indexer_types: expected a list of names, found \"full\""},
    {"layer_types", "[]", E_FORMAT, "layer_types: expected 78 names, one per layer, found 0"},
    {"eos_token_id", "[]", E_UNSUPPORTED, "eos_token_id: expected 1 to 8 token ids, found 0"},
    {"eos_token_id", "[1,2,3,4,5,6,7,8,9]", E_UNSUPPORTED,
     "eos_token_id: expected 1 to 8 token ids, found 9"},
    {"eos_token_id", "154880", E_FORMAT,
     "eos_token_id: expected token ids below vocab_size, found 154880"},
    {"eos_token_id", "[1,-1]", E_FORMAT,
     "eos_token_id: expected token ids below vocab_size, found -1"},
    {"eos_token_id", "'2'", E_FORMAT,
     "eos_token_id: expected token ids below vocab_size, found \"2\""},
};

static void test_bad_fields(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++) {
        Shape s;
        Err err = {0};
        json_t *root = config_parse(CONFIG_GLM52);
        memset(&s, 0x55, sizeof s);
        config_set(root, bad[i].path, bad[i].value);
        int rc = config_shape(&s, root, &err);
        if (rc != bad[i].code || err.code != rc || strncmp(err.text, "config.json: ", 13) ||
            strcmp(err.text + 13, bad[i].error))
            fail_msg("%s = %s: %d, %s", bad[i].path, bad[i].value, rc, err.text);
        for (size_t b = 0; b < sizeof s; b++)
            assert_int_equal(((uint8_t *)&s)[b], 0x55); /* nothing is written */
        json_decref(root);
    }
}

/* Products of more than one large field. */
static void test_large_matrices(void **state) {
    (void)state;
    static const struct {
        const char *name, *value, *error;
    } large[] = {
        {"q_lora_rank", "65536",
         "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim) * q_lora_rank is "
         "17179869184"},
        {"qk_nope_head_dim", "8", NULL},
        {"v_head_dim", "4096",
         "num_attention_heads * (qk_nope_head_dim + v_head_dim) * kv_lora_rank is 2248146944"},
        {"v_head_dim", "3900", "num_attention_heads * v_head_dim * hidden_size is 24536678400"},
    };
    for (size_t i = 0; i < COUNT(large); i++) {
        Shape s;
        Err err = {0};
        json_t *root = config_parse(CONFIG_GLM52);
        config_set(root, "num_attention_heads", "1024");
        config_set(root, "num_key_value_heads", NULL);
        config_set(root, "qk_head_dim", NULL);
        config_set(root, large[i].name, large[i].value);
        int rc = config_shape(&s, root, &err);
        if (large[i].error ? rc != E_UNSUPPORTED || !strstr(err.text, large[i].error) : rc)
            fail_msg("%s = %s: %d, %s", large[i].name, large[i].value, rc, err.text);
        json_decref(root);
    }
}

static void check_list_refused(const char *name, const char *(*value)(int), int at,
                               const char *with, const char *error) {
    Shape s;
    Err err = {0};
    json_t *root = config_parse(CONFIG_GLM52);
    config_set_names(root, name, 78, value);
    json_array_set_new(json_object_get(root, name), (size_t)at, config_parse(with));
    assert_int_equal(config_shape(&s, root, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, error);
    json_decref(root);
}

static void test_bad_lists(void **state) {
    (void)state;
    check_list_refused("mlp_layer_types", config_glm52_mlp, 5, "'moe'",
                       "config.json: mlp_layer_types[5]: expected \"dense\" or \"sparse\", "
                       "found \"moe\"");
    check_list_refused("indexer_types", config_glm52_indexer, 77, "null",
                       "config.json: indexer_types[77]: expected \"full\" or \"shared\", "
                       "found null");
    check_list_refused("indexer_types", config_glm52_indexer, 0, "'shared'",
                       "config.json: indexer_types: the first layer shares an indexer, but there "
                       "is none before it");
    check_list_refused("layer_types", config_glm52_layer, 3, "'full_attention'",
                       "config.json: layer_types[3]: expected \"deepseek_sparse_attention\", "
                       "found \"full_attention\"");
}

static void check_text(const char *text, const char *error) {
    Shape s;
    Err err = {0};
    assert_int_equal(shape_parse(&s, text, strlen(text), &err), E_FORMAT);
    if (strncmp(err.text, error, strlen(error)))
        fail_msg("%s", err.text);
}

static void test_bad_json(void **state) {
    (void)state;
    check_text("", "config.json: line 1: ");
    check_text("{\n\"a\": }", "config.json: line 2: ");
    check_text("[]", "config.json: expected a JSON object");
    check_text("{\"vocab_size\":1,\"vocab_size\":2}", "config.json: line 1: duplicate object key");
    char *deep = xmalloc(100001);
    memset(deep, '[', 100000);
    deep[100000] = 0;
    check_text(deep, "config.json: line 1: maximum parsing depth reached");
    free(deep);
}

static void test_files(void **state) {
    (void)state;
    Shape s;
    Err err = {0};
    assert_int_equal(shape_load(&s, TINY "nowhere.json", &err), E_IO);
    assert_non_null(strstr(err.text, TINY "nowhere.json"));
    assert_int_equal(shape_load(&s, TINY, &err), E_IO);
    assert_int_equal(shape_load(&s, TINY "fp8/generation_config.json", &err), E_FORMAT);
    assert_string_equal(err.text, TINY "fp8/generation_config.json: model_type is missing");
    char path[] = "/tmp/baton-shape-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0 && ftruncate(fd, (4 << 20) + 1) == 0);
    assert_int_equal(shape_load(&s, path, &err), E_LIMIT);
    assert_non_null(strstr(err.text, "larger than 4194304 bytes"));
    close(fd);
    unlink(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_fields), cmocka_unit_test(test_bad_fields),
        cmocka_unit_test(test_large_matrices), cmocka_unit_test(test_bad_lists),
        cmocka_unit_test(test_bad_json),       cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
