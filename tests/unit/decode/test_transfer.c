/* KV on its way and what becomes of its pages: notices that are late, twice or wrong, cancel in
 * each state, deadlines, routers that die, quarantine. */
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
    *state = rig_open(&l, false);
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

static DecodeState state_of(const Rig *r, uint64_t id) {
    const DecodeRequest *q = decode_requests_find(&r->d.requests, id);
    assert_non_null(q);
    return q->state;
}

/* A request of 130 prompt tokens (3 pages) that holds 5 in all. */
static void reserve(Rig *r, uint64_t id) {
    rig_reserve(r, 0, id, 130, 180);
    rig_forget();
}

/* ---- notices ---- */

static void bad_hash(Baton__KvReady *m) {
    m->page_hash[2] ^= 1;
}

static void bad_count(Baton__KvReady *m) {
    m->n_tokens--;
}

static void bad_hash_count(Baton__KvReady *m) {
    m->n_page_hash--;
}

static void no_first(Baton__KvReady *m) {
    m->first = NULL;
}

static void padding_first(Baton__KvReady *m) {
    m->first->token = RIG_TOKENS;
}

static void give_up(Baton__KvReady *m) {
    m->n_tokens = 0;
    m->n_page_hash = 0;
    m->first = NULL;
}

static void test_what_does_not_fit_fails_the_transfer(void **state) {
    Rig *r = *state;
    void (*edit[])(Baton__KvReady *) = {bad_hash, bad_count,     bad_hash_count,
                                        no_first, padding_first, give_up};
    for (uint64_t i = 0; i < sizeof edit / sizeof *edit; i++) {
        reserve(r, 1 + i);
        rig_ready(r, 1 + i, 9, edit[i]);
        rig_task();
        assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
        assert_int_equal(rig_failed()->request, 1 + i);
        pages(r, RIG_PAGES, 0); /* a notice is the writer's last word */
    }
    assert_int_equal(rig_step.steps, 0);
}

static void test_a_byte_that_changed_on_the_way_is_seen(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_ready(r, 1, 9, NULL);
    const DecodeRequest *q = decode_requests_find(&r->d.requests, 1);
    KvRange range[3];
    kv_layout_ranges(&r->runtime.layout, 1, -1, q->page[2], 0, 2, range); /* rows 128, 129 */
    r->pool[range[0].offset + range[0].bytes] ^= 1; /* a row that is not there: no matter */
    r->pool[range[0].offset + range[0].bytes - 1] ^= 1;
    rig_task();
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    pages(r, RIG_PAGES, 0);
}

static void test_rows_that_are_not_there_do_not_count(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_ready(r, 1, 9, NULL);
    const DecodeRequest *q = decode_requests_find(&r->d.requests, 1);
    KvRange range[3];
    kv_layout_ranges(&r->runtime.layout, 1, -1, q->page[2], 2, 64, range);
    memset(r->pool + range[0].offset, 0xee, range[0].bytes);
    rig_task();
    assert_int_equal(state_of(r, 1), DECODE_RUNNING);
}

static void test_verification_can_be_off(void **state) {
    (void)state;
    DecodeLimits l = rig_limits();
    l.verify = false;
    Rig *r = rig_open(&l, false);
    reserve(r, 1);
    rig_ready(r, 1, 9, bad_hash);
    assert_int_equal(state_of(r, 1), DECODE_RUNNING);
    rig_close(r);
}

static void other_generation(Baton__KvReady *m) {
    m->generation++;
}

static void other_ticket(Baton__KvReady *m) {
    m->ticket++;
}

static void other_request(Baton__KvReady *m) {
    m->request++;
}

static void test_notices_of_nothing_are_ignored_and_counted(void **state) {
    Rig *r = *state;
    double before = stat_counter_value(r->d.stats.late_notices);
    reserve(r, 1);
    rig_ready(r, 1, 9, other_generation);
    rig_ready(r, 1, 9, other_ticket);
    rig_ready(r, 1, 9, other_request);
    decode_on_notice(&r->d, "\xff\xff garbage", 10);
    assert_int_equal(rig_n_sent(), 0);
    assert_int_equal(state_of(r, 1), DECODE_RESERVED);
    assert_true(stat_counter_value(r->d.stats.late_notices) - before == 4);
    rig_ready(r, 1, 9, NULL); /* the right one still counts */
    assert_int_equal(state_of(r, 1), DECODE_VERIFYING);
}

