/* Tests base/admin.c over a real socket. */
#include "base/admin.h"
#include "base/stat.h"
#include "http_client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <string.h>

static Loop *loop;
static Admin *admin;
static const char *reason; /* written before the client thread starts */

typedef struct Ask {
    const char *line;
    Buf head, body;
    int rc;
} Ask;

static bool ready(void *arg, char *why, size_t n) {
    assert_ptr_equal(arg, &loop);
    if (reason)
        snprintf(why, n, "%s", reason);
    return !reason;
}

static void stop(void *arg) {
    (void)arg;
    loop_stop(loop);
}

static void *client_main(void *arg) {
    Ask *a = arg;
    a->rc = client_ask(admin_port(admin), a->line, NULL, 0, &a->head, &a->body);
    loop_post(loop, stop, NULL);
    return NULL;
}

/* Asks once and checks the status line, a header (or NULL) and the body's beginning. */
static void ask(const char *line, const char *status, const char *header, const char *body) {
    Err err = {0};
    loop = loop_new();
    assert_int_equal(admin_open(&admin, loop, "127.0.0.1", 0, ready, &loop, &err), 0);
    Ask a = {.line = line};
    pthread_t thread;
    pthread_create(&thread, NULL, client_main, &a);
    loop_run(loop);
    pthread_join(thread, NULL);
    assert_int_equal(a.rc, 0);
    assert_non_null(strstr(a.head.data, status));
    if (header)
        assert_non_null(strstr(a.head.data, header));
    assert_non_null(strstr(a.body.data ? a.body.data : "", body));
    buf_done(&a.head);
    buf_done(&a.body);
    admin_close(admin);
    loop_free(loop);
}

static void test_live(void **state) {
    (void)state;
    reason = "not ready at all";
    ask("GET /live", " 200 ", "application/json", "{\"live\": true}");
}

static void test_ready(void **state) {
    (void)state;
    reason = NULL;
    ask("GET /ready", " 200 ", "application/json", "{\"ready\": true}");
    reason = "cut\xe4\xbd";
    ask("GET /ready", " 503 ", NULL, "{\"ready\": false, \"reason\": \"cut??\"}");
    reason = "no \"decode\"\n";
    ask("GET /ready", " 503 ", "Retry-After: 1",
        "{\"ready\": false, \"reason\": \"no \\\"decode\\\"\\u000a\"}");
}

static void test_metrics(void **state) {
    (void)state;
    stat_add(stat_counter("test_admin_total", "", "a counter"), 3);
    ask("GET /metrics", " 200 ", "text/plain", "test_admin_total 3");
}

static void test_refusals(void **state) {
    (void)state;
    ask("POST /ready", " 405 ", "Allow: GET, HEAD", "method not allowed");
    ask("GET /else", " 404 ", NULL, "not found");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_live), cmocka_unit_test(test_ready),
                                       cmocka_unit_test(test_metrics),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
