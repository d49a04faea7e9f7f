/* Reads config.json into a Shape. Start-up only. Every refusal names the field, what was expected
 * and what is there. */
#include "model/shape.h"

#include <jansson.h>

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { CONFIG_MAX_BYTES = 4 << 20, DIM_MAX = 1 << 24 };

typedef struct Reader {
    const json_t *root;
    Shape *s;
    Err *err;
} Reader;

#define TRY(expr)                                                                                  \
    do {                                                                                           \
        int try_rc = (expr);                                                                       \
        if (try_rc)                                                                                \
            return try_rc;                                                                         \
    } while (0)

static const json_t *field(const Reader *r, const char *name) {
    const json_t *v = json_object_get(r->root, name);
    return json_is_null(v) ? NULL : v;
}

static int read_int(const Reader *r, const char *name, long long min, long long max, int *out) {
    const json_t *v = field(r, name);
    if (!v)
        return err_set(r->err, E_FORMAT, "config.json: %s is missing", name);
    if (!json_is_integer(v) || json_integer_value(v) < min || json_integer_value(v) > max)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: %s: expected an integer from %lld to %lld", name, min, max);
    *out = (int)json_integer_value(v);
    return 0;
}

static int read_int_or(const Reader *r, const char *name, long long min, long long max, int def,
                       int *out) {
    *out = def;
    return field(r, name) ? read_int(r, name, min, max, out) : 0;
}

static int read_real(const Reader *r, const char *name, double min, double max, float *out) {
    const json_t *v = field(r, name);
    if (!v)
        return err_set(r->err, E_FORMAT, "config.json: %s is missing", name);
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= min && x <= max))
        return err_set(r->err, E_UNSUPPORTED, "config.json: %s: expected a number from %g to %g",
                       name, min, max);
    *out = (float)x;
    return 0;
}

/* A field that, when present, must have the one value that the code implements. */
static int must_be(const Reader *r, const char *name, const char *value) {
    const json_t *v = field(r, name);
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), value)))
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: %s: only \"%s\" is supported, found \"%s\"", name, value,
                       json_is_string(v) ? json_string_value(v) : "another type");
    return 0;
}

static int must_be_bool(const Reader *r, const char *name, bool value) {
    const json_t *v = field(r, name);
    if (v && (!json_is_boolean(v) || json_is_true(v) != value))
        return err_set(r->err, E_UNSUPPORTED, "config.json: %s: only %s is supported", name,
                       value ? "true" : "false");
    return 0;
}

static int must_be_int(const Reader *r, const char *name, int value) {
    const json_t *v = field(r, name);
    if (v && (!json_is_integer(v) || json_integer_value(v) != value))
        return err_set(r->err, E_UNSUPPORTED, "config.json: %s: only %d is supported", name, value);
    return 0;
}

static int read_kind(const Reader *r) {
    const json_t *v = field(r, "model_type");
    if (!json_is_string(v))
        return err_set(r->err, E_FORMAT, "config.json: model_type is missing");
    if (strcmp(json_string_value(v), "glm_moe_dsa"))
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: model_type \"%s\" is not supported, only \"glm_moe_dsa\"",
                       json_string_value(v));
    TRY(must_be(r, "hidden_act", "silu"));
    TRY(must_be(r, "scoring_func", "sigmoid"));
    TRY(must_be(r, "topk_method", "noaux_tc"));
    TRY(must_be_int(r, "n_group", 1));
    TRY(must_be_int(r, "topk_group", 1));
    TRY(must_be_bool(r, "attention_bias", false));
    TRY(must_be_bool(r, "mlp_bias", false));
    TRY(must_be_bool(r, "tie_word_embeddings", false));
    TRY(must_be_bool(r, "rope_interleave", true));
    return must_be_bool(r, "indexer_rope_interleave", true);
}

static int read_rope(const Reader *r) {
    const json_t *p = field(r, "rope_parameters");
    Reader in = {json_is_object(p) ? p : r->root, r->s, r->err};
    TRY(must_be(&in, "rope_type", "default"));
    if (!json_is_object(p) && field(r, "rope_scaling"))
        return err_set(r->err, E_UNSUPPORTED, "config.json: rope_scaling is not supported");
    return read_real(&in, "rope_theta", 1.0, 1e12, &r->s->rope_theta);
}

