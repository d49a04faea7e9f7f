/* Reads config.json into a Shape. Start-up only. Every refusal names the field, what was expected
 * and what is there. */
#include "model/shape.h"

#include "kernels/quant.h"

#include <jansson.h>

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { CONFIG_MAX_BYTES = 4 << 20 };

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

/* Absent and null are the same. */
static const json_t *field(const Reader *r, const char *name) {
    const json_t *v = json_object_get(r->root, name);
    return json_is_null(v) ? NULL : v;
}

static int missing(const Reader *r, const char *name) {
    return err_set(r->err, E_FORMAT, "%s is missing", name);
}

/* Refuses a value with what was expected and what is there. */
static int refuse(const Reader *r, int code, const char *name, const json_t *v,
                  const char *expected) {
    char *found = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    err_set(r->err, code, "%s: expected %s, found %.80s", name, expected, found ? found : "?");
    free(found);
    return code;
}

static int read_int(const Reader *r, const char *name, long long min, long long max, int *out) {
    const json_t *v = field(r, name);
    char expected[80];
    if (!v)
        return missing(r, name);
    snprintf(expected, sizeof expected, "an integer from %lld to %lld", min, max);
    if (!json_is_integer(v))
        return refuse(r, E_FORMAT, name, v, expected);
    if (json_integer_value(v) < min || json_integer_value(v) > max)
        return refuse(r, E_UNSUPPORTED, name, v, expected);
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
    char expected[80];
    if (!v)
        return missing(r, name);
    snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
    if (!json_is_number(v))
        return refuse(r, E_FORMAT, name, v, expected);
    double x = json_number_value(v);
    if (!(x >= min && x <= max))
        return refuse(r, E_UNSUPPORTED, name, v, expected);
    *out = (float)x;
    return 0;
}

static int read_bool(const Reader *r, const char *name, bool *out) {
    const json_t *v = field(r, name);
    if (!v)
        return missing(r, name);
    if (!json_is_boolean(v))
        return refuse(r, E_FORMAT, name, v, "true or false");
    *out = json_is_true(v);
    return 0;
}

/* A field that, when present, must have the one value that the code implements. */
static int must_be(const Reader *r, const char *name, const char *value) {
    const json_t *v = field(r, name);
    char expected[80];
    snprintf(expected, sizeof expected, "\"%s\"", value);
    if (v && (!json_is_string(v) || strcmp(json_string_value(v), value)))
        return refuse(r, E_UNSUPPORTED, name, v, expected);
    return 0;
}

static int must_be_bool(const Reader *r, const char *name, bool value) {
    const json_t *v = field(r, name);
    if (v && (!json_is_boolean(v) || json_is_true(v) != value))
        return refuse(r, E_UNSUPPORTED, name, v, value ? "true" : "false");
    return 0;
}

static int must_be_number(const Reader *r, const char *name, int value) {
    const json_t *v = field(r, name);
    char expected[16];
    snprintf(expected, sizeof expected, "%d", value);
    if (v && (!json_is_number(v) || json_number_value(v) != value))
        return refuse(r, E_UNSUPPORTED, name, v, expected);
    return 0;
}

/* What kind of model it is, and the switches of its kind that the code has in one position only. */
static int read_kind(const Reader *r) {
    if (!field(r, "model_type"))
        return missing(r, "model_type");
    TRY(must_be(r, "model_type", "glm_moe_dsa"));
    TRY(must_be(r, "hidden_act", "silu"));
    TRY(must_be(r, "scoring_func", "sigmoid"));
    TRY(must_be(r, "topk_method", "noaux_tc"));
    TRY(must_be(r, "moe_router_dtype", "float32"));
    TRY(must_be_number(r, "n_group", 1));
    TRY(must_be_number(r, "topk_group", 1));
    TRY(must_be_bool(r, "attention_bias", false));
    TRY(must_be_bool(r, "mlp_bias", false));
    TRY(must_be_bool(r, "tie_word_embeddings", false));
    TRY(must_be_bool(r, "rope_interleave", true));
    return must_be_bool(r, "indexer_rope_interleave", true);
}

/* rope_theta stands in rope_parameters or beside it. */
static int read_rope(const Reader *r) {
    const json_t *p = field(r, "rope_parameters"), *scaling = field(r, "rope_scaling");
    Reader in = {p, r->s, r->err};
    if (p && !json_is_object(p))
        return refuse(r, E_FORMAT, "rope_parameters", p, "an object");
    if (scaling)
        return refuse(r, E_UNSUPPORTED, "rope_scaling", scaling, "null");
    if (p) {
        TRY(must_be(&in, "rope_type", "default"));
        TRY(must_be_number(&in, "partial_rotary_factor", 1));
    }
    if (!p || !field(&in, "rope_theta"))
        in.root = r->root;
    return read_real(&in, "rope_theta", 1.0, 1e12, &r->s->rope_theta);
}

