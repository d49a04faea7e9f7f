/* See out.h. */
#include "decode/out.h"

#include <stdlib.h>

void decode_out_init(DecodeOut *o, int max) {
    *o = (DecodeOut){.max = max};
    o->item = xcalloc((size_t)max, sizeof *o->item);
    o->frame = xcalloc((size_t)max, sizeof *o->frame);
}

void decode_out_done(DecodeOut *o) {
    free(o->item);
    free(o->frame);
    *o = (DecodeOut){0};
}

static void fill_token(DecodeOutItem *it, const SampleParams *p, const SampleOut *token) {
    it->token = (Baton__TokenOut)BATON__TOKEN_OUT__INIT;
    it->token.token = (uint32_t)token->token;
    if (p->logprobs) {
        it->token.logprob = token->logprob;
        for (int i = 0; i < token->n_top; i++) {
            it->top[i] = (Baton__Logprob)BATON__LOGPROB__INIT;
            it->top[i].token = (uint32_t)token->top_token[i];
            it->top[i].logprob = token->top_logprob[i];
            it->top_at[i] = &it->top[i];
        }
        it->token.n_top = (size_t)token->n_top;
        it->token.top = it->top_at;
    }
    it->token_at = &it->token;
    it->step.n_out = 1;
    it->step.out = &it->token_at;
}

void decode_out_add(DecodeOut *o, const DecodeRequest *r, const SampleOut *token,
                    Baton__Finish finish) {
    if (!r->router)
        return;
    CHECK(o->n < o->max);
    DecodeOutItem *it = &o->item[o->n++];
    it->router = r->router;
    it->step = (Baton__TokenStep)BATON__TOKEN_STEP__INIT;
    it->step.request = r->id;
    it->step.finish = finish;
    if (token)
        fill_token(it, &r->params, token);
}

/* Sends all items of one router. */
static int send_frame(DecodeOut *o, BusPeer *router, Err *err) {
    Baton__Tokens tokens = BATON__TOKENS__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    for (int i = 0; i < o->n; i++) {
        if (o->item[i].router != router)
            continue;
        o->frame[tokens.n_step++] = &o->item[i].step;
        o->item[i].router = NULL;
    }
    tokens.step = o->frame;
    env.body_case = BATON__ENVELOPE__BODY_TOKENS;
    env.tokens = &tokens;
    return bus_send(router, &env, NULL, 0, err);
}

void decode_out_send(DecodeOut *o, void (*on_lost)(void *arg, BusPeer *router, const char *reason),
                     void *arg) {
    for (int i = 0; i < o->n; i++) {
        Err err = {0};
        BusPeer *router = o->item[i].router;
        if (router && send_frame(o, router, &err))
            on_lost(arg, router, err.text);
    }
    o->n = 0;
}