static int read_dims(const Reader *r) {
    Shape *s = r->s;
    TRY(read_int(r, "num_hidden_layers", 1, SHAPE_MAX_LAYERS - 1, &s->n_layers));
    TRY(read_int_or(r, "num_nextn_predict_layers", 0, 1, 0, &s->n_mtp));
    TRY(read_int(r, "hidden_size", 16, 1 << 16, &s->hidden));
    TRY(read_int(r, "vocab_size", 1, 1 << 22, &s->vocab));
    TRY(read_int(r, "max_position_embeddings", 1, DIM_MAX, &s->max_positions));
    TRY(read_real(r, "rms_norm_eps", 1e-12, 0.1, &s->eps));
    TRY(read_int(r, "num_attention_heads", 1, 1024, &s->n_heads));
    TRY(read_int(r, "q_lora_rank", 1, 1 << 16, &s->q_lora));
    TRY(read_int(r, "kv_lora_rank", 1, 1 << 12, &s->kv_lora));
    TRY(read_int(r, "qk_nope_head_dim", 1, 4096, &s->nope));
    TRY(read_int(r, "qk_rope_head_dim", 2, 4096, &s->rope));
    TRY(read_int(r, "v_head_dim", 1, 4096, &s->v_dim));
    TRY(read_int(r, "intermediate_size", 1, 1 << 20, &s->dense_inner));
    TRY(read_int(r, "moe_intermediate_size", 1, 1 << 20, &s->moe_inner));
    TRY(read_int(r, "n_routed_experts", 1, 4096, &s->n_experts));
    TRY(read_int(r, "num_experts_per_tok", 1, SHAPE_MAX_TOPK_EXPERTS, &s->n_active));
    TRY(read_int_or(r, "n_shared_experts", 0, 16, 0, &s->n_shared));
    TRY(read_real(r, "routed_scaling_factor", 1e-6, 1e6, &s->routed_scale));
    TRY(read_int(r, "index_n_heads", 1, 256, &s->index_heads));
    TRY(read_int(r, "index_head_dim", 1, 1024, &s->index_dim));
    TRY(read_int(r, "index_topk", 1, 1 << 20, &s->index_topk));
    const json_t *norm = field(r, "norm_topk_prob");
    if (!json_is_boolean(norm))
        return err_set(r->err, E_FORMAT, "config.json: norm_topk_prob: expected true or false");
    s->norm_topk = json_is_true(norm);
    return 0;
}

/* Shapes that parse but that the code cannot do. */
static int check_dims(const Reader *r) {
    const Shape *s = r->s;
    if (s->kv_lora % 128)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: kv_lora_rank %d: expected a multiple of 128", s->kv_lora);
    if (s->rope % 2)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: qk_rope_head_dim %d: expected an even number", s->rope);
    if (s->kv_lora + s->rope > 1024)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: kv_lora_rank + qk_rope_head_dim %d: expected at most 1024",
                       s->kv_lora + s->rope);
    if (s->index_dim < s->rope)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: index_head_dim %d: smaller than qk_rope_head_dim %d",
                       s->index_dim, s->rope);
    if (s->n_active > s->n_experts)
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: num_experts_per_tok %d: more than n_routed_experts %d",
                       s->n_active, s->n_experts);
    if (s->n_layers + s->n_mtp > SHAPE_MAX_LAYERS)
        return err_set(r->err, E_UNSUPPORTED, "config.json: num_hidden_layers %d: at most %d",
                       s->n_layers, SHAPE_MAX_LAYERS - 1);
    int qk;
    TRY(read_int_or(r, "qk_head_dim", 1, 8192, s->nope + s->rope, &qk));
    if (qk != s->nope + s->rope)
        return err_set(
            r->err, E_MISMATCH,
            "config.json: qk_head_dim %d is not qk_nope_head_dim %d + qk_rope_head_dim %d", qk,
            s->nope, s->rope);
    return 0;
}

static int list_of(const Reader *r, const char *name, const json_t **out) {
    const json_t *v = field(r, name);
    *out = v;
    if (v && (!json_is_array(v) || json_array_size(v) < (size_t)r->s->n_layers))
        return err_set(r->err, E_FORMAT, "config.json: %s: expected a list of %d names", name,
                       r->s->n_layers);
    return 0;
}

/* Entry i of a list of two names: 1 for yes, 0 for no. */
static int one_of(const Reader *r, const char *name, const json_t *list, int i, const char *yes,
                  const char *no, bool *out) {
    const char *v = json_string_value(json_array_get(list, (size_t)i));
    if (!v || (strcmp(v, yes) && strcmp(v, no)))
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: %s[%d]: expected \"%s\" or \"%s\", found \"%s\"", name, i, yes,
                       no, v ? v : "another type");
    *out = !strcmp(v, yes);
    return 0;
}

static int read_mlp_layers(const Reader *r) {
    Shape *s = r->s;
    const json_t *types;
    int first_dense, freq;
    TRY(list_of(r, "mlp_layer_types", &types));
    if (types) {
        for (int i = 0; i < s->n_layers; i++)
            TRY(one_of(r, "mlp_layer_types", types, i, "dense", "sparse", &s->layer_dense[i]));
        return 0;
    }
    TRY(read_int(r, "first_k_dense_replace", 0, s->n_layers, &first_dense));
    TRY(read_int_or(r, "moe_layer_freq", 1, SHAPE_MAX_LAYERS, 1, &freq));
    for (int i = 0; i < s->n_layers; i++)
        s->layer_dense[i] = i < first_dense || i % freq != 0;
    return 0;
}

static int index_by_pattern(const Reader *r, const json_t *pattern) {
    const char *p = json_string_value(pattern);
    Shape *s = r->s;
    if (!p || strlen(p) < (size_t)s->n_layers || strspn(p, "FS") != strlen(p))
        return err_set(r->err, E_FORMAT,
                       "config.json: index_topk_pattern: expected %d letters F or S", s->n_layers);
    for (int i = 0; i < s->n_layers; i++)
        s->layer_has_index[i] = p[i] == 'F';
    return 0;
}

