/* The worker pool: every chunk once, by threads that exist, seen by the caller; idle workers
 * sleep. */
#include "kernels/cpu/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_CHUNKS = 300 };

typedef struct Job {
    int n_threads;
    int done[MAX_CHUNKS]; /* written by the chunk's thread, read after the run */
    _Atomic int wrong;
} Job;

static void count(void *arg, int chunk, int thread) {
    Job *j = arg;
    j->done[chunk]++;
    if (thread < 0 || thread >= j->n_threads)
        atomic_fetch_add(&j->wrong, 1);
}

static void test_every_chunk_once(void **state) {
    (void)state;
    static const int counts[] = {0, 1, 2, 7, MAX_CHUNKS};
    for (int n_threads = 1; n_threads <= 4; n_threads++) {
        HostPool *p;
        assert_int_equal(pool_new(&p, &(PoolConf){.n_threads = n_threads, .spin_us = 50}, NULL), 0);
        assert_int_equal(pool_size(p), n_threads);
        for (int round = 0; round < 400; round++) {
            Job j = {.n_threads = n_threads};
            int n = counts[round % 5];
            pool_run(p, n, count, &j);
            for (int i = 0; i < MAX_CHUNKS; i++)
                assert_int_equal(j.done[i], i < n);
            assert_int_equal(j.wrong, 0);
        }
        pool_free(p);
    }
    pool_free(NULL);
}

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void test_idle_workers_sleep(void **state) {
    (void)state;
    HostPool *p;
    Job j = {.n_threads = 3};
    assert_int_equal(pool_new(&p, &(PoolConf){.n_threads = 3}, NULL), 0);
    pool_run(p, MAX_CHUNKS, count, &j);
    usleep(50000); /* they spin for a moment first */
    double before = cpu_seconds();
    usleep(300000);
    assert_true(cpu_seconds() - before < 0.03);
    pool_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_chunk_once),
        cmocka_unit_test(test_idle_workers_sleep),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
