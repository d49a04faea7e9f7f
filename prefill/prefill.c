/* See prefill.h. Ends requests, and leads messages and time to the parts. Loop thread. */
#include "prefill/prefill.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>

/* ---- life ---- */

static void show_load(Prefill *p) {
    stat_set(p->stats.running, p->n_begun);
    stat_set(p->stats.waiting, p->n - p->n_begun);
    stat_set(p->stats.free_pages, kv_pool_n_free(p->pool));
    stat_set(p->stats.used_pages, kv_pool_n_used(p->pool));
    stat_set(p->stats.quarantined_pages, kv_pool_n_quarantined(p->pool));
    stat_set(p->stats.queued_tokens, (double)p->queued_tokens);
}

void prefill_init(Prefill *p, const PrefillConf *conf) {
    *p = (Prefill){.conf = *conf};
    p->pool = kv_pool_new((int)conf->runtime->layout.n_pages);
    prefill_stats_init(&p->stats);
    p->peers = (PrefillPeers){.link = conf->link, .count = p->stats.peers};
    prefill_steps_init(p);
    show_load(p);
}

static void forget(Prefill *p, PrefillRequest *r) {
    if (r->begun_ms) {
        kv_pool_give(p->pool, r->page, r->n_pages);
        p->n_begun--;
    }
    p->queued_tokens -= (uint64_t)(r->n_prompt - r->computed);
    prefill_peers_put(r->peer, clock_now_ms());
    if (r->prev)
        r->prev->next = r->next;
    else
        p->first = r->next;
    if (r->next)
        r->next->prev = r->prev;
    else
        p->last = r->prev;
    p->n--;
    prefill_request_free(r);
}

void prefill_done(Prefill *p) {
    while (p->first)
        forget(p, p->first);
    prefill_peers_done(&p->peers);
    prefill_steps_done(p);
    kv_pool_free(p->pool);
}

/* ---- the end of a request ---- */

static void send_done(const PrefillRequest *r, int64_t now) {
    Err err = {0};
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    done.request = r->id;
    done.computed_tokens = (uint32_t)r->computed;
    done.queue_ms = (uint32_t)(r->begun_ms - r->arrived_ms);
    done.compute_ms = (uint32_t)(r->computed_ms - r->begun_ms);
    done.push_ms = (uint32_t)(now - r->computed_ms);
    env.body_case = BATON__ENVELOPE__BODY_PREFILL_DONE;
    env.prefill_done = &done;
    if (bus_send(r->router, &env, NULL, 0, &err))
        LOG_WARN("req %016" PRIx64 ": cannot tell the router of its end: %s", r->id, err.text);
}

void prefill_send_failed(BusPeer *router, uint64_t id, Baton__FailCode code, uint32_t retry_ms,
                         bool quiet, const char *reason) {
    Err err = {0};
    Baton__Failed failed = BATON__FAILED__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    char text[BUS_REASON_MAX];
    snprintf(text, sizeof text, "%s", reason);
    failed.request = id;
    failed.code = code;
    failed.reason = text;
    failed.retry_after_ms = retry_ms;
    failed.quiet = quiet;
    env.body_case = BATON__ENVELOPE__BODY_FAILED;
    env.failed = &failed;
    if (bus_send(router, &env, NULL, 0, &err))
        LOG_WARN("req %016" PRIx64 ": cannot tell the router of its end: %s", id, err.text);
}

static void log_summary(const PrefillRequest *r, int64_t now) {
    bool canceled = r->doom_code == BATON__FAIL_CODE__FAIL_CANCELED;
    int64_t begun = r->begun_ms ? r->begun_ms : now,
            computed = r->computed_ms ? r->computed_ms : now;
    LOG_INFO("req %016" PRIx64 ": %s%s, %d of %d prompt tokens, %d pages, queue %" PRId64
             " ms, compute %" PRId64 " ms, push %" PRId64 " ms",
             r->id,
             !r->doomed ? "done"
             : canceled ? "canceled: "
                        : "failed: ",
             r->doom_reason, r->computed, r->n_prompt, r->n_pages, begun - r->arrived_ms,
             computed - begun, now - computed);
}

void prefill_over(Prefill *p, PrefillRequest *r) {
    int64_t now = clock_now_ms();
    CHECK(!r->in_step && !r->pending);
    log_summary(r, now);
    if (r->doomed)
        stat_add(r->doom_code == BATON__FAIL_CODE__FAIL_CANCELED ? p->stats.canceled
                                                                 : p->stats.failed,
                 1);
    else
        stat_observe(p->stats.push_s, (double)(now - r->computed_ms) * 1e-3);
    if (r->router && r->doomed)
        prefill_send_failed(r->router, r->id, r->doom_code, 0, !r->unproven, r->doom_reason);
    else if (r->router)
        send_done(r, now);
    forget(p, r);
    if (p->draining && p->n == 0)
        p->conf.on_idle(p->conf.arg);
}

