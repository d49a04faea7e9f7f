/* Tests router/files.c on the small model and on broken folders. */
#include "router/files.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MODEL "tests/models/tiny-glm52/fp8"

static char dir[64];

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/test_files.XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state) {
    static const char *const names[] = {"tokenizer.json", "config.json", "generation_config.json"};
    char path[128];
    (void)state;
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    return rmdir(dir);
}

/* text NULL: the model's own file. */
static void put(const char *name, const char *text) {
    char path[128], block[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *to = fopen(path, "wb");
    assert_non_null(to);
    if (text) {
        fputs(text, to);
    } else {
        snprintf(path, sizeof path, MODEL "/%s", name);
        FILE *from = fopen(path, "rb");
        assert_non_null(from);
        for (size_t n; (n = fread(block, 1, sizeof block, from)) > 0;)
            assert_int_equal(fwrite(block, 1, n, to), n);
        fclose(from);
    }
    fclose(to);
}

static void expect_error(int code, const char *words) {
    Files f;
    Err err = {0};
    assert_int_equal(files_open(&f, dir, &err), code);
    if (!strstr(err.text, words))
        fail_msg("%s", err.text);
}

static void test_model(void **state) {
    Files f;
    Err err = {0};
    (void)state;
    assert_int_equal(files_open(&f, MODEL, &err), 0);
    assert_int_equal(f.max_positions, 8192);
    assert_int_equal(f.n_eos, 3); /* both files name the same three */
    assert_int_equal(f.eos[0], 4036);
    assert_true(f.temperature == 1 && f.top_p == 0.95f);
    assert_int_equal(f.think_end, tok_added_id(f.tok, "</think>"));
    assert_true(f.tokenizer_hash != 0);
    files_close(&f);
}

static void test_no_generation_config(void **state) {
    Files f;
    Err err = {0};
    (void)state;
    put("tokenizer.json", NULL);
    put("config.json", NULL);
    assert_int_equal(files_open(&f, dir, &err), 0);
    assert_true(f.temperature == 1 && f.top_p == 1);
    assert_int_equal(f.n_eos, 3);
    files_close(&f);
}

static void test_broken(void **state) {
    (void)state;
    expect_error(E_NOTFOUND, "tokenizer.json");
    put("tokenizer.json", "{");
    Files f;
    Err err = {0};
    assert_int_not_equal(files_open(&f, dir, &err), 0);
    assert_non_null(strstr(err.text, "tokenizer.json"));
    put("tokenizer.json", NULL);
    assert_int_not_equal(files_open(&f, dir, &err), 0); /* no config.json */
    put("config.json", NULL);
    put("generation_config.json", "[1]");
    expect_error(E_FORMAT, "not a JSON object");
    put("generation_config.json", "{");
    expect_error(E_FORMAT, "generation_config.json");
    put("generation_config.json", "{\"temperature\": 3}");
    expect_error(E_FORMAT, "temperature");
    put("generation_config.json", "{\"top_p\": \"x\"}");
    expect_error(E_FORMAT, "top_p");
    put("generation_config.json", "{\"eos_token_id\": 100000}");
    expect_error(E_FORMAT, "eos_token_id");
    put("generation_config.json", "{\"eos_token_id\": [1, \"a\"]}");
    expect_error(E_FORMAT, "eos_token_id");
    put("generation_config.json", "{\"eos_token_id\": [1,2,3,4,5,6]}");
    expect_error(E_LIMIT, "end tokens");
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_model), T(test_no_generation_config),
                                       T(test_broken)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