static void test_a_second_notice_changes_nothing(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_ready(r, 1, 9, NULL);
    rig_ready(r, 1, 8, NULL);
    rig_task();
    rig_ready(r, 1, 7, NULL);
    assert_int_equal(rig_n_sent(), 1);
    assert_int_equal(rig_sent(0)->tokens->step[0]->out[0]->token, 9);
    assert_int_equal(r->d.n_running, 1);
}

static void test_long_prompts_are_compared_in_slices(void **state) {
    Rig *r = *state;
    r->d.verify_pages = 1;
    reserve(r, 1);
    rig_reserve(r, 0, 2, 20, 5);
    rig_ready(r, 1, 9, NULL);
    rig_ready(r, 2, 9, NULL);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(state_of(r, 1), DECODE_VERIFYING);
        rig_task();
    }
    assert_int_equal(state_of(r, 1), DECODE_RUNNING);
    while (state_of(r, 2) == DECODE_VERIFYING)
        rig_task();
    assert_int_equal(r->d.n_running, 2);
}

/* ---- cancel in each state ---- */

static void test_cancel_while_reserved(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_cancel(r, 1, true);
    pages(r, RIG_PAGES, 0);
    reserve(r, 2);
    rig_cancel(r, 2, false); /* the 3 granted pages wait, the other 2 do not */
    pages(r, RIG_PAGES - 3, 3);
    assert_int_equal(state_of(r, 2), DECODE_QUARANTINED);
    assert_int_equal(r->d.n_active, 0);
    rig_cancel(r, 2, false);
    pages(r, RIG_PAGES - 3, 3);
    rig_quiet(r, 2);
    pages(r, RIG_PAGES, 0);
    rig_quiet(r, 2);
    rig_cancel(r, 2, true);
    assert_int_equal(rig_n_sent(), 0); /* a cancel is not answered */
    pages(r, RIG_PAGES, 0);
}

static void test_a_second_cancel_may_end_quarantine(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_cancel(r, 1, false);
    rig_cancel(r, 1, true);
    pages(r, RIG_PAGES, 0);
}

static void test_a_late_notice_ends_quarantine(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    rig_cancel(r, 1, false);
    rig_ready(r, 1, 9, other_ticket);
    pages(r, RIG_PAGES - 3, 3);
    rig_ready(r, 1, 9, NULL);
    pages(r, RIG_PAGES, 0);
    assert_false(rig_task());
    assert_int_equal(rig_n_sent(), 0);
}

static void test_quarantined_pages_are_not_granted(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    const DecodeRequest *q = decode_requests_find(&r->d.requests, 1);
    int32_t held[3] = {q->page[0], q->page[1], q->page[2]};
    rig_cancel(r, 1, false);
    rig_reserve(r, 0, 2, 500, 12); /* 8 pages */
    rig_reserve(r, 0, 3, 500, 12);
    for (const DecodeRequest *x = r->d.requests.list; x; x = x->next)
        for (int i = 0; x->id != 1 && i < x->n_pages; i++)
            for (int k = 0; k < 3; k++)
                assert_int_not_equal(x->page[i], held[k]);
    rig_cancel(r, 2, true);
    rig_cancel(r, 3, true);
    rig_quiet(r, 1);
}

static void test_cancel_while_verifying(void **state) {
    Rig *r = *state;
    reserve(r, 1);
    reserve(r, 2);
    rig_ready(r, 1, 9, NULL);
    rig_ready(r, 2, 9, NULL);
    assert_true(rig_run()); /* the engine thread reads pages of 1; 2 waits */
    rig_cancel(r, 1, false);
    rig_cancel(r, 2, false);
    pages(r, RIG_PAGES - 5, 0);
    rig_tell();
    pages(r, RIG_PAGES, 0);
    assert_false(rig_task());
    assert_int_equal(rig_n_sent(), 0);
}