static int read_dims(const Reader *r) {
    Shape *s = r->s;
    TRY(read_int(r, "num_hidden_layers", 1, SHAPE_MAX_LAYERS, &s->n_layers));
    TRY(read_int_or(r, "num_nextn_predict_layers", 0, 1, 0, &s->n_mtp));
    TRY(read_int(r, "hidden_size", 16, 1 << 16, &s->hidden));
    TRY(read_int(r, "vocab_size", 1, 1 << 22, &s->vocab));
    TRY(read_int(r, "max_position_embeddings", 1, 1 << 24, &s->max_positions));
    TRY(read_real(r, "rms_norm_eps", 1e-12, 0.1, &s->eps));
    TRY(read_int(r, "num_attention_heads", 1, 1024, &s->n_heads));
    TRY(read_int(r, "q_lora_rank", 1, 1 << 16, &s->q_lora));
    TRY(read_int(r, "kv_lora_rank", 1, 1 << 12, &s->kv_lora));
    TRY(read_int(r, "qk_nope_head_dim", 1, 4096, &s->nope));
    TRY(read_int(r, "qk_rope_head_dim", 2, 4096, &s->rope));
    TRY(read_int(r, "v_head_dim", 1, 4096, &s->v_dim));
    TRY(read_int(r, "index_n_heads", 1, 256, &s->index_heads));
    TRY(read_int(r, "index_head_dim", 1, 1024, &s->index_dim));
    return read_int(r, "index_topk", 1, 1 << 20, &s->index_topk);
}

static int read_moe_dims(const Reader *r) {
    Shape *s = r->s;
    TRY(read_int(r, "intermediate_size", 1, 1 << 20, &s->dense_inner));
    TRY(read_int(r, "moe_intermediate_size", 1, 1 << 20, &s->moe_inner));
    TRY(read_int(r, "n_routed_experts", 1, 4096, &s->n_experts));
    TRY(must_be_number(r, "num_experts", s->n_experts));
    TRY(read_int(r, "num_experts_per_tok", 1, SHAPE_MAX_TOPK_EXPERTS, &s->n_active));
    TRY(read_int_or(r, "n_shared_experts", 0, 16, 0, &s->n_shared));
    TRY(read_real(r, "routed_scaling_factor", 1e-6, 1e6, &s->routed_scale));
    return read_bool(r, "norm_topk_prob", &s->norm_topk);
}

/* Elements of the largest matrices, and with them widths of rows, fit an int. */
static int check_products(const Reader *r) {
    const Shape *s = r->s;
    const struct {
        const char *what;
        int64_t rows, cols;
    } matrix[] = {
        {"vocab_size * hidden_size", s->vocab, s->hidden},
        {"intermediate_size * hidden_size", s->dense_inner, s->hidden},
        {"n_shared_experts * moe_intermediate_size * hidden_size",
         (int64_t)s->n_shared * s->moe_inner, s->hidden},
        {"moe_intermediate_size * hidden_size", s->moe_inner, s->hidden},
        {"n_routed_experts * hidden_size", s->n_experts, s->hidden},
        {"num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim) * q_lora_rank",
         (int64_t)s->n_heads * (s->nope + s->rope), s->q_lora},
        {"num_attention_heads * (qk_nope_head_dim + v_head_dim) * kv_lora_rank",
         (int64_t)s->n_heads * (s->nope + s->v_dim), s->kv_lora},
        {"num_attention_heads * v_head_dim * hidden_size", (int64_t)s->n_heads * s->v_dim,
         s->hidden},
        {"index_n_heads * index_head_dim * q_lora_rank", (int64_t)s->index_heads * s->index_dim,
         s->q_lora},
        {"2 * hidden_size * hidden_size", 2 * (int64_t)s->hidden, s->hidden},
    };
    for (size_t i = 0; i < sizeof matrix / sizeof *matrix; i++)
        if (matrix[i].rows * matrix[i].cols > INT_MAX)
            return err_set(r->err, E_UNSUPPORTED, "%s is %lld: expected at most %d", matrix[i].what,
                           (long long)(matrix[i].rows * matrix[i].cols), INT_MAX);
    return 0;
}

