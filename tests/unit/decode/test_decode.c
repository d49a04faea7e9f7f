/* A request's way through decode: let in or refused, received, run, ended; and where its pages are
 * afterwards. */
#include "decode/sched.h"
#include "decode_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int setup(void **state) {
    DecodeLimits l = rig_limits();
    *state = rig_open(&l, true);
    return 0;
}

static int teardown(void **state) {
    rig_close(*state);
    return 0;
}

static void pages(const Rig *r, int n_free, int n_quarantined) {
    assert_int_equal(kv_pool_n_free(r->d.pool), n_free);
    assert_int_equal(kv_pool_n_quarantined(r->d.pool), n_quarantined);
    kv_pool_check(r->d.pool);
}

static const Baton__TokenStep *only_step(int i, uint64_t id) {
    const Baton__Envelope *env = rig_sent(i);
    assert_int_equal(env->body_case, BATON__ENVELOPE__BODY_TOKENS);
    assert_int_equal(env->tokens->n_step, 1);
    assert_int_equal(env->tokens->step[0]->request, id);
    return env->tokens->step[0];
}

/* ---- letting in ---- */

static void test_grant_says_where_kv_goes(void **state) {
    Rig *r = *state;
    rig_reserve(r, 0, 42, 130, 100); /* 130 + 99 positions */
    const Baton__Grant *g = rig_granted();
    assert_int_equal(g->request, 42);
    assert_int_equal(g->generation, RIG_GENERATION);
    assert_int_equal(g->n_page, 3);
    assert_int_equal(g->total_pages, RIG_PAGES);
    assert_int_equal(g->have, 0);
    assert_int_equal(g->fingerprint, 0xf00d);
    assert_true(g->kv_layout_hash == kv_layout_hash(&r->runtime.layout));
    assert_int_equal(g->kv_base, 0x1000);
    assert_int_equal(g->kv_address.len, 4);
    assert_memory_equal(g->kv_rkey.data, "key", 3);
    assert_true(g->ticket > 0);
    pages(r, RIG_PAGES - 4, 0);
    rig_cancel(r, 42, true);
    pages(r, RIG_PAGES, 0);
}

static void test_the_last_token_needs_no_place(void **state) {
    Rig *r = *state;
    rig_reserve(r, 0, 1, 64, 1);
    pages(r, RIG_PAGES - 1, 0);
    rig_reserve(r, 0, 2, 64, 2);
    pages(r, RIG_PAGES - 3, 0);
    rig_reserve(r, 0, 3, 500, 1000000); /* bounded by the context of 512 */
    pages(r, RIG_PAGES - 3 - 8, 0);
}

static void test_no_pages_is_busy_with_a_time(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 100, 400); /* 8 pages */
    rig_start(r, 0, 2, 100, 400);
    rig_reserve(r, 0, 3, 100, 400);
    assert_true(rig_task()); /* a step of 2 ms */
    rig_forget();
    rig_reserve(r, 0, 4, 64, 2);
    const Baton__Failed *f = rig_failed();
    assert_int_equal(f->request, 4);
    assert_int_equal(f->code, BATON__FAIL_CODE__FAIL_BUSY);
    assert_in_range(f->retry_after_ms, 700, 820); /* about 398 tokens of 2 ms */
    assert_non_null(strstr(f->reason, "2 pages wanted, 0 of 24 free"));
    pages(r, 0, 0);
}

static void test_no_place_is_busy(void **state) {
    Rig *r = *state;
    for (uint64_t i = 0; i < 8; i++)
        rig_reserve(r, 0, 10 + i, 10, 10);
    rig_forget();
    rig_reserve(r, 0, 30, 10, 10);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_BUSY);
    assert_int_equal(rig_failed()->retry_after_ms, DECODE_RETRY_MIN_MS);
    pages(r, RIG_PAGES - 8, 0);
}

static void refused(Rig *r, int n_prompt, const Baton__Sampling *s, const char *part) {
    rig_forget();
    rig_reserve_with(r, 0, 99, n_prompt, s);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_INVALID);
    assert_non_null(strstr(rig_failed()->reason, part));
    pages(r, RIG_PAGES, 0);
}

