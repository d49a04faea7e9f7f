/* The policy of prefill: shortest rest first, patience, pages, budget, borders. */
#include "prefill/sched.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX = 8, ITEMS = 20 };

static PrefillSchedView view(int n) {
    return (PrefillSchedView){.n = n,
                              .free_pages = 100,
                              .n_begun = 0,
                              .max_begun = 8,
                              .step_tokens = 256,
                              .max_chunks = MAX,
                              .page_tokens = 64,
                              .patience_ms = 1000};
}

/* The policy on a copy of items in order of arrival; chunks name their places in item[]. */
static int plan(PrefillSchedView *v, const PrefillSchedItem *item, PrefillSchedChunk *out) {
    PrefillSchedItem copy[ITEMS];
    for (int i = 0; i < v->n; i++) {
        copy[i] = item[i];
        copy[i].index = i;
    }
    v->item = copy;
    int n = prefill_sched_next(v, out);
    v->item = NULL;
    return n;
}

static void test_shortest_rest_first(void **state) {
    (void)state;
    const PrefillSchedItem item[] = {
        {0, 500, false, 8, 10, 0}, {900, 950, true, 0, 5, 0}, {0, 60, false, 1, 0, 0}};
    PrefillSchedView v = view(3);
    PrefillSchedChunk out[MAX];
    assert_int_equal(plan(&v, item, out), 3);
    assert_int_equal(out[0].index, 1);
    assert_int_equal(out[0].n_tokens, 50);
    assert_int_equal(out[1].index, 2);
    assert_int_equal(out[1].n_tokens, 60);
    assert_int_equal(out[2].index, 0);
    assert_int_equal(out[2].n_tokens, 128); /* of 146 left: ends on a page's border */
}

static void test_whoever_waited_too_long_comes_first(void **state) {
    (void)state;
    const PrefillSchedItem item[] = {
        {0, 5000, false, 79, 1500, 0}, {0, 40, false, 1, 0, 0}, {64, 3000, true, 0, 2000, 0}};
    PrefillSchedView v = view(3);
    PrefillSchedChunk out[MAX];
    assert_int_equal(plan(&v, item, out), 1);
    assert_int_equal(out[0].index, 2);
    assert_int_equal(out[0].n_tokens, 256);
}

static void test_an_overdue_one_without_pages_holds_up_beginners(void **state) {
    (void)state;
    const PrefillSchedItem item[] = {
        {0, 5000, false, 79, 1500, 0}, {0, 40, false, 1, 0, 0}, {64, 100, true, 0, 0, 0}};
    PrefillSchedView v = view(3);
    PrefillSchedChunk out[MAX];
    v.free_pages = 50;
    assert_int_equal(plan(&v, item, out), 1); /* who has begun goes on */
    assert_int_equal(out[0].index, 2);
    v.patience_ms = 5000; /* not overdue: the short one may pass */
    assert_int_equal(plan(&v, item, out), 2);
    assert_int_equal(out[0].index, 2);
    assert_int_equal(out[1].index, 1);
}

static void test_pages_and_places_bound_beginners(void **state) {
    (void)state;
    const PrefillSchedItem item[] = {
        {0, 60, false, 3, 0, 0}, {0, 61, false, 3, 0, 0}, {0, 62, false, 3, 0, 0}};
    PrefillSchedView v = view(3);
    PrefillSchedChunk out[MAX];
    v.free_pages = 7;
    assert_int_equal(plan(&v, item, out), 2);
    v.free_pages = 100, v.n_begun = 7;
    assert_int_equal(plan(&v, item, out), 1);
    v.n_begun = 8;
    assert_int_equal(plan(&v, item, out), 0);
    v.n_begun = 0, v.max_chunks = 2;
    assert_int_equal(plan(&v, item, out), 2);
    v.n = 0;
    assert_int_equal(plan(&v, item, out), 0);
}

static void test_no_slivers_but_always_progress(void **state) {
    (void)state;
    const PrefillSchedItem item[] = {{0, 240, true, 0, 0, 0}, {0, 500, true, 0, 0, 0}};
    PrefillSchedView v = view(2);
    PrefillSchedChunk out[MAX];
    assert_int_equal(plan(&v, item, out), 1); /* 16 tokens of the second: not worth it */
    v.n = 1, v.step_tokens = 16;              /* but alone it goes on with what there is */
    assert_int_equal(plan(&v, item + 1, out), 1);
    assert_int_equal(out[0].n_tokens, 16);
}

/* Short prompts keep coming; the long one still ends in bounded time. */
static void test_a_long_prompt_does_not_starve(void **state) {
    (void)state;
    PrefillSchedItem item[2] = {{0, 4000, true, 0, 0, 0}, {0, 250, false, 4, 0, 0}};
    PrefillSchedView v = view(2);
    PrefillSchedChunk out[MAX];
    int steps = 0;
    for (; item[0].computed < item[0].total && steps < 1000; steps++) {
        int n = plan(&v, item, out);
        assert_true(n > 0);
        item[0].waited_ms += 100;
        for (int i = 0; i < n; i++) {
            if (out[i].index == 0) {
                item[0].computed += out[i].n_tokens;
                item[0].waited_ms = 0;
            }
        }
    }
    assert_true(steps <= 16 * 11 + 1); /* 16 chunks of 256, one each eleventh step */
}

static void test_tokens_are_neither_lost_nor_doubled(void **state) {
    (void)state;
    srand(4);
    for (int round = 0; round < 3000; round++) {
        PrefillSchedItem item[ITEMS];
        PrefillSchedChunk out[MAX];
        PrefillSchedView v = view(rand() % 21);
        int sum = 0, begun = 0, pages = 0;
        bool seen[ITEMS] = {false};
        for (int i = 0; i < v.n; i++) {
            int total = 1 + rand() % 900, computed = rand() % total;
            bool has = rand() % 2;
            item[i] = (PrefillSchedItem){.computed = computed,
                                         .total = total,
                                         .begun = has,
                                         .pages = 1 + rand() % 15,
                                         .waited_ms = rand() % 1500};
        }
        v.free_pages = rand() % 40;
        v.step_tokens = 1 + rand() % 700;
        v.n_begun = rand() % 9;
        int n = plan(&v, item, out);
        assert_in_range(n, 0, MAX);
        for (int i = 0; i < n; i++) {
            const PrefillSchedItem *it = &item[out[i].index];
            assert_false(seen[out[i].index]);
            seen[out[i].index] = true;
            assert_in_range(out[i].n_tokens, 1, it->total - it->computed);
            sum += out[i].n_tokens;
            begun += !it->begun;
            pages += it->begun ? 0 : it->pages;
        }
        assert_true(sum <= v.step_tokens && pages <= v.free_pages);
        assert_true(begun == 0 || v.n_begun + begun <= v.max_begun);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shortest_rest_first),
        cmocka_unit_test(test_whoever_waited_too_long_comes_first),
        cmocka_unit_test(test_an_overdue_one_without_pages_holds_up_beginners),
        cmocka_unit_test(test_pages_and_places_bound_beginners),
        cmocka_unit_test(test_no_slivers_but_always_progress),
        cmocka_unit_test(test_a_long_prompt_does_not_starve),
        cmocka_unit_test(test_tokens_are_neither_lost_nor_doubled),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
