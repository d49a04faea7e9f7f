/* The tokenizer: exact ids and texts, and time on hostile texts. */
#include "base/clock.h"
#include "model/tok_int.h"

#include <jansson.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define MODEL    "tests/models/tiny-glm52/"
#define COUNT(a) (sizeof(a) / sizeof *(a))

static Tok *tiny;
static TokScratch *scratch;

static int setup(void **state) {
    (void)state;
    Err err;
    if (tok_open(&tiny, MODEL "fp8/tokenizer.json", &err)) {
        fprintf(stderr, "%s\n", err.text);
        return -1;
    }
    scratch = tok_scratch_new(tiny);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    tok_scratch_free(scratch);
    tok_close(tiny);
    return 0;
}

static TokIds encode(const Tok *t, TokScratch *s, const char *text, size_t len, bool added) {
    TokIds ids = {0};
    Err err;
    if (tok_encode(t, s, text, len, added, SIZE_MAX, &ids, &err))
        fail_msg("%s", err.text);
    return ids;
}

static void assert_ids(const TokIds *got, const TokIds *want) {
    assert_int_equal(got->n, want->n);
    if (want->n)
        assert_memory_equal(got->id, want->id, want->n * sizeof *want->id);
}

/* The bytes of all ids are the text. */
static void assert_lossless(const Tok *t, const TokIds *ids, const char *text, size_t len) {
    size_t at = 0;
    for (size_t i = 0; i < ids->n; i++) {
        size_t n;
        const char *bytes = tok_bytes(t, ids->id[i], &n);
        assert_true(n > 0 && n <= len - at);
        assert_memory_equal(bytes, text + at, n);
        at += n;
    }
    assert_int_equal(at, len);
}

static uint64_t random_next(uint64_t *x) {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x * 0x2545f4914f6cdd1du >> 11;
}

/* ---- vectors ---- */

static void assert_decodes(const TokIds *ids, bool skip_special, const json_t *want) {
    TokDecoder d = {0};
    Buf out = {0};
    buf_puts(&out, "");
    for (size_t i = 0; i < ids->n; i++)
        tok_decode(tiny, &d, ids->id[i], skip_special, &out);
    tok_decode_end(&d, &out);
    assert_int_equal(out.len, json_string_length(want));
    assert_memory_equal(out.data, json_string_value(want), out.len);
    buf_done(&out);
}

static void vectors_are_exact(void **state) {
    (void)state;
    json_t *list = json_load_file(MODEL "oracle/tokenizer.json", JSON_ALLOW_NUL, NULL);
    assert_int_equal(json_array_size(list), 240);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i), *text = json_object_get(v, "text");
        const json_t *want = json_object_get(v, "ids");
        TokIds ids = encode(tiny, scratch, json_string_value(text), json_string_length(text), true);
        if (ids.n != json_array_size(want))
            fail_msg("vector %zu: %zu ids for %zu", i, ids.n, json_array_size(want));
        for (size_t k = 0; k < ids.n; k++)
            assert_int_equal(ids.id[k], json_integer_value(json_array_get(want, k)));
        assert_decodes(&ids, false, json_object_get(v, "decoded"));
        assert_decodes(&ids, true, json_object_get(v, "decoded_skip_special"));
        tok_ids_done(&ids);
    }
    json_decref(list);
}

/* The pieces of a text, joined with '|'. */
static void assert_split(const char *text, const char *want) {
    Buf got = {0};
    TokSplit split;
    size_t start, end;
    tok_split_start(scratch, &split, (const uint8_t *)text, strlen(text));
    while (tok_split_next(scratch, &split, &start, &end, NULL) > 0) {
        buf_put(&got, text + start, end - start);
        buf_puts(&got, "|");
    }
    assert_string_equal(got.data, want);
    buf_done(&got);
}

static void splits_as_oniguruma(void **state) {
    (void)state;
    assert_split("I'm foo'\u017fbar 1234567\r\n next",
                 "I|'m| foo|'\u017f|bar| |123|456|7|\r\n| next|");
    assert_split("a   b", "a|  | b|");
    assert_split("a \n \n  b", "a| \n \n| | b|");
    assert_split("a\u3000\u3000b\xc2\x85", "a|\u3000|\u3000b|\xc2\x85|");
    assert_split("\u180e\u180e ", "\u180e\u180e| |"); /* not white space, unlike PCRE2's own \s */
}

/* ---- encoding ---- */