static void test_wrong_requests_are_refused(void **state) {
    Rig *r = *state;
    Baton__Sampling ok = BATON__SAMPLING__INIT, s;
    uint32_t stop[SAMPLE_MAX_STOP + 1] = {RIG_TOKENS};
    ok.top_p = 1, ok.repetition_penalty = 1, ok.max_tokens = 10;
    refused(r, 0, &ok, "empty prompt");
    refused(r, 512, &ok, "context has 512");
    s = ok, s.temperature = -1;
    refused(r, 5, &s, "temperature");
    s = ok, s.max_tokens = 0;
    refused(r, 5, &s, "max_tokens");
    s = ok, s.stop_token = stop, s.n_stop_token = 1;
    refused(r, 5, &s, "stop token");
    s.n_stop_token = SAMPLE_MAX_STOP + 1;
    refused(r, 5, &s, "stop tokens");
    s = ok, s.top_logprobs = 0x80000001u;
    refused(r, 5, &s, "top_logprobs");
}

static void test_a_prompt_token_outside_the_vocabulary_is_refused(void **state) {
    Rig *r = *state;
    Baton__Sampling s = BATON__SAMPLING__INIT;
    Baton__Reserve m = BATON__RESERVE__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    uint32_t prompt[2] = {3, RIG_TOKENS}; /* a padding row */
    s.top_p = 1, s.repetition_penalty = 1, s.max_tokens = 10;
    m.request = 5, m.prompt = prompt, m.n_prompt = 2, m.sampling = &s;
    env.body_case = BATON__ENVELOPE__BODY_RESERVE;
    env.reserve = &m;
    decode_on_message(&r->d, rig_router(0), &env);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_INVALID);
}

static void test_a_request_larger_than_the_pool_is_never_let_in(void **state) {
    (void)state;
    DecodeLimits l = rig_limits();
    l.max_context = 10000;
    Rig *r = rig_open(&l, false);
    rig_reserve(r, 0, 1, 10, 9000);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_INVALID);
    assert_non_null(strstr(rig_failed()->reason, "the pool has 24"));
    rig_close(r);
}

static void test_the_same_id_twice_changes_nothing(void **state) {
    Rig *r = *state;
    rig_reserve(r, 0, 1, 10, 10);
    rig_reserve(r, 0, 1, 10, 10);
    assert_int_equal(rig_n_sent(), 1);
    pages(r, RIG_PAGES - 1, 0);
}

/* ---- answering ---- */

static void test_from_first_token_to_length(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 7, 130, 4);
    assert_int_equal(rig_n_sent(), 2);
    assert_int_equal(only_step(1, 7)->out[0]->token, 9);
    assert_int_equal(only_step(1, 7)->finish, BATON__FINISH__FINISH_NONE);
    for (int i = 0; i < 3; i++) {
        assert_true(rig_task());
        assert_int_equal(rig_step.token[0], i == 0 ? 9 : 10 + i);
        assert_int_equal(rig_step.pos[0], 130 + i);
        const Baton__TokenStep *s = only_step(2 + i, 7);
        assert_int_equal(s->n_out, 1);
        assert_int_equal(s->out[0]->token, 11 + i);
        assert_int_equal(s->finish,
                         i == 2 ? BATON__FINISH__FINISH_LENGTH : BATON__FINISH__FINISH_NONE);
    }
    assert_false(rig_task());
    assert_int_equal(r->d.n_active, 0);
    pages(r, RIG_PAGES, 0);
}

static Baton__Sampling stop_at(uint32_t *token, uint32_t min_tokens) {
    Baton__Sampling s = BATON__SAMPLING__INIT;
    s.top_p = 1, s.repetition_penalty = 1, s.max_tokens = 50;
    s.stop_token = token, s.n_stop_token = 1, s.min_tokens = min_tokens;
    return s;
}

static void receive(Rig *r, uint64_t id, int32_t first) {
    rig_ready(r, id, first, NULL);
    assert_true(rig_task());
}

