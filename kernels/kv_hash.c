/* See kv_hash.h. */
#include "kernels/kv_hash.h"

#include "base/err.h"

#include <string.h>

static uint64_t sum_range(const uint8_t *p, uint64_t bytes, uint32_t key) {
    uint32_t n = (uint32_t)(bytes / 8), w[2] = {0};
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        memcpy(w, p + 8 * (size_t)i, 8);
        sum += kv_hash_pair(key, i, w[0], w[1]);
    }
    if (bytes % 8) {
        memcpy(w, p + 8 * (size_t)n, 4);
        sum += kv_hash_pair(key, n, w[0], 0);
    }
    return sum;
}

uint64_t kv_hash_page(const KvLayout *l, const int *index_slot, const void *pool, int32_t page,
                      int n_rows) {
    uint64_t sum = 0;
    CHECK(page >= 0 && page < l->n_pages && n_rows >= 0 && n_rows <= KV_PAGE_TOKENS);
    for (int slot = 0; slot < l->n_slots; slot++) {
        KvRange range[3];
        int n = kv_layout_ranges(l, slot, index_slot[slot], page, 0, n_rows, range);
        for (int i = 0; i < n; i++) {
            CHECK(range[i].bytes % 4 == 0);
            sum += sum_range((const uint8_t *)pool + range[i].offset, range[i].bytes,
                             kv_hash_key(slot, i));
        }
    }
    return kv_hash_end(sum, n_rows);
}
