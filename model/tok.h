/* The tokenizer: byte-level BPE from tokenizer.json, as GLM uses it.
 *
 * A Tok is immutable after tok_open and may be used by any number of threads at once; each thread
 * encodes with a TokScratch of its own. Text is UTF-8; bytes that are not are encoded byte by byte,
 * as the byte-level alphabet allows. Added tokens are matched first, then the regex of
 * tokenizer.json splits, then merges run inside each piece. */
#pragma once

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Tok Tok;
typedef struct TokScratch TokScratch;

typedef struct TokIds {
    int32_t *id; /* heap, grown by tok_encode */
    size_t n, cap;
} TokIds;

/* Reads tokenizer.json. Refuses by name whatever is not byte-level BPE of this kind (a normalizer,
 * another model type, ...). */
int tok_open(Tok **out, const char *path, Err *err);
/* The same from memory. json need not be NUL-terminated. For tests and fuzzing. */
int tok_parse(Tok **out, const char *json, size_t len, Err *err);
void tok_close(Tok *t);

TokScratch *tok_scratch_new(const Tok *t);
void tok_scratch_free(TokScratch *s);

/* Appends the ids of text[0, len) to *ids. added: match added tokens such as "<|user|>" in the
 * text; without it they are plain text. E_LIMIT when this call would append more than max_ids; *ids
 * is then as before. Time is O(len log len). */
int tok_encode(const Tok *t, TokScratch *s, const char *text, size_t len, bool added,
               size_t max_ids, TokIds *ids, Err *err);
void tok_ids_done(TokIds *ids);

/* Number of rows that hold a token: largest id + 1. */
int tok_size(const Tok *t);
/* Id of an added token by its exact content, or -1. */
int tok_added_id(const Tok *t, const char *content);
bool tok_is_added(const Tok *t, int32_t id);
bool tok_is_special(const Tok *t, int32_t id);
/* The bytes of one token; *len 0 for an id that holds none. Borrowed from t. */
const char *tok_bytes(const Tok *t, int32_t id, size_t *len);

/* Incremental decoding: text comes out as soon as it is whole UTF-8; bytes that can never become
 * valid come out as U+FFFD. Zero-initialise; no clean-up needed. */
typedef struct TokDecoder {
    uint8_t held[4];
    int n_held;
} TokDecoder;

/* Appends to out what id completes. skip_special: special tokens give nothing. */
void tok_decode(const Tok *t, TokDecoder *d, int32_t id, bool skip_special, Buf *out);
/* Ends the text: what is still held becomes U+FFFD. */
void tok_decode_end(TokDecoder *d, Buf *out);
