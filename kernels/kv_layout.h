/* Where the KV of a token stands in a pool: facts and arithmetic, no state. Any thread.
 *
 * A pool is one block of memory. First the latent part: for each layer slot, for each page, 64
 * rows; then, on a 4096-byte border, the index keys: for each index slot, for each page, 64 keys. A
 * page of one slot is contiguous.
 *
 *   latent row   f32, bf16: kv_lora + rope numbers, rotated part last (interleaved pairs)
 *                fp8: kv_lora e4m3 bytes, kv_lora / 128 float scales (amax / 448), rope bf16
 * numbers index page   f32, bf16: 64 rows of index_dim numbers, rotated part first fp8: 64 x
 * index_dim e4m3 bytes, then 64 float scales (powers of two)
 */
#pragma once

#include "kernels/quant.h"

#include <stdint.h>

#ifdef __CUDACC__
#define KV_FN static __host__ __device__ inline
#else
#define KV_FN static inline
#endif

enum { KV_PAGE_TOKENS = 64, KV_SCALE_GROUP = 128, KV_ROW_MAX = 1024 /* kv_lora + rope */ };

typedef struct KvLayout {
    Dtype dtype; /* DT_F32, DT_BF16 or DT_F8E4M3 */
    int n_slots; /* layers that have a latent cache */
    int n_index; /* layers that have index keys */
    int kv_lora, rope, index_dim;
    int64_t n_pages;
} KvLayout;

/* Pages that n positions take. */
KV_FN int kv_pages_of(int64_t n_positions) {
    return (int)((n_positions + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
}

/* Rows of page `index` of a request that holds n positions. */
KV_FN int kv_page_rows(int64_t n_positions, int index) {
    int64_t left = n_positions - (int64_t)index * KV_PAGE_TOKENS;
    return left > KV_PAGE_TOKENS ? KV_PAGE_TOKENS : (int)left;
}

typedef struct KvRange {
    uint64_t offset, bytes; /* within the pool */
} KvRange;

KV_FN uint64_t kv_latent_row_bytes(const KvLayout *l) {
    uint64_t numbers = (uint64_t)(l->kv_lora + l->rope);
    switch (l->dtype) {
    case DT_F32:
        return 4 * numbers;
    case DT_BF16:
        return 2 * numbers;
    default:
        return (uint64_t)l->kv_lora + 4u * (uint64_t)(l->kv_lora / KV_SCALE_GROUP) +
               2u * (uint64_t)l->rope;
    }
}

KV_FN uint64_t kv_index_page_bytes(const KvLayout *l) {
    uint64_t per_key = l->dtype == DT_F32    ? 4u * (uint64_t)l->index_dim
                       : l->dtype == DT_BF16 ? 2u * (uint64_t)l->index_dim
                                             : (uint64_t)l->index_dim + 4;
    return KV_PAGE_TOKENS * per_key;
}

KV_FN uint64_t kv_latent_page_bytes(const KvLayout *l) {
    return KV_PAGE_TOKENS * kv_latent_row_bytes(l);
}

KV_FN uint64_t kv_latent_page_offset(const KvLayout *l, int slot, int64_t page) {
    return ((uint64_t)slot * (uint64_t)l->n_pages + (uint64_t)page) * kv_latent_page_bytes(l);
}

KV_FN uint64_t kv_index_part_offset(const KvLayout *l) {
    uint64_t latent = (uint64_t)l->n_slots * (uint64_t)l->n_pages * kv_latent_page_bytes(l);
    return (latent + 4095) & ~(uint64_t)4095;
}

KV_FN uint64_t kv_index_page_offset(const KvLayout *l, int index_slot, int64_t page) {
    return kv_index_part_offset(l) +
           ((uint64_t)index_slot * (uint64_t)l->n_pages + (uint64_t)page) * kv_index_page_bytes(l);
}

KV_FN uint64_t kv_pool_bytes(const KvLayout *l) {
    return kv_index_part_offset(l) +
           (uint64_t)l->n_index * (uint64_t)l->n_pages * kv_index_page_bytes(l);
}

/* Bytes of one page over all slots: what one page of a request costs. */
KV_FN uint64_t kv_page_total_bytes(const KvLayout *l) {
    return (uint64_t)l->n_slots * kv_latent_page_bytes(l) +
           (uint64_t)l->n_index * kv_index_page_bytes(l);
}

/* The ranges that rows [row0, row1) of a page occupy in one layer: the latent rows, and the index
 * keys when index_slot >= 0. At most 3. The ranges of two layouts that differ in n_pages only have
 * equal lengths in equal order. */
KV_FN int kv_layout_ranges(const KvLayout *l, int slot, int index_slot, int64_t page, int row0,
                           int row1, KvRange out[3]) {
    int n = 0;
    uint64_t row = kv_latent_row_bytes(l), r0 = (uint64_t)row0, rows = (uint64_t)(row1 - row0);
    out[n++] = (KvRange){kv_latent_page_offset(l, slot, page) + r0 * row, rows * row};
    if (index_slot < 0)
        return n;
    uint64_t base = kv_index_page_offset(l, index_slot, page), dim = (uint64_t)l->index_dim;
    if (l->dtype == DT_F8E4M3) {
        out[n++] = (KvRange){base + r0 * dim, rows * dim};
        out[n++] = (KvRange){base + KV_PAGE_TOKENS * dim + r0 * 4, rows * 4};
    } else {
        uint64_t key = dim * (l->dtype == DT_F32 ? 4u : 2u);
        out[n++] = (KvRange){base + r0 * key, rows * key};
    }
    return n;
}

/* Equal for pools whose bytes mean the same, whatever their page count (FNV-1a over the fields). */
KV_FN uint64_t kv_layout_hash(const KvLayout *l) {
    const int field[7] = {2,          (int)l->dtype, l->n_slots,  l->n_index,
                          l->kv_lora, l->rope,       l->index_dim};
    uint64_t h = 0xcbf29ce484222325ull;
    for (int i = 0; i < 7; i++)
        h = (h ^ (uint64_t)(uint32_t)field[i]) * 0x100000001b3ull;
    return h;
}
