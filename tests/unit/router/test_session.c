/* Tests router/session.c and attempt.c together: every state, with every way out of it. */
#include "session_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#define RESERVE BATON__ENVELOPE__BODY_RESERVE
#define PREFILL BATON__ENVELOPE__BODY_PREFILL
#define CANCEL  BATON__ENVELOPE__BODY_CANCEL
#define QUIET   BATON__ENVELOPE__BODY_QUIET
#define NONE    BATON__FINISH__FINISH_NONE
#define STOP    BATON__FINISH__FINISH_STOP
#define LENGTH  BATON__FINISH__FINISH_LENGTH

static Peer *const p0 = &rig.prefill[0], *const p1 = &rig.prefill[1];
static Peer *const d0 = &rig.decode[0], *const d1 = &rig.decode[1];

static uint64_t current(void) {
    return rig_last(RESERVE)->request;
}

static int count_in(const char *text, const char *what) {
    int n = 0;
    for (const char *at = text; (at = strstr(at, what)); at += strlen(what))
        n++;
    return n;
}

/* The client has got this error, as a status. */
static void expect_error(int status, const char *code) {
    assert_int_equal(rig.client.n_answers, 1);
    assert_int_equal(rig.client.status, status);
    assert_non_null(strstr(rig.client.text.data, code));
    assert_int_equal(rig.client.retry_after_ms > 0, status == 429 || status == 503);
    assert_int_equal(sessions_running(rig.all), 0);
}

/* The client has got this error in a stream that was then broken off. */
static void expect_error_event(const char *code) {
    assert_int_equal(rig.client.n_answers, 1);
    assert_true(rig.client.begun && !rig.client.ended_ok);
    assert_int_equal(count_in(rig.client.text.data, "data: {\"error\":"), 1);
    assert_non_null(strstr(rig.client.text.data, code));
    assert_null(strstr(rig.client.text.data, "\"finish_reason\":\""));
    assert_null(strstr(rig.client.text.data, "[DONE]"));
    assert_int_equal(sessions_running(rig.all), 0);
}

static void expect_nothing_left(void) {
    assert_int_equal(sessions_running(rig.all), 0);
    assert_int_equal(sessions_attempts(rig.all), 0);
}

/* ---- as it should be ---- */

static void test_stream(void **state) {
    (void)state;
    rig_request("\"stream\":true");
    assert_int_equal(rig.n_sent, 0);
    rig_parsed(3);
    assert_ptr_equal(rig_last(RESERVE)->peer, d0);
    assert_int_equal(rig.n_sent, 1);
    rig_grant(d0, current());
    assert_ptr_equal(rig_last(PREFILL)->peer, p0);
    assert_int_equal(rig_last(PREFILL)->request, current());
    assert_false(rig.client.begun);
    rig_tokens(d0, current(), "a", NONE);
    assert_true(rig.client.begun);
    rig_prefill_done(p0, current());
    rig_tokens(d0, current(), "bc", STOP);
    assert_true(rig.client.ended_ok);
    assert_int_equal(rig.client.n_answers, 1);
    assert_int_equal(count_in(rig.client.text.data, "\"role\""), 1);
    assert_int_equal(count_in(rig.client.text.data, "\"finish_reason\":\"stop\""), 1);
    assert_int_equal(count_in(rig.client.text.data, "[DONE]"), 1);
    assert_int_equal(rig.n_sent, 2); /* nobody is cancelled */
    expect_nothing_left();
}

static void test_whole(void **state) {
    (void)state;
    rig_to_stream("");
    rig_prefill_done(p0, current());
    assert_int_equal(rig.client.n_answers, 0);
    rig_tokens(d0, current(), "b", LENGTH);
    assert_int_equal(rig.client.status, 200);
    assert_non_null(strstr(rig.client.text.data, "\"content\":\"ab\""));
    assert_non_null(strstr(rig.client.text.data, "\"finish_reason\":\"length\""));
    expect_nothing_left();
}

