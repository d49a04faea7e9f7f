/* A prompt on its way through prefill. Loop thread; the engine thread reads its pages and sampler
 * and writes its hashes while in_step is set. */
#pragma once

#include "model/runtime.h"
#include "model/sample.h"
#include "prefill/peers.h"
#include "proto/bus.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum PrefillState {
    PREFILL_QUEUED,    /* has no pages, computes nothing */
    PREFILL_COMPUTING, /* has pages; layers are pushed as they end */
    PREFILL_NOTIFYING, /* all computed; waits for the flush and KvReady */
    PREFILL_CLOSING,   /* failed or canceled; waits until nothing of it can be written */
} PrefillState;

typedef struct PrefillRequest PrefillRequest;
struct PrefillRequest {
    uint64_t id;
    BusPeer *router; /* NULL when it is gone */
    PrefillState state;
    int32_t *prompt; /* [n_prompt] */
    int n_prompt, computed;
    SampleParams params;
    Sampler *sampler;
    SampleOut first; /* sampled after the last chunk */
    int32_t *page;   /* [n_pages] local, once begun */
    int n_pages;
    uint64_t *hash; /* [n_pages] of the local pages */
    int n_hashed;

    /* the grant */
    PrefillPeer *peer;
    uint64_t ticket;
    int32_t *remote_page; /* [n_pages] */
    KvLayout remote;      /* of decode's pool */
    int have;             /* positions that decode holds already */

    bool in_step;  /* the engine thread uses it: it may end only afterwards */
    bool wrote;    /* puts were queued */
    bool pending;  /* the link owes a callback */
    bool owed;     /* a flush or notice for which the link had no room */
    bool unproven; /* it ends though something of it may still be written */
    bool doomed;   /* ends with doom_code */
    Baton__FailCode doom_code;
    char doom_reason[200];

    int64_t arrived_ms, begun_ms, computed_ms, served_ms; /* served: its last chunk ended */
    int64_t deadline_ms;
    void *owner; /* the service, for callbacks of the link */
    PrefillRequest *prev, *next;
};

/* What a request is checked against. */
typedef struct PrefillRequestLimits {
    const Runtime *runtime;
    int max_context;
} PrefillRequestLimits;

/* Checks the message and makes a request without pages and peer. E_INVAL and E_LIMIT: the request
 * is wrong; E_MISMATCH: its grant does not fit it or this service. */
int prefill_request_new(PrefillRequest **out, const Baton__Prefill *m,
                        const PrefillRequestLimits *limits, Err *err);
/* Without pages and peer again. */
void prefill_request_free(PrefillRequest *r);
