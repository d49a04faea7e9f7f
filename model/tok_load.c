/* tokenizer.json into a Tok. Everything in the file is refused by field name unless it is
 * byte-level BPE as GLM uses it.
 *
 * Runs once, at start, on the thread that opens the model. */
#include "model/tok_int.h"

#include <jansson.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* A Tok under construction. */
typedef struct Load {
    Tok *t;
    const json_t *vocab;  /* model.vocab */
    Buf pool;             /* becomes t->pool */
    int16_t byte_of[512]; /* byte that a code point of the byte-level alphabet stands for; -1: not
                             in the alphabet */
    Err *err;
} Load;

/* The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes for U+0100
 * and up in their order. */
static void alphabet_init(Load *l) {
    memset(l->byte_of, 0xff, sizeof l->byte_of);
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        bool itself =
            (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || (b >= 0xae && b <= 0xff);
        l->byte_of[itself ? b : next++] = (int16_t)b;
    }
}

/* Bytes that s[0, len), UTF-8 in the alphabet, stands for, into out[0, cap). Returns their number,
 * or -1. */
static int alphabet_bytes(const Load *l, const char *s, size_t len, uint8_t *out, int cap) {
    int n = 0;
    for (size_t i = 0; i < len; n++) {
        unsigned c = (uint8_t)s[i++];
        if (c >= 0x80) {
            if ((c & 0xe0) != 0xc0 || i == len)
                return -1;
            c = (c & 0x1f) << 6 | ((uint8_t)s[i++] & 0x3f);
        }
        if (n == cap || c >= 512 || l->byte_of[c] < 0)
            return -1;
        out[n] = (uint8_t)l->byte_of[c];
    }
    return n;
}

/* Refuses obj[key] unless it is absent, null or (where empty is given) that string. */
static int want_nothing(Load *l, const json_t *obj, const char *parent, const char *key,
                        const char *empty) {
    const json_t *v = json_object_get(obj, key);
    if (!v || json_is_null(v) ||
        (empty && json_is_string(v) && !strcmp(json_string_value(v), empty)))
        return 0;
    return err_set(l->err, E_UNSUPPORTED, "%s%s: only null is supported", parent, key);
}

/* Refuses obj[key] unless it is absent or the given boolean. */
static int want_bool(Load *l, const json_t *obj, const char *parent, const char *key, bool wanted) {
    const json_t *v = json_object_get(obj, key);
    if (!v || (json_is_boolean(v) && json_is_true(v) == wanted))
        return 0;
    return err_set(l->err, E_UNSUPPORTED, "%s%s: only %s is supported", parent, key,
                   wanted ? "true" : "false");
}

/* obj[key], a boolean that is false when absent. */
static int get_bool(Load *l, const json_t *obj, const char *parent, const char *key, bool *out) {
    const json_t *v = json_object_get(obj, key);
    if (v && !json_is_boolean(v))
        return err_set(l->err, E_FORMAT, "%s%s: expected a boolean", parent, key);
    *out = json_is_true(v);
    return 0;
}

static int want_string(Load *l, const json_t *obj, const char *parent, const char *key,
                       const char *wanted) {
    const char *s = json_string_value(json_object_get(obj, key));
    if (s && !strcmp(s, wanted))
        return 0;
    return err_set(l->err, E_UNSUPPORTED, "%s%s: only \"%s\" is supported", parent, key, wanted);
}

static int load_shell(Load *l, const json_t *root) {
    const json_t *post = json_object_get(root, "post_processor");
    int rc = 0;
    if ((rc = want_nothing(l, root, "", "truncation", NULL)) ||
        (rc = want_nothing(l, root, "", "padding", NULL)) ||
        (rc = want_nothing(l, root, "", "normalizer", NULL)) ||
        (rc = want_string(l, json_object_get(root, "decoder"), "decoder.", "type", "ByteLevel")))
        return rc;
    if (post && !json_is_null(post)) /* it moves offsets only, never ids */
        rc = want_string(l, post, "post_processor.", "type", "ByteLevel");
    return rc;
}

