/* config.json: the published models and the tiny one by the same code, and what is refused. */
#include "model/shape.h"

#include <jansson.h>

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

/* The configs of GLM-5, 5.1 and 5.2 without what only names the release, with ' for ". */
#define GLM5_GEOMETRY                                                                              \
    "'architectures':['GlmMoeDsaForCausalLM'],'model_type':'glm_moe_dsa','dtype':'bfloat16',"      \
    "'hidden_act':'silu','num_hidden_layers':78,'hidden_size':6144,'intermediate_size':12288,"     \
    "'moe_intermediate_size':2048,'vocab_size':154880,'tie_word_embeddings':false,"                \
    "'rms_norm_eps':1e-05,'initializer_range':0.02,'rope_interleave':true,"                        \
    "'indexer_rope_interleave':true,'num_attention_heads':64,'num_key_value_heads':64,"            \
    "'q_lora_rank':2048,'kv_lora_rank':512,'qk_nope_head_dim':192,'qk_rope_head_dim':64,"          \
    "'qk_head_dim':256,'v_head_dim':256,'attention_bias':false,'attention_dropout':0.0,"           \
    "'n_routed_experts':256,'num_experts_per_tok':8,'n_shared_experts':1,"                         \
    "'first_k_dense_replace':3,'moe_layer_freq':1,'scoring_func':'sigmoid',"                       \
    "'topk_method':'noaux_tc','norm_topk_prob':true,'routed_scaling_factor':2.5,'n_group':1,"      \
    "'topk_group':1,'index_n_heads':32,'index_head_dim':128,'index_topk':2048,"                    \
    "'num_nextn_predict_layers':1,'pretraining_tp':1,'ep_size':1,"                                 \
    "'eos_token_id':[154820,154827,154829],'pad_token_id':154820,'use_cache':true"

