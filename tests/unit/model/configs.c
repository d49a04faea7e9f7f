/* See configs.h. */
#include "tests/unit/model/configs.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

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

const char CONFIG_GLM5[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':202752,'head_dim':64,"
                           "'rope_parameters':{'rope_theta':1000000,'rope_type':'default'},"
                           "'transformers_version':'5.0.2.dev0'}";
const char CONFIG_GLM51[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':202752,'head_dim':64,"
                            "'rope_theta':1000000,'rope_scaling':null}";
const char CONFIG_GLM52[] = "{" GLM5_GEOMETRY ",'max_position_embeddings':1048576,'head_dim':192,"
                            "'rope_parameters':{'rope_theta':8000000,'rope_type':'default'},"
                            "'index_topk_freq':4,'index_skip_topk_offset':3,"
                            "'index_topk_pattern':null,'index_share_for_mtp_iteration':true,"
                            "'moe_router_dtype':'float32','transformers_version':'5.12.0'}";

/* JSON with ' for ". */
json_t *config_parse(const char *text) {
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
void config_set(json_t *root, const char *path, const char *value) {
    const char *slash = strchr(path, '/');
    if (slash) {
        char object[64];
        snprintf(object, sizeof object, "%.*s", (int)(slash - path), path);
        root = json_object_get(root, object);
        assert_non_null(root);
        path = slash + 1;
    }
    if (value)
        json_object_set_new(root, path, config_parse(value));
    else
        assert_int_equal(json_object_del(root, path), 0);
}

int config_shape(Shape *s, const json_t *root, Err *err) {
    char *text = json_dumps(root, 0);
    int rc = shape_parse(s, text, strlen(text), err);
    free(text);
    return rc;
}

void config_set_names(json_t *root, const char *name, int n, const char *(*value)(int)) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_string(value(i)));
    json_object_set_new(root, name, list);
}

const int CONFIG_GLM52_FULL[21] = {0,  1,  2,  6,  10, 14, 18, 22, 26, 30, 34,
                                   38, 42, 46, 50, 54, 58, 62, 66, 70, 74};

const char *config_glm52_indexer(int i) {
    for (size_t k = 0; k < 21; k++)
        if (CONFIG_GLM52_FULL[k] == i)
            return "full";
    return "shared";
}

const char *config_glm52_mlp(int i) {
    return i < 3 ? "dense" : "sparse";
}

const char *config_glm52_layer(int i) {
    (void)i;
    return "deepseek_sparse_attention";
}