static void test_cancel_while_running(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 130, 180);
    rig_start(r, 0, 2, 20, 20);
    while (rig_step.n < 2)
        assert_true(rig_task());
    rig_forget();
    assert_true(rig_run()); /* the engine writes into pages of both */
    rig_cancel(r, 1, false);
    pages(r, RIG_PAGES - 6, 0);
    rig_tell();
    pages(r, RIG_PAGES - 1, 0);
    assert_int_equal(rig_n_sent(), 1);
    assert_int_equal(rig_sent(0)->tokens->n_step, 1);
    assert_int_equal(rig_sent(0)->tokens->step[0]->request, 2);
    assert_true(rig_task());
    assert_int_equal(rig_step.n, 1);
}

static void test_cancel_between_joining_and_the_first_step(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 20, 20);
    reserve(r, 2);
    rig_ready(r, 2, 9, NULL);
    assert_true(rig_task()); /* a step of 1 */
    assert_true(rig_task()); /* the comparison: 2 joins while the next step waits */
    assert_int_equal(state_of(r, 2), DECODE_RUNNING);
    rig_cancel(r, 2, false);
    pages(r, RIG_PAGES - 1, 0);
    assert_true(rig_task());
    assert_int_equal(rig_step.n, 1);
}

/* ---- time and death ---- */

static void test_kv_that_does_not_come_in_time(void **state) {
    (void)state;
    DecodeLimits l = rig_limits();
    l.transfer_ms = 20;
    Rig *r = rig_open(&l, false);
    reserve(r, 1);
    decode_tick(&r->d);
    assert_int_equal(rig_n_sent(), 0);
    usleep(30000);
    decode_tick(&r->d);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    pages(r, RIG_PAGES - 3, 3);
    decode_tick(&r->d);
    assert_int_equal(rig_n_sent(), 1);
    rig_quiet(r, 1);
    pages(r, RIG_PAGES, 0);
    rig_start(r, 0, 2, 20, 200); /* once KV is there, that deadline is over */
    rig_forget();
    usleep(30000);
    decode_tick(&r->d);
    assert_int_equal(rig_n_sent(), 0);
    rig_close(r);
}

static void test_a_request_has_a_deadline(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 130, 180);
    reserve(r, 2);
    decode_requests_find(&r->d.requests, 1)->deadline_ms = 0;
    decode_requests_find(&r->d.requests, 2)->deadline_ms = 0;
    decode_tick(&r->d); /* 1 is in a step that has not begun */
    assert_int_equal(rig_failed()->request, 2);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_DEADLINE);
    rig_forget();
    assert_true(rig_task());
    assert_int_equal(rig_failed()->request, 1);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_DEADLINE);
    rig_quiet(r, 2);
    pages(r, RIG_PAGES, 0);
}

static void test_a_router_that_dies_takes_its_requests_along(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 20, 20);
    rig_start(r, 1, 2, 20, 20);
    reserve(r, 3);
    reserve(r, 4);
    rig_ready(r, 4, 9, NULL);
    rig_forget();
    decode_on_router_gone(&r->d, rig_router(0));
    assert_int_equal(state_of(r, 3), DECODE_QUARANTINED);
    for (int i = 0; i < 4; i++)
        rig_task();
    assert_int_equal(r->d.n_active, 1);
    pages(r, RIG_PAGES - 1 - 3, 3);
    for (int i = 0; i < rig_n_sent(); i++)
        assert_ptr_equal(rig_sent_to(i), rig_router(1));
    rig_ready(r, 3, 9, give_up); /* its prefill has seen the same */
    pages(r, RIG_PAGES - 1, 0);
}

static void test_too_much_quarantine_ends_readiness(void **state) {
    Rig *r = *state;
    const char *why;
    for (uint64_t i = 1; i <= 4; i++) {
        reserve(r, i);
        rig_cancel(r, i, false);
        assert_true(decode_ready(&r->d, &why));
    }
    pages(r, RIG_PAGES - 12, 12); /* half of the pool is within the budget */
    assert_int_equal(r->n_ready, 0);
    rig_reserve(r, 0, 5, 10, 5);
    rig_cancel(r, 5, false);
    assert_int_equal(r->n_ready, 1);
    assert_true(r->d.spent);
    assert_false(decode_ready(&r->d, &why));
    assert_non_null(strstr(why, "quarantine"));
    rig_forget();
    rig_reserve(r, 0, 6, 10, 5);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_BUSY);
}