static const char glm5[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':202752,'head_dim':64,"
                           "'rope_parameters':{'rope_theta':1000000,'rope_type':'default'},"
                           "'transformers_version':'5.0.2.dev0'}";
static const char glm51[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':202752,'head_dim':64,"
                            "'rope_theta':1000000,'rope_scaling':null}";
static const char glm52[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':1048576,'head_dim':192,"
                            "'rope_parameters':{'rope_theta':8000000,'rope_type':'default'},"
                            "'index_topk_freq':4,'index_skip_topk_offset':3,"
                            "'index_topk_pattern':null,'index_share_for_mtp_iteration':true,"
                            "'moe_router_dtype':'float32','transformers_version':'5.12.0'}";

/* JSON with ' for ". */
static json_t *parse(const char *text) {
    char *json = xstrdup(text);
    for (char *p = json; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_t *v = json_loads(json, JSON_DECODE_ANY, NULL);
    if (!v)
        fail_msg("not JSON: %s", text);
    free(json);
    return v;
}

/* Sets "field" or "object/field"; value NULL takes it out. */
static void set(json_t *root, const char *path, const char *value) {
    const char *slash = strchr(path, '/');
    if (slash) {
        char object[64];
        snprintf(object, sizeof object, "%.*s", (int)(slash - path), path);
        root = json_object_get(root, object);
        assert_non_null(root);
        path = slash + 1;
    }
    if (value)
        json_object_set_new(root, path, parse(value));
    else
        assert_int_equal(json_object_del(root, path), 0);
}

static int read_json(Shape *s, const json_t *root, Err *err) {
    char *text = json_dumps(root, 0);
    int rc = shape_parse(s, text, strlen(text), err);
    free(text);
    return rc;
}

static void must_read(Shape *s, json_t *root) {
    Err err = {0};
    if (read_json(s, root, &err))
        fail_msg("%s", err.text);
    json_decref(root);
}

static void set_strings(json_t *root, const char *name, int n, const char *(*value)(int)) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_string(value(i)));
    json_object_set_new(root, name, list);
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
    const char *const config[] = {glm5, glm51};
    for (size_t k = 0; k < COUNT(config); k++) {
        Shape s;
        must_read(&s, parse(config[k]));
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

static const int glm52_full[] = {0,  1,  2,  6,  10, 14, 18, 22, 26, 30, 34,
                                 38, 42, 46, 50, 54, 58, 62, 66, 70, 74};

static void check_glm52(const Shape *s) {
    check_glm_geometry(s);
    assert_int_equal(s->max_positions, 1048576);
    assert_true(s->rope_theta == 8e6f);
    assert_int_equal(s->n_index_layers, 21);
    int slot = 0;
    for (int i = 0; i < 78; i++) {
        bool full = slot < 21 && glm52_full[slot] == i;
        assert_int_equal(s->layer_has_index[i], full);
        assert_int_equal(s->index_slot[i], full ? slot : -1);
        slot += full;
    }
    assert_int_equal(slot, 21);
    assert_true(s->layer_has_index[78]);
    assert_int_equal(s->index_slot[78], 21);
}

static const char *glm52_indexer(int i) {
    for (size_t k = 0; k < COUNT(glm52_full); k++)
        if (glm52_full[k] == i)
            return "full";
    return "shared";
}

static const char *glm52_mlp(int i) {
    return i < 3 ? "dense" : "sparse";
}

static const char *dsa(int i) {
    (void)i;
    return "deepseek_sparse_attention";
}

/* By the formula, by the list, by the pattern. */
static void test_glm52(void **state) {
    (void)state;
    Shape s;
    must_read(&s, parse(glm52));
    check_glm52(&s);

    json_t *root = parse(glm52);
    set_strings(root, "indexer_types", 78, glm52_indexer);
    set_strings(root, "mlp_layer_types", 78, glm52_mlp);
    set(root, "first_k_dense_replace", NULL);
    set(root, "index_topk_freq", "7"); /* the list is the better authority */
    must_read(&s, root);
    check_glm52(&s);

    char pattern[96] = "'";
    for (int i = 0; i < 78; i++)
        strcat(pattern, *glm52_indexer(i) == 'f' ? "F" : "S");
    strcat(pattern, "'");
    root = parse(glm52);
    set(root, "index_topk_pattern", pattern);
    set(root, "index_topk_freq", NULL);
    must_read(&s, root);
    check_glm52(&s);
}

/* What the NVFP4 release has besides. */
static void test_glm52_nvfp4(void **state) {
    (void)state;
    Shape s;
    json_t *root = parse(glm52);
    set(root, "moe_router_dtype", NULL);
    set(root, "bos_token_id", "0");
    set(root, "mlp_bias", "false");
    set(root, "num_experts", "256");
    set(root, "quantization_config", "{'quant_algo':'NVFP4','ignore':['lm_head']}");
    set_strings(root, "layer_types", 78, dsa);
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
    json_t *root = parse(glm52);
    set(root, "eos_token_id", "7");
    set(root, "n_shared_experts", NULL);
    set(root, "num_nextn_predict_layers", NULL);
    set(root, "qk_head_dim", NULL);
    set(root, "head_dim", "'anything'");
    set(root, "moe_layer_freq", "2");
    set(root, "norm_topk_prob", "false");
    set(root, "rope_parameters", "{'rope_type':'default','partial_rotary_factor':1.0}");
    set(root, "rope_theta", "5e5");
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
    json_t *root = parse(glm52);
    set_strings(root, "indexer_types", 79, glm52_indexer);
    set_strings(root, "mlp_layer_types", 79, glm52_mlp);
    set_strings(root, "layer_types", 79, dsa);
    must_read(&s, root);
    check_glm52(&s);
}

static void test_limits(void **state) {
    (void)state;
    Shape s;
    json_t *root = parse(glm52);
    set(root, "num_hidden_layers", "127");
    must_read(&s, root);
    assert_int_equal(s.n_layers + s.n_mtp, SHAPE_MAX_LAYERS);
    root = parse(glm52);
    set(root, "num_hidden_layers", "128");
    set(root, "num_nextn_predict_layers", "0");
    must_read(&s, root);
    root = parse(glm52);
    set(root, "num_hidden_layers", "1");
    set(root, "first_k_dense_replace", "0");
    must_read(&s, root);
    assert_int_equal(s.n_index_layers, 1);
    assert_int_equal(s.index_slot[1], 1);
}

/* ---- refusals ---- */

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
            json_t *root = parse(glm52);
            set(root, required[i], null ? "null" : NULL);
            snprintf(want, sizeof want, "config.json: %s is missing",
                     slash ? slash + 1 : required[i]);
            assert_int_equal(read_json(&s, root, &err), E_FORMAT);
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
        json_t *root = parse(glm52);
        memset(&s, 0x55, sizeof s);
        set(root, bad[i].path, bad[i].value);
        int rc = read_json(&s, root, &err);
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
        json_t *root = parse(glm52);
        set(root, "num_attention_heads", "1024");
        set(root, "num_key_value_heads", NULL);
        set(root, "qk_head_dim", NULL);
        set(root, large[i].name, large[i].value);
        int rc = read_json(&s, root, &err);
        if (large[i].error ? rc != E_UNSUPPORTED || !strstr(err.text, large[i].error) : rc)
            fail_msg("%s = %s: %d, %s", large[i].name, large[i].value, rc, err.text);
        json_decref(root);
    }
}

static void check_list_refused(const char *name, const char *(*value)(int), int at,
                               const char *with, const char *error) {
    Shape s;
    Err err = {0};
    json_t *root = parse(glm52);
    set_strings(root, name, 78, value);
    json_array_set_new(json_object_get(root, name), (size_t)at, parse(with));
    assert_int_equal(read_json(&s, root, &err), E_UNSUPPORTED);
    assert_string_equal(err.text, error);
    json_decref(root);
}

static void test_bad_lists(void **state) {
    (void)state;
    check_list_refused("mlp_layer_types", glm52_mlp, 5, "'moe'",
                       "config.json: mlp_layer_types[5]: expected \"dense\" or \"sparse\", "
                       "found \"moe\"");
    check_list_refused("indexer_types", glm52_indexer, 77, "null",
                       "config.json: indexer_types[77]: expected \"full\" or \"shared\", "
                       "found null");
    check_list_refused("indexer_types", glm52_indexer, 0, "'shared'",
                       "config.json: indexer_types: the first layer shares an indexer, but there "
                       "is none before it");
    check_list_refused("layer_types", dsa, 3, "'full_attention'",
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

/* json need not end in NUL */
static void test_length_counts(void **state) {
    (void)state;
    Shape s;
    Err err = {0};
    json_t *root = parse(glm52);
    char *text = json_dumps(root, 0);
    size_t len = strlen(text);
    text[len] = '}';
    assert_int_equal(shape_parse(&s, text, len, &err), 0);
    assert_int_equal(shape_parse(&s, text, len - 1, &err), E_FORMAT);
    free(text);
    json_decref(root);
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

/* ---- ranks ---- */

static void test_ranks(void **state) {
    (void)state;
    Shape s;
    Err err = {0};
    must_read(&s, parse(glm52));
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
        cmocka_unit_test(test_glm5),          cmocka_unit_test(test_glm52),
        cmocka_unit_test(test_glm52_nvfp4),   cmocka_unit_test(test_tiny),
        cmocka_unit_test(test_forms),         cmocka_unit_test(test_lists_with_mtp),
        cmocka_unit_test(test_limits),        cmocka_unit_test(test_missing_fields),
        cmocka_unit_test(test_bad_fields),    cmocka_unit_test(test_large_matrices),
        cmocka_unit_test(test_bad_lists),     cmocka_unit_test(test_bad_json),
        cmocka_unit_test(test_length_counts), cmocka_unit_test(test_files),
        cmocka_unit_test(test_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