static void test_stop_carries_no_token(void **state) {
    Rig *r = *state;
    uint32_t stop = 12;
    Baton__Sampling s = stop_at(&stop, 0);
    rig_reserve_with(r, 0, 3, 20, &s);
    receive(r, 3, 9);
    assert_true(rig_task());
    assert_int_equal(only_step(2, 3)->out[0]->token, 11);
    assert_true(rig_task());
    assert_int_equal(only_step(3, 3)->n_out, 0);
    assert_int_equal(only_step(3, 3)->finish, BATON__FINISH__FINISH_STOP);
    pages(r, RIG_PAGES, 0);
}

static void test_the_first_token_may_be_the_last(void **state) {
    Rig *r = *state;
    uint32_t stop = 9;
    Baton__Sampling s = stop_at(&stop, 0);
    rig_reserve_with(r, 0, 3, 20, &s);
    receive(r, 3, 9);
    assert_int_equal(only_step(1, 3)->n_out, 0);
    assert_int_equal(only_step(1, 3)->finish, BATON__FINISH__FINISH_STOP);
    rig_forget();
    rig_reserve(r, 0, 4, 20, 1);
    receive(r, 4, 9);
    assert_int_equal(only_step(1, 4)->out[0]->token, 9);
    assert_int_equal(only_step(1, 4)->finish, BATON__FINISH__FINISH_LENGTH);
    assert_int_equal(rig_step.steps, 0);
    pages(r, RIG_PAGES, 0);
}

static void test_a_stop_before_min_tokens_is_a_token(void **state) {
    Rig *r = *state;
    uint32_t stop = 9;
    Baton__Sampling s = stop_at(&stop, 1);
    rig_reserve_with(r, 0, 3, 20, &s);
    receive(r, 3, 9);
    assert_int_equal(only_step(1, 3)->n_out, 1);
    assert_int_equal(only_step(1, 3)->finish, BATON__FINISH__FINISH_NONE);
}

static void test_log_probabilities_go_out_when_asked_for(void **state) {
    Rig *r = *state;
    Baton__Sampling s = BATON__SAMPLING__INIT;
    s.top_p = 1, s.repetition_penalty = 1, s.max_tokens = 50;
    s.logprobs = true, s.top_logprobs = 3;
    rig_reserve_with(r, 0, 3, 20, &s);
    receive(r, 3, 9);
    assert_true(rig_task());
    const Baton__TokenOut *out = only_step(2, 3)->out[0];
    assert_true(out->logprob == -0.5f);
    assert_int_equal(out->n_top, 3);
    assert_int_equal(out->top[2]->token, 2);
}

static void test_one_frame_per_step_and_router(void **state) {
    Rig *r = *state;
    for (uint64_t i = 0; i < 6; i++)
        rig_start(r, i < 4 ? 0 : 1, 50 + i, 20, 20);
    while (rig_step.n < 6) /* the step that was under way when the last one joined */
        assert_true(rig_task());
    rig_forget();
    assert_true(rig_task());
    assert_int_equal(rig_step.n, 6);
    assert_int_equal(rig_n_sent(), 2);
    for (int i = 0; i < 2; i++) {
        const Baton__Tokens *t = rig_sent(i)->tokens;
        bool first = rig_sent_to(i) == rig_router(0);
        assert_int_equal(t->n_step, first ? 4 : 2);
        for (size_t k = 0; k < t->n_step; k++)
            assert_true((t->step[k]->request < 54) == first);
    }
    for (int a = 0; a < 6; a++) /* each sequence has pages of its own */
        for (int b = 0; b < a; b++)
            assert_int_not_equal(rig_step.first_page[a], rig_step.first_page[b]);
}

static void test_more_than_a_batch_take_turns(void **state) {
    (void)state;
    DecodeLimits l = rig_limits();
    l.max_batch = 3;
    Rig *r = rig_open(&l, false);
    for (uint64_t i = 0; i < 8; i++)
        rig_start(r, 0, 1 + i, 20, 40);
    for (int i = 0; i < 48; i++) {
        assert_true(rig_task());
        assert_true(rig_step.n <= 3);
    }
    int least = 1000, most = 0;
    for (const DecodeRequest *q = r->d.requests.list; q; q = q->next) {
        least = q->n_answer < least ? q->n_answer : least;
        most = q->n_answer > most ? q->n_answer : most;
    }
    assert_true(least >= 16 && most - least <= 8);
    rig_close(r);
}

