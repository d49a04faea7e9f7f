/* See decode.h. Ends requests, and leads messages, notices and time to the parts. Loop thread. */
#include "decode/decode.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* ---- life ---- */

static void show_load(Decode *d) {
    stat_set(d->stats.running, d->n_running);
    stat_set(d->stats.waiting, d->n_active - d->n_running);
    stat_set(d->stats.free_pages, kv_pool_n_free(d->pool));
    stat_set(d->stats.used_pages, kv_pool_n_used(d->pool));
    stat_set(d->stats.quarantined_pages, kv_pool_n_quarantined(d->pool));
}

void decode_init(Decode *d, const DecodeConf *conf) {
    *d = (Decode){.conf = *conf, .next_ticket = 1};
    d->pool = kv_pool_new((int)conf->runtime->layout.n_pages);
    decode_stats_init(&d->stats);
    decode_out_init(&d->out, conf->limits.max_batch);
    decode_steps_init(d);
    decode_transfer_init(d);
    show_load(d);
}

static void give_pages(Decode *d, DecodeRequest *r) {
    if (r->state == DECODE_QUARANTINED)
        kv_pool_release(d->pool, r->page, r->n_granted);
    else
        kv_pool_give(d->pool, r->page, r->n_pages);
}

void decode_done(Decode *d) {
    for (DecodeRequest *r; (r = d->requests.list);) {
        give_pages(d, r); /* the link is closed: nobody writes any more */
        decode_requests_remove(&d->requests, r);
        decode_request_free(r);
    }
    decode_transfer_done(d);
    decode_steps_done(d);
    decode_out_done(&d->out);
    kv_pool_free(d->pool);
}

/* ---- the end of a request ---- */

static void forget(Decode *d, DecodeRequest *r) {
    give_pages(d, r);
    decode_requests_remove(&d->requests, r);
    decode_request_free(r);
}

static void check_budget(Decode *d) {
    int held = kv_pool_n_quarantined(d->pool);
    if (d->spent || held <= d->conf.limits.quarantine_budget * kv_pool_total(d->pool))
        return;
    LOG_ERR("%d of %d pages are in quarantine, more than the budget: no new requests, restart",
            held, kv_pool_total(d->pool));
    d->spent = true;
    d->conf.on_ready(d->conf.arg);
}

/* Takes r out of the work; its pages become free or go to quarantine. */
static void leave(Decode *d, DecodeRequest *r) {
    d->n_active--;
    d->n_running -= r->state == DECODE_RUNNING;
    if (r->writer_quiet) {
        forget(d, r);
    } else {
        kv_pool_quarantine(d->pool, r->page, r->n_granted);
        kv_pool_give(d->pool, r->page + r->n_granted, r->n_pages - r->n_granted);
        r->state = DECODE_QUARANTINED;
        r->router = NULL;
        check_budget(d);
    }
    if (d->draining && d->n_active == 0)
        d->conf.on_idle(d->conf.arg);
}

static void log_summary(const DecodeRequest *r, const char *how) {
    int64_t now = clock_now_ms();
    LOG_INFO("req %016" PRIx64 ": %s, %d prompt and %d answer tokens, %d pages, transfer %" PRId64
             " ms, verify %" PRId64 " ms, answer %" PRId64 " ms, total %" PRId64 " ms",
             r->id, how, r->n_prompt, r->n_answer, r->n_pages,
             r->ready_ms ? r->ready_ms - r->reserved_ms : now - r->reserved_ms,
             r->running_ms ? r->running_ms - r->ready_ms : 0,
             r->running_ms ? now - r->running_ms : 0, now - r->reserved_ms);
}

void decode_finish(Decode *d, DecodeRequest *r, Baton__Finish finish) {
    log_summary(r, finish == BATON__FINISH__FINISH_STOP ? "stop" : "length");
    leave(d, r);
}

void decode_send_failed(BusPeer *router, uint64_t id, Baton__FailCode code, uint32_t retry_ms,
                        const char *reason) {
    Err err = {0};
    Baton__Failed failed = BATON__FAILED__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    char text[BUS_REASON_MAX];
    snprintf(text, sizeof text, "%s", reason);
    failed.request = id;
    failed.code = code;
    failed.reason = text;
    failed.retry_after_ms = retry_ms;
    env.body_case = BATON__ENVELOPE__BODY_FAILED;
    env.failed = &failed;
    if (bus_send(router, &env, NULL, 0, &err))
        LOG_WARN("req %016" PRIx64 ": cannot tell the router that it failed: %s", id, err.text);
}

void decode_fail(Decode *d, DecodeRequest *r, Baton__FailCode code, uint32_t retry_ms,
                 const char *reason) {
    if (r->state == DECODE_QUARANTINED || r->doomed)
        return;
    if (r->in_task) {
        r->doomed = true;
        r->doom_code = code;
        snprintf(r->doom_reason, sizeof r->doom_reason, "%s", reason);
        return;
    }
    bool canceled = code == BATON__FAIL_CODE__FAIL_CANCELED;
    char how[300];
    snprintf(how, sizeof how, "%s: %s%s", canceled ? "canceled" : "failed", reason,
             r->writer_quiet ? "" : " (pages in quarantine)");
    log_summary(r, how);
    stat_add(canceled ? d->stats.canceled : d->stats.failed, 1);
    if (r->router && !canceled)
        decode_send_failed(r->router, r->id, code, retry_ms, reason);
    if (r->state == DECODE_VERIFYING)
        decode_transfer_forget(d, r);
    leave(d, r);
}

