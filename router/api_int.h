/* Between the files of the request parser, api*.c. */
#pragma once

#include "router/api.h"

/* One request being read. */
typedef struct ApiParse {
    const ApiModel *model;
    ApiReq *req;
    ApiError *error;
    bool thinking_is_set; /* chat_template_kwargs.enable_thinking was given */
    const char *effort;   /* reasoning_effort, or NULL */
    bool stream_options;  /* given */
    bool ignore_eos;
    int64_t max_tokens, max_completion_tokens; /* -1: not given */
    int64_t top_logprobs;                      /* chat; -1: not given */
} ApiParse;

/* A wrong value: 400 invalid_value, or invalid_type. Both return E_INVAL. */
int api_bad_value(ApiParse *p, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
int api_bad_type(ApiParse *p, const char *param, const char *expected);
/* 400 unsupported_parameter. */
int api_unsupported(ApiParse *p, const char *param, const char *what);

/* api_json.c: parses a body that is one object; the caller's. NULL with *error filled, also for one
 * that would take far more memory than it has bytes. */
json_t *api_json(const char *body, size_t len, ApiError *error);

/* api_field.c: reads one top-level field that is not null. */
int api_field(ApiParse *p, const char *key, const json_t *value);

/* api_chat.c */
int api_messages(ApiParse *p, const json_t *value);
int api_template_kwargs(ApiParse *p, const json_t *value);
int api_effort(ApiParse *p, const json_t *value);
/* Settles thinking once every field has been read. */
void api_thinking(ApiParse *p);