/* Sequence[Split(regex, isolated), ByteLevel without a regex of its own]. */
static int load_pre_tokenizer(Load *l, const json_t *root) {
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    const json_t *list = json_object_get(pre, "pretokenizers");
    int rc = want_string(l, pre, "pre_tokenizer.", "type", "Sequence");
    if (rc)
        return rc;
    if (json_array_size(list) != 2)
        return err_set(l->err, E_UNSUPPORTED,
                       "pre_tokenizer.pretokenizers: only [Split, ByteLevel] is supported");
    const json_t *split = json_array_get(list, 0), *bytes = json_array_get(list, 1);
    const char *at0 = "pre_tokenizer.pretokenizers[0].", *at1 = "pre_tokenizer.pretokenizers[1].";
    if ((rc = want_string(l, split, at0, "type", "Split")) ||
        (rc = want_string(l, split, at0, "behavior", "Isolated")) ||
        (rc = want_bool(l, split, at0, "invert", false)) ||
        (rc = want_string(l, bytes, at1, "type", "ByteLevel")) ||
        (rc = want_bool(l, bytes, at1, "add_prefix_space", false)) ||
        (rc = want_bool(l, bytes, at1, "use_regex", false)))
        return rc;
    const char *field = "pre_tokenizer.pretokenizers[0].pattern.Regex";
    const char *regex =
        json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    if (!regex)
        return err_set(l->err, E_UNSUPPORTED, "%s: expected a string", field);
    return tok_regex_compile(&l->t->regex, regex, field, l->err);
}

static int load_model_kind(Load *l, const json_t *model) {
    int rc;
    if ((rc = want_string(l, model, "model.", "type", "BPE")) ||
        (rc = want_nothing(l, model, "model.", "dropout", NULL)) ||
        (rc = want_nothing(l, model, "model.", "unk_token", NULL)) ||
        (rc = want_nothing(l, model, "model.", "continuing_subword_prefix", "")) ||
        (rc = want_nothing(l, model, "model.", "end_of_word_suffix", "")) ||
        (rc = want_bool(l, model, "model.", "byte_fallback", false)) ||
        (rc = get_bool(l, model, "model.", "ignore_merges", &l->t->ignore_merges)))
        return rc;
    l->vocab = json_object_get(model, "vocab");
    if (!json_is_object(l->vocab) || json_object_size(l->vocab) > TOK_ROWS_MAX)
        return err_set(l->err, E_FORMAT, "model.vocab: expected an object of at most %d tokens",
                       TOK_ROWS_MAX);
    return 0;
}

/* Reads an id and grows the rows to hold it. */
static int load_id(Load *l, const json_t *value, int32_t *id) {
    json_int_t v = json_integer_value(value);
    if (!json_is_integer(value) || v < 0 || v >= TOK_ROWS_MAX)
        return E_FORMAT;
    Tok *t = l->t;
    if (v >= t->n_rows) {
        int n = t->n_rows;
        t->n_rows = (int)v + 1;
        t->row = xrealloc(t->row, (size_t)t->n_rows * sizeof *t->row);
        memset(t->row + n, 0, (size_t)(t->n_rows - n) * sizeof *t->row);
    }
    *id = (int32_t)v;
    return 0;
}

static void load_row(Load *l, int32_t id, const void *bytes, size_t len, int flags) {
    l->t->row[id] = (TokRow){(uint32_t)l->pool.len, (uint16_t)len, (uint16_t)flags};
    buf_put(&l->pool, bytes, len);
    if (len > l->t->bytes_max)
        l->t->bytes_max = (uint32_t)len;
}

static int load_added_token(Load *l, const json_t *token, const char *at) {
    bool special = false, late = false;
    int rc;
    if ((rc = want_bool(l, token, at, "single_word", false)) ||
        (rc = want_bool(l, token, at, "lstrip", false)) ||
        (rc = want_bool(l, token, at, "rstrip", false)) ||
        (rc = get_bool(l, token, at, "special", &special)) ||
        (rc = get_bool(l, token, at, "normalized", &late)))
        return rc;
    int32_t id;
    if (load_id(l, json_object_get(token, "id"), &id) < 0)
        return err_set(l->err, E_FORMAT, "%sid: expected a number below %d", at, TOK_ROWS_MAX);
    if (l->t->row[id].len)
        return err_set(l->err, E_FORMAT, "%sid: %d is taken", at, id);
    const json_t *content = json_object_get(token, "content");
    size_t len = json_string_length(content);
    if (len == 0 || len > TOK_ADDED_BYTES_MAX)
        return err_set(l->err, E_FORMAT, "%scontent: expected a string of 1 to %d bytes", at,
                       TOK_ADDED_BYTES_MAX);
    const json_t *same = json_object_get(l->vocab, json_string_value(content));
    if (same && json_integer_value(same) != id)
        return err_set(l->err, E_FORMAT, "%sid: %d, but model.vocab has the content under another",
                       at, id);
    load_row(l, id, json_string_value(content), len,
             TOK_ROW_ADDED | (special ? TOK_ROW_SPECIAL : 0));
    if (tok_added_id(l->t, json_string_value(content)) >= 0)
        return err_set(l->err, E_FORMAT, "%scontent: given twice", at);
    tok_trie_put(&l->t->added[late], json_string_value(content), len, id);
    return 0;
}

