/* What a hello must say, and the words of each refusal. */
#include "proto/hello.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static Baton__Hello hello(Baton__Role role, const char *name) {
    Baton__Hello h = BATON__HELLO__INIT;
    h.protocol = PROTOCOL_VERSION;
    h.role = role;
    h.name = (char *)name;
    h.generation = 7;
    return h;
}

static Baton__Hello router(void) {
    Baton__Hello h = hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    h.tokenizer_hash = 0xabc;
    h.page_tokens = 64;
    return h;
}

static Baton__Hello worker(Baton__Role role, const char *name) {
    Baton__Hello h = hello(role, name);
    h.fingerprint = 0xf00d;
    h.tokenizer_hash = 0xabc;
    h.tp = 4;
    h.page_tokens = 64;
    h.kv_dtype = (char *)"bf16";
    h.kv_layout_hash = 0x11;
    h.hidden = 6144;
    h.n_experts = 256;
    return h;
}

static void refused(const Baton__Hello *mine, const Baton__Hello *theirs, const char *words) {
    Err err = {0};
    assert_int_equal(hello_check(mine, theirs, &err), E_MISMATCH);
    assert_string_equal(err.text, words);
}

static void test_fits(void **state) {
    (void)state;
    Baton__Hello r = router(), d = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    assert_int_equal(hello_check(&r, &d, NULL), 0);
    assert_int_equal(hello_check(&d, &r, NULL), 0);
    Baton__Hello e = hello(BATON__ROLE__ROLE_EXPERTD, "expertd-1");
    e.fingerprint = 0xf00d;
    e.hidden = 6144;
    e.n_shards = 2;
    e.shard = 1;
    assert_int_equal(hello_check(&d, &e, NULL), 0);
}

static void test_fields(void **state) {
    (void)state;
    Baton__Hello r = router(), p = worker(BATON__ROLE__ROLE_PREFILL, "prefill-0"),
                 d = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    Baton__Hello x = d;
    x.page_tokens = 32;
    refused(&r, &x, "decode-0 has page_tokens 32, router-0 expects 64");
    x = d;
    x.protocol = 9;
    refused(&r, &x, "decode-0 has protocol 9, router-0 expects 1");
    x = d;
    x.tokenizer_hash = 1;
    refused(&r, &x,
            "decode-0 has tokenizer_hash 0000000000000001, router-0 expects 0000000000000abc");
    x = d;
    x.kv_dtype = (char *)"fp8";
    refused(&p, &x, "decode-0 has kv_dtype fp8, prefill-0 expects bf16");
    x.kv_layout_hash = 0x22; /* follows from it: the dtype is what to say */
    refused(&p, &x, "decode-0 has kv_dtype fp8, prefill-0 expects bf16");
    x = d;
    x.fingerprint = 2;
    refused(&p, &x,
            "decode-0 has fingerprint 0000000000000002, prefill-0 expects 000000000000f00d");
    x = d;
    x.tp = 2;
    refused(&p, &x, "decode-0 has tp 2, prefill-0 expects 4");
    x = d;
    x.kv_layout_hash = 3;
    refused(&p, &x,
            "decode-0 has kv_layout_hash 0000000000000003, prefill-0 expects 0000000000000011");
    x = d;
    x.hidden = 64;
    refused(&p, &x, "decode-0 has hidden 64, prefill-0 expects 6144");
    x = d;
    x.n_experts = 8;
    refused(&p, &x, "decode-0 has n_experts 8, prefill-0 expects 256");
}

static void test_form(void **state) {
    (void)state;
    Baton__Hello r = router(), x = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    x.generation = 0;
    refused(&r, &x, "decode-0 has no generation");
    x.generation = 1;
    x.role = (Baton__Role)77;
    refused(&r, &x, "decode-0 has no known role");
    char text[HELLO_NAME_MAX + 2];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    const char *const bad[] = {"", "two words", "line\n", "\x1b[2J", text};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        x = worker(BATON__ROLE__ROLE_DECODE, bad[i]);
        refused(&r, &x, "hello without a printable name of at most 63 characters");
    }
    x = worker(BATON__ROLE__ROLE_DECODE, text + 1);
    assert_int_equal(hello_check(&r, &x, NULL), 0);
    Baton__Hello e = hello(BATON__ROLE__ROLE_EXPERTD, "expertd-0");
    e.shard = e.n_shards = 2;
    Baton__Hello d = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    refused(&d, &e, "expertd-0 has shard 2 of 2");
}

static void test_roles(void **state) {
    (void)state;
    Baton__Hello r = router(), d = worker(BATON__ROLE__ROLE_DECODE, "decode-0"),
                 d1 = worker(BATON__ROLE__ROLE_DECODE, "decode-1"),
                 e = hello(BATON__ROLE__ROLE_EXPERTD, "expertd-0");
    e.n_shards = 1;
    refused(&r, &e, "expertd-0 has role expertd, router-0 is a router and does not talk to it");
    refused(&r, &r, "router-0 has role router, router-0 is a router and does not talk to it");
    refused(&d, &d1, "decode-1 has role decode, decode-0 is a decode and does not talk to it");
}

static void test_pair(void **state) {
    (void)state;
    Baton__Hello p = worker(BATON__ROLE__ROLE_PREFILL, "prefill-0"),
                 d = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    Err err = {0};
    assert_int_equal(hello_check_pair(&p, &d, NULL), 0);
    assert_int_equal(hello_check_pair(&d, &p, &err), E_MISMATCH);
    assert_string_equal(
        err.text, "decode-0 and prefill-0 are a decode and a prefill, not a prefill and a decode");
    d.kv_layout_hash = 0x12;
    assert_int_equal(hello_check_pair(&p, &d, NULL), E_MISMATCH);
}

static void test_copy(void **state) {
    (void)state;
    Baton__Hello d = worker(BATON__ROLE__ROLE_DECODE, "decode-0");
    d.model = (char *)"glm-5.2";
    Baton__Hello *c = hello_copy(&d);
    assert_ptr_not_equal(c->name, d.name);
    assert_string_equal(c->name, "decode-0");
    assert_string_equal(c->model, "glm-5.2");
    assert_string_equal(c->kv_dtype, "bf16");
    assert_int_equal(c->kv_layout_hash, 0x11);
    assert_true(hello_same_process(c, &d));
    d.generation++;
    assert_false(hello_same_process(c, &d));
    hello_free(c);
    hello_free(NULL);
}

/* A field number 0 in two bytes can be read, but not be packed and read again: a copy must not need
 * that. */
static void test_copy_of_malformed(void **state) {
    (void)state;
    const uint8_t bytes[] = {0x1a, 1, 'x', 0x81, 0x00, 1, 2, 3, 4, 5, 6, 7, 8};
    Baton__Hello *h = baton__hello__unpack(NULL, sizeof bytes, bytes);
    assert_non_null(h);
    assert_int_equal(h->base.n_unknown_fields, 1);
    Baton__Hello *c = hello_copy(h);
    hello_free(h);
    assert_string_equal(c->name, "x");
    assert_int_equal(c->base.n_unknown_fields, 0);
    hello_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fits),
        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_form),
        cmocka_unit_test(test_roles),
        cmocka_unit_test(test_pair),
        cmocka_unit_test(test_copy),
        cmocka_unit_test(test_copy_of_malformed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
