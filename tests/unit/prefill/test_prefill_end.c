/* How a prompt ends otherwise: cancel, failure and death in each state; and that Failed is never
 * said before the link is done. */
#include "prefill_rig.h"

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

/* ---- cancel in each state ---- */

static void test_cancel_while_queued(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 900, 0, NULL);
    rig_prefill(r, 0, 2, 900, 0, NULL);
    rig_cancel(r, 2);
    assert_int_equal(rig_failed()->request, 2);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_CANCELED);
    assert_true(rig_failed()->quiet);
    assert_int_equal(rig_n_pending(), 0);
    assert_int_equal(r->p.n, 1);
}

static void test_cancel_between_steps(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 300, 0, NULL);
    assert_true(rig_run());
    rig_cancel(r, 1); /* in the step */
    assert_int_equal(rig_n_sent(), 0);
    pages(r, RIG_PAGES - 5);
    rig_tell();
    assert_int_equal(state_of(r, 1), PREFILL_CLOSING);
    assert_int_equal(rig_n_sent(), 0); /* its puts are still under way */
    pages(r, RIG_PAGES - 5);
    rig_cancel(r, 1);
    assert_int_equal(rig_n_pending(), 1);
    assert_true(rig_settle(0));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_CANCELED);
    assert_true(rig_failed()->quiet);
    pages(r, RIG_PAGES);
    assert_null(rig_notice(0));
    assert_false(rig_task());
}

static void test_cancel_while_notifying(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    assert_true(rig_task());
    assert_int_equal(state_of(r, 1), PREFILL_NOTIFYING);
    rig_cancel(r, 1);
    assert_int_equal(rig_n_sent(), 0);
    assert_int_equal(rig_n_pending(), 1);
    assert_true(rig_settle(0));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_CANCELED);
    assert_true(rig_failed()->quiet);
    pages(r, RIG_PAGES);
}

static void test_cancel_of_the_unknown_is_quiet(void **state) {
    Rig *r = *state;
    rig_cancel(r, 77);
    assert_int_equal(rig_failed()->request, 77);
    assert_true(rig_failed()->quiet);
}

/* ---- failures ---- */

static void test_a_notice_that_fails(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    assert_true(rig_task());
    assert_true(rig_settle(E_DEADLINE));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    assert_true(rig_failed()->quiet);
    assert_int_equal(rig_n_disconnected(), 1);
    rig_forget(); /* the next request to the same decode connects anew */
    rig_prefill(r, 0, 2, 64, 0, NULL);
    assert_true(rig_task());
    assert_true(rig_settle(0));
    assert_int_equal(rig_done()->request, 2);
    pages(r, RIG_PAGES);
}

static void test_a_notice_that_is_refused_at_once(void **state) {
    Rig *r = *state;
    rig_wish.notify_status = E_PEER;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    assert_true(rig_task());
    assert_int_equal(rig_n_sent(), 0);
    assert_true(rig_settle(E_PEER)); /* the flush that proves quiet */
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    assert_true(rig_failed()->quiet);
    pages(r, RIG_PAGES);
}

static void test_a_dead_decode_ends_all_its_requests_and_no_others(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 100, 0, NULL);
    rig_prefill(r, 0, 2, 100, 0, NULL);
    rig_prefill(r, 0, 3, 900, 0, NULL); /* stays queued */
    assert_true(rig_task());            /* 1 is done */
    rig_prefill(r, 0, 4, 20, 1, NULL);
    assert_true(rig_run()); /* 2 is in the step */
    assert_true(rig_settle(E_PEER));
    assert_int_equal(rig_n_sent(), 2);         /* 1, and 3 which never wrote */
    assert_int_equal(rig_n_disconnected(), 0); /* the engine may still put */
    rig_wish.put_status = E_PEER;
    rig_tell();
    assert_int_equal(rig_n_disconnected(), 1);
    assert_int_equal(rig_n_sent(), 2);
    assert_true(rig_settle(0)); /* E_CANCELED by the disconnect */
    assert_int_equal(rig_n_sent(), 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(rig_sent(i)->failed->code, BATON__FAIL_CODE__FAIL_TRANSFER);
        assert_true(rig_sent(i)->failed->quiet);
    }
    rig_forget();
    rig_wish.put_status = 0;
    while (rig_task())
        ;
    while (rig_settle(0))
        ;
    assert_int_equal(rig_done()->request, 4);
    pages(r, RIG_PAGES);
}