/* The answer may be over before prefill's last word. */
static void test_prefill_done_late(void **state) {
    (void)state;
    rig_to_stream("");
    rig_tokens(d0, current(), "", STOP);
    assert_int_equal(rig.client.status, 200);
    assert_int_equal(sessions_attempts(rig.all), 1);
    rig_prefill_done(p0, current());
    expect_nothing_left();
    assert_int_equal(rig_count(CANCEL) + rig_count(QUIET), 0);
}

/* ---- refusals ---- */

static void test_bad_request(void **state) {
    (void)state;
    rig_request("\"n\":2");
    rig_parsed(3);
    expect_error(400, "unsupported_parameter");
    assert_int_equal(rig.n_sent, 0);
}

static void test_context(void **state) {
    (void)state;
    rig_request("\"stream\":true,\"max_tokens\":98");
    rig_parsed(3);
    expect_error(400, "context_length_exceeded");
    assert_int_equal(rig.n_sent, 0);
}

static void test_parser_full(void **state) {
    (void)state;
    rig.parser_full = true;
    rig_request("");
    assert_null(rig.session);
    expect_error(429, "no_capacity");
}

static void test_too_many(void **state) {
    (void)state;
    rig_request("");
    Session *first = rig.session;
    rig_request("");
    Session *second = rig.session;
    rig_request("");
    assert_null(rig.session);
    assert_int_equal(rig.client.n_answers, 1);
    assert_int_equal(rig.client.status, 429);
    assert_true(rig.client.retry_after_ms > 0);
    session_on_gone(first);
    session_on_gone(second);
}

static void test_draining(void **state) {
    (void)state;
    sessions_drain(rig.all);
    rig_request("");
    assert_null(rig.session);
    expect_error(503, "draining");
}

static void test_draining_spares_the_running(void **state) {
    (void)state;
    rig_to_stream("");
    sessions_drain(rig.all);
    rig_tokens(d0, current(), "b", STOP);
    assert_int_equal(rig.client.status, 200);
}

static void test_no_pair(void **state) {
    (void)state;
    rig.down[1][0] = rig.down[1][1] = true;
    rig_request("");
    rig_parsed(3);
    expect_error(503, "not_ready");
    expect_nothing_left();
}

static void test_busy_everywhere(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    uint64_t first = current();
    rig_failed(d0, first, BATON__FAIL_CODE__FAIL_BUSY, false);
    assert_ptr_equal(rig_last(RESERVE)->peer, d1); /* the other one is asked */
    assert_int_not_equal(current(), first);
    rig_failed(d1, current(), BATON__FAIL_CODE__FAIL_BUSY, false);
    expect_error(429, "no_capacity");
    assert_int_equal(rig.client.retry_after_ms, 2500);
    assert_int_equal(rig_count(CANCEL), 0);
    expect_nothing_left();
}

static void test_busy_alone(void **state) {
    (void)state;
    rig.down[1][1] = true;
    rig_request("");
    rig_parsed(3);
    rig_failed(d0, current(), BATON__FAIL_CODE__FAIL_BUSY, false);
    rig_pass(100);
    expect_error(429, "no_capacity");
    assert_int_equal(rig_count(RESERVE), 1);
}

static void test_invalid_is_final(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    rig_failed(d0, current(), BATON__FAIL_CODE__FAIL_INVALID, false);
    expect_error(400, "told so");
    assert_int_equal(rig_count(RESERVE), 1);
}

static void test_deaf_decode(void **state) {
    (void)state;
    rig.deaf[1][0] = true;
    rig_request("");
    rig_parsed(3);
    assert_ptr_equal(rig_last(RESERVE)->peer, d1);
}

static void test_deaf_prefill(void **state) {
    (void)state;
    rig.deaf[0][0] = true;
    rig_to_prefill("");
    assert_int_equal(rig_count(RESERVE), 2);
    assert_true(rig_cancel_to(d0)->writer_quiet); /* prefill never heard of it */
    rig_grant(d0, current());
    assert_ptr_equal(rig_last(PREFILL)->peer, p1);
}

/* ---- the client goes away ---- */

static void test_gone_while_parsing(void **state) {
    (void)state;
    rig_request("");
    session_on_gone(rig.session);
    assert_int_equal(rig.n_abandoned, 1);
    assert_int_equal(rig.client.n_answers, 0);
    expect_nothing_left();
}

