/* Single safetensors files: what a good one yields, and every way in which one is refused. */
#include "model/weights.h"

#include "base/buf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* A file: header length, the header with ' for " and spaces up to a multiple of 8, n data bytes. */
static void image(Buf *out, const char *header, size_t n) {
    uint64_t len = (strlen(header) + 7) / 8 * 8;
    buf_put(out, &len, 8);
    buf_printf(out, "%-*s", (int)len, header);
    for (char *p = out->data + 8; *p; p++)
        if (*p == '\'')
            *p = '"';
    for (size_t i = 0; i < n; i++)
        buf_put(out, &(char){(char)(i + 1)}, 1);
}

typedef struct Seen {
    WeightsTensor t[8];
    char name[8][64];
    int n, fail_at;
} Seen;

static int keep(void *ctx, const WeightsTensor *t, Err *err) {
    Seen *s = ctx;
    if (s->n == s->fail_at)
        return err_set(err, E_BUSY, "enough");
    assert_true(s->n < 8 && strlen(t->name) < 64);
    strcpy(s->name[s->n], t->name);
    s->t[s->n++] = *t;
    return 0;
}

static void check(const Seen *s, int i, const char *name, const char *dtype, int n_dims,
                  const uint8_t *data, size_t bytes) {
    assert_string_equal(s->name[i], name);
    assert_string_equal(s->t[i].dtype, dtype);
    assert_int_equal(s->t[i].n_dims, n_dims);
    assert_ptr_equal(s->t[i].data, data);
    assert_int_equal(s->t[i].bytes, bytes);
}

static void test_good(void **state) {
    (void)state;
    Buf b = {0};
    Seen s = {.fail_at = -1};
    Err err = {0};
    image(&b,
          "{'__metadata__':{'format':'pt'},"
          "'e':{'dtype':'F8_E4M3','shape':[0,30],'data_offsets':[20,20]},"
          "'d':{'dtype':'U8','shape':[1,2,1,2],'data_offsets':[28,32]},"
          "'c':{'dtype':'BF16','shape':[2,3],'data_offsets':[16,28]},"
          "'b':{'dtype':'F32','shape':[],'data_offsets':[12,16]},"
          "'a':{'dtype':'F32','shape':[3],'data_offsets':[0,12],'more':1}}",
          40);
    const uint8_t *base = (const uint8_t *)b.data, *data = base + b.len - 40;
    assert_int_equal(weights_parse(base, b.len, keep, &s, &err), 0);
    assert_int_equal(s.n, 5);
    check(&s, 0, "a", "F32", 1, data, 12);
    check(&s, 1, "b", "F32", 0, data + 12, 4);
    check(&s, 2, "c", "BF16", 2, data + 16, 12);
    assert_int_equal(s.t[2].dim[0], 2);
    assert_int_equal(s.t[2].dim[1], 3);
    check(&s, 3, "e", "F8_E4M3", 2, data + 20, 0);
    check(&s, 4, "d", "U8", 4, data + 28, 4);
    buf_done(&b);
}

static void test_empty(void **state) {
    (void)state;
    Buf b = {0};
    Seen s = {.fail_at = -1};
    Err err = {0};
    image(&b, "{}", 0);
    assert_int_equal(weights_parse((const uint8_t *)b.data, b.len, keep, &s, &err), 0);
    assert_int_equal(s.n, 0);
    buf_done(&b);
}

static void test_callback_ends(void **state) {
    (void)state;
    Buf b = {0};
    Seen s = {.fail_at = 1};
    Err err = {0};
    image(&b,
          "{'a':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},"
          "'b':{'dtype':'U8','shape':[1],'data_offsets':[1,2]}}",
          2);
    assert_int_equal(weights_parse((const uint8_t *)b.data, b.len, keep, &s, &err), E_BUSY);
    assert_string_equal(err.text, "enough");
    assert_int_equal(s.n, 1);
    buf_done(&b);
}

/* ---- refusals ---- */

static void must_refuse(const Buf *b, int code, const char *error) {
    Seen s = {.fail_at = -1};
    Err err = {0};
    int rc = weights_parse((const uint8_t *)b->data, b->len, keep, &s, &err);
    if (rc != code || err.code != rc || !strstr(err.text, error))
        fail_msg("expected %d \"%s\", got %d \"%s\"", code, error, rc, err.text);
    assert_int_equal(s.n, 0); /* nothing is handed out before all of it is good */
}

