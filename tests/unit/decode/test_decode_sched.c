/* The policies of decode: who is let in, when to come back, who runs next. */
#include "decode/sched.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

static DecodeSchedRunning running[3];

static DecodeSchedView view(void) {
    running[0] = (DecodeSchedRunning){500, 4};
    running[1] = (DecodeSchedRunning){100, 3};
    running[2] = (DecodeSchedRunning){300, 2};
    return (DecodeSchedView){.free_pages = 2,
                             .total_pages = 20,
                             .active = 3,
                             .max_active = 10,
                             .step_ms = 20,
                             .n_running = 3,
                             .running = running};
}

static void test_admission(void **state) {
    (void)state;
    DecodeSchedView v = view();
    uint32_t retry = 7;
    assert_int_equal(decode_sched_admit(&v, 2, &retry), DECODE_ADMIT);
    assert_int_equal(retry, 7);
    assert_int_equal(decode_sched_admit(&v, 21, &retry), DECODE_NEVER);
    assert_int_equal(retry, 7);
    assert_int_equal(decode_sched_admit(&v, 20, &retry), DECODE_BUSY);
    v.active = 10;
    assert_int_equal(decode_sched_admit(&v, 2, &retry), DECODE_BUSY);
    v.active = 9;
    assert_int_equal(decode_sched_admit(&v, 2, &retry), DECODE_ADMIT);
}

static void test_retry_times(void **state) {
    (void)state;
    DecodeSchedView v = view();
    uint32_t retry;
    decode_sched_admit(&v, 5, &retry); /* 3 pages: the one with 100 tokens left has them */
    assert_int_equal(retry, 100 * 20);
    decode_sched_admit(&v, 6, &retry); /* and the next */
    assert_int_equal(retry, 300 * 20);
    decode_sched_admit(&v, 11, &retry);
    assert_int_equal(retry, 500 * 20);
    decode_sched_admit(&v, 12, &retry); /* more than what runs gives back */
    assert_int_equal(retry, DECODE_RETRY_MAX_MS);
    v.step_ms = 1000;
    decode_sched_admit(&v, 11, &retry);
    assert_int_equal(retry, DECODE_RETRY_MAX_MS);
    v.step_ms = 0.01;
    decode_sched_admit(&v, 5, &retry);
    assert_int_equal(retry, DECODE_RETRY_MIN_MS);
    v = view(), v.active = 10; /* a place is enough */
    decode_sched_admit(&v, 1, &retry);
    assert_int_equal(retry, 100 * 20);
}

static void test_all_run_when_they_fit(void **state) {
    (void)state;
    DecodeSchedTurn turn[4] = {{9, 0}, {1, 1}, {5, 2}, {5, 3}};
    assert_int_equal(decode_sched_step(turn, 4, 4), 4);
    for (int i = 0; i < 4; i++)
        assert_int_equal(turn[i].index, i);
    assert_int_equal(decode_sched_step(turn, 0, 4), 0);
}

static void test_those_that_waited_longest_run_first(void **state) {
    (void)state;
    DecodeSchedTurn turn[5] = {{9, 0}, {1, 1}, {5, 2}, {5, 3}, {0, 4}};
    assert_int_equal(decode_sched_step(turn, 5, 3), 3);
    assert_int_equal(turn[0].index, 4);
    assert_int_equal(turn[1].index, 1);
    assert_int_equal(turn[2].index, 2); /* before 3, which waited as long */
}

static void test_turns_are_fair(void **state) {
    (void)state;
    enum { N = 17, MAX = 5, STEPS = 340 };
    uint64_t last[N] = {0}, n_turns = 0;
    int count[N] = {0};
    for (int step = 0; step < STEPS; step++) {
        DecodeSchedTurn turn[N];
        for (int i = 0; i < N; i++)
            turn[i] = (DecodeSchedTurn){last[i], i};
        int n = decode_sched_step(turn, N, MAX);
        for (int i = 0; i < n; i++) {
            last[turn[i].index] = ++n_turns;
            count[turn[i].index]++;
        }
    }
    for (int i = 0; i < N; i++)
        assert_in_range(count[i], STEPS * MAX / N - 1, STEPS * MAX / N + 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_admission),
        cmocka_unit_test(test_retry_times),
        cmocka_unit_test(test_all_run_when_they_fit),
        cmocka_unit_test(test_those_that_waited_longest_run_first),
        cmocka_unit_test(test_turns_are_fair),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