static void added_tokens_are_a_choice(void **state) {
    (void)state;
    const char *text = "a<|user|><think>b";
    TokIds with = encode(tiny, scratch, text, strlen(text), true);
    TokIds without = encode(tiny, scratch, text, strlen(text), false);
    assert_int_equal(with.n, 4);
    assert_int_equal(with.id[1], tok_added_id(tiny, "<|user|>"));
    assert_int_equal(with.id[2], tok_added_id(tiny, "<think>"));
    assert_true(without.n > 4);
    for (size_t i = 0; i < without.n; i++)
        assert_false(tok_is_added(tiny, without.id[i]));
    assert_lossless(tiny, &with, text, strlen(text));
    assert_lossless(tiny, &without, text, strlen(text));
    tok_ids_done(&with);
    tok_ids_done(&without);
}

static void ids_answer_questions(void **state) {
    (void)state;
    assert_int_equal(tok_size(tiny), 4072);
    int user = tok_added_id(tiny, "<|user|>"), think = tok_added_id(tiny, "<think>");
    assert_int_equal(user, 4043);
    assert_true(tok_is_added(tiny, user) && tok_is_special(tiny, user));
    assert_true(tok_is_added(tiny, think) && !tok_is_special(tiny, think));
    assert_false(tok_is_added(tiny, 0) || tok_is_special(tiny, 0));
    assert_int_equal(tok_added_id(tiny, "<|user|"), -1);
    assert_int_equal(tok_added_id(tiny, "<|user|>x"), -1);
    assert_int_equal(tok_added_id(tiny, ""), -1);
    static const int32_t none[] = {-1, 4072, INT32_MIN, INT32_MAX};
    for (size_t i = 0; i < COUNT(none); i++) {
        size_t len = 1;
        tok_bytes(tiny, none[i], &len);
        assert_int_equal(len, 0);
        assert_false(tok_is_added(tiny, none[i]) || tok_is_special(tiny, none[i]));
    }
}

/* Invalid bytes are tokens of their own and disturb nothing around them. */
static void invalid_utf8_is_lossless(void **state) {
    (void)state;
    TokIds plain = encode(tiny, scratch, " Hello world", 12, true);
    TokIds broken = encode(tiny, scratch, "\xff Hello world\xe4\xb8", 15, true);
    assert_int_equal(broken.n, plain.n + 3);
    assert_memory_equal(broken.id + 1, plain.id, plain.n * sizeof *plain.id);
    assert_int_equal(broken.id[0], tiny->byte_id[0xff]);
    assert_int_equal(broken.id[broken.n - 1], tiny->byte_id[0xb8]);
    tok_ids_done(&plain);
    tok_ids_done(&broken);
    uint64_t x = 1;
    static const char *const parts[] = {"\xf0\x9f\x98\x80", "\xe4\xb8\xad", "<|user|>", " the",
                                        "\n"};
    for (int round = 0; round < 2000; round++) {
        Buf text = {0};
        for (int i = 0; i < 30; i++) {
            uint64_t r = random_next(&x);
            uint8_t byte = (uint8_t)(r >> 8);
            if (r % 3 == 0)
                buf_puts(&text, parts[r / 3 % COUNT(parts)]);
            else
                buf_put(&text, &byte, 1);
        }
        TokIds ids = encode(tiny, scratch, text.data, text.len, round & 1);
        assert_lossless(tiny, &ids, text.data, text.len);
        tok_ids_done(&ids);
        buf_done(&text);
    }
}

static void limits_leave_ids_alone(void **state) {
    (void)state;
    static const struct {
        const char *text;
        size_t n;
    } cases[] = {{"1 2 3", 5}, {"<|user|><|user|>", 2}, {"\xff\xff", 2}, {"a<|user|>\xff", 3}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        Err err = {0};
        TokIds ids = encode(tiny, scratch, "x", 1, false);
        int32_t first = ids.id[0];
        size_t len = strlen(cases[i].text), n = cases[i].n;
        for (size_t k = 0; k < n; k++)
            assert_int_equal(tok_encode(tiny, scratch, cases[i].text, len, true, k, &ids, &err),
                             E_LIMIT);
        assert_int_equal(ids.n, 1);
        assert_int_equal(tok_encode(tiny, scratch, cases[i].text, len, true, n, &ids, &err), 0);
        assert_int_equal(ids.n, n + 1);
        assert_int_equal(ids.id[0], first);
        tok_ids_done(&ids);
    }
}