static void test_a_put_that_fails_disconnects(void **state) {
    Rig *r = *state;
    rig_wish.put_status = E_PEER;
    rig_prefill(r, 0, 1, 300, 0, NULL);
    assert_true(rig_task());
    assert_int_equal(rig_n_disconnected(), 1);
    assert_int_equal(rig_n_sent(), 0);
    assert_true(rig_settle(0));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_TRANSFER);
    assert_true(rig_failed()->quiet);
    pages(r, RIG_PAGES);
    assert_int_equal(rig_step.steps, 1);
}

static void test_an_expert_that_fails_voids_the_step(void **state) {
    Rig *r = *state;
    const char *why;
    rig_wish.step_status = E_DEADLINE;
    rig_prefill(r, 0, 1, 300, 0, NULL);
    rig_prefill(r, 0, 2, 900, 0, NULL); /* waits */
    assert_true(rig_task());
    assert_int_equal(rig_failed()->request, 2);
    assert_true(rig_settle(0));
    for (int i = 0; i < 2; i++) {
        assert_int_equal(rig_sent(i)->failed->code, BATON__FAIL_CODE__FAIL_EXPERT);
        assert_true(rig_sent(i)->failed->quiet);
    }
    assert_false(prefill_ready(&r->p, &why));
    assert_non_null(strstr(why, "expertd-1"));
    assert_int_equal(r->n_ready, 1);
    rig_forget();
    rig_prefill(r, 0, 3, 10, 0, NULL);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_EXPERT);
    rig_wish.step_status = 0;
    uv_run(loop_uv(r->loop), UV_RUN_ONCE); /* the probe */
    assert_true(rig_task());
    assert_true(prefill_ready(&r->p, &why));
    assert_int_equal(r->n_ready, 2);
    pages(r, RIG_PAGES);
}

static void test_a_row_without_logits_is_no_token(void **state) {
    Rig *r = *state;
    rig_wish.row_status = E_FORMAT;
    rig_prefill(r, 0, 1, 30, 0, NULL);
    assert_true(rig_task());
    assert_null(rig_notice(0));
    assert_true(rig_settle(0));
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_INTERNAL);
}

static void test_deadlines_count_in_every_state(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 64, 0, NULL);
    rig_prefill(r, 0, 2, 100, 0, NULL);
    rig_prefill(r, 0, 3, 900, 0, NULL);
    assert_true(rig_task()); /* 1 notifies, 2 is in the next step, 3 waits */
    for (PrefillRequest *q = r->p.first; q; q = q->next)
        q->deadline_ms = 0;
    prefill_tick(&r->p);
    assert_int_equal(rig_failed()->request, 3);
    assert_true(rig_task());
    while (rig_settle(0))
        ;
    assert_int_equal(rig_n_sent(), 3);
    for (int i = 0; i < 3; i++)
        assert_int_equal(rig_sent(i)->failed->code, BATON__FAIL_CODE__FAIL_DEADLINE);
    pages(r, RIG_PAGES);
}

static void test_a_dead_router_and_what_decode_learns(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 300, 0, NULL);
    rig_prefill(r, 0, 2, 900, 1, NULL); /* never begins */
    rig_prefill(r, 1, 3, 20, 2, NULL);
    assert_true(rig_task());
    prefill_on_router_gone(&r->p, rig_router(0));
    while (rig_task())
        ;
    for (int i = 0; i < 2; i++) { /* each decode hears that no more comes */
        const Baton__KvReady *m = rig_notice(i);
        while (m->n_tokens != 0)
            m = rig_notice(++i);
        assert_null(m->first);
        assert_int_equal(m->ticket, m->request + 1000);
    }
    while (rig_settle(0))
        ;
    assert_int_equal(rig_done()->request, 3);
    assert_int_equal(r->p.n, 0);
    pages(r, RIG_PAGES);
}

