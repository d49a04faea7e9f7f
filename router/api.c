/* See api.h. The request as a whole: parsing, what must be there, what must fit together. */
#include "router/api.h"

#include "base/clock.h"
#include "router/api_int.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const INVALID = "invalid_request_error";

/* Length of the UTF-8 character at s, or 0 when there is none. */
static size_t utf8_char(const unsigned char *s) {
    static const struct {
        unsigned char lead_min, lead_max, second_min, second_max;
        size_t n;
    } forms[] = {
        {0x00, 0x7f, 0, 0xff, 1},    {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (s[0] < forms[i].lead_min || s[0] > forms[i].lead_max)
            continue;
        if (forms[i].n > 1 && (s[1] < forms[i].second_min || s[1] > forms[i].second_max))
            return 0;
        for (size_t k = 2; k < forms[i].n; k++)
            if ((s[k] & 0xc0) != 0x80)
                return 0;
        return forms[i].n;
    }
    return 0;
}

/* An error may quote the client, cut anywhere; what goes out has to be UTF-8. */
static void make_utf8(char *s) {
    while (*s) {
        size_t n = utf8_char((const unsigned char *)s);
        if (n == 0)
            *s = '?';
        s += n ? n : 1;
    }
}

static int refuse_v(ApiError *error, int status, const char *type, const char *code,
                    const char *param, const char *fmt, va_list args) {
    memset(error, 0, sizeof *error);
    error->status = status;
    error->type = type;
    error->code = code;
    snprintf(error->param, sizeof error->param, "%s", param ? param : "");
    vsnprintf(error->message, sizeof error->message, fmt, args);
    make_utf8(error->param);
    make_utf8(error->message);
    return E_INVAL;
}

int api_refuse(ApiError *error, int status, const char *type, const char *code, const char *param,
               const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    refuse_v(error, status, type, code, param, fmt, args);
    va_end(args);
    return E_INVAL;
}

int api_bad_value(ApiParse *p, const char *param, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    refuse_v(p->error, 400, INVALID, "invalid_value", param, fmt, args);
    va_end(args);
    return E_INVAL;
}

int api_bad_type(ApiParse *p, const char *param, const char *expected) {
    return api_refuse(p->error, 400, INVALID, "invalid_type", param, "%s: expected %s", param,
                      expected);
}

int api_unsupported(ApiParse *p, const char *param, const char *what) {
    return api_refuse(p->error, 400, INVALID, "unsupported_parameter", param, "%s: %s", param,
                      what);
}

static void set_defaults(ApiParse *p, bool chat) {
    ApiReq *r = p->req;
    r->chat = chat;
    r->max_tokens = -1;
    r->options = chat_options_default();
    r->options.enable_thinking = p->model->enable_thinking;
    baton__sampling__init(&r->sampling);
    r->sampling.temperature = p->model->temperature;
    r->sampling.top_p = p->model->top_p;
    r->sampling.repetition_penalty = 1;
    r->sampling.seed = clock_unique();
    r->sampling.stop_token = r->stop;
    for (int i = 0; i < p->model->n_eos; i++)
        r->stop[r->sampling.n_stop_token++] = (uint32_t)p->model->eos[i];
}

/* The model comes first: what else is wrong matters only to the right one. */
static int check_model(ApiParse *p, const json_t *root) {
    const json_t *model = json_object_get(root, "model");
    if (!model)
        return api_refuse(p->error, 400, INVALID, "missing_required_parameter", "model",
                          "model: a model name is required");
    if (!json_is_string(model))
        return api_bad_type(p, "model", "a string");
    if (strcmp(json_string_value(model), p->model->name) != 0)
        return api_refuse(p->error, 404, INVALID, "model_not_found", "model",
                          "the model does not exist here; this server has \"%s\"", p->model->name);
    return 0;
}

static int check_required(ApiParse *p, const json_t *root) {
    const char *need = p->req->chat ? "messages" : "prompt";
    const json_t *value = json_object_get(root, need);
    if (!value || json_is_null(value))
        return api_refuse(p->error, 400, INVALID, "missing_required_parameter", need,
                          "%s: this field is required", need);
    return 0;
}

/* The model's own end tokens come first in the list. */
static void drop_eos(ApiParse *p) {
    Baton__Sampling *s = &p->req->sampling;
    size_t n_eos = (size_t)p->model->n_eos;
    s->n_stop_token -= n_eos;
    memmove(p->req->stop, p->req->stop + n_eos, s->n_stop_token * sizeof *p->req->stop);
}

/* What can be judged only when every field has been read. */
static int check_together(ApiParse *p) {
    ApiReq *r = p->req;
    if (p->stream_options && !r->stream)
        return api_bad_value(p, "stream_options", "stream_options: only with stream = true");
    if (p->top_logprobs > 0 && !r->sampling.logprobs)
        return api_bad_value(p, "top_logprobs", "top_logprobs: only with logprobs = true");
    if (p->top_logprobs >= 0)
        r->sampling.top_logprobs = (uint32_t)p->top_logprobs;
    r->max_tokens = p->max_completion_tokens >= 0 ? p->max_completion_tokens : p->max_tokens;
    if (r->max_tokens >= 0 && r->sampling.min_tokens > r->max_tokens)
        return api_bad_value(p, "min_tokens", "min_tokens: larger than max_tokens");
    if (p->ignore_eos)
        drop_eos(p);
    if (r->chat)
        api_thinking(p);
    return 0;
}

static int read_fields(ApiParse *p, const json_t *root) {
    const char *key;
    json_t *value;
    int rc = check_model(p, root);
    if (rc == 0)
        rc = check_required(p, root);
    json_object_foreach((json_t *)root, key, value) {
        if (rc)
            break;
        if (!json_is_null(value))
            rc = api_field(p, key, value);
    }
    return rc ? rc : check_together(p);
}

int api_parse(const ApiModel *model, bool chat, const char *body, size_t len, ApiReq *out,
              ApiError *error) {
    memset(out, 0, sizeof *out);
    memset(error, 0, sizeof *error);
    ApiParse p = {.model = model,
                  .req = out,
                  .error = error,
                  .max_tokens = -1,
                  .max_completion_tokens = -1,
                  .top_logprobs = -1};
    json_t *root = api_json(body, len, error);
    if (!root)
        return E_INVAL;
    set_defaults(&p, chat);
    int rc = read_fields(&p, root);
    json_decref(root);
    if (rc)
        api_done(out);
    return rc;
}

void api_drop_text(ApiReq *req) {
    json_decref(req->messages);
    free(req->text);
    req->messages = NULL;
    req->text = NULL;
    req->text_len = 0;
}

void api_done(ApiReq *req) {
    api_drop_text(req);
    free(req->ids);
    free(req->bias);
    free(req->bias_list);
    memset(req, 0, sizeof *req);
}

int api_fit(const ApiModel *model, ApiReq *req, int context, ApiError *error) {
    int64_t room = (int64_t)context - (int64_t)req->n_ids;
    if (room < 1 || req->max_tokens > room) {
        char answer[64] = "";
        if (req->max_tokens > 0)
            snprintf(answer, sizeof answer, " and %lld of answer", (long long)req->max_tokens);
        api_refuse(error, 400, INVALID, "context_length_exceeded",
                   req->chat ? "messages" : "prompt",
                   "the context is %d tokens long, the request needs %zu of prompt%s", context,
                   req->n_ids, answer);
        return E_LIMIT;
    }
    if (req->max_tokens < 0)
        req->max_tokens = room < model->default_max_tokens ? room : model->default_max_tokens;
    if (req->sampling.min_tokens > req->max_tokens) {
        api_refuse(error, 400, INVALID, "invalid_value", "min_tokens",
                   "min_tokens: larger than what the answer may have, %lld tokens",
                   (long long)req->max_tokens);
        return E_LIMIT;
    }
    req->sampling.max_tokens = (uint32_t)req->max_tokens;
    return 0;
}
