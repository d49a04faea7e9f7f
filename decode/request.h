/* The requests that hold pages of this decode, found by their id. Loop thread; the engine thread
 * reads a request's pages and sampler while in_task is set. */
#pragma once

#include "model/kv_pool.h"
#include "model/sample.h"
#include "proto/bus.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum DecodeState {
    DECODE_RESERVED,   /* pages granted, KV on its way */
    DECODE_VERIFYING,  /* KV arrived, its hashes are compared */
    DECODE_RUNNING,    /* answers */
    DECODE_QUARANTINED /* over, but somebody may still write into its granted pages */
} DecodeState;

typedef struct DecodeRequest DecodeRequest;
struct DecodeRequest {
    uint64_t id, ticket;
    BusPeer *router; /* NULL when it is gone */
    DecodeState state;
    bool writer_quiet; /* nobody will write into the granted pages any more */

    int n_prompt, n_answer, max_answer;
    int32_t last; /* newest answer token */
    int32_t *page;
    int n_pages, n_granted; /* the first n_granted hold the prompt and were advertised */
    SampleParams params;
    Sampler *sampler;

    bool in_task; /* a task on the engine thread uses it: it may end only afterwards */
    bool doomed;  /* it ends when that task is done, with doom_code */
    Baton__FailCode doom_code;
    char doom_reason[200];

    uint64_t last_turn;  /* number of the last turn it had in a step */
    uint64_t *page_hash; /* [n_granted] as the writer computed them, while VERIFYING */
    int n_verified;      /* pages compared */
    SampleOut first;     /* as delivered, while VERIFYING */

    int64_t reserved_ms, ready_ms, running_ms; /* when it came into that state */
    int64_t deadline_ms, transfer_deadline_ms;
    DecodeRequest *next_in_bucket, *prev, *next, *next_verify;
};

enum { DECODE_BUCKETS = 1024 };

typedef struct DecodeRequests {
    DecodeRequest *buckets[DECODE_BUCKETS], *list;
    int n;
} DecodeRequests;

/* Checks the message against the model and makes a request without pages: E_INVAL or E_LIMIT with
 * words. n_tokens: ids below it are tokens; vocab: rows of the logits. max_answer is what
 * max_tokens and the context allow. */
int decode_request_new(DecodeRequest **out, const Baton__Reserve *m, int max_context, int n_tokens,
                       int vocab, Err *err);
void decode_request_free(DecodeRequest *r);

/* NULL when there is none. */
DecodeRequest *decode_requests_find(const DecodeRequests *all, uint64_t id);
void decode_requests_put(DecodeRequests *all, DecodeRequest *r);
void decode_requests_remove(DecodeRequests *all, DecodeRequest *r);
