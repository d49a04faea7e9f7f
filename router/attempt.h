/* One attempt at a request: its two legs, a decode and a prefill, and what each must still be told.
 *
 * An attempt outlives the request it was made for: decode reuses pages only once nobody writes into
 * them, so the attempt stays until prefill has said so (or its process has ended) and decode knows.
 * What cannot be sent now (a silent peer) stays owed and is sent later, within a bound. Loop thread
 * only. */
#pragma once

#include "router/api.h"
#include "router/peers.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Attempt Attempt;

struct Attempt {
    uint64_t id;      /* the request id on the wire, never used twice */
    void *owner;      /* the session, or NULL once it was given up or has ended */
    Peer *prefill;    /* NULL once prefill is done with it */
    Peer *decode;     /* NULL once decode is done with it and is owed nothing */
    bool wrote;       /* prefill was asked and is not known to be quiet */
    bool asked;       /* prefill was asked */
    bool decode_done; /* decode has said its last word */
    bool failed;      /* decode may hold pages back until it hears that the writer is quiet */
    bool owe_prefill_cancel, owe_decode_cancel, owe_quiet;
    int64_t drop_ms; /* when what is owed is given up, from the give-up on */
    Attempt *next_in_bucket, *prev, *next;
};

typedef int (*AttemptSendFn)(void *arg, Peer *peer, const Baton__Envelope *env, Err *err);

enum { ATTEMPT_BUCKETS = 4096 };

typedef struct Attempts {
    AttemptSendFn send;
    void *arg;
    int64_t keep_ms; /* how long an attempt without owner waits for prefill's last word */
    Attempt *buckets[ATTEMPT_BUCKETS], *list;
    int n, n_dropped; /* alive; given up with something owed */
} Attempts;

/* Frees every attempt; sends nothing. */
void attempts_done(Attempts *all);

Attempt *attempt_new(Attempts *all, Peer *prefill, Peer *decode, void *owner);
/* NULL when there is none. */
Attempt *attempt_find(const Attempts *all, uint64_t id);

/* Both as the send function. A refused send leaves the attempt as it was. */
int attempt_reserve(Attempts *all, Attempt *a, const ApiReq *req, int64_t deadline_ms, Err *err);
int attempt_prefill(Attempts *all, Attempt *a, const ApiReq *req, Baton__Grant *grant,
                    int64_t deadline_ms, Err *err);

/* Prefill has said its last word: nothing of it will be written any more. May free *a when it has
 * no owner. */
void attempt_quiet(Attempts *all, Attempt *a);
/* Decode has said its last word; ok when the answer is complete. Owner and attempt stay. */
void attempt_decode_over(Attempt *a, bool ok);

/* The owner lets go. Whichever leg still works is cancelled. May free *a. */
void attempt_release(Attempts *all, Attempt *a, int64_t now_ms);

/* The process of peer has ended. on_lost(arg, attempt) is called for each owned attempt that lost a
 * leg it needs; it may release that attempt. */
void attempts_gone(Attempts *all, Peer *peer, void (*on_lost)(void *arg, Attempt *a, bool decode),
                   void *arg);

/* The peer has a new connection: what was told over the old one may not have arrived, and is owed
 * again. */
void attempts_reset(Attempts *all, const Peer *peer);

/* Sends what is owed, as far as it can be sent now; drops what has waited too long. */
void attempts_pump(Attempts *all, int64_t now_ms);
