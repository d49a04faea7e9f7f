/* base/conf_value: what each type accepts, refuses and prints. */
#include "base/conf_value.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef union Field {
    int64_t integer;
    double real;
    bool flag;
    int choice;
    char *text;
} Field;

static bool accepts(ConfOpt o, const char *text, Field *out) {
    Err err = {0};
    int rc = conf_value_set(&o, text, out, &err);
    assert_true(rc == 0 || rc == E_INVAL);
    assert_int_equal(err.code, rc);
    return rc == 0;
}

static void assert_integer(ConfType type, const char *text, int64_t expected) {
    Field f = {0};
    assert_true(accepts((ConfOpt){.type = type}, text, &f));
    assert_true(f.integer == expected);
}

static void integers_and_units(void **state) {
    (void)state;
    assert_integer(CONF_INT, "-5", -5);
    assert_integer(CONF_INT, "010", 10); /* not octal */
    assert_integer(CONF_INT, "9223372036854775807", INT64_MAX);
    assert_integer(CONF_SIZE, "7", 7);
    assert_integer(CONF_SIZE, "3K", 3072);
    assert_integer(CONF_SIZE, "2 G", 2LL << 30);
    assert_integer(CONF_SIZE, "1T", 1LL << 40);
    assert_integer(CONF_MS, "250", 250);
    assert_integer(CONF_MS, "250ms", 250);
    assert_integer(CONF_MS, "3s", 3000);
    assert_integer(CONF_MS, "2min", 120000);
}

static void numbers_that_are_none(void **state) {
    (void)state;
    static const struct {
        ConfType type;
        const char *text;
    } bad[] = {
        {CONF_INT, ""},       {CONF_INT, "1x"},     {CONF_INT, "1.5"},
        {CONF_INT, "0x10"},   {CONF_INT, "3K"},     {CONF_INT, "9223372036854775808"},
        {CONF_SIZE, "-1"},    {CONF_SIZE, "1KB"},   {CONF_SIZE, "9000000T"},
        {CONF_SIZE, "K"},     {CONF_MS, "-1s"},     {CONF_MS, "1h"},
        {CONF_MS, "1.5s"},    {CONF_REAL, ""},      {CONF_REAL, "nan"},
        {CONF_REAL, "inf"},   {CONF_REAL, "1e999"}, {CONF_REAL, "1,5"},
        {CONF_BOOL, "maybe"}, {CONF_BOOL, ""},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Field f = {.integer = 42};
        assert_false(accepts((ConfOpt){.type = bad[i].type}, bad[i].text, &f));
        assert_int_equal(f.integer, 42); /* refused values leave the field alone */
    }
}

static void ranges_include_their_ends(void **state) {
    (void)state;
    Field f = {0};
    ConfOpt port = {.type = CONF_INT, .min = 1, .max = 65535},
            share = {.type = CONF_REAL, .min = 0, .max = 0.5};
    assert_true(accepts(port, "1", &f) && accepts(port, "65535", &f));
    assert_false(accepts(port, "0", &f) || accepts(port, "65536", &f));
    assert_true(accepts(share, "0", &f) && accepts(share, "0.5", &f));
    assert_false(accepts(share, "-0.1", &f) || accepts(share, "0.51", &f));
}

static void words(void **state) {
    (void)state;
    static const char *const yes[] = {"yes", "TRUE", "on", "1"}, *const no[] = {"no", "False",
                                                                                "off", "0"};
    ConfOpt flag = {.type = CONF_BOOL}, choice = {.type = CONF_ENUM, .choices = "auto|cpu|cuda"};
    for (int i = 0; i < 4; i++) {
        Field f = {.flag = false};
        assert_true(accepts(flag, yes[i], &f) && f.flag);
        assert_true(accepts(flag, no[i], &f) && !f.flag);
    }
    Field f = {0};
    assert_true(accepts(choice, "cuda", &f) && f.choice == 2);
    assert_true(accepts(choice, "auto", &f) && f.choice == 0);
    assert_false(accepts(choice, "cpu|cuda", &f) || accepts(choice, "cud", &f) ||
                 accepts(choice, "", &f));
}

static void text_that_a_line_can_carry(void **state) {
    (void)state;
    Field f = {0};
    ConfOpt o = {.type = CONF_STR};
    assert_true(accepts(o, "a;b # c", &f));
    assert_string_equal(f.text, "a;b # c");
    static const char *const bad[] = {"a ;b", ";a", " a", "a ", "a\nb", "a\tb"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(accepts(o, bad[i], &f));
    assert_string_equal(f.text, "a;b # c");
    assert_true(accepts(o, "", &f)); /* the old text is freed */
    assert_string_equal(f.text, "");
    free(f.text);
}

static void refusals_say_what_fits(void **state) {
    (void)state;
    static const struct {
        ConfOpt o;
        const char *expected;
    } cases[] = {
        {{.type = CONF_INT}, "an integer"},
        {{.type = CONF_INT, .min = -1, .max = 9}, "an integer, from -1 to 9"},
        {{.type = CONF_SIZE, .min = 4096, .max = 1LL << 40},
         "bytes with suffix K, M, G or T, from 4K to 1T"},
        {{.type = CONF_MS, .min = 0, .max = 90000},
         "a time with suffix ms, s or min, from 0 to 90s"},
        {{.type = CONF_REAL, .min = 0, .max = 0.25}, "a number, from 0 to 0.25"},
        {{.type = CONF_BOOL}, "yes or no"},
        {{.type = CONF_ENUM, .choices = "auto|cpu|cuda"}, "one of auto, cpu, cuda"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Buf text = {0};
        conf_value_expected(&cases[i].o, &text);
        assert_string_equal(text.data, cases[i].expected);
        buf_done(&text);
    }
}

static void assert_prints(ConfOpt o, Field f, const char *expected) {
    char *text;
    size_t n;
    FILE *to = open_memstream(&text, &n);
    conf_value_print(&o, &f, to);
    fclose(to);
    assert_string_equal(text, expected);
    free(text);
}

static void values_print_as_they_are_read(void **state) {
    (void)state;
    assert_prints((ConfOpt){.type = CONF_SIZE}, (Field){.integer = 1536}, "1536");
    assert_prints((ConfOpt){.type = CONF_SIZE}, (Field){.integer = 3LL << 30}, "3G");
    assert_prints((ConfOpt){.type = CONF_SIZE}, (Field){.integer = 0}, "0");
    assert_prints((ConfOpt){.type = CONF_MS}, (Field){.integer = 1500}, "1500ms");
    assert_prints((ConfOpt){.type = CONF_MS}, (Field){.integer = 90000}, "90s");
    assert_prints((ConfOpt){.type = CONF_INT}, (Field){.integer = -60000}, "-60000");
    assert_prints((ConfOpt){.type = CONF_BOOL}, (Field){.flag = true}, "yes");
    assert_prints((ConfOpt){.type = CONF_ENUM, .choices = "auto|cpu|cuda"}, (Field){.choice = 1},
                  "cpu");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integers_and_units),
        cmocka_unit_test(numbers_that_are_none),
        cmocka_unit_test(ranges_include_their_ends),
        cmocka_unit_test(words),
        cmocka_unit_test(text_that_a_line_can_carry),
        cmocka_unit_test(refusals_say_what_fits),
        cmocka_unit_test(values_print_as_they_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