/* Merges by looking at all pairs for the lowest rank, over and over. */
static TokIds naive_bpe(const Tok *t, const uint8_t *piece, size_t len) {
    TokIds ids = {0};
    tok_ids_reserve(&ids, len);
    for (; ids.n < len; ids.n++)
        ids.id[ids.n] = t->byte_id[piece[ids.n]];
    for (;;) {
        const TokPair *best = NULL;
        size_t at = 0;
        for (size_t i = 0; i + 1 < ids.n; i++) {
            const TokPair *p = tok_pairs_get(&t->merges, ids.id[i], ids.id[i + 1]);
            if (p && (!best || p->info < best->info)) {
                best = p;
                at = i;
            }
        }
        if (!best)
            return ids;
        ids.id[at] = best->to;
        ids.n--;
        memmove(ids.id + at + 1, ids.id + at + 2, (ids.n - at - 1) * sizeof *ids.id);
    }
}

static void long_pieces_merge_as_short_ones(void **state) {
    (void)state;
    static const char *const alphabets[] = {"a", "ab", "etaoinshrdlu", " ", "th", "-=", "\n "};
    uint64_t x = 7;
    for (int round = 0; round < 700; round++) {
        const char *alphabet = alphabets[round % (int)COUNT(alphabets)];
        uint8_t piece[400];
        size_t len = 1 + random_next(&x) % sizeof piece, n = strlen(alphabet);
        for (size_t i = 0; i < len; i++)
            piece[i] = (uint8_t)alphabet[random_next(&x) % n];
        TokIds want = naive_bpe(tiny, piece, len);
        for (int again = 0; again < 2; again++) { /* the second time from the cache */
            TokIds got = {0};
            tok_bpe_piece(scratch, piece, len, &got);
            assert_ids(&got, &want);
            tok_ids_done(&got);
        }
        tok_ids_done(&want);
    }
}

/* ---- decoding ---- */

/* The ids of single bytes, so that every character is cut at every place. */
static void decode_bytes(const char *bytes, size_t len, Buf *out) {
    TokDecoder d = {0};
    for (size_t i = 0; i < len; i++) {
        tok_decode(tiny, &d, tiny->byte_id[(uint8_t)bytes[i]], true, out);
        size_t at = 0;
        while (at < out->len) { /* whole characters at any time */
            int n = tok_utf8_at((const uint8_t *)out->data + at, out->len - at);
            assert_true(n > 0);
            at += (size_t)n;
        }
    }
    tok_decode_end(&d, out);
}

