/* The prefill service without its surroundings: prompts from PREFILL to PrefillDone.
 *
 *   PREFILL -> QUEUED -> COMPUTING -> NOTIFYING -> PrefillDone
 *                 |          |            |
 *                 '-- cancel, deadline, failure --> CLOSING -> Failed{quiet}
 *
 * Failed is said only once nothing of the request can be written any more. Parts: intake.c takes
 * requests, steps.c computes and pushes them, deliver.c tells decode and waits for the link,
 * prefill.c ends them and dispatches. All of it runs on the loop thread but the step, which the
 * stepper carries to the engine thread. */
#pragma once

#include "base/loop.h"
#include "model/batch.h"
#include "model/expert_watch.h"
#include "model/kv_pool.h"
#include "model/runtime.h"
#include "model/stepper.h"
#include "prefill/peers.h"
#include "prefill/push.h"
#include "prefill/request.h"
#include "prefill/sched.h"
#include "prefill/stats.h"
#include "proto/bus.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct PrefillLimits {
    int max_waiting; /* requests at once, those that have not begun included */
    int max_running; /* requests that hold pages at once, and in one step */
    int step_tokens;
    int max_context;
    int64_t patience_ms; /* of a request that shorter ones overtake */
    int64_t link_ms;     /* the link's own timeout */
} PrefillLimits;

typedef struct PrefillConf {
    PrefillLimits limits;
    Loop *loop;
    const Runtime *runtime;
    Stepper *stepper;
    ExpertWatch *experts;
    KvLink *link;
    uint64_t generation;
    LoopFn on_ready; /* readiness may have changed */
    LoopFn on_idle;  /* draining, and nothing runs any more */
    void *arg;
} PrefillConf;

/* One chunk of the step that runs. */
typedef struct PrefillChunk {
    PrefillRequest *request;
    int n_tokens;
    int row;  /* in Batch.row when the chunk is its prompt's last, else -1 */
    int push; /* in Push.seq, or -1 when decode has all of it */
} PrefillChunk;

typedef struct Prefill {
    PrefillConf conf;
    PrefillRequest *first, *last; /* in order of arrival */
    int n, n_begun;
    KvPool *pool;
    PrefillPeers peers;
    bool draining;
    uint64_t queued_tokens; /* of all requests, not yet computed */
    double token_ms;        /* per prompt token, of late */

    /* steps.c; the engine thread's while stepping */
    StepTask step_task;
    Batch batch;
    Push push;
    PrefillChunk *chunk; /* [max_running] */
    int32_t *n_rows;     /* [pages of max_context] scratch of hashing */
    int n_chunks;
    bool stepping;
    int step_status;
    Err step_err;
    PrefillSchedItem *sched_item; /* [max_waiting] scratch of the policy */
    PrefillRequest **sched_request;
    PrefillSchedChunk *sched_chunk; /* [max_running] */

    PrefillStats stats;
} Prefill;

/* prefill.c */
void prefill_init(Prefill *p, const PrefillConf *conf);
/* When the loop has ended, the stepper and the link are closed. */
void prefill_done(Prefill *p);

/* For BusCallbacks. */
void prefill_on_message(Prefill *p, BusPeer *router, const Baton__Envelope *env);
void prefill_on_router_gone(Prefill *p, BusPeer *router);
void prefill_on_ping(Prefill *p, Baton__Pong *pong);
/* Whether new requests can be served; *why is borrowed until the next call. */
bool prefill_ready(const Prefill *p, const char **why);
/* Deadlines and peers; to be called every PREFILL_TICK_MS. */
void prefill_tick(Prefill *p);
enum { PREFILL_TICK_MS = 50 };

/* Takes nothing new; on_idle follows once all is over. */
void prefill_drain(Prefill *p);
/* Ends what still runs with FAIL_DRAINING. */
void prefill_abort(Prefill *p);

/* ---- between the parts ---- */

/* prefill.c: r is to end with code, the first that is said. */
void prefill_doom(PrefillRequest *r, Baton__FailCode code, const char *reason);
/* Dooms r and ends it as soon as nothing of it can be written. */
void prefill_fail(Prefill *p, PrefillRequest *r, Baton__FailCode code, const char *reason);
/* r has ended, well or doomed: says so, gives its pages back and frees it. */
void prefill_over(Prefill *p, PrefillRequest *r);
/* A decode cannot be written to: all its requests end. */
void prefill_peer_failed(Prefill *p, PrefillPeer *peer);
void prefill_send_failed(BusPeer *router, uint64_t id, Baton__FailCode code, uint32_t retry_ms,
                         bool quiet, const char *reason);

/* intake.c */
void prefill_intake(Prefill *p, BusPeer *router, const Baton__Prefill *m);

/* steps.c */
void prefill_steps_init(Prefill *p);
void prefill_steps_done(Prefill *p);
/* Starts the next step unless one runs or nothing is to be computed. */
void prefill_steps_pump(Prefill *p);

/* deliver.c: all of r is computed and its puts are queued. */
void prefill_deliver(Prefill *p, PrefillRequest *r);
/* r is given up: waits until nothing of it can be written, then ends it. */
void prefill_close(Prefill *p, PrefillRequest *r);
/* Tries again what the link had no room for. */
void prefill_deliver_again(Prefill *p, PrefillRequest *r);