/* Shapes that parse but that the code cannot do. */
static int check_dims(const Reader *r) {
    const Shape *s = r->s;
    if (s->n_layers + s->n_mtp > SHAPE_MAX_LAYERS)
        return err_set(
            r->err, E_UNSUPPORTED,
            "num_hidden_layers %d + num_nextn_predict_layers %d: expected at most %d layers",
            s->n_layers, s->n_mtp, SHAPE_MAX_LAYERS);
    if (s->kv_lora % 128)
        return err_set(r->err, E_UNSUPPORTED, "kv_lora_rank %d: expected a multiple of 128",
                       s->kv_lora);
    if (s->rope % 2)
        return err_set(r->err, E_UNSUPPORTED, "qk_rope_head_dim %d: expected an even number",
                       s->rope);
    if (s->kv_lora + s->rope > 1024)
        return err_set(r->err, E_UNSUPPORTED,
                       "kv_lora_rank %d + qk_rope_head_dim %d: expected at most 1024", s->kv_lora,
                       s->rope);
    if (s->index_dim < s->rope)
        return err_set(r->err, E_UNSUPPORTED,
                       "index_head_dim %d: expected at least qk_rope_head_dim %d", s->index_dim,
                       s->rope);
    if (s->n_active > s->n_experts)
        return err_set(r->err, E_UNSUPPORTED,
                       "num_experts_per_tok %d: expected at most n_routed_experts %d", s->n_active,
                       s->n_experts);
    TRY(must_be_number(r, "qk_head_dim", s->nope + s->rope));
    TRY(must_be_number(r, "num_key_value_heads", s->n_heads));
    return check_products(r);
}

/* The array `name`, NULL when absent: one entry per decoder layer, and perhaps one for MTP. */
static int list_of(const Reader *r, const char *name, const json_t **out) {
    const json_t *v = field(r, name);
    size_t n = (size_t)r->s->n_layers;
    if (v && !json_is_array(v))
        return refuse(r, E_FORMAT, name, v, "a list of names");
    if (v && json_array_size(v) != n && json_array_size(v) != n + (size_t)r->s->n_mtp)
        return err_set(r->err, E_FORMAT, "%s: expected %zu names, one per layer, found %zu", name,
                       n, json_array_size(v));
    *out = v;
    return 0;
}

/* Entry i of a list of two names: 1 for yes, 0 for no. */
static int one_of(const Reader *r, const char *name, const json_t *list, size_t i, const char *yes,
                  const char *no, bool *out) {
    const json_t *v = json_array_get(list, i);
    const char *s = json_is_string(v) ? json_string_value(v) : "";
    char where[64], expected[64];
    snprintf(where, sizeof where, "%s[%zu]", name, i);
    snprintf(expected, sizeof expected, "\"%s\" or \"%s\"", yes, no);
    if (strcmp(s, yes) && strcmp(s, no))
        return refuse(r, E_UNSUPPORTED, where, v, expected);
    *out = !strcmp(s, yes);
    return 0;
}

static int read_mlp_layers(const Reader *r) {
    Shape *s = r->s;
    const json_t *types;
    int first_dense, freq;
    TRY(list_of(r, "mlp_layer_types", &types));
    if (types) {
        for (size_t i = 0; i < json_array_size(types); i++)
            TRY(one_of(r, "mlp_layer_types", types, i, "dense", "sparse", &s->layer_dense[i]));
        return 0;
    }
    TRY(read_int(r, "first_k_dense_replace", 0, s->n_layers, &first_dense));
    TRY(read_int_or(r, "moe_layer_freq", 1, SHAPE_MAX_LAYERS, 1, &freq));
    for (int i = 0; i < s->n_layers; i++)
        s->layer_dense[i] = i < first_dense || i % freq != 0;
    return 0;
}

static int index_by_list(const Reader *r, const json_t *types) {
    for (size_t i = 0; i < json_array_size(types); i++)
        TRY(one_of(r, "indexer_types", types, i, "full", "shared", &r->s->layer_has_index[i]));
    return 0;
}

