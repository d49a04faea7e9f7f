/* Reading speed: every byte counts, holes do not, and any number of threads reads. */
#include "kernels/cpu/mem_read.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

enum { PIECE = 1 << 20, N = 16 };

static void reads_all_pieces(void **state) {
    (void)state;
    uint8_t *memory = xaligned((size_t)PIECE * N);
    const uint8_t *piece[N + 1] = {NULL};
    for (int i = 0; i < N; i++)
        piece[i + 1] = memory + (size_t)i * PIECE;
    for (int threads = 1; threads <= 3; threads++) {
        PoolConf conf = {.n_threads = threads, .spin_us = 10};
        HostPool *pool;
        assert_int_equal(pool_new(&pool, &conf, NULL), 0);
        double v = mem_read(pool, piece, N + 1, PIECE);
        assert_true(v > 0.005 && v < 10000);
        assert_true(mem_read(pool, piece, 1, PIECE) <= 0); /* only the hole */
        pool_free(pool);
    }
    free(memory);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(reads_all_pieces)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
