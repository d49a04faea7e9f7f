/* base/buf: growth, formatting, hand-over. */
#include "base/buf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

static void bytes_are_appended_and_terminated(void **state) {
    (void)state;
    Buf b = {0};
    for (int i = 0; i < 10000; i++) {
        char c = (char)('a' + i % 26);
        buf_put(&b, &c, 1);
        assert_int_equal(b.data[b.len], 0);
    }
    assert_int_equal(b.len, 10000);
    for (int i = 0; i < 10000; i++)
        assert_int_equal(b.data[i], 'a' + i % 26);
    buf_done(&b);
    assert_null(b.data);
}

static void zero_bytes_are_kept(void **state) {
    (void)state;
    Buf b = {0};
    buf_put(&b, "a\0b", 3);
    buf_put(&b, NULL, 0);
    assert_int_equal(b.len, 3);
    assert_memory_equal(b.data, "a\0b", 4);
    buf_done(&b);
}

static void printf_grows_to_fit(void **state) {
    (void)state;
    Buf b = {0};
    buf_puts(&b, "x=");
    buf_printf(&b, "%0500d;%s", 7, "end");
    assert_int_equal(b.len, 2 + 500 + 4);
    assert_memory_equal(b.data, "x=000", 5);
    assert_string_equal(b.data + 501, "7;end");
    buf_done(&b);
}

static void clear_keeps_the_memory(void **state) {
    (void)state;
    Buf b = {0};
    buf_clear(&b);
    assert_null(b.data);
    buf_puts(&b, "some text");
    char *data = b.data;
    buf_clear(&b);
    assert_int_equal(b.len, 0);
    assert_ptr_equal(b.data, data);
    assert_string_equal(b.data, "");
    buf_done(&b);
}

static void take_hands_over(void **state) {
    (void)state;
    Buf b = {0};
    char *empty = buf_take(&b);
    assert_string_equal(empty, "");
    free(empty);
    buf_puts(&b, "mine");
    char *s = buf_take(&b);
    assert_string_equal(s, "mine");
    assert_null(b.data);
    assert_int_equal(b.len, 0);
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_are_appended_and_terminated),
        cmocka_unit_test(zero_bytes_are_kept),
        cmocka_unit_test(printf_grows_to_fit),
        cmocka_unit_test(clear_keeps_the_memory),
        cmocka_unit_test(take_hands_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
