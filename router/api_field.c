/* See api.h. One table row per top-level field: who may send it and how it is read. */
#include "router/api_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*FieldFn)(ApiParse *p, const char *key, const json_t *v);

/* ---- values ---- */

static int read_bool(ApiParse *p, const char *key, const json_t *v, bool *out) {
    if (!json_is_boolean(v))
        return api_bad_type(p, key, "a boolean");
    *out = json_is_true(v);
    return 0;
}

static int read_int(ApiParse *p, const char *key, const json_t *v, int64_t min, int64_t max,
                    int64_t *out) {
    if (!json_is_integer(v))
        return api_bad_type(p, key, "an integer");
    int64_t x = json_integer_value(v);
    if (x < min || x > max)
        return api_bad_value(p, key, "%s: expected an integer from %lld to %lld", key,
                             (long long)min, (long long)max);
    *out = x;
    return 0;
}

static int read_real(ApiParse *p, const char *key, const json_t *v, double min, double max,
                     float *out) {
    if (!json_is_number(v))
        return api_bad_type(p, key, "a number");
    double x = json_number_value(v);
    if (!(x >= min && x <= max))
        return api_bad_value(p, key, "%s: expected a number from %g to %g", key, min, max);
    *out = (float)x;
    return 0;
}

/* ---- sampling ---- */

static int on_temperature(ApiParse *p, const char *key, const json_t *v) {
    return read_real(p, key, v, 0, 2, &p->req->sampling.temperature);
}

static int on_top_p(ApiParse *p, const char *key, const json_t *v) {
    int rc = read_real(p, key, v, 0, 1, &p->req->sampling.top_p);
    if (rc == 0 && p->req->sampling.top_p <= 0)
        return api_bad_value(p, key, "top_p: expected a number above 0, up to 1");
    return rc;
}

static int on_top_k(ApiParse *p, const char *key, const json_t *v) {
    int64_t k = 0; /* 0 and -1: all */
    int rc = read_int(p, key, v, -1, INT32_MAX, &k);
    if (rc == 0)
        p->req->sampling.top_k = k > 0 ? (uint32_t)k : 0;
    return rc;
}

static int on_min_p(ApiParse *p, const char *key, const json_t *v) {
    return read_real(p, key, v, 0, 1, &p->req->sampling.min_p);
}

static int on_seed(ApiParse *p, const char *key, const json_t *v) {
    int64_t seed = 0;
    int rc = read_int(p, key, v, INT64_MIN, INT64_MAX, &seed);
    if (rc == 0)
        p->req->sampling.seed = (uint64_t)seed;
    return rc;
}

static int on_presence(ApiParse *p, const char *key, const json_t *v) {
    return read_real(p, key, v, -2, 2, &p->req->sampling.presence_penalty);
}

static int on_frequency(ApiParse *p, const char *key, const json_t *v) {
    return read_real(p, key, v, -2, 2, &p->req->sampling.frequency_penalty);
}

static int on_repetition(ApiParse *p, const char *key, const json_t *v) {
    return read_real(p, key, v, 0.01, 10, &p->req->sampling.repetition_penalty);
}

/* A token id as an object's key, or -1. */
static int64_t token_key(const ApiModel *model, const char *key) {
    char *end;
    if (*key < '0' || *key > '9')
        return -1;
    long long id = strtoll(key, &end, 10);
    return *end == '\0' && id < model->n_tokens ? (int64_t)id : -1;
}

static int on_bias(ApiParse *p, const char *key, const json_t *v) {
    ApiReq *r = p->req;
    const char *id_text;
    json_t *bias;
    if (!json_is_object(v))
        return api_bad_type(p, key, "an object of token ids");
    size_t n = json_object_size(v);
    if (n > API_MAX_BIAS)
        return api_bad_value(p, key, "logit_bias: at most %d tokens", API_MAX_BIAS);
    r->bias = xcalloc(n + 1, sizeof *r->bias);
    r->bias_list = xcalloc(n + 1, sizeof(Baton__LogitBias *));
    json_object_foreach((json_t *)v, id_text, bias) {
        int64_t id = token_key(p->model, id_text);
        if (id < 0)
            return api_bad_value(p, key, "logit_bias: a key is not a token id below %d",
                                 p->model->n_tokens);
        Baton__LogitBias *b = &r->bias[r->sampling.n_logit_bias];
        baton__logit_bias__init(b);
        b->token = (uint32_t)id;
        int rc = read_real(p, key, bias, -100, 100, &b->bias);
        if (rc)
            return rc;
        r->bias_list[r->sampling.n_logit_bias++] = b;
    }
    r->sampling.logit_bias = r->bias_list;
    return 0;
}

/* ---- length and end ---- */

static int on_max_tokens(ApiParse *p, const char *key, const json_t *v) {
    return read_int(p, key, v, 1, INT32_MAX, &p->max_tokens);
}

