/* See answer.h. */
#include "router/answer.h"

#include "model/chat_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void answer_init(Answer *a, const AnswerConf *conf) {
    answer_done(a);
    a->conf = *conf;
    snprintf(a->id, sizeof a->id, "%s-%s", conf->chat ? "chatcmpl" : "cmpl", conf->id);
    a->in_think = conf->chat && conf->thinking;
}

void answer_done(Answer *a) {
    Buf *all[] = {&a->reasoning, &a->content, &a->tokens, &a->values, &a->tops, &a->offsets};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        buf_done(all[i]);
    memset(a, 0, sizeof *a);
}

static void put_string(Buf *out, const char *s, size_t n) {
    chat_json_put_string(s ? s : "", n, out);
}

static void put_text(Buf *out, const Buf *text) {
    put_string(out, text->data, text->len);
}

/* ---- log probabilities ---- */

/* JSON has no infinities; this is what clients expect in their place. */
static void put_logprob(Buf *out, float logprob) {
    buf_printf(out, "%.6g", isfinite(logprob) ? (double)logprob : -9999.0);
}

/* The token by itself, as a string: bytes that are no text are spelled out, so that different
 * tokens have different strings. */
static void put_token(const Tok *tok, int32_t id, Buf *out) {
    size_t n;
    const char *bytes = tok_bytes(tok, id, &n);
    json_t *text = json_stringn_nocheck("", 0);
    bool valid = n == 0 || json_string_setn(text, bytes, n) == 0; /* takes UTF-8 only */
    json_decref(text);
    if (valid) {
        put_string(out, bytes, n);
        return;
    }
    buf_puts(out, "\"bytes:");
    for (size_t i = 0; i < n; i++)
        buf_printf(out, "\\\\x%02x", (unsigned char)bytes[i]);
    buf_puts(out, "\"");
}

static void put_chat_entry(const Tok *tok, int32_t id, float logprob, Buf *out) {
    size_t n;
    const char *bytes = tok_bytes(tok, id, &n);
    buf_puts(out, "{\"token\":");
    put_token(tok, id, out);
    buf_puts(out, ",\"logprob\":");
    put_logprob(out, logprob);
    buf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++)
        buf_printf(out, "%s%d", i ? "," : "", (unsigned char)bytes[i]);
    buf_puts(out, "]");
}

static void comma(Buf *list) {
    if (list->len)
        buf_puts(list, ",");
}

static void note_chat_logprob(Answer *a, const Baton__TokenOut *o) {
    const Tok *tok = a->conf.tok;
    comma(&a->tokens);
    put_chat_entry(tok, (int32_t)o->token, o->logprob, &a->tokens);
    buf_puts(&a->tokens, ",\"top_logprobs\":[");
    for (size_t i = 0; i < o->n_top; i++) {
        buf_puts(&a->tokens, i ? "," : "");
        put_chat_entry(tok, (int32_t)o->top[i]->token, o->top[i]->logprob, &a->tokens);
        buf_puts(&a->tokens, "}");
    }
    buf_puts(&a->tokens, "]}");
}

static void note_completion_logprob(Answer *a, const Baton__TokenOut *o) {
    const Tok *tok = a->conf.tok;
    Buf *lists[] = {&a->tokens, &a->values, &a->tops, &a->offsets};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        comma(lists[i]);
    put_token(tok, (int32_t)o->token, &a->tokens);
    put_logprob(&a->values, o->logprob);
    buf_puts(&a->tops, "{");
    for (size_t i = 0; i < o->n_top; i++) {
        buf_puts(&a->tops, i ? "," : "");
        put_token(tok, (int32_t)o->top[i]->token, &a->tops);
        buf_puts(&a->tops, ":");
        put_logprob(&a->tops, o->top[i]->logprob);
    }
    buf_puts(&a->tops, "}");
    buf_printf(&a->offsets, "%lld", (long long)a->n_chars);
}

/* Appends ,"logprobs":... and empties the lists. */
static void put_logprobs(Answer *a, Buf *out) {
    if (!a->conf.logprobs || a->tokens.len == 0) {
        buf_puts(out, ",\"logprobs\":null");
        return;
    }
    const char *tokens = a->tokens.data;
    if (a->conf.chat)
        buf_printf(out, ",\"logprobs\":{\"content\":[%s],\"refusal\":null}", tokens);
    else
        buf_printf(out,
                   ",\"logprobs\":{\"tokens\":[%s],\"token_logprobs\":[%s],\"top_logprobs\":[%s],"
                   "\"text_offset\":[%s]}",
                   tokens, a->values.data, a->tops.data, a->offsets.data);
    buf_clear(&a->tokens);
    buf_clear(&a->values);
    buf_clear(&a->tops);
    buf_clear(&a->offsets);
}

/* ---- tokens ---- */

static int64_t count_chars(const char *s, size_t n) {
    int64_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)s[i] & 0xc0) != 0x80;
    return chars;
}