static void test_drain_waits_and_abort_ends(void **state) {
    Rig *r = *state;
    rig_start(r, 0, 1, 20, 2);
    rig_start(r, 0, 2, 20, 200);
    reserve(r, 3);
    rig_forget();
    decode_drain(&r->d);
    assert_int_equal(r->n_idle, 0);
    rig_reserve(r, 0, 4, 20, 20);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_DRAINING);
    for (int i = 0; i < 3; i++)
        assert_true(rig_task());
    assert_int_equal(r->n_idle, 0);
    rig_forget();
    decode_abort(&r->d);
    assert_int_equal(rig_failed()->request, 3);
    assert_true(rig_task());
    assert_int_equal(rig_sent(1)->failed->request, 2);
    assert_int_equal(rig_sent(1)->failed->code, BATON__FAIL_CODE__FAIL_DRAINING);
    assert_int_equal(r->n_idle, 1);
}

/* ---- anything, in any order ---- */

/* Some request that holds pages, or the newest id. */
static uint64_t some_id(const Rig *r, uint64_t newest) {
    const DecodeRequest *q = r->d.requests.list;
    for (int skip = r->d.requests.n > 0 ? rand() % r->d.requests.n : 0; skip > 0; skip--)
        q = q->next;
    return q ? q->id : newest;
}

static void random_event(Rig *r, uint64_t *next_id) {
    uint64_t id = some_id(r, *next_id);
    const DecodeRequest *q = decode_requests_find(&r->d.requests, id);
    bool may_notify = q && (q->state == DECODE_RESERVED || q->state == DECODE_QUARANTINED);
    switch (rand() % 9) {
    case 0:
    case 1:
        ++*next_id;
        rig_reserve(r, rand() % 2, *next_id, 1 + rand() % 300, 1 + rand() % 60);
        break;
    case 2:
        rig_cancel(r, id, rand() % 2);
        break;
    case 3:
        rig_quiet(r, id);
        break;
    case 4:
    case 5:
        if (may_notify)
            rig_ready(r, id, rand() % RIG_TOKENS,
                      rand() % 4   ? NULL
                      : rand() % 2 ? bad_hash_count
                                   : other_ticket);
        break;
    case 6:
        if (rand() % 20 == 0)
            decode_on_router_gone(&r->d, rig_router(rand() % 2));
        break;
    default:
        rig_task();
    }
    decode_tick(&r->d);
    kv_pool_check(r->d.pool);
}

static void test_pages_always_come_back(void **state) {
    (void)state;
    DecodeLimits l = rig_limits();
    l.quarantine_budget = 1;
    Rig *r = rig_open(&l, false);
    uint64_t id = 100;
    srand(3);
    for (int i = 0; i < 30000; i++) {
        random_event(r, &id);
        if (rig_n_sent() > 1000)
            rig_forget();
    }
    assert_true(id > 3000 && rig_step.steps > 1000);
    for (uint64_t i = 100; i <= id; i++)
        rig_cancel(r, i, true);
    while (rig_task())
        ;
    assert_int_equal(r->d.requests.n, 0);
    assert_int_equal(r->d.n_active, 0);
    assert_int_equal(r->d.n_running, 0);
    pages(r, RIG_PAGES, 0);
    rig_close(r);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_what_does_not_fit_fails_the_transfer),
        T(test_a_byte_that_changed_on_the_way_is_seen),
        T(test_rows_that_are_not_there_do_not_count),
        cmocka_unit_test(test_verification_can_be_off),
        T(test_notices_of_nothing_are_ignored_and_counted),
        T(test_a_second_notice_changes_nothing),
        T(test_long_prompts_are_compared_in_slices),
        T(test_cancel_while_reserved),
        T(test_a_second_cancel_may_end_quarantine),
        T(test_a_late_notice_ends_quarantine),
        T(test_quarantined_pages_are_not_granted),
        T(test_cancel_while_verifying),
        T(test_cancel_while_running),
        T(test_cancel_between_joining_and_the_first_step),
        cmocka_unit_test(test_kv_that_does_not_come_in_time),
        T(test_a_request_has_a_deadline),
        T(test_a_router_that_dies_takes_its_requests_along),
        T(test_too_much_quarantine_ends_readiness),
        T(test_drain_waits_and_abort_ends),
        cmocka_unit_test(test_pages_always_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
