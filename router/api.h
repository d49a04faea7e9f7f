/* A client's JSON into a request that can be run, or into the error that the client gets.
 *
 * Every field is either understood, or harmless at the value given, or refused by name: nothing is
 * ignored. Pure; any thread (the tokenizer workers run it). */
#pragma once

#include "base/err.h"
#include "model/chat.h"
#include "model/shape.h"
#include "proto/baton.pb-c.h"

#include <jansson.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    API_MAX_TOP_LOGPROBS = 20,
    API_MAX_BIAS = 1024,
    API_MAX_STOP = 64, /* stop tokens, the model's own included */
};

/* What a request is judged by. Constant after start. */
typedef struct ApiModel {
    const char *name; /* the one that clients use; borrowed */
    int max_context;  /* prompt and answer, tokens */
    int default_max_tokens;
    int n_tokens; /* ids below this exist */
    float temperature, top_p;
    bool enable_thinking;
    int eos[SHAPE_MAX_EOS];
    int n_eos;
    int32_t think_end; /* id of "</think>", or -1 */
} ApiModel;

/* The error object of an answer. type and code are constants. */
typedef struct ApiError {
    int status; /* 0: none */
    const char *type, *code;
    char param[128]; /* "" : null */
    char message[400];
    int64_t retry_after_ms; /* 0: no such header */
} ApiError;

typedef struct ApiReq {
    bool chat, stream, include_usage;
    json_t *messages;    /* chat: the array, owned */
    ChatOptions options; /* chat; its string is a constant */
    char *text;          /* completions: the prompt, owned, or NULL when ids were given */
    size_t text_len;
    int32_t *ids; /* the prompt's tokens, owned */
    size_t n_ids;
    int64_t max_tokens; /* -1: not given; api_fit settles it */

    Baton__Sampling sampling;            /* its arrays lie below */
    Baton__LogitBias *bias, **bias_list; /* [sampling.n_logit_bias] */
    uint32_t stop[API_MAX_STOP];
} ApiReq;

/* Parses and checks body[0, len) for /v1/chat/completions (chat) or /v1/completions. 0 and *out,
 * to be released with api_done; or E_INVAL and *error, and *out is zeroed. */
int api_parse(const ApiModel *model, bool chat, const char *body, size_t len, ApiReq *out,
              ApiError *error);
void api_done(ApiReq *req);
/* Releases messages and text early: once they are ids nobody needs them. */
void api_drop_text(ApiReq *req);

/* Settles max_tokens for a prompt of req->n_ids tokens in a context of `context` tokens, or fills
 * *error (context_length_exceeded) and returns E_LIMIT. */
int api_fit(const ApiModel *model, ApiReq *req, int context, ApiError *error);

/* Fills *error and returns E_INVAL. param may be NULL. */
int api_refuse(ApiError *error, int status, const char *type, const char *code, const char *param,
               const char *fmt, ...) __attribute__((format(printf, 6, 7)));