/* One tensor named w and 64 data bytes. */
#define ONE(dtype, shape, offsets)                                                                 \
    "{'w':{'dtype':" dtype ",'shape':" shape ",'data_offsets':" offsets "}}"

static const struct {
    const char *header, *error;
} bad[] = {
    {"[]", "header: expected an object"},
    {"7", "header: "},
    {"{'w':", "header: "},
    {"{'w':{}} x", "header: end of file expected"},
    {"{'w\\u0000':{}}", "header: "},
    {"{'w':{'dtype':'U8','shape':[1],'data_offsets':[0,1]},"
     "'w':{'dtype':'U8','shape':[1],'data_offsets':[1,2]}}",
     "header: duplicate object key near '\"w\"'"},
    {"{'w':{'dtype':'U8','dtype':'I8','shape':[1],'data_offsets':[0,1]}}",
     "header: duplicate object key"},
    {"{'w':1}", "w: expected an object"},
    {"{'w':{'shape':[1],'data_offsets':[0,1]}}", "w: dtype: expected"},
    {ONE("7", "[1]", "[0,1]"), "w: dtype: expected"},
    {ONE("'F8_E8M0FNU'", "[1]", "[0,1]"), "w: dtype: expected"},
    {ONE("'bf16'", "[1]", "[0,2]"), "w: dtype: expected"},
    {ONE("'U8'", "7", "[0,1]"), "w: shape: expected a list of at most 4 numbers"},
    {ONE("'U8'", "{}", "[0,1]"), "w: shape: expected a list"},
    {ONE("'U8'", "[1,1,1,1,1]", "[0,1]"), "w: shape: expected a list of at most 4 numbers"},
    {ONE("'U8'", "[-1]", "[0,1]"), "w: shape: more than the file holds, or not a number"},
    {ONE("'U8'", "[1.0]", "[0,1]"), "w: shape: more than the file holds, or not a number"},
    {ONE("'U8'", "['1']", "[0,1]"), "w: shape: more than the file holds, or not a number"},
    {ONE("'U8'", "[65]", "[0,64]"), "w: shape: more than the file holds"},
    {ONE("'F32'", "[4,5]", "[0,64]"), "w: shape: more than the file holds"},
    {ONE("'U8'", "[9223372036854775807]", "[0,64]"), "w: shape: more than the file holds"},
    {ONE("'U8'", "[0,9223372036854775807]", "[0,0]"), "w: shape: more than the file holds"},
    {ONE("'F32'", "[64,64,64,64]", "[0,64]"), "w: shape: more than the file holds"},
    {ONE("'U8'", "[4611686018427387904,4]", "[0,0]"), "w: shape: more than the file holds"},
    {ONE("'U8'", "[99999999999999999999]", "[0,1]"), "header: too big integer"},
    {ONE("'BF16'", "[2]", "[0,2]"), "w: data_offsets span 2 bytes, but shape and dtype need 4"},
    {ONE("'U8'", "[]", "[0,0]"), "w: data_offsets span 0 bytes, but shape and dtype need 1"},
    {ONE("'U8'", "[0]", "[0,1]"), "w: data_offsets span 1 bytes, but shape and dtype need 0"},
    {"{'w':{'dtype':'U8','shape':[1]}}", "w: data_offsets: expected two numbers"},
    {ONE("'U8'", "[1]", "[0]"), "w: data_offsets: expected two numbers"},
    {ONE("'U8'", "[1]", "[0,1,2]"), "w: data_offsets: expected two numbers"},
    {ONE("'U8'", "[1]", "'0,1'"), "w: data_offsets: expected two numbers"},
    {ONE("'U8'", "[1]", "[true,1]"), "w: data_offsets: outside the file's 64 data bytes"},
    {ONE("'U8'", "[1]", "[-1,0]"), "w: data_offsets: outside the file's 64 data bytes"},
    {ONE("'U8'", "[1]", "[64,65]"), "w: data_offsets: outside the file's 64 data bytes"},
    {ONE("'U8'", "[1]", "[9223372036854775807,9223372036854775807]"),
     "w: data_offsets: outside the file's 64 data bytes"},
    {ONE("'U8'", "[1]", "[2,1]"), "w: data_offsets: end 1 before begin 2"},
    {ONE("'F32'", "[1]", "[2,6]"), "w: data_offsets: begin not aligned to 4 bytes"},
    {ONE("'BF16'", "[1]", "[7,9]"), "w: data_offsets: begin not aligned to 2 bytes"},
    {"{'w':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
     "'v':{'dtype':'U8','shape':[8],'data_offsets':[7,15]}}",
     "v: data_offsets: overlaps with w"},
    {"{'w':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
     "'v':{'dtype':'U8','shape':[2],'data_offsets':[3,5]}}",
     "v: data_offsets: overlaps with w"},
    {"{'w':{'dtype':'U8','shape':[8],'data_offsets':[0,8]},"
     "'z':{'dtype':'U8','shape':[0],'data_offsets':[4,4]},"
     "'v':{'dtype':'U8','shape':[8],'data_offsets':[6,14]}}",
     "v: data_offsets: overlaps with w"},
};

