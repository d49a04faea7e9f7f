/* Counts of routed experts: adding, the file and what is refused of it. */
#include "model/route_count.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static const uint64_t MODEL = 0xfedcba9876543210;
static char path[] = "/tmp/baton-counts-XXXXXX";

static Shape shape(void) {
    Shape s = {.n_layers = 2, .n_experts = 3};
    s.layer_dense[0] = true;
    return s;
}

static void test_add_save_load(void **state) {
    (void)state;
    Shape s = shape();
    Err err = {0};
    RouteCount *c = route_count_new(&s), *back;
    route_count_add(c, 1, (int32_t[]){2, 0, -1, 2}, 4);
    route_count_tokens(c, 2);
    route_count_pairs(c, 4, 1);
    assert_int_equal(route_count_get(c, 1, 2), 2);
    assert_int_equal(route_count_n_pairs(c), 4);
    assert_int_equal(route_count_n_remote(c), 1);
    assert_int_equal(route_count_save(c, path, MODEL, &err), 0);
    assert_int_equal(route_count_load(&back, path, &s, MODEL, &err), 0);
    uint64_t *copy = route_count_copy(back);
    assert_memory_equal(copy, ((uint64_t[]){0, 0, 0, 1, 0, 2}), 6 * sizeof *copy);
    assert_int_equal(route_count_n_tokens(back), 2);
    free(copy);
    route_count_free(back);
    assert_int_equal(route_count_load(&back, path, &s, 1, &err), E_MISMATCH);
    assert_non_null(strstr(err.text, "fedcba9876543210, this is 0000000000000001"));
    assert_int_equal(route_count_save(c, "/no/such/place", MODEL, &err), E_IO);
    route_count_free(c);
}

static void refused(const char *text, int code, const char *part) {
    Shape s = shape();
    Err err = {0};
    RouteCount *c = NULL;
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, text, "\"model_id\":\"fedcba9876543210\"");
    fclose(f);
    assert_int_equal(route_count_load(&c, path, &s, MODEL, &err), code);
    assert_null(c);
    assert_non_null(strstr(err.text, part));
}

static void test_refusals(void **state) {
    (void)state;
    Shape s = shape();
    Err err = {0};
    RouteCount *c;
    refused("{%s", E_FORMAT, ":1:");
    refused("[%.0s]", E_MISMATCH, "model_id");
    refused("{%s}", E_FORMAT, "tokens");
    refused("{%s,\"tokens\":-1}", E_FORMAT, "tokens");
    refused("{%s,\"tokens\":1}", E_MISMATCH, "layers.1");
    refused("{%s,\"tokens\":1,\"layers\":{\"1\":[1,2]}}", E_MISMATCH, "list of 3");
    refused("{%s,\"tokens\":1,\"layers\":{\"1\":[1,2,-3]}}", E_FORMAT, "layers.1[2]");
    refused("{%s,\"tokens\":1,\"layers\":{\"1\":[1,2,3],\"2\":[]}}", E_MISMATCH, "no others");
    assert_int_equal(route_count_load(&c, "tests/no-such", &s, MODEL, &err), E_NOTFOUND);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_add_save_load),
        cmocka_unit_test(test_refusals),
    };
    int fd = mkstemp(path);
    if (fd < 0)
        return 1;
    close(fd);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
