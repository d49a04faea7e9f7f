/* See kv_hash.h. */
#include "model/kv_hash.h"

#include "base/err.h"

#include <xxhash.h>

#include <stdlib.h>
#include <string.h>

struct KvHash {
    KvLayout layout;
    int *index_slot; /* [n_slots] */
    XXH3_state_t *state;
};

KvHash *kv_hash_new(const KvLayout *layout, const int *index_slot) {
    KvHash *h = xcalloc(1, sizeof *h);
    size_t bytes = (size_t)layout->n_slots * sizeof *index_slot;
    h->layout = *layout;
    h->index_slot = xmalloc(bytes);
    memcpy(h->index_slot, index_slot, bytes);
    h->state = XXH3_createState();
    CHECK(h->state);
    return h;
}

void kv_hash_free(KvHash *h) {
    if (!h)
        return;
    XXH3_freeState(h->state);
    free(h->index_slot);
    free(h);
}

uint64_t kv_hash_page(KvHash *h, const void *pool, int32_t page, int n_rows) {
    CHECK(page >= 0 && page < h->layout.n_pages && n_rows >= 0 && n_rows <= KV_PAGE_TOKENS);
    XXH3_64bits_reset(h->state);
    for (int slot = 0; slot < h->layout.n_slots; slot++) {
        KvRange range[3];
        int n = kv_layout_ranges(&h->layout, slot, h->index_slot[slot], page, 0, n_rows, range);
        for (int i = 0; i < n; i++)
            XXH3_64bits_update(h->state, (const char *)pool + range[i].offset, range[i].bytes);
    }
    return XXH3_64bits_digest(h->state);
}
