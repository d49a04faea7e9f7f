/* JSON in Python's notation. No state; any thread. */
#include "model/chat_json.h"

#include "base/err.h"

#include <float.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void chat_json_put_string(const char *s, size_t len, Buf *out) {
    buf_puts(out, "\"");
    size_t done = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        buf_put(out, s + done, i - done);
        done = i + 1;
        const char *plain = "\"\\\n\r\t\f\b", *letter = "\"\\nrtfb";
        const char *at = c ? strchr(plain, c) : NULL;
        if (at)
            buf_printf(out, "\\%c", letter[at - plain]);
        else
            buf_printf(out, "\\u%04x", c);
    }
    buf_put(out, s + done, len - done);
    buf_puts(out, "\"");
}

/* Shortest digits of a positive value: value = 0.DIGITS * 10^point. Rounding a normal double to 15
 * digits finds every decimal that short; subnormal ones hold fewer. Of 16 digits, the next one up
 * can be the only one that reads back: where the value is a power of two, and doubles above it lie
 * twice as far apart as below. */
static int shortest_digits(double value, char digits[24]) {
    for (int n = value < DBL_MIN ? 1 : 15; n <= 17; n++) {
        char text[40];
        snprintf(text, sizeof text, "%.*e", n - 1, value);
        int exponent = atoi(strchr(text, 'e') + 1);
        text[1] = text[0]; /* over the decimal point, whatever the locale writes there */
        uint64_t rounded = strtoull(text + 1, NULL, 10);
        for (uint64_t m = rounded; m <= rounded + 1; m++) {
            snprintf(text, sizeof text, "%" PRIu64 "e%d", m, exponent - n + 1);
            if (strtod(text, NULL) != value)
                continue;
            int len = snprintf(digits, 24, "%" PRIu64, m);
            int point = len + exponent - n + 1;
            while (len > 1 && digits[len - 1] == '0')
                digits[--len] = '\0';
            return point;
        }
    }
    CHECK(!"17 digits read back as the value they came from");
}

void chat_json_put_real(double value, Buf *out) {
    if (__builtin_signbit(value)) {
        buf_puts(out, "-");
        value = -value;
    }
    if (value == 0) {
        buf_puts(out, "0.0");
        return;
    }
    char digits[24];
    int point = shortest_digits(value, digits), n = (int)strlen(digits);
    if (point > 16 || point < -3) {
        buf_printf(out, "%c%s%se%+03d", digits[0], n > 1 ? "." : "", digits + 1, point - 1);
    } else if (point <= 0) {
        buf_printf(out, "0.%.*s%s", -point, "000", digits);
    } else if (point >= n) {
        buf_printf(out, "%s%.*s.0", digits, point - n, "0000000000000000");
    } else {
        buf_printf(out, "%.*s.%s", point, digits, digits + point);
    }
}

static void put_array(const json_t *value, Buf *out) {
    buf_puts(out, "[");
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i)
            buf_puts(out, ", ");
        chat_json_put(json_array_get(value, i), out);
    }
    buf_puts(out, "]");
}

static void put_object(const json_t *value, Buf *out) {
    buf_puts(out, "{");
    const char *key, *separator = "";
    json_t *v;
    json_object_foreach((json_t *)value, key, v) {
        buf_puts(out, separator);
        separator = ", ";
        chat_json_put_string(key, strlen(key), out);
        buf_puts(out, ": ");
        chat_json_put(v, out);
    }
    buf_puts(out, "}");
}

void chat_json_put(const json_t *value, Buf *out) {
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        put_object(value, out);
        break;
    case JSON_ARRAY:
        put_array(value, out);
        break;
    case JSON_STRING:
        chat_json_put_string(json_string_value(value), json_string_length(value), out);
        break;
    case JSON_INTEGER:
        buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        break;
    case JSON_REAL:
        chat_json_put_real(json_real_value(value), out);
        break;
    case JSON_TRUE:
        buf_puts(out, "true");
        break;
    case JSON_FALSE:
        buf_puts(out, "false");
        break;
    case JSON_NULL:
        buf_puts(out, "null");
        break;
    }
}
