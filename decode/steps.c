/* Continuous batching: every running request gives its newest token to each step and takes one from
 * it. One step is on the engine thread at a time; what it uses is left alone until it is done. */
#include "decode/decode.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- engine thread ---- */

static void run_step(StepTask *t) {
    Decode *d = t->arg;
    d->step_err = (Err){0};
    d->step_status = engine_step(d->conf.runtime->engine, &d->batch.ops, d->batch.row,
                                 d->batch.n_rows, NULL, &d->step_err);
}

/* ---- loop thread ---- */

static void add_to_batch(Decode *d, DecodeRequest *r) {
    batch_add(&d->batch, &r->last, 1, r->n_prompt + r->n_answer - 1, r->page);
    batch_want(&d->batch, r->sampler, r->n_answer);
    r->in_task = true;
    r->last_turn = ++d->n_turns;
    d->in_step[d->n_in_step++] = r;
}

static void pump(Decode *d) {
    int n = 0;
    if (d->stepping || d->n_running == 0)
        return;
    for (DecodeRequest *r = d->requests.list; r; r = r->next) {
        if (r->state != DECODE_RUNNING)
            continue;
        d->turn[n] = (DecodeSchedTurn){r->last_turn, n};
        d->running[n++] = r;
    }
    n = decode_sched_step(d->turn, n, d->conf.limits.max_batch);
    d->n_in_step = 0;
    batch_clear(&d->batch);
    for (int i = 0; i < n; i++)
        add_to_batch(d, d->running[d->turn[i].index]);
    d->stepping = stepper_put(d->conf.stepper, &d->step_task);
    CHECK(d->stepping); /* the stepper has room for each kind of task */
}

/* Gives r its next token and queues it for the router. True when that was the last. */
static bool take_token(Decode *d, DecodeRequest *r, const SampleOut *token, Baton__Finish *finish) {
    *finish = BATON__FINISH__FINISH_NONE;
    if (sampler_is_stop(r->sampler, token->token, r->n_answer)) {
        *finish = BATON__FINISH__FINISH_STOP;
        decode_out_add(&d->out, r, NULL, *finish);
        return true;
    }
    r->last = token->token;
    r->n_answer++;
    sampler_see(r->sampler, &r->last, 1, true);
    stat_add(d->stats.tokens, 1);
    if (r->n_answer == r->max_answer)
        *finish = BATON__FINISH__FINISH_LENGTH;
    decode_out_add(&d->out, r, token, *finish);
    return *finish != BATON__FINISH__FINISH_NONE;
}

static void on_lost(void *arg, BusPeer *router, const char *reason) {
    LOG_WARN("%s takes no more messages: %s", bus_peer_hello(router)->name, reason);
    decode_lose_router(arg, router, reason);
}

/* The whole step is void: no request of it has a token that could be trusted. */
static void fail_step(Decode *d) {
    bool remote = d->conf.runtime->n_remote > 0;
    LOG_ERR("step of %d requests failed: %s", d->n_in_step, d->step_err.text);
    for (int i = 0; i < d->n_in_step; i++)
        if (!decode_task_over(d, d->in_step[i]))
            decode_fail(d, d->in_step[i],
                        remote ? BATON__FAIL_CODE__FAIL_EXPERT : BATON__FAIL_CODE__FAIL_INTERNAL, 0,
                        d->step_err.text);
    if (remote)
        expert_watch_failed(d->conf.experts, d->step_err.text);
}

static void take_step(Decode *d) {
    for (int i = 0; i < d->n_in_step; i++) {
        DecodeRequest *r = d->in_step[i];
        const EngineRow *row = &d->batch.row[i];
        Baton__Finish finish;
        if (decode_task_over(d, r))
            continue;
        if (row->status)
            decode_fail(d, r, BATON__FAIL_CODE__FAIL_INTERNAL, 0, "the step gave no usable logits");
        else if (take_token(d, r, &row->out, &finish))
            decode_finish(d, r, finish);
    }
    expert_watch_worked(d->conf.experts);
}

static void on_stepped(StepTask *t) {
    Decode *d = t->arg;
    double s = (double)(t->end_us - t->begin_us) * 1e-6;
    d->stepping = false;
    d->step_ms = d->step_ms > 0 ? 0.9 * d->step_ms + 0.1 * s * 1e3 : s * 1e3;
    stat_observe(d->stats.step_s, s);
    stat_observe(d->stats.batch_rows, d->n_in_step);
    if (d->step_status)
        fail_step(d);
    else
        take_step(d);
    pump(d); /* first, so that the engine works while the frames are packed */
    decode_out_send(&d->out, on_lost, d);
}

void decode_steps_join(Decode *d, DecodeRequest *r) {
    Baton__Finish finish;
    if (!expert_watch_up(d->conf.experts)) {
        decode_fail(d, r, BATON__FAIL_CODE__FAIL_EXPERT, 0, expert_watch_reason(d->conf.experts));
        return;
    }
    r->state = DECODE_RUNNING;
    r->running_ms = clock_now_ms();
    r->last_turn = d->n_turns;
    d->n_running++;
    if (take_token(d, r, &r->first, &finish))
        decode_finish(d, r, finish);
    pump(d);
    decode_out_send(&d->out, on_lost, d);
}

void decode_steps_init(Decode *d) {
    const DecodeLimits *l = &d->conf.limits;
    size_t batch = (size_t)l->max_batch, running = (size_t)l->max_running;
    batch_init(&d->batch, l->max_batch, l->max_batch, l->max_context);
    d->in_step = xcalloc(batch, sizeof(DecodeRequest *));
    d->running = xcalloc(running, sizeof(DecodeRequest *));
    d->turn = xcalloc(running, sizeof *d->turn);
    d->load = xcalloc(running, sizeof *d->load);
    d->step_task = (StepTask){.run = run_step, .done = on_stepped, .arg = d};
}

void decode_steps_done(Decode *d) {
    batch_done(&d->batch);
    free(d->in_step);
    free(d->running);
    free(d->turn);
    free(d->load);
}
