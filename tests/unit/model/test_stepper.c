/* The engine thread: order, where done is called, bound, liveness, close. */
#include "model/stepper.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct Job {
    StepTask task;
    int number;
} Job;

static Loop *loop;
static Stepper *stepper;
static pthread_t ran_on, done_on;
static int ran[256], n_ran, done[256], n_done;
static atomic_bool gate_closed;

static void run(StepTask *t) {
    const Job *j = t->arg;
    while (atomic_load(&gate_closed))
        usleep(500);
    ran_on = pthread_self();
    ran[n_ran++] = j->number;
}

static void on_done(StepTask *t) {
    const Job *j = t->arg;
    done_on = pthread_self();
    assert_true(t->put_us <= t->begin_us && t->begin_us <= t->end_us);
    done[n_done++] = j->number;
}

static Job *jobs(int n) {
    Job *j = calloc((size_t)n, sizeof *j);
    for (int i = 0; i < n; i++)
        j[i] = (Job){.task = {.run = run, .done = on_done, .arg = &j[i]}, .number = i};
    return j;
}

static int setup(void **state) {
    (void)state;
    loop = loop_new();
    n_ran = n_done = 0;
    atomic_store(&gate_closed, false);
    return stepper_open(&stepper, loop, NULL);
}

static int teardown(void **state) {
    (void)state;
    stepper_close(stepper);
    loop_free(loop);
    return 0;
}

static void until_done(int n) {
    for (int64_t end = clock_now_ms() + 20000; n_done < n;) {
        assert_true(clock_now_ms() < end);
        uv_run(loop_uv(loop), UV_RUN_NOWAIT);
    }
}

static void test_tasks_run_in_order_and_end_on_the_loop(void **state) {
    (void)state;
    Job *j = jobs(50);
    for (int i = 0; i < 50; i++)
        assert_true(stepper_put(stepper, &j[i].task));
    until_done(50);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(ran[i], i);
        assert_int_equal(done[i], i);
    }
    assert_true(pthread_equal(done_on, pthread_self()));
    assert_false(pthread_equal(ran_on, pthread_self()));
    free(j);
}

static void test_the_queue_is_bounded(void **state) {
    (void)state;
    int n = STEPPER_QUEUE + 2, taken = 0;
    Job *j = jobs(n);
    atomic_store(&gate_closed, true);
    for (int i = 0; i < n; i++)
        taken += stepper_put(stepper, &j[i].task);
    assert_in_range(taken, STEPPER_QUEUE, STEPPER_QUEUE + 1); /* one may have begun */
    atomic_store(&gate_closed, false);
    until_done(taken);
    free(j);
}

static void test_a_stuck_task_is_not_alive(void **state) {
    (void)state;
    Job *j = jobs(1);
    assert_true(stepper_alive(stepper, 1));
    atomic_store(&gate_closed, true);
    stepper_put(stepper, &j->task);
    assert_true(stepper_alive(stepper, 60000));
    for (int64_t end = clock_now_ms() + 20000; stepper_alive(stepper, 30);)
        assert_true(clock_now_ms() < end);
    assert_true(stepper_alive(stepper, 60000));
    atomic_store(&gate_closed, false);
    until_done(1);
    assert_true(stepper_alive(stepper, 1));
    free(j);
}

static void *open_gate(void *arg) {
    usleep(30000);
    atomic_store(&gate_closed, false);
    return arg;
}

static void test_close_waits_for_what_runs_and_drops_the_rest(void **state) {
    (void)state;
    pthread_t t;
    Job *j = jobs(5);
    atomic_store(&gate_closed, true);
    for (int i = 0; i < 5; i++)
        stepper_put(stepper, &j[i].task);
    usleep(10000); /* the first has begun */
    pthread_create(&t, NULL, open_gate, NULL);
    stepper_close(stepper);
    stepper = NULL;
    assert_int_equal(n_ran, 1);
    assert_int_equal(n_done, 0);
    pthread_join(t, NULL);
    free(j);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_tasks_run_in_order_and_end_on_the_loop),
        T(test_the_queue_is_bounded),
        T(test_a_stuck_task_is_not_alive),
        T(test_close_waits_for_what_runs_and_drops_the_rest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