static void test_bad_headers(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(bad); i++) {
        Buf b = {0};
        image(&b, bad[i].header, 64);
        must_refuse(&b, E_FORMAT, bad[i].error);
        buf_done(&b);
    }
}

/* The same header is good or bad by where the data begins in the file. */
static void test_alignment_counts_in_the_file(void **state) {
    (void)state;
    char header[] = "{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}    ";
    size_t shortest = strlen(header) - 4;
    for (size_t spaces = 0; spaces < 4; spaces++) {
        Buf b = {0};
        Seen s = {.fail_at = -1};
        Err err = {0};
        uint64_t len = shortest + spaces;
        buf_put(&b, &len, 8);
        buf_put(&b, header, (size_t)len);
        buf_put(&b, "abcd", 4);
        if (len % 4)
            must_refuse(&b, E_FORMAT, "w: data_offsets: begin not aligned to 4 bytes");
        else
            assert_int_equal(weights_parse((uint8_t *)b.data, b.len, keep, &s, &err), 0);
        buf_done(&b);
    }
}

static void test_bad_lengths(void **state) {
    (void)state;
    static const uint64_t length[] = {63,        1 << 20,        (256u << 20) + 1,
                                      INT64_MAX, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < COUNT(length); i++) {
        Buf b = {0};
        image(&b, "{}", 54); /* 62 bytes after the length */
        memcpy(b.data, &length[i], 8);
        must_refuse(&b, E_FORMAT, "header length ");
        buf_done(&b);
    }
    Buf b = {0};
    buf_put(&b, "\2\0\0\0\0\0\0", 7);
    must_refuse(&b, E_FORMAT, "7 bytes: too short for a safetensors header");
    buf_put(&b, "", 1);
    must_refuse(&b, E_FORMAT, "header length 2: ");
    buf_done(&b);
}

/* A file cut at any byte is refused, and with it nothing past its end is read. */
static void test_truncated(void **state) {
    (void)state;
    Buf b = {0};
    image(&b, ONE("'F32'", "[4,4]", "[0,64]"), 64);
    for (size_t n = 0; n < b.len; n++) {
        Buf cut = {0};
        buf_put(&cut, b.data, n);
        cut.data = xrealloc(cut.data, n + 1); /* sanitizers see the end */
        must_refuse(&cut, E_FORMAT, "");
        buf_done(&cut);
    }
    buf_done(&b);
}

static void test_nesting_bomb(void **state) {
    (void)state;
    enum { DEPTH = 1 << 20 };
    Buf b = {0};
    uint64_t len = DEPTH;
    buf_put(&b, &len, 8);
    for (int i = 0; i < DEPTH / 8; i++)
        buf_puts(&b, "{\"a\":[[["); /* 8 bytes */
    must_refuse(&b, E_FORMAT, "header: maximum parsing depth reached");
    buf_done(&b);
}

static void test_long_name(void **state) {
    (void)state;
    char name[514], header[700];
    for (int n = 512; n <= 513; n++) {
        Buf b = {0};
        memset(name, 'n', (size_t)n);
        name[n] = 0;
        snprintf(header, sizeof header, "{'%s':{'dtype':'X','shape':[1],'data_offsets':[0,1]}}",
                 name);
        image(&b, header, 1);
        if (n > 512)
            must_refuse(&b, E_LIMIT, "name longer than 512 bytes");
        else
            must_refuse(&b, E_FORMAT, "nnn");
        buf_done(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_callback_ends),
        cmocka_unit_test(test_bad_headers),
        cmocka_unit_test(test_alignment_counts_in_the_file),
        cmocka_unit_test(test_bad_lengths),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_nesting_bomb),
        cmocka_unit_test(test_long_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
