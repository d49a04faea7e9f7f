/* KV that has arrived: is it for a request that waits, and is it what prefill computed? Comparing
 * hashes is done on the engine thread, in slices between steps, so that a long prompt does not hold
 * up the others. */
#include "decode/decode.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SLICE_BYTES = 32 << 20 }; /* a few milliseconds of hashing */

/* ---- engine thread ---- */

static void run_verify(StepTask *t) {
    Decode *d = t->arg;
    DecodeRequest *r = d->verify_first;
    int first = r->n_verified, left = r->n_granted - first;
    int n = left < d->verify_pages ? left : d->verify_pages;
    size_t bytes = (size_t)n * sizeof *d->verify_hash;
    for (int i = 0; i < n; i++)
        d->verify_rows[i] = kv_page_rows(r->n_prompt, first + i);
    engine_kv_hash(d->conf.runtime->engine, r->page + first, d->verify_rows, n, d->verify_hash);
    d->verify_ok = memcmp(d->verify_hash, r->page_hash + first, bytes) == 0;
    r->n_verified += n;
}

/* ---- loop thread ---- */

static void pump(Decode *d) {
    if (d->verifying || !d->verify_first)
        return;
    d->verifying = stepper_put(d->conf.stepper, &d->verify_task);
    CHECK(d->verifying); /* the stepper has room for each kind of task */
    d->verify_first->in_task = true;
}

static void bad_transfer(Decode *d, DecodeRequest *r, const char *what) {
    stat_add(d->stats.bad_transfers, 1);
    decode_fail(d, r, BATON__FAIL_CODE__FAIL_TRANSFER, 0, what);
}

static void on_verified(StepTask *t) {
    Decode *d = t->arg;
    DecodeRequest *r = d->verify_first;
    d->verifying = false;
    if (!decode_task_over(d, r)) {
        if (!d->verify_ok) {
            bad_transfer(d, r, "KV arrived damaged: a page hash differs");
        } else if (r->n_verified == r->n_granted) {
            stat_observe(d->stats.verify_s, (double)(clock_now_ms() - r->ready_ms) * 1e-3);
            decode_transfer_forget(d, r);
            decode_steps_join(d, r);
        }
    }
    pump(d);
}

void decode_transfer_init(Decode *d) {
    int64_t page = (int64_t)kv_page_total_bytes(&d->conf.runtime->layout);
    d->verify_pages = page < SLICE_BYTES ? (int)(SLICE_BYTES / page) : 1;
    d->verify_rows = xcalloc((size_t)d->verify_pages, sizeof *d->verify_rows);
    d->verify_hash = xcalloc((size_t)d->verify_pages, sizeof *d->verify_hash);
    d->verify_task = (StepTask){.run = run_verify, .done = on_verified, .arg = d};
}

void decode_transfer_done(Decode *d) {
    free(d->verify_rows);
    free(d->verify_hash);
}

void decode_transfer_forget(Decode *d, DecodeRequest *r) {
    DecodeRequest **at = &d->verify_first, *before = NULL;
    while (*at && *at != r) {
        before = *at;
        at = &before->next_verify;
    }
    if (!*at)
        return;
    *at = r->next_verify;
    if (d->verify_last == r)
        d->verify_last = before;
}

static void verify(Decode *d, DecodeRequest *r) {
    r->next_verify = NULL;
    if (d->verify_last)
        d->verify_last->next_verify = r;
    else
        d->verify_first = r;
    d->verify_last = r;
    pump(d);
}

/* What is wrong with a notice for r, or NULL. */
static const char *check(const Decode *d, const DecodeRequest *r, const Baton__KvReady *m) {
    if (m->n_tokens != (uint32_t)r->n_prompt)
        return "KV of another number of tokens arrived";
    if (m->n_page_hash != (size_t)r->n_granted)
        return "KV with another number of page hashes arrived";
    if (!m->first || m->first->token >= (uint32_t)d->conf.runtime->n_tokens ||
        m->first->n_top > SAMPLE_MAX_TOP)
        return "KV without a valid first token arrived";
    return NULL;
}

static void take_first(DecodeRequest *r, const Baton__TokenOut *first) {
    r->first = (SampleOut){
        .token = (int32_t)first->token, .logprob = first->logprob, .n_top = (int)first->n_top};
    for (size_t i = 0; i < first->n_top; i++) {
        r->first.top_token[i] = (int32_t)first->top[i]->token;
        r->first.top_logprob[i] = first->top[i]->logprob;
    }
}

/* The request that a notice is for: its ticket is of this process and still out. */
static DecodeRequest *find(const Decode *d, const Baton__KvReady *m) {
    DecodeRequest *r = decode_requests_find(&d->requests, m->request);
    bool fits = r && m->generation == d->conf.generation && m->ticket == r->ticket &&
                (r->state == DECODE_RESERVED || r->state == DECODE_QUARANTINED);
    return fits ? r : NULL;
}

void decode_transfer_ready(Decode *d, const Baton__KvReady *m) {
    DecodeRequest *r = find(d, m);
    if (!r) {
        stat_add(d->stats.late_notices, 1);
        LOG_DEBUG("req %016" PRIx64 ": notice of KV that nothing waits for", m->request);
        return;
    }
    if (r->state == DECODE_QUARANTINED) {
        decode_quiet(d, r);
        return;
    }
    r->writer_quiet = true; /* a notice is the writer's last word */
    if (m->n_tokens == 0) {
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_TRANSFER, 0, "prefill gave up");
        return;
    }
    const char *wrong = check(d, r, m);
    if (wrong) {
        bad_transfer(d, r, wrong);
        return;
    }
    r->state = DECODE_VERIFYING;
    r->ready_ms = clock_now_ms();
    stat_observe(d->stats.transfer_s, (double)(r->ready_ms - r->reserved_ms) * 1e-3);
    take_first(r, m->first);
    if (!d->conf.limits.verify) {
        decode_steps_join(d, r);
        return;
    }
    size_t bytes = m->n_page_hash * sizeof *r->page_hash;
    r->page_hash = xmalloc(bytes);
    memcpy(r->page_hash, m->page_hash, bytes);
    verify(d, r);
}