void prefill_doom(PrefillRequest *r, Baton__FailCode code, const char *reason) {
    if (r->doomed)
        return;
    r->doomed = true;
    r->doom_code = code;
    snprintf(r->doom_reason, sizeof r->doom_reason, "%s", reason);
}

void prefill_fail(Prefill *p, PrefillRequest *r, Baton__FailCode code, const char *reason) {
    if (r->doomed)
        return;
    prefill_doom(r, code, reason);
    if (!r->in_step && !r->pending)
        prefill_close(p, r);
}

void prefill_peer_failed(Prefill *p, PrefillPeer *peer) {
    if (peer->failed)
        return;
    peer->failed = true;
    for (PrefillRequest *next, *r = p->first; r; r = next) {
        next = r->next;
        if (r->peer == peer)
            prefill_fail(p, r, BATON__FAIL_CODE__FAIL_TRANSFER, "decode cannot be written to");
    }
    if (!p->stepping)
        prefill_peers_sweep(&p->peers, clock_now_ms());
}

/* ---- what comes in ---- */

static PrefillRequest *find(const Prefill *p, uint64_t id) {
    PrefillRequest *r = p->first;
    while (r && r->id != id)
        r = r->next;
    return r;
}

static void on_cancel(Prefill *p, BusPeer *router, const Baton__Cancel *m) {
    PrefillRequest *r = find(p, m->request);
    if (r)
        prefill_fail(p, r, BATON__FAIL_CODE__FAIL_CANCELED, m->reason);
    else /* what is not known here is not written */
        prefill_send_failed(router, m->request, BATON__FAIL_CODE__FAIL_CANCELED, 0, true,
                            "not known here");
}

void prefill_on_message(Prefill *p, BusPeer *router, const Baton__Envelope *env) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_PREFILL:
        if (find(p, env->prefill->request))
            LOG_WARN("req %016" PRIx64 ": sent twice; the second is ignored",
                     env->prefill->request);
        else
            prefill_intake(p, router, env->prefill);
        break;
    case BATON__ENVELOPE__BODY_CANCEL:
        on_cancel(p, router, env->cancel);
        break;
    default:
        LOG_DEBUG("a message that prefill has no use for: %d", (int)env->body_case);
    }
    prefill_steps_pump(p);
}

void prefill_on_router_gone(Prefill *p, BusPeer *router) {
    for (PrefillRequest *next, *r = p->first; r; r = next) {
        next = r->next;
        if (r->router != router)
            continue;
        r->router = NULL;
        prefill_fail(p, r, BATON__FAIL_CODE__FAIL_CANCELED, "router gone");
    }
    prefill_steps_pump(p);
}

/* ---- readiness and time ---- */

bool prefill_ready(const Prefill *p, const char **why) {
    *why = p->draining ? "shutting down" : expert_watch_reason(p->conf.experts);
    return !p->draining && expert_watch_up(p->conf.experts);
}

void prefill_on_ping(Prefill *p, Baton__Pong *pong) {
    const char *why;
    pong->ready = prefill_ready(p, &why);
    pong->reason = (char *)(pong->ready ? "" : why);
    pong->free_pages = (uint32_t)kv_pool_n_free(p->pool);
    pong->total_pages = (uint32_t)kv_pool_total(p->pool);
    pong->running = (uint32_t)p->n_begun;
    pong->waiting = (uint32_t)(p->n - p->n_begun);
    pong->capacity = (uint32_t)p->conf.limits.max_waiting;
    pong->queued_tokens = p->queued_tokens;
    pong->draining = p->draining;
}

void prefill_tick(Prefill *p) {
    int64_t now = clock_now_ms();
    for (PrefillRequest *next, *r = p->first; r; r = next) {
        next = r->next;
        if (now >= r->deadline_ms && !r->doomed)
            prefill_fail(p, r, BATON__FAIL_CODE__FAIL_DEADLINE, "deadline of the request passed");
        else
            prefill_deliver_again(p, r);
    }
    if (!p->stepping)
        prefill_peers_sweep(&p->peers, now);
    prefill_steps_pump(p);
    show_load(p);
}

void prefill_drain(Prefill *p) {
    if (p->draining)
        return;
    p->draining = true;
    p->conf.on_ready(p->conf.arg);
    if (p->n == 0)
        p->conf.on_idle(p->conf.arg);
}

void prefill_abort(Prefill *p) {
    for (PrefillRequest *next, *r = p->first; r; r = next) {
        next = r->next;
        prefill_fail(p, r, BATON__FAIL_CODE__FAIL_DRAINING, "shut down before its end");
    }
}