static void test_gone_while_reserving(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    session_on_gone(rig.session);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    assert_null(rig_cancel_to(p0));
    expect_nothing_left();
    rig_grant(d0, current()); /* too late */
    assert_int_equal(rig_count(PREFILL), 0);
}

static void test_gone_while_waiting(void **state) {
    (void)state;
    rig.down[1][1] = true;
    rig_to_prefill("");
    rig_peer(d0, BUS_GONE);
    assert_int_equal(sessions_running(rig.all), 1); /* no pair for the retry yet */
    uint64_t first = current();
    session_on_gone(rig.session);
    assert_int_equal(rig_cancel_to(p0)->request, first);
    rig_failed(p0, first, BATON__FAIL_CODE__FAIL_CANCELED, true);
    expect_nothing_left();
    rig.down[1][0] = false;
    rig_pass(100); /* a pair comes, nobody wants it */
    assert_int_equal(rig_count(RESERVE), 1);
    assert_int_equal(rig.client.n_answers, 0);
}

/* Decode hears of quiet only once prefill has said so. */
static void gone_with_writer(void) {
    session_on_gone(rig.session);
    assert_int_equal(rig.client.n_answers, 0);
    assert_false(rig_cancel_to(d0)->writer_quiet);
    assert_int_equal(rig_cancel_to(p0)->request, current());
    assert_int_equal(rig_count(QUIET), 0);
    rig_failed(p0, current(), BATON__FAIL_CODE__FAIL_CANCELED, false);
    assert_int_equal(rig_count(QUIET), 0);
    rig_failed(p0, current(), BATON__FAIL_CODE__FAIL_CANCELED, true);
    assert_ptr_equal(rig_last(QUIET)->peer, d0);
    assert_int_equal(rig_count(QUIET), 1);
    expect_nothing_left();
}

static void test_gone_while_prefilling(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    gone_with_writer();
}

static void test_gone_while_streaming(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    gone_with_writer();
}

static void test_gone_after_prefill(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig_prefill_done(p0, current());
    session_on_gone(rig.session);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    assert_null(rig_cancel_to(p0));
    expect_nothing_left();
}

/* All was written, but decode did not hear of it: it is told that nobody writes any more. */
static void test_decode_fails_after_prefill(void **state) {
    (void)state;
    rig_to_prefill("");
    uint64_t first = current();
    rig_prefill_done(p0, first);
    assert_int_equal(rig_count(QUIET), 0);
    rig_failed(d0, first, BATON__FAIL_CODE__FAIL_TRANSFER, false);
    assert_int_equal(rig_count(QUIET), 1);
    assert_int_equal(rig_last(QUIET)->request, first);
    assert_ptr_equal(rig_last(QUIET)->peer, d0);
    assert_int_not_equal(current(), first); /* and the request is tried again */
}

static void test_slow_client(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig.client.slow = true;
    rig_tokens(d0, current(), "b", NONE);
    assert_int_equal(rig.client.n_answers, 1);
    assert_false(rig.client.ended_ok);
    assert_non_null(rig_cancel_to(d0));
    assert_int_equal(sessions_running(rig.all), 0);
}

/* ---- deaths ---- */

static void test_decode_dies_reserving(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    uint64_t first = current();
    rig_peer(d0, BUS_GONE);
    assert_ptr_equal(rig_last(RESERVE)->peer, d1);
    assert_int_not_equal(current(), first);
    assert_int_equal(sessions_attempts(rig.all), 1);
}

static void test_decode_dies_prefilling(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    uint64_t first = current();
    rig_peer(d0, BUS_GONE);
    assert_ptr_equal(rig_last(RESERVE)->peer, d1);
    assert_int_equal(rig_cancel_to(p0)->request, first); /* it would write to nobody */
    rig_grant(d1, current());
    rig_tokens(d1, current(), "x", STOP);
    assert_true(rig.client.ended_ok);
    rig_prefill_done(p0, current());
    rig_failed(p0, first, BATON__FAIL_CODE__FAIL_CANCELED, true);
    assert_int_equal(rig_count(QUIET), 0);
    expect_nothing_left();
}

