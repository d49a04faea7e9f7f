/* Opening the links of a service: what is measured, and what is refused with which words. */
#include "proto/service.h"

#include "base/clock.h"
#include "base/log.h"
#include "proto/hello.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static ServiceOpts opts(void) {
    return (ServiceOpts){.name = (char *)"decode-0",
                         .transports = (char *)"",
                         .devices = (char *)"",
                         .kv_timeout_ms = 5000};
}

static void on_notice(void *arg, const void *bytes, size_t len) {
    (void)arg, (void)bytes, (void)len;
}

static void test_the_link_is_measured(void **state) {
    (void)state;
    Err err = {0};
    Loop *loop = loop_new();
    ServiceOpts o = opts();
    KvLink *link = NULL;
    const KvMemory host = {0};
    double rate = 0;
    uint64_t bytes;
    assert_int_equal(
        service_open_link(&link, &o, loop, 8 << 20, &host, on_notice, NULL, &rate, &err), 0);
    assert_true(rate > 0);
    assert_non_null(kvlink_pool(link, &bytes));
    assert_true(bytes >= 8 << 20);
    kvlink_close(link);
    link = NULL;
    o.min_gb_per_s = 1e6;
    assert_int_equal(
        service_open_link(&link, &o, loop, 8 << 20, &host, on_notice, NULL, &rate, &err), E_LIMIT);
    assert_non_null(strstr(err.text, "asks for 1000000.00"));
    assert_null(link);
    loop_free(loop);
}

static void test_expert_endpoints(void **state) {
    (void)state;
    Err err = {0};
    ExpertLink *link = NULL;
    Baton__Hello self = BATON__HELLO__INIT;
    self.protocol = PROTOCOL_VERSION;
    self.role = BATON__ROLE__ROLE_DECODE;
    self.name = (char *)"decode-0";
    self.generation = 1;
    assert_int_equal(service_open_experts(&link, " , ", &self, 100, 0, &err), E_INVAL);
    assert_non_null(strstr(err.text, "\" , \""));
    char *many = xcalloc(1, 2 * EXPERTLINK_MAX + 3);
    for (int i = 0; i <= EXPERTLINK_MAX; i++)
        strcat(many, "x,");
    assert_int_equal(service_open_experts(&link, many, &self, 100, 0, &err), E_INVAL);
    free(many);
    int64_t begin = clock_now_ms(); /* nobody there: tried again, but not for ever */
    int rc = service_open_experts(&link, "tcp://127.0.0.1:1", &self, 200, 1200, &err);
    int64_t took = clock_now_ms() - begin;
    assert_true(rc == E_PEER || rc == E_DEADLINE);
    assert_non_null(strstr(err.text, "127.0.0.1:1"));
    assert_in_range(took, 500, 5000);
    assert_null(link);
}

static void test_names(void **state) {
    (void)state;
    Err err = {0};
    char longest[HELLO_NAME_MAX + 2];
    ServiceOpts o = opts();
    memset(longest, 'x', sizeof longest);
    longest[HELLO_NAME_MAX + 1] = '\0';
    assert_int_equal(service_check(&o, &err), 0);
    o.name = longest;
    assert_int_equal(service_check(&o, &err), E_INVAL);
    longest[HELLO_NAME_MAX] = '\0';
    assert_int_equal(service_check(&o, &err), 0);
    o.name = (char *)"";
    assert_int_equal(service_check(&o, &err), E_INVAL);
    o.name = (char *)"a\nb";
    assert_int_equal(service_check(&o, &err), E_INVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_link_is_measured),
        cmocka_unit_test(test_expert_endpoints),
        cmocka_unit_test(test_names),
    };
    log_init("test", LOG_LV_ERR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