static void test_a_row_without_logits_fails_alone(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 20, 20);
    rig_start(r, 0, 2, 20, 20);
    while (rig_step.n < 2)
        assert_true(rig_task());
    rig_forget();
    rig_wish.row_status = E_FORMAT;
    assert_true(rig_task());
    assert_int_equal(rig_n_sent(), 2); /* Failed, and the other's token */
    int tokens = rig_sent(0)->body_case == BATON__ENVELOPE__BODY_TOKENS ? 0 : 1;
    assert_int_equal(rig_sent(1 - tokens)->failed->code, BATON__FAIL_CODE__FAIL_INTERNAL);
    assert_int_equal(rig_sent(tokens)->tokens->n_step, 1);
    assert_int_equal(r->d.n_running, 1);
}

static void test_an_expert_that_fails_voids_the_step(void **state) {
    Rig *r = *state;
    const char *why;
    rig_start(r, 0, 1, 20, 20);
    rig_start(r, 1, 2, 20, 20);
    while (rig_step.n < 2)
        assert_true(rig_task());
    rig_reserve(r, 0, 3, 20, 20);
    rig_forget();
    rig_wish.step_status = E_PEER;
    r->probe_status = E_PEER;
    assert_true(rig_task());
    assert_int_equal(rig_n_sent(), 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rig_sent(i)->failed->code, BATON__FAIL_CODE__FAIL_EXPERT);
        assert_non_null(strstr(rig_sent(i)->failed->reason, "expertd-1"));
    }
    assert_int_equal(r->n_ready, 1);
    assert_false(decode_ready(&r->d, &why));
    assert_non_null(strstr(why, "expertd-1"));
    rig_forget(); /* what comes now is refused, and what arrives now cannot run */
    rig_reserve(r, 0, 4, 20, 20);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_EXPERT);
    rig_forget();
    receive(r, 3, 9);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_EXPERT);
    pages(r, RIG_PAGES, 0);
    uv_run(loop_uv(r->loop), UV_RUN_ONCE); /* the probe, first without success */
    assert_true(rig_task());
    assert_false(decode_ready(&r->d, &why));
    r->probe_status = rig_wish.step_status = 0;
    uv_run(loop_uv(r->loop), UV_RUN_ONCE);
    assert_true(rig_task());
    assert_true(decode_ready(&r->d, &why));
    assert_int_equal(r->n_ready, 2);
    rig_start(r, 0, 5, 20, 2);
    assert_true(rig_task());
    pages(r, RIG_PAGES, 0);
}

static void test_a_router_that_does_not_read_loses_its_requests(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 20, 20);
    rig_start(r, 1, 2, 20, 20);
    rig_wish.deaf = rig_router(0);
    for (int i = 0; i < 3; i++)
        assert_true(rig_task());
    assert_int_equal(r->d.n_active, 1);
    assert_non_null(decode_requests_find(&r->d.requests, 2));
    pages(r, RIG_PAGES - 1, 0);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_grant_says_where_kv_goes),
        T(test_the_last_token_needs_no_place),
        T(test_no_pages_is_busy_with_a_time),
        T(test_no_place_is_busy),
        T(test_wrong_requests_are_refused),
        T(test_a_prompt_token_outside_the_vocabulary_is_refused),
        cmocka_unit_test(test_a_request_larger_than_the_pool_is_never_let_in),
        T(test_the_same_id_twice_changes_nothing),
        T(test_from_first_token_to_length),
        T(test_stop_carries_no_token),
        T(test_the_first_token_may_be_the_last),
        T(test_a_stop_before_min_tokens_is_a_token),
        T(test_log_probabilities_go_out_when_asked_for),
        T(test_one_frame_per_step_and_router),
        cmocka_unit_test(test_more_than_a_batch_take_turns),
        T(test_a_row_without_logits_fails_alone),
        T(test_an_expert_that_fails_voids_the_step),
        T(test_a_router_that_does_not_read_loses_its_requests),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