static int load_added(Load *l, const json_t *root) {
    const json_t *list = json_object_get(root, "added_tokens");
    size_t n = json_array_size(list), bytes = 0;
    if ((list && !json_is_array(list)) || n > TOK_ADDED_MAX)
        return err_set(l->err, E_FORMAT, "added_tokens: expected a list of at most %d",
                       TOK_ADDED_MAX);
    for (size_t i = 0; i < n; i++)
        bytes += json_string_length(json_object_get(json_array_get(list, i), "content"));
    if (bytes > (size_t)TOK_ADDED_MAX * TOK_ADDED_BYTES_MAX)
        return err_set(l->err, E_LIMIT, "added_tokens: contents are too long");
    tok_pairs_init(&l->t->added[0].edges, bytes);
    tok_pairs_init(&l->t->added[1].edges, bytes);
    for (size_t i = 0; i < n; i++) {
        char at[40];
        snprintf(at, sizeof at, "added_tokens[%zu].", i);
        int rc = load_added_token(l, json_array_get(list, i), at);
        if (rc)
            return rc;
    }
    return 0;
}

/* Entry number i of model.vocab. An id that an added token holds has that token's content, as
 * load_added_token made sure from its side. */
static int load_vocab_token(Load *l, int i, const char *key, const json_t *value) {
    Tok *t = l->t;
    size_t key_len = strlen(key);
    int32_t id;
    if (load_id(l, value, &id) < 0)
        return err_set(l->err, E_FORMAT, "model.vocab: the id of entry %d is not from 0 to %d", i,
                       TOK_ROWS_MAX - 1);
    const TokRow *row = &t->row[id];
    if ((row->flags & TOK_ROW_ADDED) && row->len == key_len &&
        !memcmp(l->pool.data + row->at, key, key_len))
        return 0; /* merges do not make it */
    if (row->len)
        return err_set(l->err, E_FORMAT, "model.vocab: id %d is given twice", id);
    uint8_t bytes[TOK_BYTES_MAX];
    int len = alphabet_bytes(l, key, key_len, bytes, TOK_BYTES_MAX);
    if (len <= 0)
        return err_set(l->err, E_FORMAT,
                       "model.vocab: token %d is not 1 to %d characters of the byte-level alphabet",
                       id, TOK_BYTES_MAX);
    load_row(l, id, bytes, (size_t)len, 0);
    if (len == 1)
        t->byte_id[bytes[0]] = id;
    t->n_vocab++;
    return 0;
}

static int load_vocab(Load *l) {
    Tok *t = l->t;
    memset(t->byte_id, 0xff, sizeof t->byte_id);
    const char *key;
    json_t *value;
    int i = 0;
    json_object_foreach((json_t *)l->vocab, key, value) {
        int rc = load_vocab_token(l, i++, key, value);
        if (rc)
            return rc;
    }
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] < 0)
            return err_set(l->err, E_FORMAT, "model.vocab: no token for the byte 0x%02x", b);
    t->pool = buf_take(&l->pool);
    tok_vocab_init(t, (size_t)t->n_vocab);
    for (int32_t id = 0; id < t->n_rows; id++)
        if (t->row[id].len && !(t->row[id].flags & TOK_ROW_ADDED))
            tok_vocab_put(t, id);
    return 0;
}

/* The two halves of a merge: ["a", "b"], or "a b" in older files. */
static bool merge_halves(const json_t *merge, const char *half[2], size_t len[2]) {
    if (json_is_string(merge)) {
        half[0] = json_string_value(merge);
        const char *space = strchr(half[0], ' ');
        if (!space || strchr(space + 1, ' '))
            return false;
        len[0] = (size_t)(space - half[0]);
        half[1] = space + 1;
        len[1] = strlen(half[1]);
        return true;
    }
    for (size_t i = 0; i < 2; i++) {
        const json_t *part = json_array_get(merge, i);
        half[i] = json_string_value(part);
        len[i] = json_string_length(part);
    }
    return json_array_size(merge) == 2 && half[0] && half[1];
}

