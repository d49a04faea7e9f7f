/* The look-up tables of a tokenizer: pairs of ids, the trie of added tokens, tokens by their bytes,
 * UTF-8. Pure; any thread. */
#include "model/tok_int.h"

#include <xxhash.h>

#include <string.h>

void tok_pairs_init(TokPairs *p, size_t n_max) {
    uint32_t slots = 16;
    while (slots < n_max * 2)
        slots *= 2;
    p->slot = xmalloc(slots * sizeof *p->slot);
    memset(p->slot, 0xff, slots * sizeof *p->slot);
    p->mask = slots - 1;
    p->n = 0;
}

void tok_pairs_done(TokPairs *p) {
    free(p->slot);
    *p = (TokPairs){0};
}

bool tok_pairs_put(TokPairs *p, int32_t a, int32_t b, int32_t to, int32_t info) {
    CHECK(a >= 0 && p->n * 2 <= p->mask);
    uint32_t i = tok_pairs_hash(a, b) & p->mask;
    for (; p->slot[i].a >= 0; i = (i + 1) & p->mask)
        if (p->slot[i].a == a && p->slot[i].b == b)
            return false;
    p->slot[i] = (TokPair){.a = a, .b = b, .to = to, .info = info};
    p->n++;
    return true;
}

bool tok_trie_put(TokTrie *trie, const char *bytes, size_t len, int32_t id) {
    trie->first[(uint8_t)bytes[0]] = true;
    TokPair *edge = NULL;
    for (size_t i = 0; i < len; i++) {
        int32_t node = edge ? edge->to : 0;
        edge = tok_pairs_get(&trie->edges, node, (uint8_t)bytes[i]);
        if (!edge) {
            tok_pairs_put(&trie->edges, node, (uint8_t)bytes[i], ++trie->n_nodes, -1);
            edge = tok_pairs_get(&trie->edges, node, (uint8_t)bytes[i]);
        }
    }
    if (edge->info >= 0)
        return false;
    edge->info = id;
    return true;
}

int32_t tok_trie_match(const TokTrie *trie, const uint8_t *s, size_t n, size_t *len) {
    int32_t id = -1, node = 0;
    for (size_t i = 0; i < n; i++) {
        const TokPair *edge = tok_pairs_get(&trie->edges, node, s[i]);
        if (!edge)
            break;
        if (edge->info >= 0) {
            id = edge->info;
            *len = i + 1;
        }
        node = edge->to;
    }
    return id;
}

void tok_vocab_init(Tok *t, size_t n_max) {
    uint32_t slots = 16;
    while (slots < n_max * 2)
        slots *= 2;
    t->vocab = xmalloc(slots * sizeof *t->vocab);
    memset(t->vocab, 0xff, slots * sizeof *t->vocab);
    t->vocab_mask = slots - 1;
}

/* The slot that holds the token with these bytes, or the empty one where it belongs. */
static int32_t *vocab_slot(const Tok *t, const void *bytes, size_t len) {
    for (uint32_t i = (uint32_t)XXH3_64bits(bytes, len);; i++) {
        int32_t *slot = &t->vocab[i & t->vocab_mask];
        if (*slot < 0)
            return slot;
        const TokRow *row = &t->row[*slot];
        if (row->len == len && memcmp(t->pool + row->at, bytes, len) == 0)
            return slot;
    }
}

void tok_vocab_put(Tok *t, int32_t id) {
    *vocab_slot(t, t->pool + t->row[id].at, t->row[id].len) = id;
}

int32_t tok_vocab_get(const Tok *t, const void *bytes, size_t len) {
    return *vocab_slot(t, bytes, len);
}

/* Number of bytes of the character that a lead byte announces, and the range of its second byte
 * (Unicode 15.0, table 3-7). 0: no lead. */
static int utf8_lead(uint8_t lead, uint8_t *low, uint8_t *high) {
    *low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    *high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

int tok_utf8_at(const uint8_t *s, size_t n) {
    uint8_t low, high;
    int want = utf8_lead(s[0], &low, &high);
    if (want == 0)
        return -1;
    for (int i = 1; i < want; i++) {
        if ((size_t)i == n)
            return 0;
        if (s[i] < low || s[i] > high)
            return -i;
        low = 0x80;
        high = 0xbf;
    }
    return want;
}