static int index_by_formula(const Reader *r) {
    Shape *s = r->s;
    int freq, offset;
    TRY(read_int_or(r, "index_topk_freq", 1, SHAPE_MAX_LAYERS, 1, &freq));
    TRY(read_int_or(r, "index_skip_topk_offset", 1, SHAPE_MAX_LAYERS, 2, &offset));
    for (int i = 0; i < s->n_layers; i++) {
        int past = i - (offset - 1);
        s->layer_has_index[i] = (past > 0 ? past : 0) % freq == 0;
    }
    return 0;
}

/* Which layers own an indexer: the explicit list is the best authority, then the pattern, then the
 * formula. */
static int read_index_layers(const Reader *r) {
    Shape *s = r->s;
    const json_t *types, *pattern = field(r, "index_topk_pattern");
    TRY(list_of(r, "indexer_types", &types));
    if (types)
        for (int i = 0; i < s->n_layers; i++)
            TRY(one_of(r, "indexer_types", types, i, "full", "shared", &s->layer_has_index[i]));
    else if (pattern)
        TRY(index_by_pattern(r, pattern));
    else
        TRY(index_by_formula(r));
    if (!s->layer_has_index[0])
        return err_set(r->err, E_UNSUPPORTED,
                       "config.json: indexer_types: the first layer has no indexer to share");
    for (int i = 0; i < s->n_mtp; i++)
        s->layer_has_index[s->n_layers + i] = true;
    int slot = 0;
    for (int i = 0; i < s->n_layers + s->n_mtp; i++) {
        s->index_slot[i] = s->layer_has_index[i] ? slot++ : -1;
        if (i + 1 == s->n_layers)
            s->n_index_layers = slot;
    }
    return 0;
}

static int read_layer_types(const Reader *r) {
    const json_t *types;
    TRY(list_of(r, "layer_types", &types));
    for (size_t i = 0; types && i < json_array_size(types); i++) {
        const char *v = json_string_value(json_array_get(types, i));
        if (!v || strcmp(v, "deepseek_sparse_attention"))
            return err_set(r->err, E_UNSUPPORTED,
                           "config.json: layer_types[%zu]: only \"deepseek_sparse_attention\" is "
                           "supported, found \"%s\"",
                           i, v ? v : "another type");
    }
    return 0;
}

static int read_eos(const Reader *r) {
    const json_t *v = field(r, "eos_token_id");
    Shape *s = r->s;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (!v || n < 1 || n > SHAPE_MAX_EOS)
        return err_set(r->err, E_FORMAT, "config.json: eos_token_id: expected 1 to %d token ids",
                       SHAPE_MAX_EOS);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= s->vocab)
            return err_set(r->err, E_FORMAT,
                           "config.json: eos_token_id: expected ids below vocab_size %d", s->vocab);
        s->eos[s->n_eos++] = (int)json_integer_value(id);
    }
    return 0;
}

static int read_all(const Reader *r) {
    TRY(read_kind(r));
    TRY(read_dims(r));
    TRY(read_rope(r));
    TRY(check_dims(r));
    TRY(read_mlp_layers(r));
    TRY(read_index_layers(r));
    TRY(read_layer_types(r));
    return read_eos(r);
}

static int from_json(Shape *out, json_t *root, Err *err) {
    Shape s = {0};
    Reader r = {root, &s, err};
    int rc = json_is_object(root) ? read_all(&r)
                                  : err_set(err, E_FORMAT, "config.json: expected an object");
    json_decref(root);
    if (rc == 0)
        *out = s;
    return rc;
}

int shape_parse(Shape *out, const char *json, size_t len, Err *err) {
    json_error_t je;
    if (len > CONFIG_MAX_BYTES)
        return err_set(err, E_LIMIT, "config.json: larger than %d bytes", CONFIG_MAX_BYTES);
    json_t *root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return err_set(err, E_FORMAT, "config.json: line %d: %s", je.line, je.text);
    return from_json(out, root, err);
}

int shape_load(Shape *out, const char *path, Err *err) {
    json_error_t je;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return je.line > 0 ? err_set(err, E_FORMAT, "%s: line %d: %s", path, je.line, je.text)
                           : err_set(err, E_IO, "%s: %s", path, je.text);
    int rc = from_json(out, root, err);
    return rc ? err_wrap(err, "%s", path) : 0;
}

static int divides(int n, int tp, const char *what, Err *err) {
    if (n % tp)
        return err_set(err, E_UNSUPPORTED, "tp %d does not divide %s %d", tp, what, n);
    return 0;
}

int shape_check_tp(const Shape *s, int tp, Err *err) {
    if (tp < 1)
        return err_set(err, E_INVAL, "tp %d: expected at least 1", tp);
    TRY(divides(s->n_heads, tp, "num_attention_heads", err));
    TRY(divides(s->dense_inner, tp, "intermediate_size", err));
    TRY(divides(s->moe_inner, tp, "moe_intermediate_size", err));
    return divides(s->vocab, tp, "vocab_size", err);
}