void answer_token(Answer *a, const Baton__TokenOut *o) {
    const AnswerConf *c = &a->conf;
    a->n_out++;
    if (c->logprobs && c->chat)
        note_chat_logprob(a, o);
    else if (c->logprobs)
        note_completion_logprob(a, o);
    if (a->in_think && (int32_t)o->token == c->think_end) {
        tok_decode_end(&a->decoder, &a->reasoning);
        a->in_think = false;
        return;
    }
    a->n_reasoning += a->in_think;
    Buf *to = a->in_think ? &a->reasoning : &a->content;
    size_t before = to->len;
    tok_decode(c->tok, &a->decoder, (int32_t)o->token, true, to);
    if (to->len > before)
        a->n_chars += count_chars(to->data + before, to->len - before);
}

void answer_finish(Answer *a, Baton__Finish finish) {
    tok_decode_end(&a->decoder, a->in_think ? &a->reasoning : &a->content);
    a->finish = finish;
}

/* ---- JSON ---- */

static void put_head(const Answer *a, const char *object, Buf *out) {
    buf_printf(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", a->id, object,
               (long long)a->conf.created);
    put_string(out, a->conf.model, strlen(a->conf.model));
}

static void put_finish_reason(const Answer *a, Buf *out) {
    buf_printf(out, ",\"finish_reason\":\"%s\"",
               a->finish == BATON__FINISH__FINISH_LENGTH ? "length" : "stop");
}

static void put_usage(const Answer *a, Buf *out) {
    buf_printf(
        out, ",\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%lld,\"total_tokens\":%lld",
        a->conf.n_prompt, (long long)a->n_out, (long long)a->conf.n_prompt + (long long)a->n_out);
    if (a->conf.chat)
        buf_printf(out, ",\"completion_tokens_details\":{\"reasoning_tokens\":%lld}",
                   (long long)a->n_reasoning);
    buf_puts(out, "}");
}

static const char *chunk_object(const Answer *a) {
    return a->conf.chat ? "chat.completion.chunk" : "text_completion";
}

/* One chunk. key: the delta's member that holds text ("reasoning_content", "content"), or NULL for
 * an empty delta. last: with the finish reason. Empties text. */
static void put_chunk(Answer *a, const char *key, Buf *text, bool last, Buf *out) {
    buf_puts(out, "data: ");
    put_head(a, chunk_object(a), out);
    buf_puts(out, ",\"choices\":[{\"index\":0,");
    if (a->conf.chat) {
        buf_puts(out, "\"delta\":{");
        if (!a->begun)
            buf_puts(out, "\"role\":\"assistant\"");
        if (key) {
            buf_printf(out, "%s\"%s\":", a->begun ? "" : ",", key);
            put_text(out, text);
        }
        buf_puts(out, "}");
    } else {
        buf_puts(out, "\"text\":");
        put_text(out, text);
    }
    put_logprobs(a, out);
    if (last)
        put_finish_reason(a, out);
    else
        buf_puts(out, ",\"finish_reason\":null");
    buf_printf(out, "}]%s}\n\n", a->conf.include_usage ? ",\"usage\":null" : "");
    buf_clear(text);
    a->begun = true;
}

void answer_events(Answer *a, Buf *out) {
    if (a->reasoning.len)
        put_chunk(a, "reasoning_content", &a->reasoning, false, out);
    if (a->content.len || (!a->begun && a->n_out && !a->in_think))
        put_chunk(a, "content", &a->content, false, out);
    else if (!a->begun && a->n_out)
        put_chunk(a, "reasoning_content", &a->reasoning, false, out);
}

void answer_last_events(Answer *a, Buf *out) {
    answer_events(a, out);
    put_chunk(a, a->begun ? NULL : "content", &a->content, true, out);
    if (a->conf.include_usage) {
        buf_puts(out, "data: ");
        put_head(a, chunk_object(a), out);
        buf_puts(out, ",\"choices\":[]");
        put_usage(a, out);
        buf_puts(out, "}\n\n");
    }
    buf_puts(out, "data: [DONE]\n\n");
}

void answer_whole(Answer *a, Buf *out) {
    put_head(a, a->conf.chat ? "chat.completion" : "text_completion", out);
    buf_puts(out, ",\"choices\":[{\"index\":0,");
    if (a->conf.chat) {
        buf_puts(out, "\"message\":{\"role\":\"assistant\",");
        if (a->conf.thinking) {
            buf_puts(out, "\"reasoning_content\":");
            put_text(out, &a->reasoning);
            buf_puts(out, ",");
        }
        buf_puts(out, "\"content\":");
        put_text(out, &a->content);
        buf_puts(out, "}");
    } else {
        buf_puts(out, "\"text\":");
        put_text(out, &a->content);
    }
    put_logprobs(a, out);
    put_finish_reason(a, out);
    buf_puts(out, "}]");
    put_usage(a, out);
    buf_puts(out, "}");
}

/* ---- errors ---- */

void answer_error(const ApiError *e, Buf *out) {
    buf_puts(out, "{\"error\":{\"message\":");
    put_string(out, e->message, strlen(e->message));
    buf_printf(out, ",\"type\":\"%s\",\"param\":", e->type);
    if (e->param[0])
        put_string(out, e->param, strlen(e->param));
    else
        buf_puts(out, "null");
    buf_printf(out, ",\"code\":\"%s\"}}", e->code);
}

void answer_error_event(const ApiError *e, Buf *out) {
    buf_puts(out, "data: ");
    answer_error(e, out);
    buf_puts(out, "\n\n");
}
