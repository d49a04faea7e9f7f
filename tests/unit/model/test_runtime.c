/* What a daemon refuses to start with, each by name; and what it knows once it has started. */
#include "model/runtime.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL "tests/models/tiny-glm52/fp8"

static EngineOpts opts(void) {
    return (EngineOpts){.dir = (char *)MODEL,
                        .name = (char *)"tiny",
                        .backend = (char *)"cpu",
                        .tp = 2,
                        .threads = 1,
                        .kv_dtype = 2,
                        .max_context = 1000,
                        .pages = 20,
                        .resident = (char *)"all"};
}

static void test_start(void **state) {
    (void)state;
    Err err = {0};
    Runtime r, other;
    EngineOpts o = opts();
    assert_int_equal(runtime_load(&r, &o, &err), 0);
    assert_int_equal(runtime_start(&r, &o, 16, 4, NULL, &err), 0);
    assert_int_equal(r.layout.n_pages, 20);
    assert_int_equal(r.layout.dtype, DT_F8E4M3);
    assert_string_equal(r.kv_dtype, "fp8");
    assert_int_equal(r.max_context, 1000);
    assert_int_equal(r.n_remote, 0);
    assert_true(r.n_tokens > 1000 && r.n_tokens <= r.shape->vocab);
    assert_true(r.tokenizer_hash != 0 && r.fingerprint != 0);
    o.dir = (char *)"tests/models/tiny-glm52/mixed", o.max_context = 0;
    o.resident = (char *)"4";
    assert_int_equal(runtime_load(&other, &o, &err), 0);
    assert_true(other.tokenizer_hash == r.tokenizer_hash);
    assert_true(other.fingerprint != r.fingerprint);
    assert_int_equal(other.max_context, other.shape->max_positions);
    assert_true(other.n_remote > 0);
    runtime_close(&other);
    runtime_close(&r);
    runtime_close(&r);
}

static void test_pool_bytes_become_pages(void **state) {
    (void)state;
    Err err = {0};
    Runtime r;
    EngineOpts o = opts();
    o.pages = 0, o.pool_bytes = 64 << 20;
    assert_int_equal(runtime_load(&r, &o, &err), 0);
    assert_int_equal(runtime_start(&r, &o, 16, 4, NULL, &err), 0);
    uint64_t page = kv_page_total_bytes(&r.layout);
    assert_int_equal(r.layout.n_pages, (64 << 20) / page);
    runtime_close(&r);
}

static void refused(const EngineOpts *o, int code, const char *part) {
    Err err = {0};
    Runtime r = {0};
    int rc = runtime_load(&r, o, &err);
    if (rc == 0)
        rc = runtime_start(&r, o, 16, 4, NULL, &err);
    runtime_close(&r);
    assert_int_equal(rc, code);
    assert_non_null(strstr(err.text, part));
}

static void test_refusals(void **state) {
    (void)state;
    EngineOpts o = opts();
    o.pages = 15; /* 1000 tokens take 16 */
    refused(&o, E_INVAL, "has 15 pages");
    refused(&o, E_INVAL, "takes 16: raise [engine] pages to at least 16");
    o.pages = 0, o.pool_bytes = 1 << 20;
    refused(&o, E_INVAL, "raise [engine] pool_bytes");
    o = opts(), o.max_context = 9000;
    refused(&o, E_INVAL, "max_context is 9000, the model has 8192");
    o = opts(), o.tp = 3;
    refused(&o, E_UNSUPPORTED, "tp 3");
    o = opts(), o.backend = (char *)"tpu";
    refused(&o, E_UNSUPPORTED, "backend tpu");
    o = opts(), o.resident = (char *)"some";
    refused(&o, E_INVAL, "\"some\"");
    o = opts(), o.resident = (char *)"none";
    refused(&o, E_INVAL, "no expertd is configured");
    o = opts(), o.dir = (char *)"tests/models";
    refused(&o, E_IO, "tests/models/config.json");
}

/* A copy of the model by links, with a tokenizer of its own. */
static void test_a_tokenizer_that_does_not_fit_is_refused(void **state) {
    (void)state;
    char dir[] = "/tmp/baton-runtime-XXXXXX", cmd[512], path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(cmd, sizeof cmd, "ln -s \"$PWD\"/%s/* %s/ && rm %s/tokenizer.json", MODEL, dir, dir);
    assert_int_equal(system(cmd), 0);
    EngineOpts o = opts();
    o.dir = dir;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    refused(&o, E_IO, path);
    snprintf(cmd, sizeof cmd,
             "sed '0,/\"id\": [0-9]*/s//\"id\": 5000/' %s/tokenizer.json > %s/tokenizer.json",
             MODEL, dir);
    assert_int_equal(system(cmd), 0);
    refused(&o, E_MISMATCH, "has 5001 tokens");
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_start),
        cmocka_unit_test(test_pool_bytes_become_pages),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_tokenizer_that_does_not_fit_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
