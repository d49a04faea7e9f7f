/* A prompt's way through prefill: taken or refused, computed in chunks, pushed, handed over. */
#include "prefill_rig.h"

#include "kernels/kv_hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int setup(void **state) {
    PrefillLimits l = rig_limits();
    *state = rig_open(&l, true);
    return 0;
}

static int teardown(void **state) {
    rig_close(*state);
    return 0;
}

static void pages(const Rig *r, int n_free) {
    assert_int_equal(kv_pool_n_free(r->p.pool), n_free);
    kv_pool_check(r->p.pool);
}

static PrefillState state_of(const Rig *r, uint64_t id) {
    const PrefillRequest *q = r->p.first;
    while (q && q->id != id)
        q = q->next;
    assert_non_null(q);
    return q->state;
}

/* ---- the good way ---- */

static void check_hashes(const Rig *r, const Baton__KvReady *m, uint64_t id, int n_prompt) {
    const PrefillRequest *q = r->p.first;
    assert_int_equal(q->id, id);
    for (size_t i = 0; i < m->n_page_hash; i++)
        assert_true(m->page_hash[i] == kv_hash_page(&r->runtime.layout, r->shape.index_slot,
                                                    r->pool, q->page[i],
                                                    kv_page_rows(n_prompt, (int)i)));
}

static void test_chunks_are_pushed_and_handed_over(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 300, 0, NULL); /* 128 + 128 + 44 */
    pages(r, RIG_PAGES - 5);
    assert_true(rig_task());
    assert_int_equal(rig_step.n_tok, 128);
    rig_check_kv(r, 1, 0, 0, 128); /* while later chunks are still to come */
    assert_true(rig_task());
    assert_true(rig_task());
    assert_int_equal(rig_step.n_tok, 44);
    assert_int_equal(rig_step.pos[0], 256);
    assert_false(rig_task());
    rig_check_kv(r, 1, 0, 0, 300);
    const Baton__KvReady *m = rig_notice(0);
    assert_non_null(m);
    assert_int_equal(m->ticket, 1001);
    assert_int_equal(m->generation, 100);
    assert_int_equal(m->request, 1);
    assert_int_equal(m->n_tokens, 300);
    assert_int_equal(m->prefill_generation, 0x55);
    assert_int_equal(m->first->token, 17);
    assert_int_equal(m->first->n_top, 0); /* not asked for */
    assert_int_equal(m->n_page_hash, 5);
    check_hashes(r, m, 1, 300);
    assert_int_equal(rig_n_sent(), 0); /* not before the link is done */
    pages(r, RIG_PAGES - 5);
    assert_true(rig_settle(0));
    assert_int_equal(rig_done()->request, 1);
    assert_int_equal(rig_done()->computed_tokens, 300);
    pages(r, RIG_PAGES);
    assert_int_equal(r->p.queued_tokens, 0);
}

static void test_neighbouring_pages_go_as_one(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 128, 0, NULL); /* two pages side by side, here and there */
    assert_true(rig_task());
    /* layer 0: one run of rows; layer 1: rows, and keys and scales of each page */
    assert_int_equal(rig_n_puts(), 1 + 1 + 2 + 2);
}

static void log_probabilities(Baton__Prefill *m) {
    m->sampling->logprobs = true;
    m->sampling->top_logprobs = 1;
}

static void test_log_probabilities_travel_along(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 10, 0, log_probabilities);
    assert_true(rig_task());
    const Baton__TokenOut *first = rig_notice(0)->first;
    assert_true(first->logprob == -0.25f);
    assert_int_equal(first->n_top, 1);
    assert_int_equal(first->top[0]->token, 3);
}

static void have_128(Baton__Prefill *m) {
    m->grant->have = 128;
}

static void test_what_decode_has_is_not_pushed(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 200, 0, have_128);
    assert_true(rig_task());
    assert_int_equal(rig_n_puts(), 0);
    assert_true(rig_task());
    assert_true(rig_n_puts() > 0);
    rig_check_kv(r, 1, 0, 128, 200);
    assert_int_equal(rig_notice(0)->n_page_hash, 2);
}

static void test_several_prompts_share_steps(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 200, 0, NULL); /* begins alone: 128 */
    rig_prefill(r, 1, 2, 30, 1, NULL);
    rig_prefill(r, 0, 3, 50, 2, NULL);
    assert_true(rig_task());
    assert_int_equal(rig_step.n_seq, 1);
    assert_true(rig_task()); /* shortest rest first: 30, 50, then what is left of the budget */
    assert_int_equal(rig_step.n_seq, 2);
    assert_int_equal(rig_step.n_tokens[0], 30);
    assert_int_equal(rig_step.n_tokens[1], 50);
    assert_true(rig_task());
    assert_int_equal(rig_step.n_tokens[0], 72);
    for (int i = 0; i < 3; i++)
        assert_true(rig_settle(0));
    rig_check_kv(r, 1, 0, 0, 200);
    rig_check_kv(r, 2, 1, 0, 30);
    rig_check_kv(r, 3, 2, 0, 50);
    assert_int_equal(rig_n_sent(), 3);
    pages(r, RIG_PAGES);
}

static void test_a_full_link_makes_the_engine_wait(void **state) {
    Rig *r = *state;
    rig_wish.put_busy = 5;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    assert_true(rig_task());
    rig_check_kv(r, 1, 0, 0, 64);
    rig_wish.put_busy = 1 << 30; /* for longer than the link's timeout */
    rig_prefill(r, 0, 2, 64, 0, NULL);
    assert_true(rig_task());
    assert_true(rig_settle(0));
    rig_forget();
    assert_true(rig_settle(0));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    assert_true(rig_failed()->quiet);
    pages(r, RIG_PAGES);
}