static void test_decode_dies_streaming(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig_peer(d0, BUS_GONE);
    expect_error_event("peer_lost");
    assert_int_equal(rig_count(RESERVE), 1);
}

/* Without a stream no byte has been sent, so that it is made again, from the start. */
static void test_decode_dies_whole(void **state) {
    (void)state;
    rig_to_stream("");
    rig_peer(d0, BUS_GONE);
    rig_grant(d1, current());
    rig_tokens(d1, current(), "xy", STOP);
    assert_int_equal(rig.client.status, 200);
    assert_non_null(strstr(rig.client.text.data, "\"content\":\"xy\""));
}

static void test_decode_silent_streaming(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    uint64_t request = current();
    rig_peer(d0, BUS_SILENT);
    expect_error_event("peer_lost");
    assert_null(rig_cancel_to(d0)); /* cannot be sent */
    rig_failed(p0, request, BATON__FAIL_CODE__FAIL_CANCELED, true);
    rig_peer(d0, BUS_BACK);
    assert_int_equal(rig_cancel_to(d0)->request, request);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    expect_nothing_left();
}

/* Nothing was asked of it yet: decode's pages are free at once. */
static void test_prefill_dies_reserving(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    uint64_t first = current();
    rig_peer(p0, BUS_GONE);
    assert_int_equal(rig_cancel_to(d0)->request, first);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    rig_grant(d0, first); /* too late */
    assert_int_equal(rig_count(PREFILL), 0);
    rig_grant(d0, current());
    assert_ptr_equal(rig_last(PREFILL)->peer, p1);
}

static void test_prefill_dies_prefilling(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    uint64_t first = current();
    rig_peer(p0, BUS_GONE);
    assert_true(rig_cancel_to(d0)->writer_quiet); /* a dead process writes nothing */
    assert_int_equal(rig_cancel_to(d0)->request, first);
    rig_grant(d0, current());
    assert_ptr_equal(rig_last(PREFILL)->peer, p1);
    assert_int_not_equal(current(), first);
}

static void test_prefill_dies_streaming(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig_peer(p0, BUS_GONE);
    rig_tokens(d0, current(), "b", STOP);
    assert_true(rig.client.ended_ok);
    expect_nothing_left();
}

/* Its silence proves nothing about its writes. */
static void test_prefill_silent(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    uint64_t first = current();
    rig_peer(p0, BUS_SILENT);
    assert_false(rig_cancel_to(d0)->writer_quiet);
    assert_null(rig_cancel_to(p0)); /* cannot be sent */
    assert_int_equal(sessions_attempts(rig.all), 2);
    rig_peer(p0, BUS_BACK);
    assert_int_equal(rig_cancel_to(p0)->request, first);
    assert_int_equal(rig_count(QUIET), 0);
    rig_failed(p0, first, BATON__FAIL_CODE__FAIL_CANCELED, true);
    assert_int_equal(rig_last(QUIET)->request, first);
    assert_int_equal(sessions_attempts(rig.all), 1);
}

static void test_prefill_silent_then_gone(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    uint64_t first = current();
    rig_peer(p0, BUS_SILENT);
    assert_int_equal(rig_count(QUIET), 0);
    rig_peer(p0, BUS_GONE);
    assert_int_equal(rig_last(QUIET)->request, first);
    assert_ptr_equal(rig_last(QUIET)->peer, d0);
    assert_int_equal(sessions_attempts(rig.all), 1);
}

/* A cancel that may have been lost with its connection is sent again. */
static void test_reset(void **state) {
    (void)state;
    rig_to_prefill("");
    session_on_gone(rig.session);
    int before = rig_count(CANCEL);
    rig_peer(p0, BUS_RESET);
    assert_int_equal(rig_count(CANCEL), before + 1);
    assert_ptr_equal(rig_last(CANCEL)->peer, p0);
}

static void test_one_retry_only(void **state) {
    (void)state;
    rig_to_prefill("");
    rig_peer(d0, BUS_GONE);
    rig_grant(d1, current());
    rig_peer(d1, BUS_GONE);
    expect_error(503, "peer_lost");
    assert_int_equal(rig_count(RESERVE), 2);
}

