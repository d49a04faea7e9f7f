/* Clocks and unpredictable numbers. No state; any thread. */
#include "base/clock.h"

#include "base/err.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>

int64_t clock_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

int64_t clock_now_ms(void) {
    return clock_now_us() / 1000;
}

int64_t clock_wall_s(void) {
    return (int64_t)time(NULL);
}

uint64_t clock_unique(void) {
    uint64_t v = 0;
    while (v == 0) {
        ssize_t n = getrandom(&v, sizeof v, 0);
        CHECK(n == (ssize_t)sizeof v || (n < 0 && errno == EINTR));
        if (n < 0)
            v = 0;
    }
    return v;
}
