/* What comes first, what may be passed by and how often, bounds, closing. */
#include "expertd/order.h"

#include "base/clock.h"
#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <time.h>

static char thing[4 * ORDER_BURST];

static void test_small_ones_first_each_kind_by_arrival(void **state) {
    (void)state;
    Order *o = order_new(8);
    for (int i = 0; i < 6; i++)
        assert_true(order_push(o, &thing[i], i % 2));
    const int expected[] = {1, 3, 5, 0, 2, 4};
    for (int i = 0; i < 6; i++)
        assert_ptr_equal(order_pop(o, 0), &thing[expected[i]]);
    assert_null(order_pop(o, 0));
    order_free(o);
}

static void test_a_large_one_is_passed_by_a_bounded_number(void **state) {
    (void)state;
    Order *o = order_new(4 * ORDER_BURST);
    assert_true(order_push(o, &thing[0], false));
    assert_true(order_push(o, &thing[1], false));
    for (int i = 2; i < 3 * ORDER_BURST; i++)
        assert_true(order_push(o, &thing[i], true));
    for (int large = 0; large < 2; large++) {
        for (int i = 0; i < ORDER_BURST; i++)
            assert_true(order_pop(o, 0) != &thing[large]);
        assert_ptr_equal(order_pop(o, 0), &thing[large]);
    }
    order_free(o);
}

static void test_small_ones_inside_of_a_large_one(void **state) {
    (void)state;
    Order *o = order_new(4);
    assert_true(order_push(o, &thing[0], false));
    assert_null(order_pop_small(o));
    assert_true(order_push(o, &thing[1], true));
    assert_ptr_equal(order_pop_small(o), &thing[1]);
    assert_ptr_equal(order_pop(o, 0), &thing[0]);
    order_free(o);
}

static void test_both_kinds_share_the_bound(void **state) {
    (void)state;
    Order *o = order_new(2);
    assert_true(order_push(o, &thing[0], false));
    assert_true(order_push(o, &thing[1], true));
    assert_false(order_push(o, &thing[2], true));
    assert_false(order_push(o, &thing[2], false));
    assert_int_equal(order_length(o), 2);
    assert_non_null(order_pop(o, 0));
    assert_true(order_push(o, &thing[2], true));
    order_free(o);
}

static void *close_soon(void *arg) {
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    order_close(arg);
    return NULL;
}

static void test_waits_end(void **state) {
    (void)state;
    Order *o = order_new(2);
    int64_t begin = clock_now_ms();
    assert_null(order_pop(o, 30));
    assert_true(clock_now_ms() - begin >= 29);
    pthread_t closer;
    assert_int_equal(pthread_create(&closer, NULL, close_soon, o), 0);
    assert_null(order_pop(o, -1));
    assert_int_equal(pthread_join(closer, NULL), 0);
    assert_false(order_push(o, &thing[0], true));
    order_free(o);
}

static void test_closed_gives_nothing_out(void **state) {
    (void)state;
    Order *o = order_new(2);
    assert_true(order_push(o, &thing[0], true));
    assert_true(order_push(o, &thing[1], false));
    order_close(o);
    assert_null(order_pop(o, -1));
    assert_null(order_pop_small(o));
    order_free(o);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_ones_first_each_kind_by_arrival),
        cmocka_unit_test(test_a_large_one_is_passed_by_a_bounded_number),
        cmocka_unit_test(test_small_ones_inside_of_a_large_one),
        cmocka_unit_test(test_both_kinds_share_the_bound),
        cmocka_unit_test(test_waits_end),
        cmocka_unit_test(test_closed_gives_nothing_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