static void test_a_notice_without_room_is_sent_later(void **state) {
    Rig *r = *state;
    rig_wish.notify_status = E_BUSY;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    assert_true(rig_task());
    assert_null(rig_notice(0));
    rig_wish.notify_status = 0;
    prefill_tick(&r->p);
    assert_non_null(rig_notice(0));
    assert_true(rig_settle(0));
    assert_int_equal(rig_done()->request, 1);
}

/* ---- refusals ---- */

static void other_layout(Baton__Prefill *m) {
    m->grant->kv_layout_hash ^= 1;
}

static void other_model(Baton__Prefill *m) {
    m->grant->fingerprint ^= 1;
}

static void other_request(Baton__Prefill *m) {
    m->grant->request++;
}

static void no_generation(Baton__Prefill *m) {
    m->grant->generation = 0;
}

static void fewer_pages(Baton__Prefill *m) {
    m->grant->n_page--;
}

static void outside(Baton__Prefill *m) {
    m->grant->page[1] = RIG_REMOTE_PAGES;
}

static void small_pool(Baton__Prefill *m) {
    m->grant->kv_bytes--;
}

static void has_all(Baton__Prefill *m) {
    m->grant->have = (uint32_t)m->n_prompt;
}

static void has_half_a_page(Baton__Prefill *m) {
    m->grant->have = 32;
}

static void bad_token(Baton__Prefill *m) {
    m->prompt[5] = RIG_TOKENS;
}

static void bad_sampling(Baton__Prefill *m) {
    m->sampling->top_p = 2;
}

static void no_prompt(Baton__Prefill *m) {
    m->n_prompt = 0;
    m->grant->n_page = 0;
}

static void test_wrong_grants_and_requests_are_refused(void **state) {
    Rig *r = *state;
    const struct {
        void (*edit)(Baton__Prefill *m);
        Baton__FailCode code;
        const char *part;
    } wrong[] = {
        {other_layout, BATON__FAIL_CODE__FAIL_MISMATCH, "layout"},
        {other_model, BATON__FAIL_CODE__FAIL_MISMATCH, "model"},
        {other_request, BATON__FAIL_CODE__FAIL_MISMATCH, "another request"},
        {no_generation, BATON__FAIL_CODE__FAIL_MISMATCH, "generation"},
        {fewer_pages, BATON__FAIL_CODE__FAIL_MISMATCH, "1 pages for 100 tokens"},
        {outside, BATON__FAIL_CODE__FAIL_MISMATCH, "outside"},
        {small_pool, BATON__FAIL_CODE__FAIL_MISMATCH, "does not hold 40 pages"},
        {has_all, BATON__FAIL_CODE__FAIL_MISMATCH, "100 of 100"},
        {has_half_a_page, BATON__FAIL_CODE__FAIL_MISMATCH, "32 of 100"},
        {bad_token, BATON__FAIL_CODE__FAIL_INVALID, "token 5"},
        {bad_sampling, BATON__FAIL_CODE__FAIL_INVALID, "top_p"},
        {no_prompt, BATON__FAIL_CODE__FAIL_INVALID, "empty"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        rig_forget();
        rig_prefill(r, 0, 1, 100, 0, wrong[i].edit);
        assert_int_equal(rig_failed()->code, wrong[i].code);
        assert_non_null(strstr(rig_failed()->reason, wrong[i].part));
        assert_true(rig_failed()->quiet);
    }
    assert_int_equal(r->p.n, 0);
    assert_false(rig_task());
}

static void test_the_queue_is_bounded(void **state) {
    Rig *r = *state;
    for (uint64_t i = 0; i < 12; i++)
        rig_prefill(r, 0, 1 + i, 500, 0, NULL);
    assert_int_equal(rig_n_sent(), 0);
    assert_int_equal(r->p.n_begun, 1);
    assert_true(rig_task()); /* 128 tokens in 2 ms */
    rig_prefill(r, 0, 50, 10, 0, NULL);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_BUSY);
    assert_true(rig_failed()->quiet);
    assert_int_equal(rig_failed()->retry_after_ms, 100);
    rig_forget();
    r->p.token_ms = 2;
    rig_prefill(r, 0, 51, 10, 0, NULL);
    assert_in_range(rig_failed()->retry_after_ms, 900, 1000); /* 5872 tokens of 12 requests */
}

static void test_the_same_id_twice_changes_nothing(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 500, 0, NULL);
    rig_prefill(r, 0, 1, 500, 0, NULL);
    assert_int_equal(r->p.n, 1);
    assert_int_equal(rig_n_sent(), 0);
}

static void test_what_does_not_fit_the_pool_waits(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 700, 0, NULL); /* 11 of 16 pages */
    rig_prefill(r, 0, 2, 640, 0, NULL); /* 10 */
    for (int i = 0; i < 6; i++)
        assert_true(rig_task());
    assert_int_equal(state_of(r, 2), PREFILL_QUEUED);
    assert_false(rig_task());
    assert_true(rig_settle(0));
    assert_int_equal(state_of(r, 2), PREFILL_COMPUTING);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_chunks_are_pushed_and_handed_over),
        T(test_neighbouring_pages_go_as_one),
        T(test_log_probabilities_travel_along),
        T(test_what_decode_has_is_not_pushed),
        T(test_several_prompts_share_steps),
        T(test_a_full_link_makes_the_engine_wait),
        T(test_a_notice_without_room_is_sent_later),
        T(test_wrong_grants_and_requests_are_refused),
        T(test_the_queue_is_bounded),
        T(test_the_same_id_twice_changes_nothing),
        T(test_what_does_not_fit_the_pool_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
