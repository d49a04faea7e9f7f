/* Inside of the tokenizer: what its files share. Nobody else
 * includes this.
 *
 * A Tok is written by tok_load.c only and constant afterwards. A TokScratch belongs to one thread.
 */
#pragma once

#include "model/tok.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

enum {
    TOK_ROWS_MAX = 1 << 20, /* largest id + 1 */
    TOK_MERGES_MAX = 1 << 21,
    TOK_ADDED_MAX = 4096,      /* added tokens */
    TOK_ADDED_BYTES_MAX = 256, /* of one added token: bounds the look-ahead per byte of text */
    TOK_BYTES_MAX = 4096,      /* of one token of the vocabulary */
    TOK_REGEX_MAX = 4096,      /* bytes of the split regex */
    TOK_JSON_MAX = 256 << 20,  /* bytes of tokenizer.json */
    TOK_TEXT_MAX = 1 << 30,    /* bytes of one text */
    TOK_CACHE_SLOTS = 1 << 14, /* pieces remembered per scratch, 64 bytes each */
    TOK_CACHE_TEXT = 30,       /* longest piece that is remembered */
    TOK_CACHE_IDS = 8,         /* most ids of one */
};

enum { TOK_ROW_ADDED = 1, TOK_ROW_SPECIAL = 2 };

/* One id: its bytes in Tok.pool. len 0: the id holds no token. */
typedef struct TokRow {
    uint32_t at;
    uint16_t len;
    uint16_t flags;
} TokRow;

/* Open-addressing table from a pair of ids to two numbers. Used for merges, (left, right) -> (id,
 * rank), and for the edges of a trie of added tokens, (node, byte) -> (child, token or -1). a -1:
 * empty slot. */
typedef struct TokPair {
    int32_t a, b;
    int32_t to, info;
} TokPair;

typedef struct TokPairs {
    TokPair *slot; /* [mask + 1], at most half full */
    uint32_t mask, n;
} TokPairs;

void tok_pairs_init(TokPairs *p, size_t n_max);
void tok_pairs_done(TokPairs *p);
/* False when the pair is there already. */
bool tok_pairs_put(TokPairs *p, int32_t a, int32_t b, int32_t to, int32_t info);

static inline uint32_t tok_pairs_hash(int32_t a, int32_t b) {
    uint64_t x = ((uint64_t)(uint32_t)a << 32 | (uint32_t)b) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(x >> 32) ^ (uint32_t)(x >> 17);
}

/* The slot of a pair, or NULL. */
static inline TokPair *tok_pairs_get(const TokPairs *p, int32_t a, int32_t b) {
    for (uint32_t i = tok_pairs_hash(a, b) & p->mask;; i = (i + 1) & p->mask) {
        TokPair *s = &p->slot[i];
        if (s->a == a && s->b == b)
            return s;
        if (s->a < 0)
            return NULL;
    }
}

/* Added tokens of one class as a trie over bytes; node 0 is the root. */
typedef struct TokTrie {
    TokPairs edges;
    int32_t n_nodes;
    bool first[256]; /* bytes that begin a token */
} TokTrie;

/* False when the same bytes are there already. len > 0. */
bool tok_trie_put(TokTrie *trie, const char *bytes, size_t len, int32_t id);
/* Longest token that is a prefix of s[0, n): its id, with its bytes in *len, or -1. */
int32_t tok_trie_match(const TokTrie *trie, const uint8_t *s, size_t n, size_t *len);

struct Tok {
    TokRow *row; /* [n_rows] */
    int n_rows;
    char *pool;           /* bytes of all tokens, in no particular order */
    uint32_t bytes_max;   /* of the longest token */
    int n_vocab;          /* tokens that are not added ones */
    int32_t byte_id[256]; /* the token of each single byte; all present */
    TokPairs merges;
    int32_t *vocab; /* [vocab_mask + 1] ids of n_vocab tokens by hash of their bytes; -1 empty */
    uint32_t vocab_mask;
    bool ignore_merges; /* a piece that is a token of the vocabulary is that token, whatever the
                           merges say */
    TokTrie added[2];   /* in the order in which they apply: "normalized": false, then true */
    pcre2_code *regex;
};

void tok_vocab_init(Tok *t, size_t n_max);
/* Enters a row whose bytes are in the pool and not yet in the table. */
void tok_vocab_put(Tok *t, int32_t id);
/* Id of a token of the vocabulary by its bytes, or -1. */
int32_t tok_vocab_get(const Tok *t, const void *bytes, size_t len);

/* One remembered piece: a cache line. len 0: empty. */
typedef struct TokCached {
    uint8_t len, n_ids;
    char text[TOK_CACHE_TEXT];
    int32_t id[TOK_CACHE_IDS];
} TokCached;

/* One symbol of a long piece, as a doubly linked list; index = its first byte. */
typedef struct TokSymbol {
    int32_t id;   /* -1: merged into an earlier one */
    int32_t rank; /* of the merge with the next symbol; INT32_MAX: none */
    uint32_t prev, next;
} TokSymbol;

struct TokScratch {
    const Tok *tok; /* cached ids are of this tokenizer */
    TokCached *cache;
    TokSymbol *symbol; /* [symbol_cap] for long pieces */
    uint64_t *heap;    /* [heap_cap] of rank << 32 | index */
    size_t symbol_cap, heap_cap, n_heap;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *jit_stack; /* NULL without JIT */
};

/* Grows *ids for n more. */
void tok_ids_reserve(TokIds *ids, size_t n);

/* Compiles the regex of tokenizer.json. field names it in errors. */
int tok_regex_compile(pcre2_code **out, const char *regex, const char *field, Err *err);

/* The part of a scratch that the regex needs. */
void tok_split_init(TokScratch *s);
void tok_split_done(TokScratch *s);

/* A walk over the pieces of one text without added tokens. */
typedef struct TokSplit {
    const uint8_t *text;
    size_t len;
    size_t done;             /* bytes before this are handed out */
    size_t found, found_end; /* a match that waits behind a piece the regex skipped; empty: none */
} TokSplit;

/* text is valid UTF-8 and borrowed for the walk. */
void tok_split_start(TokScratch *s, TokSplit *split, const uint8_t *text, size_t len);
/* The next piece: returns 1 with *start < *end, 0 at the end of the text, or a code below 0. The
 * pieces cover the text without gaps. */
int tok_split_next(TokScratch *s, TokSplit *split, size_t *start, size_t *end, Err *err);

/* Appends the ids of one piece, at most len of them. */
void tok_bpe_piece(TokScratch *s, const uint8_t *piece, size_t len, TokIds *ids);
/* Gives back what long pieces needed when it is large. */
void tok_bpe_trim(TokScratch *s);

/* Looks at the UTF-8 character at s[0, n), n > 0. Above 0: its length. 0: s is a proper prefix of a
 * character. Below 0: minus the length of the maximal part that can never become valid, which
 * stands for one U+FFFD (Unicode 15.0 section 3.9, table 3-8). */
int tok_utf8_at(const uint8_t *s, size_t n);