static void test_drain_and_abort(void **state) {
    Rig *r = *state;
    rig_prefill(r, 0, 1, 300, 0, NULL);
    rig_prefill(r, 0, 2, 900, 0, NULL);
    prefill_drain(&r->p);
    rig_prefill(r, 0, 3, 10, 0, NULL);
    assert_int_equal(rig_failed()->code, BATON__FAIL_CODE__FAIL_DRAINING);
    rig_forget();
    assert_true(rig_task());
    assert_int_equal(r->n_idle, 0);
    prefill_abort(&r->p);
    assert_int_equal(rig_failed()->request, 2);
    assert_true(rig_task());
    assert_true(rig_settle(0));
    assert_int_equal(rig_n_sent(), 2);
    assert_int_equal(rig_sent(1)->failed->code, BATON__FAIL_CODE__FAIL_DRAINING);
    assert_int_equal(r->n_idle, 1);
}

/* ---- anything, in any order ---- */

static uint64_t some_id(const Rig *r, uint64_t newest) {
    const PrefillRequest *q = r->p.first;
    for (int skip = r->p.n > 0 ? rand() % r->p.n : 0; skip > 0; skip--)
        q = q->next;
    return q ? q->id : newest;
}

static void random_event(Rig *r, uint64_t *newest) {
    rig_wish.put_status = rand() % 60 ? 0 : E_PEER;
    rig_wish.notify_status = rand() % 40 ? 0 : rand() % 2 ? E_PEER : E_BUSY;
    rig_wish.flush_status = rand() % 20 ? 0 : E_BUSY;
    rig_wish.step_status = rand() % 80 ? 0 : E_FORMAT;
    switch (rand() % 8) {
    case 0:
    case 1:
        rig_prefill(r, rand() % 2, ++*newest, 1 + rand() % 400, rand() % RIG_DECODES, NULL);
        break;
    case 2:
        rig_cancel(r, some_id(r, *newest));
        break;
    case 3:
        if (rand() % 30 == 0)
            prefill_on_router_gone(&r->p, rig_router(rand() % 2));
        break;
    case 4:
        rig_settle(rand() % 30 ? 0 : E_DEADLINE);
        break;
    case 5:
        prefill_tick(&r->p);
        break;
    default:
        rig_task();
    }
    kv_pool_check(r->p.pool);
}

static void test_pages_always_come_back(void **state) {
    (void)state;
    PrefillLimits l = rig_limits();
    Rig *r = rig_open(&l, false);
    uint64_t id = 100;
    srand(8);
    for (int i = 0; i < 20000; i++) {
        random_event(r, &id);
        if (rig_n_sent() > 1000)
            rig_forget();
    }
    assert_true(id > 3000 && rig_step.steps > 1000);
    rig_wish = (RigWish){0};
    for (int i = 0; i < 200 && r->p.n > 0; i++) {
        rig_cancel(r, some_id(r, 0));
        rig_task();
        rig_settle(0);
        prefill_tick(&r->p);
    }
    assert_int_equal(r->p.n, 0);
    assert_int_equal(r->p.n_begun, 0);
    assert_int_equal(r->p.queued_tokens, 0);
    pages(r, RIG_PAGES);
    rig_close(r);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_cancel_while_queued),
        T(test_cancel_between_steps),
        T(test_cancel_while_notifying),
        T(test_cancel_of_the_unknown_is_quiet),
        T(test_a_notice_that_fails),
        T(test_a_notice_that_is_refused_at_once),
        T(test_a_dead_decode_ends_all_its_requests_and_no_others),
        T(test_a_put_that_fails_disconnects),
        T(test_an_expert_that_fails_voids_the_step),
        T(test_a_row_without_logits_is_no_token),
        T(test_deadlines_count_in_every_state),
        T(test_a_dead_router_and_what_decode_learns),
        T(test_drain_and_abort),
        cmocka_unit_test(test_pages_always_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