bool decode_task_over(Decode *d, DecodeRequest *r) {
    r->in_task = false;
    if (!r->doomed)
        return false;
    r->doomed = false;
    decode_fail(d, r, r->doom_code, 0, r->doom_reason);
    return true;
}

void decode_quiet(Decode *d, DecodeRequest *r) {
    r->writer_quiet = true;
    if (r->state != DECODE_QUARANTINED)
        return;
    LOG_DEBUG("req %016" PRIx64 ": writer quiet, %d pages leave quarantine", r->id, r->n_granted);
    forget(d, r);
}

void decode_lose_router(Decode *d, BusPeer *router, const char *reason) {
    for (DecodeRequest *next, *r = d->requests.list; r; r = next) {
        next = r->next;
        if (r->router == router)
            decode_fail(d, r, BATON__FAIL_CODE__FAIL_INTERNAL, 0, reason);
    }
}

/* ---- what comes in ---- */

static void on_cancel(Decode *d, const Baton__Cancel *m) {
    DecodeRequest *r = decode_requests_find(&d->requests, m->request);
    if (!r)
        return; /* over already */
    if (m->writer_quiet)
        r->writer_quiet = true;
    if (r->state == DECODE_QUARANTINED && r->writer_quiet)
        decode_quiet(d, r);
    else
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_CANCELED, 0, m->reason);
}

static void on_quiet(Decode *d, const Baton__Quiet *m) {
    DecodeRequest *r = decode_requests_find(&d->requests, m->request);
    if (!r)
        return;
    decode_quiet(d, r);
}

void decode_on_message(Decode *d, BusPeer *router, const Baton__Envelope *env) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_RESERVE:
        decode_admit_reserve(d, router, env->reserve);
        break;
    case BATON__ENVELOPE__BODY_CANCEL:
        on_cancel(d, env->cancel);
        break;
    case BATON__ENVELOPE__BODY_QUIET:
        on_quiet(d, env->quiet);
        break;
    default:
        LOG_DEBUG("a message that decode has no use for: %d", (int)env->body_case);
    }
}

void decode_on_router_gone(Decode *d, BusPeer *router) {
    for (DecodeRequest *next, *r = d->requests.list; r; r = next) {
        next = r->next;
        if (r->router != router)
            continue;
        r->router = NULL;
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_CANCELED, 0, "router gone");
    }
}

void decode_on_notice(Decode *d, const void *bytes, size_t len) {
    Baton__KvReady *m = baton__kv_ready__unpack(NULL, len, bytes);
    if (m) {
        decode_transfer_ready(d, m);
        baton__kv_ready__free_unpacked(m, NULL);
    } else {
        stat_add(d->stats.late_notices, 1);
        LOG_WARN("a notice of %zu bytes that does not parse", len);
    }
}

/* ---- readiness and time ---- */

bool decode_ready(const Decode *d, const char **why) {
    *why = d->draining ? "shutting down"
           : d->spent  ? "too many pages are in quarantine"
                       : expert_watch_reason(d->conf.experts);
    return !d->draining && !d->spent && expert_watch_up(d->conf.experts);
}

void decode_on_ping(Decode *d, Baton__Pong *pong) {
    const char *why;
    pong->ready = decode_ready(d, &why);
    pong->reason = (char *)(pong->ready ? "" : why);
    pong->free_pages = (uint32_t)kv_pool_n_free(d->pool);
    pong->total_pages = (uint32_t)kv_pool_total(d->pool);
    pong->quarantined_pages = (uint32_t)kv_pool_n_quarantined(d->pool);
    pong->running = (uint32_t)d->n_running;
    pong->waiting = (uint32_t)(d->n_active - d->n_running);
    pong->capacity = (uint32_t)d->conf.limits.max_running;
    pong->draining = d->draining;
}

static void check_deadlines(Decode *d, DecodeRequest *r, int64_t now) {
    if (r->state == DECODE_QUARANTINED)
        return;
    if (now >= r->deadline_ms)
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_DEADLINE, 0, "deadline of the request passed");
    else if (r->state == DECODE_RESERVED && now >= r->transfer_deadline_ms)
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_TRANSFER, 0, "KV did not arrive in time");
}

void decode_tick(Decode *d) {
    int64_t now = clock_now_ms();
    for (DecodeRequest *next, *r = d->requests.list; r; r = next) {
        next = r->next;
        check_deadlines(d, r, now);
    }
    show_load(d);
}

void decode_drain(Decode *d) {
    if (d->draining)
        return;
    d->draining = true;
    d->conf.on_ready(d->conf.arg);
    if (d->n_active == 0)
        d->conf.on_idle(d->conf.arg);
}

void decode_abort(Decode *d) {
    for (DecodeRequest *next, *r = d->requests.list; r; r = next) {
        next = r->next;
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_DRAINING, 0, "shut down before the answer's end");
    }
}
