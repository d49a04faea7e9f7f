/* See bus_frame.h. No state. */
#include "proto/bus_frame.h"

#include "proto/bus.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { KV_ADDRESS_MAX = 64 << 10, GRANT_PAGES_MAX = 1 << 20, TOP_LOGPROBS_MAX = 20 };

/* ---- unpacking within a budget ---- */

static void *budget_alloc(void *arg, size_t bytes) {
    size_t *left = arg;
    if (bytes > *left)
        return NULL;
    *left -= bytes;
    return malloc(bytes ? bytes : 1);
}

static void budget_free(void *arg, void *p) {
    (void)arg;
    free(p);
}

Baton__Envelope *bus_frame_unpack(const void *bytes, size_t len, Err *err) {
    if (len > BUS_ENVELOPE_MAX) {
        err_set(err, E_LIMIT, "envelope of %zu bytes, at most %d", len, BUS_ENVELOPE_MAX);
        return NULL;
    }
    size_t left = BUS_FRAME_MEMORY_MAX;
    ProtobufCAllocator within = {budget_alloc, budget_free, &left};
    Baton__Envelope *env = baton__envelope__unpack(&within, len, bytes);
    if (!env) {
        err_set(err, E_FORMAT, "bytes that are no envelope");
        return NULL;
    }
    if (bus_frame_check(env, err)) {
        bus_frame_free(env);
        return NULL;
    }
    return env;
}

void bus_frame_free(Baton__Envelope *env) {
    ProtobufCAllocator plain = {budget_alloc, budget_free, NULL};
    if (env)
        baton__envelope__free_unpacked(env, &plain);
}

/* ---- what the fields must satisfy ---- */

static int bad(Err *err, const char *what) {
    return err_set(err, E_FORMAT, "%s", what);
}

static int check_reason(const char *reason, Err *err) {
    return strnlen(reason, BUS_REASON_MAX + 1) > BUS_REASON_MAX ? bad(err, "reason too long") : 0;
}

static int check_code(Baton__FailCode code, Err *err) {
    bool known = code >= BATON__FAIL_CODE__FAIL_NONE && code <= BATON__FAIL_CODE__FAIL_CANCELED;
    return known ? 0 : bad(err, "unknown failure code");
}

static int check_grant(const Baton__Grant *g, Err *err) {
    if (g->kv_address.len > KV_ADDRESS_MAX || g->kv_rkey.len > KV_ADDRESS_MAX)
        return bad(err, "grant with an oversized KV address");
    if (g->n_page > GRANT_PAGES_MAX)
        return bad(err, "grant of too many pages");
    for (size_t i = 0; i < g->n_page; i++)
        if (g->page[i] >= g->total_pages)
            return bad(err, "grant of a page outside the pool");
    return 0;
}

static int check_tokens(const Baton__Tokens *t, Err *err) {
    for (size_t i = 0; i < t->n_step; i++) {
        const Baton__TokenStep *s = t->step[i];
        if (s->finish < BATON__FINISH__FINISH_NONE || s->finish > BATON__FINISH__FINISH_LENGTH)
            return bad(err, "unknown way to finish");
        for (size_t k = 0; k < s->n_out; k++)
            if (s->out[k]->n_top > TOP_LOGPROBS_MAX)
                return bad(err, "too many alternatives of a token");
    }
    return 0;
}

static int check_reply(const Baton__ExpertReply *r, Err *err) {
    int rc = check_reason(r->reason, err);
    return rc ? rc : check_code(r->code, err);
}

static int check_failed(const Baton__Failed *f, Err *err) {
    int rc = check_reason(f->reason, err);
    return rc ? rc : check_code(f->code, err);
}

int bus_frame_check(const Baton__Envelope *env, Err *err) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_RESERVE:
        return env->reserve->sampling ? 0 : bad(err, "reserve without sampling");
    case BATON__ENVELOPE__BODY_GRANT:
        return check_grant(env->grant, err);
    case BATON__ENVELOPE__BODY_PREFILL:
        if (!env->prefill->sampling)
            return bad(err, "prefill without sampling");
        if (!env->prefill->grant)
            return bad(err, "prefill without a grant");
        return check_grant(env->prefill->grant, err);
    case BATON__ENVELOPE__BODY_TOKENS:
        return check_tokens(env->tokens, err);
    case BATON__ENVELOPE__BODY_FAILED:
        return check_failed(env->failed, err);
    case BATON__ENVELOPE__BODY_EXPERT_REPLY:
        return check_reply(env->expert_reply, err);
    case BATON__ENVELOPE__BODY_REFUSE:
        return check_reason(env->refuse->reason, err);
    case BATON__ENVELOPE__BODY_CANCEL:
        return check_reason(env->cancel->reason, err);
    case BATON__ENVELOPE__BODY_PONG:
        return check_reason(env->pong->reason, err);
    case BATON__ENVELOPE__BODY_HELLO:
    case BATON__ENVELOPE__BODY_PING:
    case BATON__ENVELOPE__BODY_PREFILL_DONE:
    case BATON__ENVELOPE__BODY_QUIET:
    case BATON__ENVELOPE__BODY_EXPERT_CALL:
        return 0;
    default:
        return bad(err, "envelope without a known body");
    }
}

void bus_frame_text(char *out, size_t n, const char *text) {
    size_t i = 0;
    for (; i + 1 < n && text[i]; i++)
        out[i] = (unsigned char)text[i] < ' ' || text[i] == 0x7f ? '?' : text[i];
    out[i] = '\0';
}
