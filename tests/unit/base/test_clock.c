/* base/clock: time that only goes forward, numbers that do not repeat. */
#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <time.h>

static void monotonic_time_advances(void **state) {
    (void)state;
    int64_t ms = clock_now_ms(), us = clock_now_us();
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    int64_t slept_us = clock_now_us() - us, slept_ms = clock_now_ms() - ms;
    assert_true(slept_us >= 20000);
    assert_true(slept_ms >= 20 && slept_ms <= slept_us / 1000 + 1000);
}

static void wall_time_is_the_systems(void **state) {
    (void)state;
    int64_t gap = clock_wall_s() - (int64_t)time(NULL);
    assert_true(gap >= -1 && gap <= 1);
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void unique_numbers_differ(void **state) {
    (void)state;
    enum { N = 10000 };
    static uint64_t v[N];
    uint64_t ones = 0, zeros = 0;
    for (int i = 0; i < N; i++) {
        v[i] = clock_unique();
        ones |= v[i];
        zeros |= ~v[i];
    }
    assert_true(ones == UINT64_MAX && zeros == UINT64_MAX); /* every bit takes both values */
    qsort(v, N, sizeof *v, by_value);
    assert_true(v[0] != 0);
    for (int i = 1; i < N; i++)
        assert_true(v[i] != v[i - 1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(monotonic_time_advances),
        cmocka_unit_test(wall_time_is_the_systems),
        cmocka_unit_test(unique_numbers_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
