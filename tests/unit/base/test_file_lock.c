/* One holder of a path at a time, of this process and of others. */
#include "base/file_lock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[] = "/tmp/baton-lock-XXXXXX", path[64];

static int setup(void **state) {
    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/counts.json", dir);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char lock[80];
    snprintf(lock, sizeof lock, "%s.lock", path);
    unlink(lock);
    rmdir(dir);
    return 0;
}

static void test_one_holder(void **state) {
    (void)state;
    FileLock *a, *b;
    Err err = {0};
    char who[200];
    assert_int_equal(file_lock_take(&a, path, &err), 0);
    assert_int_equal(file_lock_take(&b, path, &err), E_BUSY);
    snprintf(who, sizeof who, "%s: process %ld writes it already", path, (long)getpid());
    assert_string_equal(err.text, who);
    file_lock_free(a);
    assert_int_equal(file_lock_take(&b, path, &err), 0);
    file_lock_free(b);
    file_lock_free(NULL);
}

static void test_a_dead_holder_has_nothing(void **state) {
    (void)state;
    FileLock *l;
    pid_t child = fork();
    if (child == 0)
        _exit(file_lock_take(&l, path, NULL) ? 1 : 0);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(file_lock_take(&l, path, NULL), 0);
    file_lock_free(l);
}

static void test_nowhere(void **state) {
    (void)state;
    FileLock *l;
    Err err = {0};
    assert_int_equal(file_lock_take(&l, "/no/such/folder/x", &err), E_IO);
    assert_string_equal(err.text, "/no/such/folder/x.lock: No such file or directory");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_holder),
        cmocka_unit_test(test_a_dead_holder_has_nothing),
        cmocka_unit_test(test_nowhere),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
