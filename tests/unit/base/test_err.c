/* base/err: words, context, codes, allocation. */
#include "base/err.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void set_returns_its_code(void **state) {
    (void)state;
    Err err = {0};
    assert_int_equal(err_set(&err, E_LIMIT, "%d pages", 7), E_LIMIT);
    assert_int_equal(err.code, E_LIMIT);
    assert_string_equal(err.text, "7 pages");
    assert_int_equal(err_set(NULL, E_BUSY, "nobody listens"), E_BUSY);
}

static void wrap_adds_context_in_front(void **state) {
    (void)state;
    Err err = {0};
    err_set(&err, E_IO, "no such file");
    assert_int_equal(err_wrap(&err, "shard %d", 2), E_IO);
    assert_string_equal(err.text, "shard 2: no such file");
}

static void text_may_come_from_the_error_itself(void **state) {
    (void)state;
    Err err = {0};
    err_set(&err, E_IO, "inner");
    err_set(&err, E_IO, "outer (%s)", err.text);
    assert_string_equal(err.text, "outer (inner)");
}

static void text_stays_one_line_and_bounded(void **state) {
    (void)state;
    Err err = {0};
    err_set(&err, E_FORMAT, "a\nb\r\tc");
    assert_string_equal(err.text, "a b  c");
    char big[2000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    err_set(&err, E_FORMAT, "%s", big);
    assert_int_equal(strlen(err.text), sizeof err.text - 1);
    err_wrap(&err, "%s", big);
    assert_int_equal(strlen(err.text), sizeof err.text - 1);
}

static void every_code_has_its_own_name(void **state) {
    (void)state;
    for (int a = E_NOTFOUND; a <= E_INVAL; a++) {
        assert_string_not_equal(err_name(a), "unknown");
        for (int b = a + 1; b <= E_INVAL; b++)
            assert_string_not_equal(err_name(a), err_name(b));
    }
    assert_string_equal(err_name(E_OK), "ok");
    assert_string_equal(err_name(-1), "unknown");
}

/* Runs fn in a child whose standard error is closed and returns the signal that ended it. */
static int signal_of(void (*fn)(void)) {
    pid_t pid = fork();
    if (pid == 0) {
        close(STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        fn();
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

static void break_check(void) {
    CHECK(1 + 1 == 3);
}

static void keep_check(void) {
    CHECK(1 + 1 == 2);
}

static void check_aborts(void **state) {
    (void)state;
    assert_int_equal(signal_of(break_check), SIGABRT);
    assert_int_equal(signal_of(keep_check), 0);
}

static void allocation_is_aligned_and_zeroed(void **state) {
    (void)state;
    for (size_t n = 0; n < 200; n += 13) {
        unsigned char *p = xaligned(n);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(p[i], 0);
        free(p);
    }
    char *s = xasprintf("%s-%d", "a", 5);
    assert_string_equal(s, "a-5");
    s = xrealloc(s, 100);
    assert_string_equal(s, "a-5");
    free(s);
    void *none = xcalloc(0, 8);
    assert_non_null(none);
    free(none);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(set_returns_its_code),
        cmocka_unit_test(wrap_adds_context_in_front),
        cmocka_unit_test(text_may_come_from_the_error_itself),
        cmocka_unit_test(text_stays_one_line_and_bounded),
        cmocka_unit_test(every_code_has_its_own_name),
        cmocka_unit_test(check_aborts),
        cmocka_unit_test(allocation_is_aligned_and_zeroed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
