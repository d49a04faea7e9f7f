/* Tokens into what the client reads: one JSON object, or server-sent events.
 *
 * An Answer is fed every token in order; it decodes (never half a character), splits reasoning from
 * content at the "</think>" token, and keeps log probabilities until text they belong to goes out.
 * Streaming: answer_events after each step, then answer_finish and answer_last_events. Whole:
 * answer_finish, then answer_whole. Pure but for the buffers it owns; loop thread. */
#pragma once

#include "base/buf.h"
#include "model/tok.h"
#include "proto/baton.pb-c.h"
#include "router/api.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct AnswerConf {
    const Tok *tok;    /* borrowed */
    const char *model; /* borrowed */
    const char *id;    /* unique part of the answer's id; copied */
    int64_t created;   /* seconds since the epoch */
    bool chat, include_usage, logprobs;
    bool thinking;     /* the prompt ends inside <think> */
    int32_t think_end; /* id of "</think>" */
    size_t n_prompt;
} AnswerConf;

typedef struct Answer {
    AnswerConf conf;
    char id[64];
    bool in_think;
    bool begun; /* a chunk with the role has gone out */
    TokDecoder decoder;
    Buf reasoning, content; /* text that has not gone out */
    /* Entries that have not gone out, each list without brackets. Chat uses `tokens` alone. */
    Buf tokens, values, tops, offsets;
    int64_t n_out, n_reasoning; /* tokens */
    int64_t n_chars;            /* of text so far, for text_offset */
    Baton__Finish finish;
} Answer;

/* Starts over when *a was in use: a zeroed or formerly used Answer. */
void answer_init(Answer *a, const AnswerConf *conf);
void answer_done(Answer *a);

void answer_token(Answer *a, const Baton__TokenOut *out);
/* No token comes after it. finish is STOP or LENGTH. */
void answer_finish(Answer *a, Baton__Finish finish);

/* Appends the events for what came since the last call; nothing when no text is ready, except that
 * the first token always gives the chunk with the role. */
void answer_events(Answer *a, Buf *out);
/* After answer_finish: what is left, the finish reason, the usage if asked for, [DONE]. */
void answer_last_events(Answer *a, Buf *out);
/* After answer_finish: the whole object. */
void answer_whole(Answer *a, Buf *out);

/* {"error": {...}} */
void answer_error(const ApiError *error, Buf *out);
/* The same as an event. */
void answer_error_event(const ApiError *error, Buf *out);
