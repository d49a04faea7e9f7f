/* See attempt.h. */
#include "router/attempt.h"

#include "base/clock.h"

#include <stdlib.h>

static Attempt **bucket(const Attempts *all, uint64_t id) {
    return (Attempt **)&all->buckets[id % ATTEMPT_BUCKETS];
}

Attempt *attempt_new(Attempts *all, Peer *prefill, Peer *decode, void *owner) {
    Attempt *a = xcalloc(1, sizeof *a);
    do
        a->id = clock_unique();
    while (attempt_find(all, a->id));
    a->prefill = prefill;
    a->decode = decode;
    a->owner = owner;
    a->next_in_bucket = *bucket(all, a->id);
    *bucket(all, a->id) = a;
    a->next = all->list;
    if (a->next)
        a->next->prev = a;
    all->list = a;
    all->n++;
    return a;
}

static void attempt_free(Attempts *all, Attempt *a) {
    Attempt **at = bucket(all, a->id);
    while (*at != a)
        at = &(*at)->next_in_bucket;
    *at = a->next_in_bucket;
    if (a->prev)
        a->prev->next = a->next;
    else
        all->list = a->next;
    if (a->next)
        a->next->prev = a->prev;
    all->n--;
    free(a);
}

void attempts_done(Attempts *all) {
    while (all->list)
        attempt_free(all, all->list);
}

Attempt *attempt_find(const Attempts *all, uint64_t id) {
    Attempt *a = *bucket(all, id);
    while (a && a->id != id)
        a = a->next_in_bucket;
    return a;
}

/* ---- messages ---- */

static uint32_t to_deadline(int64_t ms) {
    return ms < 1 ? 1 : ms > UINT32_MAX ? UINT32_MAX : (uint32_t)ms;
}

int attempt_reserve(Attempts *all, Attempt *a, const ApiReq *req, int64_t deadline_ms, Err *err) {
    Baton__Reserve reserve = BATON__RESERVE__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    reserve.request = a->id;
    reserve.n_prompt = req->n_ids;
    reserve.prompt = (uint32_t *)req->ids; /* ids are not negative */
    reserve.sampling = (Baton__Sampling *)&req->sampling;
    reserve.deadline_ms = to_deadline(deadline_ms);
    env.body_case = BATON__ENVELOPE__BODY_RESERVE;
    env.reserve = &reserve;
    return all->send(all->arg, a->decode, &env, err);
}

int attempt_prefill(Attempts *all, Attempt *a, const ApiReq *req, Baton__Grant *grant,
                    int64_t deadline_ms, Err *err) {
    Baton__Prefill prefill = BATON__PREFILL__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    prefill.request = a->id;
    prefill.n_prompt = req->n_ids;
    prefill.prompt = (uint32_t *)req->ids;
    prefill.sampling = (Baton__Sampling *)&req->sampling;
    prefill.grant = grant;
    prefill.deadline_ms = to_deadline(deadline_ms);
    env.body_case = BATON__ENVELOPE__BODY_PREFILL;
    env.prefill = &prefill;
    int rc = all->send(all->arg, a->prefill, &env, err);
    a->wrote |= rc == 0;
    a->asked |= rc == 0;
    return rc;
}

static bool send_cancel(Attempts *all, Peer *peer, uint64_t id, bool writer_quiet) {
    Baton__Cancel cancel = BATON__CANCEL__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    cancel.request = id;
    cancel.reason = "given up";
    cancel.writer_quiet = writer_quiet;
    env.body_case = BATON__ENVELOPE__BODY_CANCEL;
    env.cancel = &cancel;
    return all->send(all->arg, peer, &env, NULL) == 0;
}

static bool send_quiet(Attempts *all, Peer *peer, uint64_t id) {
    Baton__Quiet quiet = BATON__QUIET__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    quiet.request = id;
    env.body_case = BATON__ENVELOPE__BODY_QUIET;
    env.quiet = &quiet;
    return all->send(all->arg, peer, &env, NULL) == 0;
}

/* Sends what is owed; frees an attempt that has no owner and waits for nothing. */
static void settle(Attempts *all, Attempt *a) {
    if (a->owe_prefill_cancel && (!a->prefill || send_cancel(all, a->prefill, a->id, false)))
        a->owe_prefill_cancel = false;
    if (a->owe_decode_cancel && (!a->decode || send_cancel(all, a->decode, a->id, !a->wrote))) {
        a->owe_decode_cancel = false;
        a->owe_quiet = a->decode && a->wrote;
    }
    /* Quiet waits for prefill's last word, and stays behind a cancel that is still owed. */
    if (a->owe_quiet && !a->wrote && !a->owe_decode_cancel &&
        (!a->decode || send_quiet(all, a->decode, a->id)))
        a->owe_quiet = false;
    if (!a->owner && !a->wrote && !a->owe_prefill_cancel && !a->owe_decode_cancel && !a->owe_quiet)
        attempt_free(all, a);
}

/* ---- a life's end ---- */

void attempt_quiet(Attempts *all, Attempt *a) {
    a->wrote = false;
    a->prefill = NULL;
    settle(all, a);
}

void attempt_decode_over(Attempt *a, bool ok) {
    a->decode_done = true;
    a->failed = !ok;
}

void attempt_release(Attempts *all, Attempt *a, int64_t now_ms) {
    bool complete = a->decode_done && !a->failed;
    a->owner = NULL;
    a->drop_ms = now_ms + all->keep_ms;
    /* After a complete answer all KV has arrived, and prefill is about to say that it is done. */
    a->owe_prefill_cancel = a->wrote && !complete;
    a->owe_decode_cancel = a->decode && !a->decode_done;
    /* Prefill may have been done before decode failed: its notice was lost on the way. */
    a->owe_quiet = a->decode && a->failed && a->asked;
    settle(all, a);
}

void attempts_gone(Attempts *all, Peer *peer, void (*on_lost)(void *arg, Attempt *a, bool decode),
                   void *arg) {
    Attempt *next;
    for (Attempt *a = all->list; a; a = next) {
        next = a->next; /* on_lost makes new ones at the head of the list and frees this one only */
        bool lost_prefill = a->prefill == peer, lost_decode = a->decode == peer;
        if (lost_prefill) {
            a->prefill = NULL;
            a->wrote = false;
        }
        if (lost_decode)
            a->decode = NULL;
        if (a->owner && (lost_prefill || lost_decode))
            on_lost(arg, a, lost_decode);
        else if (lost_prefill || lost_decode)
            settle(all, a);
    }
}

void attempts_reset(Attempts *all, const Peer *peer) {
    for (Attempt *a = all->list; a; a = a->next) {
        if (a->owner)
            continue;
        if (a->prefill == peer && a->wrote)
            a->owe_prefill_cancel = true;
        if (a->decode == peer && !a->decode_done)
            a->owe_decode_cancel = true;
    }
}

void attempts_pump(Attempts *all, int64_t now_ms) {
    Attempt *next;
    for (Attempt *a = all->list; a; a = next) {
        next = a->next;
        if (a->owner)
            continue;
        if (now_ms < a->drop_ms) {
            settle(all, a);
        } else {
            all->n_dropped++;
            attempt_free(all, a);
        }
    }
}
