/* Byte-pair merges inside one piece of text, and the cache of pieces seen before.
 *
 * Everything here works on the caller's TokScratch, so any number of threads run it at once. Maths:
 * of all neighbouring pairs that have a merge, the one of lowest rank goes first, the leftmost of
 * equals; repeat until no pair has a merge (Sennrich et al. 2016, section 3.2). */
#include "model/tok_int.h"

#include <xxhash.h>

#include <string.h>

enum {
    SHORT_MAX = 64,      /* bytes of a piece for which scanning beats a heap */
    KEEP_MAX = 1 << 16,  /* symbols that a scratch keeps between texts */
    NO_RANK = INT32_MAX, /* of a pair without a merge */
    LAST = 0x7fffffff,   /* "next" of the last symbol */
};

void tok_ids_reserve(TokIds *ids, size_t n) {
    if (ids->cap - ids->n >= n)
        return;
    size_t cap = ids->cap + ids->cap / 2;
    if (cap < ids->n + n)
        cap = ids->n + n;
    ids->id = xrealloc(ids->id, cap * sizeof *ids->id);
    ids->cap = cap;
}

static int32_t pair_rank(const Tok *t, int32_t left, int32_t right) {
    const TokPair *merge = tok_pairs_get(&t->merges, left, right);
    return merge ? merge->info : NO_RANK;
}

/* A short piece: rank[i] is that of the pair (i, i + 1). Scanning for the lowest is O(len^2) in a
 * few cache lines. Returns the ids' number. */
static int merge_short(const Tok *t, const uint8_t *piece, int len, int32_t *id) {
    int32_t rank[SHORT_MAX];
    int n = len;
    for (int i = 0; i < n; i++)
        id[i] = t->byte_id[piece[i]];
    for (int i = 0; i + 1 < n; i++)
        rank[i] = pair_rank(t, id[i], id[i + 1]);
    while (n > 1) {
        int best = 0;
        for (int i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == NO_RANK)
            break;
        id[best] = tok_pairs_get(&t->merges, id[best], id[best + 1])->to;
        n--;
        memmove(id + best + 1, id + best + 2, (size_t)(n - best - 1) * sizeof *id);
        memmove(rank + best, rank + best + 1, (size_t)(n - best - 1) * sizeof *rank);
        if (best > 0)
            rank[best - 1] = pair_rank(t, id[best - 1], id[best]);
        if (best + 1 < n)
            rank[best] = pair_rank(t, id[best], id[best + 1]);
    }
    return n;
}

/* Moves the top of a heap of n down to where it belongs. */
static void heap_sink(uint64_t *heap, size_t n) {
    uint64_t x = heap[0];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= x)
            break;
        heap[i] = heap[child];
    }
    heap[i] = x;
}

