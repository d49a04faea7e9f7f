/* TOKENS frames: what one step gave, gathered and sent as one frame per router. Loop thread;
 * allocates nothing after out_init. */
#pragma once

#include "decode/request.h"

#include <stdbool.h>

typedef struct DecodeOutItem {
    BusPeer *router; /* NULL once sent */
    Baton__TokenStep step;
    Baton__TokenOut token;
    Baton__TokenOut *token_at;
    Baton__Logprob top[SAMPLE_MAX_TOP];
    Baton__Logprob *top_at[SAMPLE_MAX_TOP];
} DecodeOutItem;

typedef struct DecodeOut {
    DecodeOutItem *item; /* [max] */
    Baton__TokenStep **frame;
    int n, max;
} DecodeOut;

/* At most max requests between two sends. */
void decode_out_init(DecodeOut *o, int max);
void decode_out_done(DecodeOut *o);

/* token may be NULL: the answer ends without one. Everything is copied; a request without router is
 * left out. */
void decode_out_add(DecodeOut *o, const DecodeRequest *r, const SampleOut *token,
                    Baton__Finish finish);
/* Sends what was added; on_lost(arg, router, reason) for a router whose frame could not be sent. */
void decode_out_send(DecodeOut *o, void (*on_lost)(void *arg, BusPeer *router, const char *reason),
                     void *arg);
