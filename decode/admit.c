/* RESERVE: pages for the whole request at once, and the grant that tells prefill where its KV goes;
 * or a refusal. Loop thread. */
#include "decode/decode.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>

static DecodeAdmit may_enter(const Decode *d, int need_pages, uint32_t *retry_ms) {
    DecodeSchedView v = {
        .free_pages = kv_pool_n_free(d->pool),
        .total_pages = kv_pool_total(d->pool),
        .active = d->n_active,
        .max_active = d->conf.limits.max_running,
        .step_ms = d->step_ms,
        .running = d->load,
    };
    for (const DecodeRequest *r = d->requests.list; r; r = r->next)
        if (r->state == DECODE_RUNNING)
            v.running[v.n_running++] =
                (DecodeSchedRunning){r->max_answer - r->n_answer, r->n_pages};
    return decode_sched_admit(&v, need_pages, retry_ms);
}

static int send_grant(const Decode *d, const DecodeRequest *r, Err *err) {
    Baton__Grant g = BATON__GRANT__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    KvRemote self;
    kvlink_describe(d->conf.link, &self);
    g.request = r->id;
    g.generation = d->conf.generation;
    g.kv_address = (ProtobufCBinaryData){self.address_len, (uint8_t *)self.address};
    g.kv_rkey = (ProtobufCBinaryData){self.rkey_len, (uint8_t *)self.rkey};
    g.kv_base = self.base;
    g.kv_bytes = self.bytes;
    g.total_pages = (uint32_t)kv_pool_total(d->pool);
    g.n_page = (size_t)r->n_granted;
    g.page = (uint32_t *)r->page; /* ids are not negative */
    g.kv_layout_hash = kv_layout_hash(&d->conf.runtime->layout);
    g.fingerprint = d->conf.runtime->fingerprint;
    g.ticket = r->ticket;
    env.body_case = BATON__ENVELOPE__BODY_GRANT;
    env.grant = &g;
    return bus_send(r->router, &env, NULL, 0, err);
}

static void enter(Decode *d, DecodeRequest *r, BusPeer *router, uint32_t deadline_ms) {
    Err err = {0};
    int64_t now = clock_now_ms();
    CHECK(kv_pool_take(d->pool, r->n_pages, r->page, NULL) == 0); /* may_enter has seen them */
    r->router = router;
    r->ticket = d->next_ticket++;
    r->reserved_ms = now;
    r->deadline_ms = now + deadline_ms;
    r->transfer_deadline_ms = now + d->conf.limits.transfer_ms;
    decode_requests_put(&d->requests, r);
    d->n_active++;
    stat_add(d->stats.requests, 1);
    if (send_grant(d, r, &err)) {
        r->writer_quiet = true; /* nobody has heard of the pages */
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_INTERNAL, 0, err.text);
        return;
    }
    LOG_DEBUG("req %016llx: granted %d of %d pages for %d prompt and up to %d answer tokens",
              (unsigned long long)r->id, r->n_granted, r->n_pages, r->n_prompt, r->max_answer);
}

static void refuse(Decode *d, BusPeer *router, uint64_t id, Baton__FailCode code, uint32_t retry_ms,
                   const char *reason) {
    stat_add(d->stats.refused, 1);
    LOG_INFO("req %016llx: refused: %s", (unsigned long long)id, reason);
    decode_send_failed(router, id, code, retry_ms, reason);
}

/* A refusal that does not look at the request itself; true when there was one. */
static bool refuse_all(Decode *d, BusPeer *router, uint64_t id) {
    const char *why;
    if (d->draining) {
        refuse(d, router, id, BATON__FAIL_CODE__FAIL_DRAINING, 0, "shutting down");
        return true;
    }
    if (!decode_ready(d, &why)) {
        bool experts = !expert_watch_up(d->conf.experts);
        refuse(d, router, id, experts ? BATON__FAIL_CODE__FAIL_EXPERT : BATON__FAIL_CODE__FAIL_BUSY,
               1000, why);
        return true;
    }
    return false;
}

void decode_admit_reserve(Decode *d, BusPeer *router, const Baton__Reserve *m) {
    Err err = {0};
    char reason[160];
    uint32_t retry_ms = 0;
    DecodeRequest *r = NULL;
    if (decode_requests_find(&d->requests, m->request)) {
        LOG_WARN("req %016llx: reserved twice; the second is ignored",
                 (unsigned long long)m->request);
        return;
    }
    if (refuse_all(d, router, m->request))
        return;
    const Runtime *rt = d->conf.runtime;
    if (decode_request_new(&r, m, d->conf.limits.max_context, rt->n_tokens, rt->shape->vocab,
                           &err)) {
        refuse(d, router, m->request, BATON__FAIL_CODE__FAIL_INVALID, 0, err.text);
        return;
    }
    switch (may_enter(d, r->n_pages, &retry_ms)) {
    case DECODE_ADMIT:
        enter(d, r, router, m->deadline_ms);
        return;
    case DECODE_BUSY:
        snprintf(reason, sizeof reason, "%d pages wanted, %d of %d free; %d of %d requests active",
                 r->n_pages, kv_pool_n_free(d->pool), kv_pool_total(d->pool), d->n_active,
                 d->conf.limits.max_running);
        refuse(d, router, r->id, BATON__FAIL_CODE__FAIL_BUSY, retry_ms, reason);
        break;
    case DECODE_NEVER:
        snprintf(reason, sizeof reason, "%d pages wanted, the pool has %d", r->n_pages,
                 kv_pool_total(d->pool));
        refuse(d, router, r->id, BATON__FAIL_CODE__FAIL_INVALID, 0, reason);
        break;
    }
    decode_request_free(r);
}