static void heap_push(TokScratch *s, uint64_t x) {
    if (s->n_heap == s->heap_cap) {
        s->heap_cap = s->heap_cap ? s->heap_cap * 2 : 1024;
        s->heap = xrealloc(s->heap, s->heap_cap * sizeof *s->heap);
    }
    size_t i = s->n_heap++;
    for (; i > 0 && s->heap[(i - 1) / 2] > x; i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = x;
}

static uint64_t heap_pop(TokScratch *s) {
    uint64_t top = s->heap[0];
    s->heap[0] = s->heap[--s->n_heap];
    if (s->n_heap > 1)
        heap_sink(s->heap, s->n_heap);
    return top;
}

static void pair_update(TokScratch *s, uint32_t i) {
    TokSymbol *left = &s->symbol[i];
    left->rank =
        left->next == LAST ? NO_RANK : pair_rank(s->tok, left->id, s->symbol[left->next].id);
}

/* Queues the pair that begins at i if it goes before both its neighbours. Only such a pair can be
 * the next to merge, so the others wait until a neighbour changes; in a run of one character that
 * leaves one pair queued instead of all. */
static void pair_offer(TokScratch *s, uint32_t i) {
    if (i == LAST)
        return;
    const TokSymbol *left = &s->symbol[i];
    if (left->rank != NO_RANK && (left->prev == LAST || s->symbol[left->prev].rank > left->rank) &&
        (left->next == LAST || s->symbol[left->next].rank >= left->rank))
        heap_push(s, (uint64_t)left->rank << 32 | i);
}

/* Lays the bytes of a piece out as a list of symbols and queues the pairs. */
static void symbols_init(TokScratch *s, const uint8_t *piece, uint32_t len) {
    if (s->symbol_cap < len) {
        free(s->symbol);
        s->symbol_cap = len;
        s->symbol = xmalloc(len * sizeof *s->symbol);
    }
    for (uint32_t i = 0; i < len; i++)
        s->symbol[i] = (TokSymbol){.id = s->tok->byte_id[piece[i]],
                                   .prev = i ? i - 1 : LAST,
                                   .next = i + 1 < len ? i + 1 : LAST};
    for (uint32_t i = 0; i < len; i++)
        pair_update(s, i);
    s->n_heap = 0;
    for (uint32_t i = 0; i < len; i++)
        pair_offer(s, i);
}

/* Merges the symbol at i with the next and looks again at the pairs that this touches and at their
 * neighbours. */
static void merge_at(TokScratch *s, uint32_t i) {
    TokSymbol *left = &s->symbol[i], *right = &s->symbol[left->next];
    left->id = tok_pairs_get(&s->tok->merges, left->id, right->id)->to;
    right->id = -1;
    left->next = right->next;
    pair_update(s, i);
    if (left->next != LAST)
        s->symbol[left->next].prev = i;
    if (left->prev != LAST) {
        pair_update(s, left->prev);
        pair_offer(s, s->symbol[left->prev].prev);
        pair_offer(s, left->prev);
    }
    pair_offer(s, i);
    pair_offer(s, left->next);
}

/* A long piece, O(len log len): a heap of pairs by rank, then position. An entry is stale when its
 * symbol is gone or the pair there has another rank by now; an equal rank means the same merge,
 * because no two merges share one. */
static void merge_long(TokScratch *s, const uint8_t *piece, uint32_t len, TokIds *ids) {
    symbols_init(s, piece, len);
    while (s->n_heap) {
        uint64_t top = heap_pop(s);
        uint32_t i = (uint32_t)top;
        if (s->symbol[i].id >= 0 && s->symbol[i].rank == (int32_t)(top >> 32))
            merge_at(s, i);
    }
    for (uint32_t i = 0; i != LAST; i = s->symbol[i].next) {
        tok_ids_reserve(ids, 1);
        ids->id[ids->n++] = s->symbol[i].id;
    }
}

void tok_bpe_trim(TokScratch *s) {
    if (s->symbol_cap > KEEP_MAX) {
        free(s->symbol);
        s->symbol = NULL;
        s->symbol_cap = 0;
    }
    if (s->heap_cap > KEEP_MAX) {
        free(s->heap);
        s->heap = NULL;
        s->heap_cap = 0;
    }
}

/* Merges one piece of at most SHORT_MAX bytes through the cache. */
static void piece_short(TokScratch *s, const uint8_t *piece, size_t len, TokIds *ids) {
    TokCached *slot = NULL;
    if (len <= TOK_CACHE_TEXT) {
        slot = &s->cache[XXH3_64bits(piece, len) & (TOK_CACHE_SLOTS - 1)];
        if (slot->len == len && memcmp(slot->text, piece, len) == 0) {
            tok_ids_reserve(ids, slot->n_ids);
            memcpy(ids->id + ids->n, slot->id, slot->n_ids * sizeof *slot->id);
            ids->n += slot->n_ids;
            return;
        }
    }
    int32_t id[SHORT_MAX];
    int n = merge_short(s->tok, piece, (int)len, id);
    tok_ids_reserve(ids, (size_t)n);
    memcpy(ids->id + ids->n, id, (size_t)n * sizeof *id);
    ids->n += (size_t)n;
    if (slot && n <= TOK_CACHE_IDS) {
        slot->len = (uint8_t)len;
        slot->n_ids = (uint8_t)n;
        memcpy(slot->text, piece, len);
        memcpy(slot->id, id, (size_t)n * sizeof *id);
    }
}

void tok_bpe_piece(TokScratch *s, const uint8_t *piece, size_t len, TokIds *ids) {
    if (s->tok->ignore_merges && len <= s->tok->bytes_max) {
        int32_t id = tok_vocab_get(s->tok, piece, len);
        if (id >= 0) {
            tok_ids_reserve(ids, 1);
            ids->id[ids->n++] = id;
            return;
        }
    }
    if (len <= SHORT_MAX)
        piece_short(s, piece, len, ids);
    else
        merge_long(s, piece, (uint32_t)len, ids);
}
