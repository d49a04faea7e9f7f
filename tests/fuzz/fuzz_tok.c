/* Fuzzes the tokenizer. The first byte chooses: a whole tokenizer.json, changes to a small good
 * one, or text for the tiny model's tokenizer, with or without added tokens. Text must come back
 * byte by byte, and the cache must not change ids. */
#include "model/tok.h"

#include <jansson.h>

#include <string.h>

static Tok *tiny;
static TokScratch *scratch;

/* A tokenizer.json with the 256 bytes, three merges and two added tokens. */
static json_t *small_good(void) {
    json_t *vocab = json_object();
    for (int b = 0, next = 0x100; b < 256; b++) {
        bool itself = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        int c = itself ? b : next++;
        char utf8[3] = {(char)c};
        if (c >= 0x80) {
            utf8[0] = (char)(0xc0 | c >> 6);
            utf8[1] = (char)(0x80 | (c & 0x3f));
        }
        json_object_set_new(vocab, utf8, json_integer(b));
    }
    json_object_set_new(vocab, "th", json_integer(256));
    json_object_set_new(vocab, "he", json_integer(257));
    json_object_set_new(vocab, "the", json_integer(258));
    return json_pack("{s:{s:s,s:o,s:[[s,s],[s,s],s]},s:{s:s},s:{s:s,s:[{s:s,s:s,s:{s:s}},"
                     "{s:s,s:b,s:b}]},s:[{s:i,s:s},{s:i,s:s,s:b,s:b}]}",
                     "model", "type", "BPE", "vocab", vocab, "merges", "t", "h", "h", "e", "th e",
                     "decoder", "type", "ByteLevel", "pre_tokenizer", "type", "Sequence",
                     "pretokenizers", "type", "Split", "behavior", "Isolated", "pattern", "Regex",
                     " ?\\p{L}+|\\s+(?!\\S)|\\s+|.", "type", "ByteLevel", "add_prefix_space", 0,
                     "use_regex", 0, "added_tokens", "id", 259, "content", "<a>", "id", 260,
                     "content", "<ab>", "normalized", 1, "special", 1);
}

static void check_text(const Tok *t, TokScratch *s, bool added, const char *text, size_t len) {
    TokIds first = {0}, again = {0};
    if (tok_encode(t, s, text, len, added, len, &first, NULL) == 0) {
        CHECK(tok_encode(t, s, text, len, added, len, &again, NULL) == 0);
        CHECK(first.n == again.n);
        Buf bytes = {0}, whole = {0};
        TokDecoder d = {0};
        for (size_t i = 0; i < first.n; i++) {
            CHECK(first.id[i] == again.id[i]);
            size_t n;
            const char *part = tok_bytes(t, first.id[i], &n);
            buf_put(&bytes, part, n);
            tok_decode(t, &d, first.id[i], false, &whole);
        }
        tok_decode_end(&d, &whole);
        CHECK(bytes.len == len && (len == 0 || memcmp(bytes.data, text, len) == 0));
        json_t *valid = json_stringn(whole.data ? whole.data : "", whole.len);
        CHECK(valid); /* jansson takes UTF-8 only */
        json_decref(valid);
        buf_done(&bytes);
        buf_done(&whole);
    }
    tok_ids_done(&first);
    tok_ids_done(&again);
}

static void check_json(const char *json, size_t len) {
    Tok *t = NULL;
    Err err;
    if (tok_parse(&t, json, len, &err)) {
        CHECK(!t && err.code < 0 && err.text[0]);
        return;
    }
    TokScratch *s = tok_scratch_new(t);
    const char *text = "The other  theatre's \xffth\n\n<ab><a> 123 \xe4\xb8\xad";
    check_text(t, s, true, text, strlen(text));
    tok_scratch_free(s);
    tok_close(t);
}

/* Lays the fuzzed object over the good one. */
static void check_changes(const char *json, size_t len) {
    json_t *changes = json_loadb(json, len, 0, NULL), *root = small_good();
    CHECK(root);
    if (changes && json_object_update_recursive(root, changes) == 0) {
        char *text = json_dumps(root, 0);
        check_json(text, strlen(text));
        free(text);
    }
    json_decref(changes);
    json_decref(root);
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    Err err;
    CHECK(tok_open(&tiny, TINY_TOKENIZER, &err) == 0);
    scratch = tok_scratch_new(tiny);
    json_t *good = small_good();
    char *text = json_dumps(good, 0);
    Tok *t;
    CHECK(tok_parse(&t, text, strlen(text), &err) == 0);
    tok_close(t);
    free(text);
    json_decref(good);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    const char *rest = (const char *)data + 1;
    size--;
    switch (data[0] % 4) {
    case 0:
        check_json(rest, size);
        break;
    case 1:
        check_changes(rest, size);
        break;
    default:
        check_text(tiny, scratch, data[0] % 4 == 2, rest, size);
    }
    return 0;
}