static int on_max_completion(ApiParse *p, const char *key, const json_t *v) {
    return read_int(p, key, v, 1, INT32_MAX, &p->max_completion_tokens);
}

static int on_min_tokens(ApiParse *p, const char *key, const json_t *v) {
    int64_t n = 0;
    int rc = read_int(p, key, v, 0, INT32_MAX, &n);
    if (rc == 0)
        p->req->sampling.min_tokens = (uint32_t)n;
    return rc;
}

static int on_stop_ids(ApiParse *p, const char *key, const json_t *v) {
    size_t i;
    json_t *item;
    if (!json_is_array(v))
        return api_bad_type(p, key, "an array of token ids");
    json_array_foreach((json_t *)v, i, item) {
        int64_t id = 0;
        int rc = read_int(p, key, item, 0, p->model->n_tokens - 1, &id);
        if (rc)
            return rc;
        if (p->req->sampling.n_stop_token == API_MAX_STOP)
            return api_bad_value(p, key, "stop_token_ids: at most %d tokens",
                                 API_MAX_STOP - p->model->n_eos);
        p->req->stop[p->req->sampling.n_stop_token++] = (uint32_t)id;
    }
    return 0;
}

static int on_ignore_eos(ApiParse *p, const char *key, const json_t *v) {
    return read_bool(p, key, v, &p->ignore_eos);
}

/* ---- log probabilities ---- */

static int on_chat_logprobs(ApiParse *p, const char *key, const json_t *v) {
    bool on = false;
    int rc = read_bool(p, key, v, &on);
    if (rc == 0)
        p->req->sampling.logprobs = on;
    return rc;
}

static int on_top_logprobs(ApiParse *p, const char *key, const json_t *v) {
    return read_int(p, key, v, 0, API_MAX_TOP_LOGPROBS, &p->top_logprobs);
}

static int on_completion_logprobs(ApiParse *p, const char *key, const json_t *v) {
    int64_t n = 0;
    int rc = read_int(p, key, v, 0, API_MAX_TOP_LOGPROBS, &n);
    if (rc == 0) {
        p->req->sampling.logprobs = true;
        p->req->sampling.top_logprobs = (uint32_t)n;
    }
    return rc;
}

/* ---- the answer's form ---- */

static int on_stream(ApiParse *p, const char *key, const json_t *v) {
    return read_bool(p, key, v, &p->req->stream);
}

