/* PREFILL: checks a request and its grant and queues it, or says why not. Loop thread. */
#include "prefill/prefill.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>

enum { RETRY_MIN_MS = 100, RETRY_MAX_MS = 30000 };

/* Refused requests have written nothing. */
static void refuse(Prefill *p, BusPeer *router, uint64_t id, Baton__FailCode code,
                   uint32_t retry_ms, const char *reason) {
    stat_add(p->stats.refused, 1);
    LOG_INFO("req %016" PRIx64 ": refused: %s", id, reason);
    prefill_send_failed(router, id, code, retry_ms, true, reason);
}

/* When one place of the queue is likely to be free: a request's share of what is queued. */
static uint32_t retry_ms(const Prefill *p) {
    double ms = p->token_ms * (double)p->queued_tokens / (p->n > 0 ? p->n : 1);
    return ms < RETRY_MIN_MS ? RETRY_MIN_MS : ms > RETRY_MAX_MS ? RETRY_MAX_MS : (uint32_t)ms;
}

/* A refusal that does not look at the request itself; true when there was one. */
static bool refuse_all(Prefill *p, BusPeer *router, uint64_t id) {
    const char *why;
    char reason[80];
    if (p->draining) {
        refuse(p, router, id, BATON__FAIL_CODE__FAIL_DRAINING, 0, "shutting down");
    } else if (!prefill_ready(p, &why)) {
        refuse(p, router, id, BATON__FAIL_CODE__FAIL_EXPERT, 1000, why);
    } else if (p->n >= p->conf.limits.max_waiting) {
        snprintf(reason, sizeof reason, "%d requests wait already", p->n);
        refuse(p, router, id, BATON__FAIL_CODE__FAIL_BUSY, retry_ms(p), reason);
    } else {
        return false;
    }
    return true;
}

static void enqueue(Prefill *p, PrefillRequest *r, BusPeer *router, uint32_t deadline_ms) {
    int64_t now = clock_now_ms();
    r->owner = p;
    r->router = router;
    r->arrived_ms = r->served_ms = now;
    r->deadline_ms = now + deadline_ms;
    r->prev = p->last;
    if (r->prev)
        r->prev->next = r;
    else
        p->first = r;
    p->last = r;
    p->n++;
    p->queued_tokens += (uint64_t)r->n_prompt;
    stat_add(p->stats.requests, 1);
    LOG_DEBUG("req %016" PRIx64 ": queued, %d tokens, %d requests before it", r->id, r->n_prompt,
              p->n - 1);
}

void prefill_intake(Prefill *p, BusPeer *router, const Baton__Prefill *m) {
    Err err = {0};
    PrefillRequest *r = NULL;
    PrefillRequestLimits limits = {p->conf.runtime, p->conf.limits.max_context};
    if (refuse_all(p, router, m->request))
        return;
    int rc = prefill_request_new(&r, m, &limits, &err);
    if (rc) {
        refuse(p, router, m->request,
               rc == E_MISMATCH ? BATON__FAIL_CODE__FAIL_MISMATCH : BATON__FAIL_CODE__FAIL_INVALID,
               0, err.text);
        return;
    }
    rc = prefill_peers_get(&p->peers, m->grant, &r->peer, &err);
    if (rc) {
        refuse(p, router, m->request,
               rc == E_BUSY ? BATON__FAIL_CODE__FAIL_BUSY : BATON__FAIL_CODE__FAIL_TRANSFER, 1000,
               err.text);
        prefill_request_free(r);
        return;
    }
    enqueue(p, r, router, m->deadline_ms);
}
