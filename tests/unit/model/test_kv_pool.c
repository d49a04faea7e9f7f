/* Page bookkeeping: order, refusal, quarantine, and the sum under random operations. */
#include "model/kv_pool.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static void counts(const KvPool *p, int n_free, int n_used, int n_quarantined) {
    assert_int_equal(kv_pool_n_free(p), n_free);
    assert_int_equal(kv_pool_n_used(p), n_used);
    assert_int_equal(kv_pool_n_quarantined(p), n_quarantined);
    kv_pool_check(p);
}

static void test_takes_lowest_first(void **state) {
    (void)state;
    KvPool *p = kv_pool_new(10);
    int32_t a[4], b[3], c[3];
    assert_int_equal(kv_pool_take(p, 4, a, NULL), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(a[i], i);
    kv_pool_give(p, a + 1, 2); /* 1 and 2 */
    assert_int_equal(kv_pool_take(p, 3, b, NULL), 0);
    const int32_t want[3] = {1, 2, 4};
    assert_memory_equal(b, want, sizeof want);
    counts(p, 5, 5, 0);
    kv_pool_give(p, b, 3);
    kv_pool_give(p, a, 1);
    kv_pool_give(p, a + 3, 1);
    assert_int_equal(kv_pool_take(p, 3, c, NULL), 0);
    assert_int_equal(c[0], 0);
    kv_pool_give(p, c, 3);
    counts(p, 10, 0, 0);
    kv_pool_free(p);
}

static void test_refuses_with_numbers_and_takes_none(void **state) {
    (void)state;
    Err err = {0};
    KvPool *p = kv_pool_new(3);
    int32_t a[4] = {-7, -7, -7, -7};
    assert_int_equal(kv_pool_take(p, 2, a, &err), 0);
    assert_int_equal(kv_pool_take(p, 2, a + 2, &err), E_NOMEM);
    assert_non_null(strstr(err.text, "2 pages wanted, 1 of 3 free"));
    assert_int_equal(a[2], -7);
    counts(p, 1, 2, 0);
    assert_int_equal(kv_pool_take(p, 0, a + 2, &err), 0);
    kv_pool_give(p, a, 2);
    kv_pool_free(p);
}

static void test_quarantined_pages_are_not_reused(void **state) {
    (void)state;
    KvPool *p = kv_pool_new(4);
    int32_t a[4], b[4];
    assert_int_equal(kv_pool_take(p, 4, a, NULL), 0);
    kv_pool_quarantine(p, a, 2);
    kv_pool_give(p, a + 2, 2);
    counts(p, 2, 0, 2);
    assert_int_equal(kv_pool_take(p, 3, b, NULL), E_NOMEM);
    assert_int_equal(kv_pool_take(p, 2, b, NULL), 0);
    assert_int_equal(b[0], 2);
    assert_int_equal(b[1], 3);
    kv_pool_release(p, a, 2);
    counts(p, 2, 2, 0);
    kv_pool_give(p, b, 2);
    kv_pool_free(p);
}

/* Runs fn in a child; true when it aborts. */
static bool aborts(void (*fn)(void)) {
    pid_t pid = fork();
    if (pid == 0) {
        fclose(stderr);
        fn();
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void give_twice(void) {
    KvPool *p = kv_pool_new(2);
    int32_t a[1];
    kv_pool_take(p, 1, a, NULL);
    kv_pool_give(p, a, 1);
    kv_pool_give(p, a, 1);
}

static void give_quarantined(void) {
    KvPool *p = kv_pool_new(2);
    int32_t a[1];
    kv_pool_take(p, 1, a, NULL);
    kv_pool_quarantine(p, a, 1);
    kv_pool_give(p, a, 1);
}

static void free_with_pages_out(void) {
    KvPool *p = kv_pool_new(2);
    int32_t a[1];
    kv_pool_take(p, 1, a, NULL);
    kv_pool_free(p);
}

static void give_outside(void) {
    int32_t page = 2;
    kv_pool_give(kv_pool_new(2), &page, 1);
}

static void test_broken_bookkeeping_aborts(void **state) {
    (void)state;
    assert_true(aborts(give_twice));
    assert_true(aborts(give_quarantined));
    assert_true(aborts(free_with_pages_out));
    assert_true(aborts(give_outside));
}

enum { PAGES = 97, HOLDERS = 20 };

typedef struct Holder {
    int32_t page[PAGES];
    int n;
    bool quarantined;
} Holder;

/* No page has two holders. */
static void check_disjoint(const Holder *h) {
    bool seen[PAGES] = {false};
    for (int i = 0; i < HOLDERS; i++)
        for (int k = 0; k < h[i].n; k++) {
            assert_in_range(h[i].page[k], 0, PAGES - 1);
            assert_false(seen[h[i].page[k]]);
            seen[h[i].page[k]] = true;
        }
}

static void test_random_operations(void **state) {
    (void)state;
    KvPool *p = kv_pool_new(PAGES);
    Holder *h = calloc(HOLDERS, sizeof *h);
    srand(12);
    for (int step = 0; step < 20000; step++) {
        Holder *x = &h[rand() % HOLDERS];
        if (x->n == 0) {
            int want = 1 + rand() % 30, n_free = kv_pool_n_free(p);
            int rc = kv_pool_take(p, want, x->page, NULL);
            assert_int_equal(rc == 0, want <= n_free);
            x->n = rc == 0 ? want : 0;
            x->quarantined = false;
        } else if (x->quarantined) {
            kv_pool_release(p, x->page, x->n);
            *x = (Holder){0};
        } else if (rand() % 2) {
            kv_pool_quarantine(p, x->page, x->n);
            x->quarantined = true;
        } else {
            kv_pool_give(p, x->page, x->n);
            x->n = 0;
        }
        kv_pool_check(p);
        check_disjoint(h);
    }
    for (int i = 0; i < HOLDERS; i++) {
        if (h[i].quarantined)
            kv_pool_release(p, h[i].page, h[i].n);
        else
            kv_pool_give(p, h[i].page, h[i].n);
    }
    counts(p, PAGES, 0, 0);
    free(h);
    kv_pool_free(p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_takes_lowest_first),
        cmocka_unit_test(test_refuses_with_numbers_and_takes_none),
        cmocka_unit_test(test_quarantined_pages_are_not_reused),
        cmocka_unit_test(test_broken_bookkeeping_aborts),
        cmocka_unit_test(test_random_operations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
