/* The tokenizer's face: encoding, incremental decoding and questions about single ids.
 *
 * A Tok is read only here and a TokScratch belongs to one thread. Encoding goes through three
 * layers: added tokens cut the text, runs of valid UTF-8 are split by the regex, merges turn each
 * piece into ids. */
#include "model/tok_int.h"

#include <string.h>

/* What the layers of one tok_encode share. */
typedef struct Encode {
    TokScratch *scratch;
    TokIds *ids;
    size_t n_max; /* of ids->n */
    Err *err;
} Encode;

static int too_many(const Encode *e) {
    return err_set(e->err, E_LIMIT, "text has more tokens than are left for it");
}

/* Splits valid UTF-8 and merges each piece. */
static int encode_valid(Encode *e, const uint8_t *text, size_t len) {
    TokSplit split;
    tok_split_start(e->scratch, &split, text, len);
    size_t start, end;
    int rc;
    while ((rc = tok_split_next(e->scratch, &split, &start, &end, e->err)) > 0) {
        tok_bpe_piece(e->scratch, text + start, end - start, e->ids);
        if (e->ids->n > e->n_max)
            return too_many(e);
    }
    return rc;
}

/* Length of the valid UTF-8 at the front of s[0, n). */
static size_t valid_prefix(const uint8_t *s, size_t n) {
    size_t at = 0;
    while (at < n) {
        uint64_t eight;
        if (n - at >= sizeof eight) {
            memcpy(&eight, s + at, sizeof eight);
            if (!(eight & 0x8080808080808080u)) {
                at += sizeof eight;
                continue;
            }
        }
        int step = tok_utf8_at(s + at, n - at);
        if (step <= 0)
            break;
        at += (size_t)step;
    }
    return at;
}

/* Text without added tokens. A byte that is not UTF-8 is a piece of its own, which the regex never
 * sees. */
static int encode_plain(Encode *e, const uint8_t *text, size_t len) {
    while (len) {
        size_t valid = valid_prefix(text, len);
        int rc = valid ? encode_valid(e, text, valid) : 0;
        if (rc < 0)
            return rc;
        text += valid;
        len -= valid;
        if (len) {
            if (e->ids->n == e->n_max)
                return too_many(e);
            tok_ids_reserve(e->ids, 1);
            e->ids->id[e->ids->n++] = e->scratch->tok->byte_id[*text++];
            len--;
        }
    }
    return 0;
}

/* Text in which the added tokens of class level and later ones count. The leftmost match wins, then
 * the longest. */
static int encode_added(Encode *e, int level, const uint8_t *text, size_t len) {
    if (level == 2)
        return encode_plain(e, text, len);
    const TokTrie *trie = &e->scratch->tok->added[level];
    size_t done = 0;
    for (size_t at = 0; at < len;) {
        size_t n;
        int32_t id = trie->first[text[at]] ? tok_trie_match(trie, text + at, len - at, &n) : -1;
        if (id < 0) {
            at++;
            continue;
        }
        int rc = encode_added(e, level + 1, text + done, at - done);
        if (rc < 0)
            return rc;
        if (e->ids->n == e->n_max)
            return too_many(e);
        tok_ids_reserve(e->ids, 1);
        e->ids->id[e->ids->n++] = id;
        done = at += n;
    }
    return encode_added(e, level + 1, text + done, len - done);
}

int tok_encode(const Tok *t, TokScratch *s, const char *text, size_t len, bool added,
               size_t max_ids, TokIds *ids, Err *err) {
    CHECK(s->tok == t);
    if (len > TOK_TEXT_MAX)
        return err_set(err, E_LIMIT, "text has %zu bytes, more than %d", len, TOK_TEXT_MAX);
    size_t n_before = ids->n;
    Encode e = {.scratch = s, .ids = ids, .err = err};
    e.n_max = max_ids < SIZE_MAX - n_before ? n_before + max_ids : SIZE_MAX;
    int rc;
    if (len / t->bytes_max > max_ids) /* too long even if all tokens were of the longest kind */
        rc = too_many(&e);
    else
        rc = encode_added(&e, added ? 0 : 2, (const uint8_t *)text, len);
    tok_bpe_trim(s);
    if (rc < 0)
        ids->n = n_before;
    return rc;
}

void tok_ids_done(TokIds *ids) {
    free(ids->id);
    *ids = (TokIds){0};
}

TokScratch *tok_scratch_new(const Tok *t) {
    TokScratch *s = xcalloc(1, sizeof *s);
    s->tok = t;
    s->cache = xaligned(TOK_CACHE_SLOTS * sizeof *s->cache);
    tok_split_init(s);
    return s;
}

void tok_scratch_free(TokScratch *s) {
    if (!s)
        return;
    tok_split_done(s);
    free(s->cache);
    free(s->symbol);
    free(s->heap);
    free(s);
}

int tok_size(const Tok *t) {
    return t->n_rows;
}

int tok_added_id(const Tok *t, const char *content) {
    size_t len = strlen(content);
    for (int level = 0; level < 2; level++) {
        size_t n;
        int32_t id = tok_trie_match(&t->added[level], (const uint8_t *)content, len, &n);
        if (id >= 0 && n == len)
            return id;
    }
    return -1;
}

static int row_flags(const Tok *t, int32_t id) {
    return id >= 0 && id < t->n_rows ? t->row[id].flags : 0;
}

bool tok_is_added(const Tok *t, int32_t id) {
    return row_flags(t, id) & TOK_ROW_ADDED;
}

bool tok_is_special(const Tok *t, int32_t id) {
    return row_flags(t, id) & TOK_ROW_SPECIAL;
}

const char *tok_bytes(const Tok *t, int32_t id, size_t *len) {
    if (id < 0 || id >= t->n_rows) {
        *len = 0;
        return "";
    }
    *len = t->row[id].len;
    return t->pool + t->row[id].at;
}

/* Gives out what is settled of the bytes that are held: characters, and U+FFFD for parts that can
 * never become one. */
static void decoder_settle(TokDecoder *d, Buf *out) {
    int at = 0, step;
    while (at < d->n_held && (step = tok_utf8_at(d->held + at, (size_t)(d->n_held - at))) != 0) {
        if (step > 0)
            buf_put(out, d->held + at, (size_t)step);
        else
            buf_puts(out, "\xef\xbf\xbd");
        at += step > 0 ? step : -step;
    }
    d->n_held -= at;
    memmove(d->held, d->held + at, (size_t)d->n_held);
}

void tok_decode(const Tok *t, TokDecoder *d, int32_t id, bool skip_special, Buf *out) {
    if (skip_special && tok_is_special(t, id))
        return;
    size_t len;
    const char *bytes = tok_bytes(t, id, &len);
    for (size_t i = 0; i < len; i++) {
        d->held[d->n_held++] = (uint8_t)bytes[i]; /* at most 3 are held before */
        decoder_settle(d, out);
    }
}

void tok_decode_end(TokDecoder *d, Buf *out) {
    if (d->n_held)
        buf_puts(out, "\xef\xbf\xbd"); /* a prefix of one character is one maximal part */
    d->n_held = 0;
}
