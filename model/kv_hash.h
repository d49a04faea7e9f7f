/* What a page of a request hashes to: the check that KV arrived as it was computed.
 *
 * XXH3-64 over the bytes of the page's rows [0, n_rows), layer slot after layer slot, each as
 * kv_layout_ranges lists them (latent rows, then index keys). Pools of equal kv_layout_hash give
 * equal hashes for equal KV, whatever their page counts and page ids. Host memory. A KvHash is used
 * by one thread at a time. */
#pragma once

#include "kernels/kv_layout.h"

#include <stdint.h>

typedef struct KvHash KvHash;

/* index_slot[layout->n_slots]: the index slot of each layer, -1 for none. Both are copied. */
KvHash *kv_hash_new(const KvLayout *layout, const int *index_slot);
void kv_hash_free(KvHash *h);

uint64_t kv_hash_page(KvHash *h, const void *pool, int32_t page, int n_rows);

/* Pages that n positions take. */
static inline int kv_pages_of(int64_t n_positions) {
    return (int)((n_positions + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
}

/* Rows of page `index` of a request that holds n positions. */
static inline int kv_page_rows(int64_t n_positions, int index) {
    int64_t left = n_positions - (int64_t)index * KV_PAGE_TOKENS;
    return left > KV_PAGE_TOKENS ? KV_PAGE_TOKENS : (int)left;
}
