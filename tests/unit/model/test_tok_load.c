/* Reading tokenizer.json: how bad files are refused, and what the variants that are taken mean. */
#include "model/tok_int.h"

#include <jansson.h>

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

#define MODEL    "tests/models/tiny-glm52/"
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* JSON with ' for ". */
static json_t *parse(const char *text) {
    char *json = xstrdup(text);
    for (char *p = json; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_t *v = json_loads(json, JSON_DECODE_ANY, NULL);
    if (!v)
        fail_msg("not JSON: %s", text);
    free(json);
    return v;
}

/* The tiny tokenizer.json with the value at path ("model/vocab/a") replaced, or taken out when
 * value is NULL. */
static json_t *variant(const char *path, const char *value) {
    json_t *root = json_load_file(MODEL "fp8/tokenizer.json", 0, NULL), *at = root;
    char *names = xstrdup(path), *save = NULL;
    char *name = strtok_r(names, "/", &save), *next;
    for (; (next = strtok_r(NULL, "/", &save)); name = next) {
        at = json_is_array(at) ? json_array_get(at, (size_t)atoi(name)) : json_object_get(at, name);
        assert_non_null(at);
    }
    if (json_is_array(at))
        json_array_set_new(at, (size_t)atoi(name), parse(value));
    else if (value)
        json_object_set_new(at, name, parse(value));
    else
        json_object_del(at, name);
    free(names);
    return root;
}

static int parse_tok(Tok **t, const json_t *root, Err *err) {
    char *text = json_dumps(root, 0);
    int rc = tok_parse(t, text, strlen(text), err);
    free(text);
    return rc;
}

#define PRE   "pre_tokenizer/pretokenizers/"
#define REGEX "pre_tokenizer.pretokenizers[0].pattern.Regex: "

static const struct {
    const char *path, *value, *error; /* error: how the message begins */
} bad_fields[] = {
    {"truncation", "{}", "truncation: only null"},
    {"padding", "1", "padding: only null"},
    {"normalizer", "{'type':'NFC'}", "normalizer: only null"},
    {"decoder/type", "'WordPiece'", "decoder.type: only \"ByteLevel\""},
    {"decoder", "null", "decoder.type: only \"ByteLevel\""},
    {"post_processor/type", "'TemplateProcessing'", "post_processor.type: only \"ByteLevel\""},
    {"pre_tokenizer", "null", "pre_tokenizer.type: only \"Sequence\""},
    {"pre_tokenizer/pretokenizers", "[]", "pre_tokenizer.pretokenizers: only [Split, ByteLevel]"},
    {PRE "0/type", "'Digits'", "pre_tokenizer.pretokenizers[0].type: only \"Split\""},
    {PRE "0/behavior", "'Removed'", "pre_tokenizer.pretokenizers[0].behavior: only \"Isolated\""},
    {PRE "0/invert", "true", "pre_tokenizer.pretokenizers[0].invert: only false"},
    {PRE "1/type", "'Split'", "pre_tokenizer.pretokenizers[1].type: only \"ByteLevel\""},
    {PRE "1/add_prefix_space", "true",
     "pre_tokenizer.pretokenizers[1].add_prefix_space: only false"},
    {PRE "1/use_regex", "true", "pre_tokenizer.pretokenizers[1].use_regex: only false"},
    {PRE "0/pattern", "{'String':' '}", REGEX "expected a string"},
    {PRE "0/pattern/Regex", "'a('", REGEX "missing closing parenthesis"},
    {PRE "0/pattern/Regex", "'a*'", REGEX "the regex can match nothing"},
    {PRE "0/pattern/Regex", "''", REGEX "the regex can match nothing"},
    {PRE "0/pattern/Regex", "'\\\\w+'", REGEX "\"\\w\" is not supported"},
    {PRE "0/pattern/Regex", "'a\\\\K'", REGEX "\"\\K\" is not supported"},
    {PRE "0/pattern/Regex", "'a\\\\'", REGEX "\"\\\" is not supported"},
    {PRE "0/pattern/Regex", "'^a'", REGEX "\"^\" is not supported"},
    {PRE "0/pattern/Regex", "'a$'", REGEX "\"$\" is not supported"},
    {PRE "0/pattern/Regex", "'(*FAIL)a'", REGEX "\"(*\" is not supported"},
    {PRE "0/pattern/Regex", "'[a[b]]'", REGEX "\"[\" is not supported"},
    {PRE "0/pattern/Regex", "'[]a]'", REGEX "\"]\" is not supported"},
    {PRE "0/pattern/Regex", "'[a&&b]'", REGEX "\"&\" is not supported"},
    {"model", "[]", "model: expected an object"},
    {"model", NULL, "model: expected an object"},
    {"model/type", "'Unigram'", "model.type: only \"BPE\""},
    {"model/dropout", "0.1", "model.dropout: only null"},
    {"model/unk_token", "'<unk>'", "model.unk_token: only null"},
    {"model/continuing_subword_prefix", "'##'", "model.continuing_subword_prefix: only null"},
    {"model/end_of_word_suffix", "'</w>'", "model.end_of_word_suffix: only null"},
    {"model/byte_fallback", "true", "model.byte_fallback: only false"},
    {"model/ignore_merges", "1", "model.ignore_merges: expected a boolean"},
    {"model/vocab", "[]", "model.vocab: expected an object"},
    {"model/vocab/a", NULL, "model.vocab: no token for the byte 0x61"},
    {"model/vocab/a", "-1", "model.vocab: the id of entry 64 is not from 0"},
    {"model/vocab/a", "1048576", "model.vocab: the id of entry 64 is not from 0"},
    {"model/vocab/a", "'x'", "model.vocab: the id of entry 64 is not from 0"},
    {"model/vocab/a", "65", "model.vocab: id 65 is given twice"},
    {"model/vocab/a b", "5000", "model.vocab: token 5000 is not 1 to 4096 characters"},
    {"model/vocab/\u4e2d", "5000", "model.vocab: token 5000 is not 1 to 4096 characters"},
    {"model/merges", "{}", "model.merges: expected a list"},
    {"model/merges/0", "'ab'", "model.merges[0]: expected two tokens"},
    {"model/merges/1", "'a b c'", "model.merges[1]: expected two tokens"},
    {"model/merges/2", "['a']", "model.merges[2]: expected two tokens"},
    {"model/merges/2", "['a',1]", "model.merges[2]: expected two tokens"},
    {"model/merges/3", "['\u4e2d','a']", "model.merges[3]: the first token is not in model.vocab"},
    {"model/merges/3", "['a','']", "model.merges[3]: the second token is not in model.vocab"},
    {"model/merges/3", "['!','a']", "model.merges[3]: the merged token is not in model.vocab"},
    {"model/merges/1", "['\u0120','\u0120']", "model.merges[1]: given twice"},
    {"added_tokens", "{}", "added_tokens: expected a list"},
    {"added_tokens/0", "7", "added_tokens[0].id: expected a number"},
    {"added_tokens/0/id", "-1", "added_tokens[0].id: expected a number"},
    {"added_tokens/1/id", "4036", "added_tokens[1].id: 4036 is taken"},
    {"added_tokens/0/id", "0", "model.vocab: id 0 is given twice"},
    {"added_tokens/0/content", "''", "added_tokens[0].content: expected a string of 1 to 256"},
    {"added_tokens/0/content", "5", "added_tokens[0].content: expected a string of 1 to 256"},
    {"added_tokens/1/content", "'<|endoftext|>'", "added_tokens[1].content: given twice"},
    {"added_tokens/0/content", "'a'", "added_tokens[0].id: 4036, but model.vocab has"},
    {"added_tokens/2/lstrip", "true", "added_tokens[2].lstrip: only false"},
    {"added_tokens/2/rstrip", "true", "added_tokens[2].rstrip: only false"},
    {"added_tokens/2/single_word", "true", "added_tokens[2].single_word: only false"},
    {"added_tokens/2/special", "'yes'", "added_tokens[2].special: expected a boolean"},
    {"added_tokens/2/normalized", "0", "added_tokens[2].normalized: expected a boolean"},
};

static void bad_fields_are_named(void **state) {
    (void)state;
    for (size_t i = 0; i < COUNT(bad_fields); i++) {
        json_t *root = variant(bad_fields[i].path, bad_fields[i].value);
        Tok *t = NULL;
        Err err = {0};
        if (parse_tok(&t, root, &err) == 0)
            fail_msg("%s = %s is taken", bad_fields[i].path, bad_fields[i].value);
        assert_null(t);
        if (strncmp(err.text, bad_fields[i].error, strlen(bad_fields[i].error)))
            fail_msg("\"%s\" instead of \"%s\"", err.text, bad_fields[i].error);
        json_decref(root);
    }
}

static void oversized_fields_are_refused(void **state) {
    (void)state;
    json_t *root = variant("normalizer", "null");
    json_t *added = json_object_get(root, "added_tokens");
    for (int i = 0; json_array_size(added) <= TOK_ADDED_MAX; i++)
        json_array_append_new(added, json_pack("{s:i,s:s}", "id", 5000 + i, "content", "x"));
    Tok *t = NULL;
    Err err = {0};
    assert_int_equal(parse_tok(&t, root, &err), E_FORMAT);
    assert_string_equal(err.text, "added_tokens: expected a list of at most 4096");
    json_decref(root);
    root = variant("normalizer", "null");
    char regex[TOK_REGEX_MAX + 2], name[TOK_BYTES_MAX + 2];
    memset(regex, 'a', sizeof regex - 1);
    memset(name, 'a', sizeof name - 1);
    regex[sizeof regex - 1] = name[sizeof name - 1] = '\0';
    json_object_set_new(json_object_get(json_object_get(root, "model"), "vocab"), name,
                        json_integer(5000));
    assert_int_equal(parse_tok(&t, root, &err), E_FORMAT);
    assert_string_equal(err.text, "model.vocab: token 5000 is not 1 to 4096 characters of the "
                                  "byte-level alphabet");
    json_t *split =
        json_array_get(json_object_get(json_object_get(root, "pre_tokenizer"), "pretokenizers"), 0);
    json_object_set_new(json_object_get(split, "pattern"), "Regex", json_string(regex));
    assert_int_equal(parse_tok(&t, root, &err), E_LIMIT);
    assert_string_equal(err.text, REGEX "longer than 4096 bytes");
    json_decref(root);
}

static void bad_files_are_refused(void **state) {
    (void)state;
    static const char *const texts[] = {
        "", "{", "[]", "null", "\xff", "{\"model\": {}, \"model\": {}}", "{\"a\": \"\\ud800\"}",
    };
    Tok *t = NULL;
    for (size_t i = 0; i < COUNT(texts); i++) {
        Err err = {0};
        assert_int_equal(tok_parse(&t, texts[i], strlen(texts[i]), &err), E_FORMAT);
        assert_true(err.text[0] != '\0');
    }
    char deep[100000];
    memset(deep, '[', sizeof deep);
    assert_int_equal(tok_parse(&t, deep, sizeof deep, NULL), E_FORMAT);
    Err err = {0};
    assert_int_equal(tok_open(&t, "tests/no/such/tokenizer.json", &err), E_NOTFOUND);
    assert_non_null(strstr(err.text, "tests/no/such/tokenizer.json"));
    assert_int_equal(tok_open(&t, MODEL "fp8/config.json", &err), E_FORMAT);
    assert_string_equal(err.text, MODEL "fp8/config.json: model: expected an object");
    assert_null(t);
}

/* Opens a variant that is good. */
static Tok *open_variant(json_t *root) {
    Tok *t;
    Err err;
    if (parse_tok(&t, root, &err))
        fail_msg("%s", err.text);
    json_decref(root);
    return t;
}

static TokIds encode(const Tok *t, TokScratch *s, const char *text) {
    TokIds ids = {0};
    Err err;
    if (tok_encode(t, s, text, strlen(text), true, SIZE_MAX, &ids, &err))
        fail_msg("%s", err.text);
    return ids;
}

/* Older files write a merge as "a b". */
static void merges_may_be_strings(void **state) {
    (void)state;
    json_t *root = variant("normalizer", "null");
    json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    for (size_t i = 0; i < json_array_size(merges); i++) {
        const json_t *m = json_array_get(merges, i);
        char *both = xasprintf("%s %s", json_string_value(json_array_get(m, 0)),
                               json_string_value(json_array_get(m, 1)));
        json_array_set_new(merges, i, json_string(both));
        free(both);
    }
    Tok *t = open_variant(root), *tiny = open_variant(variant("normalizer", "null"));
    assert_int_equal(t->merges.n, tiny->merges.n);
    for (uint32_t i = 0; i <= tiny->merges.mask; i++) {
        const TokPair *want = &tiny->merges.slot[i];
        const TokPair *got = want->a < 0 ? NULL : tok_pairs_get(&t->merges, want->a, want->b);
        assert_true(want->a < 0 || (got && got->to == want->to && got->info == want->info));
    }
    tok_close(tiny);
    tok_close(t);
}

static void ignore_merges_takes_whole_pieces(void **state) {
    (void)state;
    json_t *root = variant("model/ignore_merges", "true");
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    json_object_set_new(vocab, "qzqzq", json_integer(4080));
    json_object_set_new(vocab, "\u0120qz", json_integer(4081));
    Tok *t = open_variant(root);
    TokScratch *s = tok_scratch_new(t);
    TokIds ids = encode(t, s, "qzqzq qz qzqzqz");
    assert_int_equal(ids.id[0], 4080);
    assert_int_equal(ids.id[1], 4081);
    assert_true(ids.n > 3);
    tok_ids_done(&ids);
    tok_scratch_free(s);
    tok_close(t);
}

/* "normalized": false tokens come first, then the others in what is left; of one class the
 * leftmost, then the longest. */
static void added_tokens_by_class(void **state) {
    (void)state;
    Tok *t = open_variant(
        variant("added_tokens",
                "[{'id':5000,'content':'QJ'},{'id':5001,'content':'QJXZ'},"
                "{'id':5002,'content':'JXW'},{'id':5003,'content':'ZZQJ','normalized':true},"
                "{'id':5004,'content':'ZZ','normalized':true,'special':true}]"));
    TokScratch *s = tok_scratch_new(t);
    static const int32_t want[] = {5001, 5004, 5000, 5004, 5002};
    TokIds ids = encode(t, s, "QJXZZZQJZZJXW");
    assert_int_equal(ids.n, COUNT(want));
    assert_memory_equal(ids.id, want, sizeof want);
    assert_true(tok_is_special(t, 5004) && !tok_is_special(t, 5003));
    assert_int_equal(tok_size(t), 5005);
    assert_int_equal(tok_added_id(t, "ZZQJ"), 5003);
    tok_ids_done(&ids);
    tok_scratch_free(s);
    tok_close(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_fields_are_named),
        cmocka_unit_test(oversized_fields_are_refused),
        cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(merges_may_be_strings),
        cmocka_unit_test(ignore_merges_takes_whole_pieces),
        cmocka_unit_test(added_tokens_by_class),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
