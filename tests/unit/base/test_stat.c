/* base/stat: values and the text that a scraper reads. */
#include "base/stat.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <string.h>

static void assert_has(const char *text, const char *part) {
    if (!strstr(text, part))
        fail_msg("\"%s\" is not in:\n%s", part, text);
}

static void series_are_grouped_by_name(void **state) {
    (void)state;
    StatCounter *a = stat_counter("req_total", "peer=\"a\"", "Requests\nwith a \\ in the help.");
    StatGauge *g = stat_gauge("free_pages", "", "Pages.");
    StatCounter *b = stat_counter("req_total", "peer=\"b\"", "");
    stat_add(a, 2);
    stat_add(a, 0.5);
    stat_add(b, 1);
    stat_set(g, -3);
    assert_ptr_equal(stat_counter("req_total", "peer=\"a\"", ""), a);
    assert_true(stat_counter_value(a) == 2.5);
    assert_true(stat_gauge_value(g) == -3);
    Buf out = {0};
    stat_render(&out);
    assert_has(out.data,
               "# HELP req_total Requests\\nwith a \\\\ in the help.\n# TYPE req_total counter\n"
               "req_total{peer=\"a\"} 2.5\nreq_total{peer=\"b\"} 1\n");
    assert_has(out.data, "# TYPE free_pages gauge\nfree_pages -3\n");
    buf_done(&out);
}

static void histograms_are_cumulative(void **state) {
    (void)state;
    static const double bounds[] = {1, 10};
    StatHist *h = stat_hist("step_tokens", "kind=\"x\"", "Tokens.", bounds, 2);
    stat_observe(h, 1); /* a bound is part of its bucket */
    stat_observe(h, 5);
    stat_observe(h, 1000);
    stat_observe(stat_hist_seconds("wait_seconds", "", "Wait."), 0.03);
    Buf out = {0};
    stat_render(&out);
    assert_has(out.data, "# TYPE step_tokens histogram\n"
                         "step_tokens_bucket{kind=\"x\",le=\"1\"} 1\n"
                         "step_tokens_bucket{kind=\"x\",le=\"10\"} 2\n"
                         "step_tokens_bucket{kind=\"x\",le=\"+Inf\"} 3\n"
                         "step_tokens_sum{kind=\"x\"} 1006\n"
                         "step_tokens_count{kind=\"x\"} 3\n");
    assert_has(out.data,
               "wait_seconds_bucket{le=\"0.025\"} 0\nwait_seconds_bucket{le=\"0.05\"} 1\n");
    assert_has(out.data, "wait_seconds_bucket{le=\"60\"} 1\n");
    assert_has(out.data, "wait_seconds_sum 0.03\nwait_seconds_count 1\n");
    buf_done(&out);
}

static void odd_numbers_are_spelled_as_prometheus_does(void **state) {
    (void)state;
    stat_set(stat_gauge("odd", "v=\"1\"", "Odd."), INFINITY);
    stat_set(stat_gauge("odd", "v=\"2\"", "Odd."), NAN);
    stat_set(stat_gauge("odd", "v=\"3\"", "Odd."), 1e300);
    stat_set(stat_gauge("odd", "v=\"4\"", "Odd."), 123456789012.0);
    Buf out = {0};
    stat_render(&out);
    assert_has(
        out.data,
        "odd{v=\"1\"} +Inf\nodd{v=\"2\"} NaN\nodd{v=\"3\"} 1e+300\nodd{v=\"4\"} 123456789012\n");
    buf_done(&out);
}

static void *count(void *arg) {
    for (int i = 0; i < 50000; i++) {
        stat_add(arg, 1);
        stat_observe(stat_hist_seconds("many_seconds", "", "Many."), 2);
    }
    return NULL;
}

static void no_update_is_lost(void **state) {
    (void)state;
    StatCounter *c = stat_counter("many_total", "", "Many.");
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, count, c);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_true(stat_counter_value(c) == 150000);
    Buf out = {0};
    stat_render(&out);
    assert_has(out.data, "many_seconds_sum 300000\nmany_seconds_count 150000\n");
    buf_done(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(series_are_grouped_by_name),
        cmocka_unit_test(histograms_are_cumulative),
        cmocka_unit_test(odd_numbers_are_spelled_as_prometheus_does),
        cmocka_unit_test(no_update_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