static int on_stream_options(ApiParse *p, const char *key, const json_t *v) {
    const char *name;
    json_t *value;
    char param[128];
    if (!json_is_object(v))
        return api_bad_type(p, key, "an object");
    p->stream_options = true;
    json_object_foreach((json_t *)v, name, value) {
        snprintf(param, sizeof param, "stream_options.%.60s", name);
        if (strcmp(name, "include_usage") != 0)
            return api_unsupported(p, param, "unknown stream option");
        int rc = json_is_null(value) ? 0 : read_bool(p, param, value, &p->req->include_usage);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- the prompt ---- */

static int on_messages(ApiParse *p, const char *key, const json_t *v) {
    (void)key;
    return api_messages(p, v);
}

static int on_kwargs(ApiParse *p, const char *key, const json_t *v) {
    (void)key;
    return api_template_kwargs(p, v);
}

static int on_effort(ApiParse *p, const char *key, const json_t *v) {
    (void)key;
    return api_effort(p, v);
}

static int read_prompt_ids(ApiParse *p, const char *key, const json_t *v) {
    ApiReq *r = p->req;
    size_t i, n = json_array_size(v);
    json_t *item;
    r->ids = xcalloc(n, sizeof *r->ids);
    json_array_foreach((json_t *)v, i, item) {
        int64_t id = 0;
        int rc = read_int(p, key, item, 0, p->model->n_tokens - 1, &id);
        if (rc)
            return rc;
        r->ids[r->n_ids++] = (int32_t)id;
    }
    return 0;
}

static int on_prompt(ApiParse *p, const char *key, const json_t *v) {
    const json_t *first = json_array_get(v, 0);
    if (json_is_string(first) || json_is_array(first)) { /* a batch of prompts */
        if (json_array_size(v) > 1)
            return api_unsupported(p, key, "only one prompt per request is supported");
        v = first;
    }
    if (json_is_array(v) && json_array_size(v) > 0)
        return read_prompt_ids(p, key, v);
    if (!json_is_string(v) && !json_is_array(v))
        return api_bad_type(p, key, "a string or an array of token ids");
    if (json_string_length(v) == 0)
        return api_bad_value(p, key, "prompt: must not be empty");
    p->req->text_len = json_string_length(v);
    p->req->text = xmalloc(p->req->text_len + 1);
    memcpy(p->req->text, json_string_value(v), p->req->text_len + 1);
    return 0;
}

/* ---- accepted, because they change nothing ---- */

static int on_model(ApiParse *p, const char *key, const json_t *v) {
    (void)p, (void)key, (void)v; /* checked before the others */
    return 0;
}

static int on_user(ApiParse *p, const char *key, const json_t *v) {
    return json_is_string(v) ? 0 : api_bad_type(p, key, "a string");
}

static int on_metadata(ApiParse *p, const char *key, const json_t *v) {
    return json_is_object(v) ? 0 : api_bad_type(p, key, "an object");
}

static int on_false_only(ApiParse *p, const char *key, const json_t *v) {
    if (!json_is_boolean(v))
        return api_bad_type(p, key, "a boolean");
    return json_is_false(v) ? 0 : api_unsupported(p, key, "not supported");
}

static int on_one_only(ApiParse *p, const char *key, const json_t *v) {
    if (!json_is_integer(v))
        return api_bad_type(p, key, "an integer");
    return json_integer_value(v) == 1 ? 0 : api_unsupported(p, key, "only 1 is supported");
}

static int on_empty_only(ApiParse *p, const char *key, const json_t *v) {
    bool empty = (json_is_array(v) && json_array_size(v) == 0) ||
                 (json_is_string(v) && json_string_length(v) == 0);
    return empty ? 0 : api_unsupported(p, key, "not supported");
}

static int on_none_only(ApiParse *p, const char *key, const json_t *v) {
    bool none = json_is_string(v) && !strcmp(json_string_value(v), "none");
    return none ? 0 : api_unsupported(p, key, "only \"none\" is supported");
}

static int on_default_tier(ApiParse *p, const char *key, const json_t *v) {
    if (!json_is_string(v))
        return api_bad_type(p, key, "a string");
    const char *tier = json_string_value(v);
    bool usual = !strcmp(tier, "auto") || !strcmp(tier, "default");
    return usual ? 0 : api_unsupported(p, key, "only \"auto\" and \"default\" are supported");
}

static int on_text_only(ApiParse *p, const char *key, const json_t *v) {
    const json_t *type = json_object_get(v, "type");
    if (!json_is_object(v))
        return api_bad_type(p, key, "an object");
    bool text = json_is_string(type) && !strcmp(json_string_value(type), "text");
    return text ? 0 : api_unsupported(p, key, "only {\"type\": \"text\"} is supported");
}

/* ---- the table ---- */

enum { CHAT = 1, COMPLETION = 2, BOTH = CHAT | COMPLETION };

static const struct {
    const char *key;
    int where;
    FieldFn read;
} fields[] = {
    {"model", BOTH, on_model},
    {"messages", CHAT, on_messages},
    {"prompt", COMPLETION, on_prompt},
    {"stream", BOTH, on_stream},
    {"stream_options", BOTH, on_stream_options},
    {"max_tokens", BOTH, on_max_tokens},
    {"max_completion_tokens", CHAT, on_max_completion},
    {"min_tokens", BOTH, on_min_tokens},
    {"stop_token_ids", BOTH, on_stop_ids},
    {"ignore_eos", BOTH, on_ignore_eos},
    {"temperature", BOTH, on_temperature},
    {"top_p", BOTH, on_top_p},
    {"top_k", BOTH, on_top_k},
    {"min_p", BOTH, on_min_p},
    {"seed", BOTH, on_seed},
    {"presence_penalty", BOTH, on_presence},
    {"frequency_penalty", BOTH, on_frequency},
    {"repetition_penalty", BOTH, on_repetition},
    {"logit_bias", BOTH, on_bias},
    {"logprobs", CHAT, on_chat_logprobs},
    {"logprobs", COMPLETION, on_completion_logprobs},
    {"top_logprobs", CHAT, on_top_logprobs},
    {"chat_template_kwargs", CHAT, on_kwargs},
    {"reasoning_effort", CHAT, on_effort},
    {"user", BOTH, on_user},
    {"metadata", BOTH, on_metadata},
    {"store", BOTH, on_false_only},
    {"echo", COMPLETION, on_false_only},
    {"n", BOTH, on_one_only},
    {"best_of", COMPLETION, on_one_only},
    {"stop", BOTH, on_empty_only},
    {"suffix", COMPLETION, on_empty_only},
    {"tools", CHAT, on_empty_only},
    {"functions", CHAT, on_empty_only},
    {"tool_choice", CHAT, on_none_only},
    {"function_call", CHAT, on_none_only},
    {"response_format", BOTH, on_text_only},
    {"service_tier", CHAT, on_default_tier},
};

int api_field(ApiParse *p, const char *key, const json_t *value) {
    int where = p->req->chat ? CHAT : COMPLETION;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if ((fields[i].where & where) && !strcmp(fields[i].key, key))
            return fields[i].read(p, key, value);
    char param[128];
    snprintf(param, sizeof param, "%.100s", key);
    return api_unsupported(p, param, "this parameter is not supported");
}
