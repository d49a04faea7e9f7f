/* The decode service without its surroundings: requests from RESERVE to their last token.
 *
 *   RESERVE -> RESERVED -(KvReady)-> VERIFYING -> RUNNING -> over
 *                  |                    |            |
 *                  '---- cancel, deadline, failure --'--> over, or QUARANTINED while a writer that
 *                                                         was given page addresses may still write
 *
 * Parts: admit.c lets requests in, transfer.c receives their KV, steps.c runs them, out.c tells the
 * routers, decode.c ends them and dispatches. All of it runs on the loop thread but the two tasks
 * that the stepper carries to the engine thread: the step and the comparison of hashes. */
#pragma once

#include "base/loop.h"
#include "decode/out.h"
#include "decode/request.h"
#include "decode/sched.h"
#include "decode/stats.h"
#include "model/batch.h"
#include "model/expert_watch.h"
#include "model/kv_pool.h"
#include "model/runtime.h"
#include "model/stepper.h"
#include "proto/bus.h"
#include "proto/kvlink.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct DecodeLimits {
    int max_running;          /* requests that hold pages at once */
    int max_batch;            /* requests in one step */
    int max_context;          /* tokens */
    int64_t transfer_ms;      /* from the grant to KvReady */
    bool verify;              /* compare page hashes */
    double quarantine_budget; /* fraction of the pool */
} DecodeLimits;

typedef struct DecodeConf {
    DecodeLimits limits;
    Loop *loop;
    const Runtime *runtime;
    Stepper *stepper;
    ExpertWatch *experts;
    KvLink *link;
    uint64_t generation;
    LoopFn on_ready; /* readiness may have changed */
    LoopFn on_idle;  /* draining, and nothing runs any more */
    void *arg;
} DecodeConf;

typedef struct Decode {
    DecodeConf conf;
    DecodeRequests requests;
    int n_active; /* reserved, verifying, running */
    int n_running;
    KvPool *pool;
    uint64_t next_ticket;
    bool draining, spent; /* spent: the quarantine is over its budget */

    /* steps.c; the engine thread's while stepping */
    StepTask step_task;
    Batch batch;
    DecodeRequest **in_step; /* [max_batch], in batch order */
    int n_in_step;
    DecodeRequest **running;  /* [max_running] candidates of a step, scratch */
    DecodeSchedTurn *turn;    /* [max_running] of them, scratch */
    DecodeSchedRunning *load; /* [max_running] for admission, scratch */
    bool stepping;
    uint64_t n_turns;
    int step_status;
    Err step_err;
    double step_ms; /* of late */

    /* transfer.c; the engine thread's while verifying */
    StepTask verify_task;
    DecodeRequest *verify_first, *verify_last; /* FIFO; the first is being worked on */
    bool verifying;
    int verify_pages;     /* at most, in one task */
    int32_t *verify_rows; /* [verify_pages] scratch, like the next */
    uint64_t *verify_hash;
    bool verify_ok;

    DecodeOut out;
    DecodeStats stats;
} Decode;

/* decode.c */
void decode_init(Decode *d, const DecodeConf *conf);
/* When the loop has ended, the stepper and the link are closed: every page counts as free again. */
void decode_done(Decode *d);

/* For BusCallbacks and KvLinkConf. */
void decode_on_message(Decode *d, BusPeer *router, const Baton__Envelope *env);
void decode_on_router_gone(Decode *d, BusPeer *router);
void decode_on_notice(Decode *d, const void *bytes, size_t len);
/* Readiness and load. */
void decode_on_ping(Decode *d, Baton__Pong *pong);
/* Whether new requests can be served; *why is borrowed until the next call. */
bool decode_ready(const Decode *d, const char **why);
/* Deadlines; to be called every DECODE_TICK_MS. */
void decode_tick(Decode *d);
enum { DECODE_TICK_MS = 50 };

/* Takes nothing new; on_idle follows once all is over. */
void decode_drain(Decode *d);
/* Ends what still runs with FAIL_DRAINING. */
void decode_abort(Decode *d);

/* ---- between the parts ---- */

/* decode.c: r is over; the router hears Failed with words unless code is FAIL_NONE or
 * FAIL_CANCELED. While the engine thread uses r it only becomes doomed. */
void decode_fail(Decode *d, DecodeRequest *r, Baton__FailCode code, uint32_t retry_ms,
                 const char *reason);
/* Like decode_fail for every request of a router that cannot be reached. */
void decode_lose_router(Decode *d, BusPeer *router, const char *reason);
/* r has had its last token. */
void decode_finish(Decode *d, DecodeRequest *r, Baton__Finish finish);
void decode_send_failed(BusPeer *router, uint64_t id, Baton__FailCode code, uint32_t retry_ms,
                        const char *reason);
/* The writer of r is known to be quiet. */
void decode_quiet(Decode *d, DecodeRequest *r);
/* A task that used r is done. True when r was doomed and is over now. */
bool decode_task_over(Decode *d, DecodeRequest *r);

/* admit.c */
void decode_admit_reserve(Decode *d, BusPeer *router, const Baton__Reserve *m);

/* transfer.c */
void decode_transfer_init(Decode *d);
void decode_transfer_done(Decode *d);
void decode_transfer_ready(Decode *d, const Baton__KvReady *m);
/* r no longer waits for a comparison, if it did. */
void decode_transfer_forget(Decode *d, DecodeRequest *r);

/* steps.c */
void decode_steps_init(Decode *d);
void decode_steps_done(Decode *d);
/* KV and first token of r are there: it answers from now on. */
void decode_steps_join(Decode *d, DecodeRequest *r);