static void lossy_decoding(void **state) {
    (void)state;
#define R "\xef\xbf\xbd"
    static const char *const cases[][2] = {
        {"abc", "abc"},
        {"\xf0\x9f\x98\x80", "\xf0\x9f\x98\x80"},
        {"\xf0\x9f\x98", R},
        {"\xf0\x9f\x98"
         "a",
         R "a"},
        {"\xff\xfe", R R},
        {"\x80", R},
        {"\xc0\xaf", R R},
        {"\xe0\x80\x80", R R R},
        {"\xed\xa0\x80", R R R},
        {"\xf4\x90\x80\x80", R R R R},
        {"\xf4\x8f\xbf\xbf", "\xf4\x8f\xbf\xbf"},
        {"\xe4\xb8\xe4\xb8\xad", R "\xe4\xb8\xad"},
        {"\xf0\x90\xf0\x90\x80\x80", R "\xf0\x90\x80\x80"},
        {"\xc3\xc3\xa9", R "\xc3\xa9"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Buf out = {0};
        decode_bytes(cases[i][0], strlen(cases[i][0]), &out);
        assert_string_equal(out.data, cases[i][1]);
        buf_done(&out);
    }
}

/* Where tokens cut the bytes does not matter: any ids decode as their bytes one by one. */
static void decoding_ignores_token_borders(void **state) {
    (void)state;
    uint64_t x = 3;
    for (int round = 0; round < 500; round++) {
        Buf bytes = {0}, whole = {0}, single = {0};
        TokDecoder d = {0};
        for (int i = 0; i < 40; i++) {
            int32_t id = (int32_t)(random_next(&x) % (uint64_t)(tok_size(tiny) + 2));
            if (random_next(&x) % 2)
                id = tiny->byte_id[0x80 + random_next(&x) % 128];
            tok_decode(tiny, &d, id, true, &whole);
            size_t n;
            const char *part = tok_bytes(tiny, id, &n);
            if (!tok_is_special(tiny, id))
                buf_put(&bytes, part, n);
        }
        tok_decode_end(&d, &whole);
        decode_bytes(bytes.data, bytes.len, &single);
        assert_int_equal(whole.len, single.len);
        assert_memory_equal(whole.data, single.data, whole.len);
        buf_done(&bytes);
        buf_done(&whole);
        buf_done(&single);
    }
}

/* ---- time ---- */

/* Best time per byte of up to three runs; stops early below enough. */
static double time_per_byte(const Tok *t, TokScratch *s, const Buf *text, double enough) {
    double best = 1e9;
    for (int i = 0; i < 3 && best > enough; i++) {
        int64_t start = clock_now_us();
        TokIds ids = encode(t, s, text->data, text->len, true);
        double per_byte = (double)(clock_now_us() - start) / (double)text->len;
        if (per_byte < best)
            best = per_byte;
        tok_ids_done(&ids);
    }
    return best;
}

/* Megabyte runs cost at most 20 times as much per byte as English; quadratic behaviour would be
 * thousands. */
static void check_times(const Tok *t) {
    static const struct {
        const char *unit, *tail;
    } runs[] = {
        {"a", ""},   {"abracadabra", ""}, {"中文没有空格", ""}, {" ", "x"},      {" ", ""},
        {"\t", "x"}, {"\n", "x"},         {"\n  \r", "   x"},   {"\u3000", "1"}, {"7", ""},
        {"-", "\n"}, {"'", "s"},          {"<|user|", ">"},     {"\xff", ""},    {"\xe4\xb8", ""},
    };
    enum { BYTES = 1 << 20 };
    TokScratch *s = tok_scratch_new(t);
    FILE *f = fopen(MODEL "eval/heldout.txt", "rb");
    assert_non_null(f);
    char once[8192];
    size_t n = fread(once, 1, sizeof once, f);
    fclose(f);
    Buf text = {0};
    while (text.len < BYTES)
        buf_put(&text, once, n);
    double english = time_per_byte(t, s, &text, 0);
    for (size_t i = 0; i < COUNT(runs); i++) {
        buf_clear(&text);
        while (text.len < BYTES)
            buf_puts(&text, runs[i].unit);
        buf_puts(&text, runs[i].tail);
        double run = time_per_byte(t, s, &text, 20 * english);
        if (run > 20 * english)
            fail_msg("\"%s\" again and again: %.1f times the time of English", runs[i].unit,
                     run / english);
    }
    buf_done(&text);
    tok_scratch_free(s);
}

static void long_runs_are_linear(void **state) {
    (void)state;
    check_times(tiny);
}

/* A copy of the tokenizer that matches without JIT. */
static Tok interpreted(void) {
    Tok t = *tiny;
    t.regex = pcre2_code_copy(tiny->regex);
    size_t jit_bytes = 1;
    pcre2_pattern_info(t.regex, PCRE2_INFO_JITSIZE, &jit_bytes);
    assert_int_equal(jit_bytes, 0);
    return t;
}

static void long_runs_are_linear_without_jit(void **state) {
    (void)state;
    Tok t = interpreted();
    check_times(&t);
    TokScratch *s = tok_scratch_new(&t);
    Buf text = {0};
    for (int i = 0; i < 100000; i++)
        buf_puts(&text, i % 1000 ? " " : "\n x");
    TokIds want = encode(tiny, scratch, text.data, text.len, true);
    TokIds got = encode(&t, s, text.data, text.len, true);
    assert_ids(&got, &want);
    tok_ids_done(&got);
    tok_ids_done(&want);
    buf_done(&text);
    tok_scratch_free(s);
    pcre2_code_free(t.regex);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_are_exact),
        cmocka_unit_test(splits_as_oniguruma),
        cmocka_unit_test(added_tokens_are_a_choice),
        cmocka_unit_test(ids_answer_questions),
        cmocka_unit_test(invalid_utf8_is_lossless),
        cmocka_unit_test(limits_leave_ids_alone),
        cmocka_unit_test(long_pieces_merge_as_short_ones),
        cmocka_unit_test(lossy_decoding),
        cmocka_unit_test(decoding_ignores_token_borders),
        cmocka_unit_test(long_runs_are_linear),
        cmocka_unit_test(long_runs_are_linear_without_jit),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