static void test_pair_comes_back(void **state) {
    (void)state;
    rig.down[0][1] = true;
    rig_to_prefill("");
    rig_peer(p0, BUS_GONE);
    rig_pass(100);
    assert_int_equal(rig.client.n_answers, 0);
    rig_peer(p0, BUS_UP);
    rig_pass(50);
    assert_int_equal(rig_count(RESERVE), 2);
}

static void test_pair_does_not_come_back(void **state) {
    (void)state;
    rig.down[0][1] = true;
    rig_to_prefill("");
    rig_peer(p0, BUS_GONE);
    rig_pass(350);
    expect_error(503, "peer_lost");
    expect_nothing_left();
}

/* ---- failures that peers tell ---- */

static void test_transfer_failed(void **state) {
    (void)state;
    rig_to_prefill("");
    uint64_t first = current();
    rig_failed(d0, first, BATON__FAIL_CODE__FAIL_TRANSFER, false);
    assert_ptr_equal(rig_last(RESERVE)->peer, d0); /* the same two once more */
    assert_int_not_equal(current(), first);
    assert_int_equal(rig_cancel_to(p0)->request, first);
    assert_null(rig_cancel_to(d0));
    rig_failed(p0, first, BATON__FAIL_CODE__FAIL_CANCELED, true);
    assert_int_equal(rig_last(QUIET)->request, first);
}

static void test_prefill_failed(void **state) {
    (void)state;
    rig_to_prefill("");
    uint64_t first = current();
    rig_failed(p0, first, BATON__FAIL_CODE__FAIL_EXPERT, true);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    assert_null(rig_cancel_to(p0));
    rig_grant(d0, current());
    assert_ptr_equal(rig_last(PREFILL)->peer, p1);
    rig_failed(p1, current(), BATON__FAIL_CODE__FAIL_EXPERT, true);
    expect_error(503, "expert_failed");
    expect_nothing_left();
}

static void test_decode_failed_streaming(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig_prefill_done(p0, current());
    rig_failed(d0, current(), BATON__FAIL_CODE__FAIL_EXPERT, false);
    expect_error_event("expert_failed");
    expect_nothing_left();
}

/* ---- late, twice, from the wrong one ---- */

static void test_stray_messages(void **state) {
    (void)state;
    rig_request("\"stream\":true");
    rig_parsed(3);
    uint64_t id = current();
    rig_tokens(d0, id, "x", NONE); /* before any grant */
    rig_grant(d1, id);
    rig_grant(d0, id + 1);
    rig_prefill_done(p0, id); /* not asked yet */
    assert_int_equal(rig_count(PREFILL), 0);
    rig_grant(d0, id);
    rig_grant(d0, id); /* twice */
    assert_int_equal(rig_count(PREFILL), 1);
    rig_tokens(d1, id, "x", NONE);
    rig_tokens(p0, id, "x", STOP);
    rig_failed(p1, id, BATON__FAIL_CODE__FAIL_INTERNAL, true);
    rig_failed(d1, id, BATON__FAIL_CODE__FAIL_INTERNAL, true);
    rig_prefill_done(p1, id);
    assert_false(rig.client.begun);
    rig_tokens(d0, id, "a", NONE);
    rig_prefill_done(p0, id);
    rig_prefill_done(p0, id);
    rig_failed(p0, id, BATON__FAIL_CODE__FAIL_INTERNAL, true);
    rig_tokens(d0, id, "", STOP);
    rig_tokens(d0, id, "z", STOP);
    rig_failed(d0, id, BATON__FAIL_CODE__FAIL_INTERNAL, false);
    assert_true(rig.client.ended_ok);
    assert_int_equal(count_in(rig.client.text.data, "\"content\":"), 1);
    assert_non_null(strstr(rig.client.text.data, "\"content\":\"a\""));
    expect_nothing_left();
}

