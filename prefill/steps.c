/* Chunked prefill: several prompts share a step by the policy of sched.h; each layer's rows are
 * pushed as they are written, and pages are hashed as they fill up. One step is on the engine
 * thread at a time. */
#include "prefill/prefill.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- engine thread ---- */

static void on_point(void *arg, ForwardPoint point, int layer, const Tensor *t) {
    Prefill *p = arg;
    (void)t;
    if (point == FORWARD_KV)
        push_layer(&p->push, layer);
}

/* Hashes the pages that the chunk has completed, the partial last one with the prompt's end. */
static void hash_pages(Prefill *p, const PrefillChunk *c) {
    PrefillRequest *r = c->request;
    int end = r->computed + c->n_tokens, first = r->n_hashed;
    int n = end == r->n_prompt ? r->n_pages : end / KV_PAGE_TOKENS;
    for (int i = first; i < n; i++)
        p->n_rows[i - first] = kv_page_rows(r->n_prompt, i);
    engine_kv_hash(p->conf.runtime->engine, r->page + first, p->n_rows, n - first, r->hash + first);
    r->n_hashed = n;
}

static void run_step(StepTask *t) {
    Prefill *p = t->arg;
    ForwardProbe probe = {p, on_point};
    p->step_err = (Err){0};
    p->step_status = engine_step(p->conf.runtime->engine, &p->batch.ops, p->batch.row,
                                 p->batch.n_rows, &probe, &p->step_err);
    for (int i = 0; i < p->n_chunks && p->step_status == 0; i++)
        hash_pages(p, &p->chunk[i]);
}

/* ---- loop thread: what the next step is ---- */

static int choose(Prefill *p) {
    int64_t now = clock_now_ms();
    PrefillSchedView v = {.item = p->sched_item,
                          .free_pages = kv_pool_n_free(p->pool),
                          .n_begun = p->n_begun,
                          .max_begun = p->conf.limits.max_running,
                          .step_tokens = p->conf.limits.step_tokens,
                          .max_chunks = p->conf.limits.max_running,
                          .page_tokens = KV_PAGE_TOKENS,
                          .patience_ms = p->conf.limits.patience_ms};
    for (PrefillRequest *r = p->first; r; r = r->next) {
        if (r->doomed || r->state > PREFILL_COMPUTING)
            continue;
        p->sched_request[v.n] = r;
        p->sched_item[v.n] = (PrefillSchedItem){.computed = r->computed,
                                                .total = r->n_prompt,
                                                .begun = r->begun_ms != 0,
                                                .pages = r->n_pages,
                                                .waited_ms = now - r->served_ms,
                                                .index = v.n};
        v.n++;
    }
    return prefill_sched_next(&v, p->sched_chunk);
}

static void begin(Prefill *p, PrefillRequest *r) {
    CHECK(kv_pool_take(p->pool, r->n_pages, r->page, NULL) == 0); /* the policy has seen them */
    r->begun_ms = clock_now_ms();
    r->state = PREFILL_COMPUTING;
    p->n_begun++;
    stat_observe(p->stats.queue_s, (double)(r->begun_ms - r->arrived_ms) * 1e-3);
}

static void add_chunk(Prefill *p, PrefillRequest *r, int n_tokens) {
    int end = r->computed + n_tokens;
    PrefillChunk c = {.request = r, .n_tokens = n_tokens, .row = -1, .push = -1};
    PushSeq push = {.peer = r->peer->kv,
                    .local_page = r->page,
                    .remote_page = r->remote_page,
                    .remote = r->remote,
                    .from = r->computed > r->have ? r->computed : r->have,
                    .to = end};
    batch_add(&p->batch, r->prompt + r->computed, n_tokens, r->computed, r->page);
    if (end == r->n_prompt)
        c.row = batch_want(&p->batch, r->sampler, 0);
    if (push.from < push.to) {
        c.push = p->push.n_seq;
        push_add(&p->push, &push);
        r->wrote = true;
    }
    r->in_step = true;
    p->chunk[p->n_chunks++] = c;
}

void prefill_steps_pump(Prefill *p) {
    if (p->stepping || p->n == 0)
        return;
    int n = choose(p);
    if (n == 0)
        return;
    p->n_chunks = 0;
    batch_clear(&p->batch);
    push_clear(&p->push);
    for (int i = 0; i < n; i++) {
        PrefillRequest *r = p->sched_request[p->sched_chunk[i].index];
        if (!r->begun_ms)
            begin(p, r);
        add_chunk(p, r, p->sched_chunk[i].n_tokens);
    }
    p->stepping = stepper_put(p->conf.stepper, &p->step_task);
    CHECK(p->stepping); /* the stepper has room for each kind of task */
}

/* ---- loop thread: what the step gave ---- */

