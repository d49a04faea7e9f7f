/* What a page of a request hashes to: the check that KV arrived as it was computed.
 *
 * The 32-bit words of the page's rows [0, n_rows), range after range as kv_layout_ranges lists them
 * (latent rows, then index keys, of each layer slot), are summed in pairs:
 *   sum over ranges and pairs of (w[2i] + k[2i]) * (w[2i+1] + k[2i+1]) mod 2^64
 * with factors mod 2^32, keys k that depend on the range and on i, and a last odd word paired with
 * 0. The order of summation does not matter, so that a GPU computes it as well as a host. This is
 * the NH of UMAC (Black et al., 1999) with fixed keys: for accidents, not against forgery. Pools of
 * equal kv_layout_hash give equal hashes for equal KV, whatever their page counts and page ids. No
 * state; any thread. */
#pragma once

#include "kernels/kv_layout.h"

#include <stdint.h>

/* The key of a range's first word; those of the others follow at this distance. */
#define KV_HASH_STEP 0x9E3779B1u

KV_FN uint32_t kv_hash_key(int slot, int range) {
    uint32_t k = (uint32_t)(slot * 3 + range + 1) * 0x85EBCA6Bu;
    k = (k ^ (k >> 15)) * 0xC2B2AE35u;
    return k ^ (k >> 13);
}

/* The term of words 2 * pair and 2 * pair + 1 of a range. */
KV_FN uint64_t kv_hash_pair(uint32_t key, uint32_t pair, uint32_t w0, uint32_t w1) {
    uint32_t k0 = key + 2 * pair * KV_HASH_STEP;
    return (uint64_t)(w0 + k0) * (uint64_t)(w1 + k0 + KV_HASH_STEP);
}

/* The hash from the sum of all terms. */
KV_FN uint64_t kv_hash_end(uint64_t sum, int n_rows) {
    sum ^= (uint64_t)(uint32_t)(n_rows + 1) * 0x9E3779B97F4A7C15ull;
    sum = (sum ^ (sum >> 30)) * 0xBF58476D1CE4E5B9ull;
    return sum ^ (sum >> 31);
}

#ifdef __cplusplus
extern "C" {
#endif
/* Of a page in host memory. index_slot[l->n_slots]: the index slot of each layer, -1 for none. */
uint64_t kv_hash_page(const KvLayout *l, const int *index_slot, const void *pool, int32_t page,
                      int n_rows);
#ifdef __cplusplus
}
#endif