/* What the first attempt still says does not reach the second one's answer. */
static void test_late_first_attempt(void **state) {
    (void)state;
    rig_to_prefill("");
    uint64_t first = current();
    rig_peer(d0, BUS_SILENT);
    rig_grant(d1, current());
    rig_peer(d0, BUS_BACK);
    assert_int_equal(rig_cancel_to(d0)->request, first);
    rig_tokens(d0, first, "x", STOP);
    assert_int_equal(rig.client.n_answers, 0);
    rig_tokens(d1, current(), "y", STOP);
    assert_non_null(strstr(rig.client.text.data, "\"content\":\"y\""));
}

/* ---- deadlines ---- */

static void test_deadline_parse(void **state) {
    (void)state;
    rig_request("");
    rig_pass(900);
    assert_int_equal(rig.client.n_answers, 0);
    rig_pass(150);
    expect_error(504, "timeout");
    assert_int_equal(rig.n_abandoned, 1);
}

static void test_deadline_reserve(void **state) {
    (void)state;
    rig_request("");
    rig_parsed(3);
    rig_pass(550);
    assert_ptr_equal(rig_last(RESERVE)->peer, d1);
    assert_true(rig_cancel_to(d0)->writer_quiet);
    rig_pass(550);
    expect_error(504, "timeout");
    expect_nothing_left();
}

static void test_deadline_first_token(void **state) {
    (void)state;
    rig_to_prefill("\"stream\":true");
    rig_pass(3050);
    expect_error(504, "timeout");
    assert_non_null(rig_cancel_to(p0));
    assert_false(rig_cancel_to(d0)->writer_quiet);
    rig_pass(5050); /* prefill never answers: forgotten, decode keeps the pages */
    assert_int_equal(rig_count(QUIET), 0);
    expect_nothing_left();
}

static void test_deadline_stall(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    rig_pass(1500);
    rig_tokens(d0, current(), "b", NONE);
    rig_pass(1500);
    assert_int_equal(rig.client.n_answers, 0);
    rig_pass(600);
    expect_error_event("timeout");
}

static void test_deadline_request(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    for (int i = 0; i < 9; i++) {
        rig_pass(1000);
        rig_tokens(d0, current(), "b", NONE);
    }
    assert_int_equal(rig.client.n_answers, 0);
    rig_pass(1050);
    expect_error_event("timeout");
}

static void test_abort(void **state) {
    (void)state;
    rig_to_stream("\"stream\":true");
    sessions_abort(rig.all);
    expect_error_event("draining");
}

#define T(name) cmocka_unit_test_setup_teardown(name, rig_setup, rig_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_stream),
        T(test_whole),
        T(test_prefill_done_late),
        T(test_bad_request),
        T(test_context),
        T(test_parser_full),
        T(test_too_many),
        T(test_draining),
        T(test_draining_spares_the_running),
        T(test_no_pair),
        T(test_busy_everywhere),
        T(test_busy_alone),
        T(test_invalid_is_final),
        T(test_deaf_decode),
        T(test_deaf_prefill),
        T(test_gone_while_parsing),
        T(test_gone_while_reserving),
        T(test_gone_while_prefilling),
        T(test_gone_while_waiting),
        T(test_gone_while_streaming),
        T(test_gone_after_prefill),
        T(test_decode_fails_after_prefill),
        T(test_slow_client),
        T(test_decode_dies_reserving),
        T(test_decode_dies_prefilling),
        T(test_decode_dies_streaming),
        T(test_decode_dies_whole),
        T(test_decode_silent_streaming),
        T(test_prefill_dies_reserving),
        T(test_prefill_dies_prefilling),
        T(test_prefill_dies_streaming),
        T(test_prefill_silent),
        T(test_prefill_silent_then_gone),
        T(test_reset),
        T(test_one_retry_only),
        T(test_pair_comes_back),
        T(test_pair_does_not_come_back),
        T(test_transfer_failed),
        T(test_prefill_failed),
        T(test_decode_failed_streaming),
        T(test_stray_messages),
        T(test_late_first_attempt),
        T(test_deadline_parse),
        T(test_deadline_reserve),
        T(test_deadline_first_token),
        T(test_deadline_stall),
        T(test_deadline_request),
        T(test_abort),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