/* Why a chunk's request ends now, or FAIL_NONE. */
static Baton__FailCode trouble(const Prefill *p, const PrefillChunk *c, const char **reason) {
    if (p->step_status) {
        *reason = p->step_err.text;
        return p->conf.runtime->n_remote > 0 ? BATON__FAIL_CODE__FAIL_EXPERT
                                             : BATON__FAIL_CODE__FAIL_INTERNAL;
    }
    if (c->push >= 0 && p->push.seq[c->push].status) {
        *reason = p->push.seq[c->push].err.text;
        return BATON__FAIL_CODE__FAIL_TRANSFER;
    }
    if (c->row >= 0 && p->batch.row[c->row].status) {
        *reason = "the step gave no usable logits";
        return BATON__FAIL_CODE__FAIL_INTERNAL;
    }
    return BATON__FAIL_CODE__FAIL_NONE;
}

static void take_chunk(Prefill *p, const PrefillChunk *c, int64_t now) {
    PrefillRequest *r = c->request;
    const char *reason;
    Baton__FailCode code = trouble(p, c, &reason);
    r->in_step = false;
    if (code == BATON__FAIL_CODE__FAIL_NONE) {
        r->computed += c->n_tokens;
        r->served_ms = now;
        p->queued_tokens -= (uint64_t)c->n_tokens;
        stat_add(p->stats.tokens, c->n_tokens);
    }
    if (r->doomed) {
        prefill_close(p, r);
    } else if (code != BATON__FAIL_CODE__FAIL_NONE) {
        prefill_fail(p, r, code, reason);
    } else if (c->row >= 0) {
        r->first = p->batch.row[c->row].out;
        r->computed_ms = now;
        stat_observe(p->stats.compute_s, (double)(now - r->begun_ms) * 1e-3);
        prefill_deliver(p, r);
    }
}

/* Without its experts nothing here can go on; whoever waits is better told now. */
static void fail_all(Prefill *p) {
    for (PrefillRequest *next, *r = p->first; r; r = next) {
        next = r->next;
        if (r->state <= PREFILL_COMPUTING)
            prefill_fail(p, r, BATON__FAIL_CODE__FAIL_EXPERT, p->step_err.text);
    }
    expert_watch_failed(p->conf.experts, p->step_err.text);
}

static void on_stepped(StepTask *t) {
    Prefill *p = t->arg;
    int64_t now = clock_now_ms();
    double s = (double)(t->end_us - t->begin_us) * 1e-6, ms = s * 1e3 / p->batch.ops.n_tok;
    p->token_ms = p->token_ms > 0 ? 0.9 * p->token_ms + 0.1 * ms : ms;
    stat_observe(p->stats.step_s, s);
    stat_observe(p->stats.step_tokens, p->batch.ops.n_tok);
    if (p->step_status)
        LOG_ERR("step of %d requests failed: %s", p->n_chunks, p->step_err.text);
    for (int i = 0; i < p->n_chunks; i++) /* before any of their requests ends */
        if (p->chunk[i].push >= 0 && p->push.seq[p->chunk[i].push].status == E_PEER)
            prefill_peer_failed(p, p->chunk[i].request->peer);
    for (int i = 0; i < p->n_chunks; i++)
        take_chunk(p, &p->chunk[i], now);
    if (p->step_status == 0)
        expert_watch_worked(p->conf.experts);
    else if (p->conf.runtime->n_remote > 0)
        fail_all(p);
    p->stepping = false;
    prefill_peers_sweep(&p->peers, now);
    prefill_steps_pump(p);
}

void prefill_steps_init(Prefill *p) {
    const PrefillLimits *l = &p->conf.limits;
    const Runtime *rt = p->conf.runtime;
    size_t running = (size_t)l->max_running, waiting = (size_t)l->max_waiting;
    batch_init(&p->batch, l->step_tokens, l->max_running, l->max_context);
    push_init(&p->push, p->conf.link, &rt->layout, rt->shape->index_slot, l->step_tokens,
              l->max_running, l->link_ms, p->stats.pushed_bytes);
    p->n_rows = xcalloc((size_t)kv_pages_of(l->max_context), sizeof *p->n_rows);
    p->chunk = xcalloc(running, sizeof *p->chunk);
    p->sched_chunk = xcalloc(running, sizeof *p->sched_chunk);
    p->sched_item = xcalloc(waiting, sizeof *p->sched_item);
    p->sched_request = xcalloc(waiting, sizeof(PrefillRequest *));
    p->step_task = (StepTask){.run = run_step, .done = on_stepped, .arg = p};
}

void prefill_steps_done(Prefill *p) {
    batch_done(&p->batch);
    push_done(&p->push);
    free(p->n_rows);
    free(p->chunk);
    free(p->sched_chunk);
    free(p->sched_item);
    free(p->sched_request);
}