static int index_by_pattern(const Reader *r, const json_t *pattern) {
    Shape *s = r->s;
    const char *p = json_is_string(pattern) ? json_string_value(pattern) : "";
    size_t n = strlen(p), layers = (size_t)s->n_layers;
    char expected[64];
    snprintf(expected, sizeof expected, "%zu letters F or S", layers);
    if ((n != layers && n != layers + (size_t)s->n_mtp) || strspn(p, "FS") != n)
        return refuse(r, E_FORMAT, "index_topk_pattern", pattern, expected);
    for (size_t i = 0; i < n; i++)
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
 * formula. The MTP layer owns one whatever they say. */
static int read_index_layers(const Reader *r) {
    Shape *s = r->s;
    const json_t *types, *pattern = field(r, "index_topk_pattern");
    TRY(list_of(r, "indexer_types", &types));
    TRY(types     ? index_by_list(r, types)
        : pattern ? index_by_pattern(r, pattern)
                  : index_by_formula(r));
    if (!s->layer_has_index[0])
        return err_set(r->err, E_UNSUPPORTED,
                       "%s: the first layer shares an indexer, but there is none before it",
                       types ? "indexer_types" : "index_topk_pattern");
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

static int check_layer_types(const Reader *r) {
    const json_t *types;
    TRY(list_of(r, "layer_types", &types));
    for (size_t i = 0; i < json_array_size(types); i++) {
        const json_t *v = json_array_get(types, i);
        char where[64];
        snprintf(where, sizeof where, "layer_types[%zu]", i);
        if (!json_is_string(v) || strcmp(json_string_value(v), "deepseek_sparse_attention"))
            return refuse(r, E_UNSUPPORTED, where, v, "\"deepseek_sparse_attention\"");
    }
    return 0;
}

/* One token id or a list of them. */
static int read_eos(const Reader *r) {
    const json_t *v = field(r, "eos_token_id");
    Shape *s = r->s;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (!v)
        return missing(r, "eos_token_id");
    if (n < 1 || n > SHAPE_MAX_EOS)
        return err_set(r->err, E_UNSUPPORTED, "eos_token_id: expected 1 to %d token ids, found %zu",
                       SHAPE_MAX_EOS, n);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= s->vocab)
            return refuse(r, E_FORMAT, "eos_token_id", id, "token ids below vocab_size");
        s->eos[s->n_eos++] = (int)json_integer_value(id);
    }
    return 0;
}

static int read_all(const Reader *r) {
    TRY(read_kind(r));
    TRY(read_dims(r));
    TRY(read_moe_dims(r));
    TRY(read_rope(r));
    TRY(check_dims(r));
    TRY(read_mlp_layers(r));
    TRY(read_index_layers(r));
    TRY(check_layer_types(r));
    return read_eos(r);
}

static int parse(Shape *out, const char *json, size_t len, Err *err) {
    json_error_t je;
    json_t *root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return err_set(err, E_FORMAT, "line %d: %s", je.line, je.text);
    Shape s = {0};
    Reader r = {root, &s, err};
    int rc = json_is_object(root) ? read_all(&r) : err_set(err, E_FORMAT, "expected a JSON object");
    json_decref(root);
    if (rc == 0)
        *out = s;
    return rc;
}

int shape_parse(Shape *out, const char *json, size_t len, Err *err) {
    int rc = parse(out, json, len, err);
    return rc ? err_wrap(err, "config.json") : 0;
}

int shape_load(Shape *out, const char *path, Err *err) {
    FILE *f = fopen(path, "rbe");
    if (!f)
        return err_set(err, E_IO, "cannot open %s: %s", path, strerror(errno));
    char *text = xmalloc(CONFIG_MAX_BYTES + 1);
    size_t len = fread(text, 1, CONFIG_MAX_BYTES + 1, f);
    int rc;
    if (ferror(f))
        rc = err_set(err, E_IO, "cannot read %s: %s", path, strerror(errno));
    else if (len > CONFIG_MAX_BYTES)
        rc = err_set(err, E_LIMIT, "%s: larger than %d bytes", path, CONFIG_MAX_BYTES);
    else
        rc = parse(out, text, len, err) ? err_wrap(err, "%s", path) : 0;
    fclose(f);
    free(text);
    return rc;
}

/* Each rank's share of `n` is whole, and a multiple of `unit`. */
static int divides(int n, int tp, int unit, const char *what, Err *err) {
    if (n % tp)
        return err_set(err, E_UNSUPPORTED, "tp %d does not divide %s %d", tp, what, n);
    if (n / tp % unit)
        return err_set(err, E_UNSUPPORTED, "tp %d cuts %s %d into %d, which is no multiple of %d",
                       tp, what, n, n / tp, unit);
    return 0;
}

int shape_check_tp(const Shape *s, int tp, Err *err) {
    if (tp < 1)
        return err_set(err, E_INVAL, "tp %d: expected at least 1", tp);
    TRY(divides(s->n_heads, tp, 1, "num_attention_heads", err));
    TRY(divides(s->n_heads * s->v_dim, tp, NVFP4_GROUP, "num_attention_heads * v_head_dim", err));
    TRY(divides(s->dense_inner, tp, NVFP4_GROUP, "intermediate_size", err));
    TRY(divides(s->moe_inner, tp, NVFP4_GROUP, "moe_intermediate_size", err));
    return divides(s->vocab, tp, 1, "vocab_size", err);
}