static int load_merge(Load *l, const json_t *merge, int32_t rank) {
    const char *half[2];
    size_t half_len[2];
    if (!merge_halves(merge, half, half_len))
        return err_set(l->err, E_FORMAT, "model.merges[%d]: expected two tokens", rank);
    uint8_t bytes[2 * TOK_BYTES_MAX];
    int32_t id[3];
    int len = 0;
    for (int i = 0; i < 2; i++) {
        int n = alphabet_bytes(l, half[i], half_len[i], bytes + len, TOK_BYTES_MAX);
        id[i] = n < 0 ? -1 : tok_vocab_get(l->t, bytes + len, (size_t)n);
        if (id[i] < 0)
            return err_set(l->err, E_FORMAT, "model.merges[%d]: the %s token is not in model.vocab",
                           rank, i ? "second" : "first");
        len += n;
    }
    id[2] = tok_vocab_get(l->t, bytes, (size_t)len);
    if (id[2] < 0)
        return err_set(l->err, E_FORMAT, "model.merges[%d]: the merged token is not in model.vocab",
                       rank);
    if (!tok_pairs_put(&l->t->merges, id[0], id[1], id[2], rank))
        return err_set(l->err, E_FORMAT, "model.merges[%d]: given twice", rank);
    return 0;
}

static int load_merges(Load *l, const json_t *model) {
    const json_t *list = json_object_get(model, "merges");
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n > TOK_MERGES_MAX)
        return err_set(l->err, E_FORMAT, "model.merges: expected a list of at most %d",
                       TOK_MERGES_MAX);
    tok_pairs_init(&l->t->merges, n);
    for (size_t i = 0; i < n; i++) {
        int rc = load_merge(l, json_array_get(list, i), (int32_t)i);
        if (rc)
            return rc;
    }
    return 0;
}

static int load_root(Load *l, const json_t *root) {
    const json_t *model = json_object_get(root, "model");
    if (!json_is_object(model))
        return err_set(l->err, E_FORMAT, "model: expected an object");
    int rc;
    if ((rc = load_model_kind(l, model)) || (rc = load_shell(l, root)) ||
        (rc = load_pre_tokenizer(l, root)) || (rc = load_added(l, root)) || (rc = load_vocab(l)))
        return rc;
    return load_merges(l, model);
}

int tok_parse(Tok **out, const char *json, size_t len, Err *err) {
    if (len > TOK_JSON_MAX)
        return err_set(err, E_LIMIT, "longer than %d bytes", TOK_JSON_MAX);
    json_error_t at;
    json_t *root = json_loadb(json, len, JSON_REJECT_DUPLICATES, &at);
    if (!root)
        return err_set(err, E_FORMAT, "line %d, column %d: %s", at.line, at.column, at.text);
    Load l = {.t = xcalloc(1, sizeof *l.t), .err = err};
    alphabet_init(&l);
    int rc = load_root(&l, root);
    buf_done(&l.pool);
    json_decref(root);
    if (rc) {
        tok_close(l.t);
        return rc;
    }
    *out = l.t;
    return 0;
}

/* Reads a whole file of at most TOK_JSON_MAX bytes. */
static int read_file(Buf *b, const char *path, Err *err) {
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_set(err, errno == ENOENT ? E_NOTFOUND : E_IO, "%s: %s", path, strerror(errno));
    char *chunk = xmalloc(1 << 16);
    size_t n;
    while (b->len <= TOK_JSON_MAX && (n = fread(chunk, 1, 1 << 16, f)) > 0)
        buf_put(b, chunk, n);
    int rc = ferror(f) ? err_set(err, E_IO, "%s: %s", path, strerror(errno)) : 0;
    free(chunk);
    fclose(f);
    return rc;
}

int tok_open(Tok **out, const char *path, Err *err) {
    Buf json = {0};
    int rc = read_file(&json, path, err);
    if (rc == 0) {
        rc = tok_parse(out, json.data ? json.data : "", json.len, err);
        if (rc)
            err_wrap(err, "%s", path);
    }
    buf_done(&json);
    return rc;
}

void tok_close(Tok *t) {
    if (!t)
        return;
    free(t->row);
    free(t->pool);
    free(t->vocab);
    tok_pairs_done(&t->merges);
    tok_pairs_done(&t->added[0].edges);
    tok_pairs_done(&t->added[1].edges);
    pcre2_code_free(t->regex);
    free(t);
}
