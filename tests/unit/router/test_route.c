/* Tests router/route.c. */
#include "router/route.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static RouteNode prefill[3], decode[3];
static uint64_t pairs[3];

static RouteView view(void) {
    return (RouteView){
        .prefill = prefill, .decode = decode, .n_prefill = 3, .n_decode = 3, .pairs = pairs};
}

static int setup(void **state) {
    (void)state;
    for (int i = 0; i < 3; i++) {
        prefill[i] = (RouteNode){.usable = true};
        decode[i] = (RouteNode){.usable = true, .free_pages = 10, .total_pages = 20};
        pairs[i] = 7;
    }
    return 0;
}

static void expect(uint32_t need_pages, int want_p, int want_d) {
    RouteView v = view();
    int p = -1, d = -1;
    assert_true(route_pick(&v, need_pages, &p, &d));
    assert_int_equal(p, want_p);
    assert_int_equal(d, want_d);
}

static void test_ties_take_the_first(void **state) {
    (void)state;
    expect(5, 0, 0);
}

static void test_most_free_pages(void **state) {
    (void)state;
    decode[1].free_pages = 12;
    decode[1].load = 9;
    expect(5, 0, 1);
    decode[2].free_pages = 12;
    expect(5, 0, 2); /* the same room, less loaded */
}

static void test_without_room_the_fullest_last(void **state) {
    (void)state;
    decode[0].free_pages = 0;
    decode[1].free_pages = 3;
    decode[2].free_pages = 2;
    expect(5, 0, 1);
}

static void test_least_queued(void **state) {
    (void)state;
    prefill[0].queued_tokens = 100;
    prefill[1].queued_tokens = 50;
    prefill[2].queued_tokens = 50;
    prefill[1].load = 2;
    prefill[2].load = 1;
    expect(5, 2, 0);
}

static void test_unusable(void **state) {
    (void)state;
    prefill[0].usable = decode[0].usable = false;
    expect(5, 1, 1);
    for (int i = 0; i < 3; i++)
        decode[i].usable = false;
    RouteView v = view();
    int p, d;
    assert_false(route_pick(&v, 1, &p, &d));
}

static void test_pairs(void **state) {
    (void)state;
    pairs[0] = 0;
    pairs[1] = 0;
    pairs[2] = 1u << 2;
    decode[0].free_pages = 20; /* better, but nobody fits it */
    expect(5, 2, 2);
    prefill[2].usable = false; /* the only one that fits */
    RouteView v = view();
    int p, d;
    assert_false(route_pick(&v, 1, &p, &d));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_ties_take_the_first, setup),
        cmocka_unit_test_setup(test_most_free_pages, setup),
        cmocka_unit_test_setup(test_without_room_the_fullest_last, setup),
        cmocka_unit_test_setup(test_least_queued, setup),
        cmocka_unit_test_setup(test_unusable, setup),
        cmocka_unit_test_setup(test_pairs, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
