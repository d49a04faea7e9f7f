/* See kvlink_seal.h: a head with a hash over everything, then the bytes. Both ends are of one build
 * and byte order; the magic number carries the format's version. */
#include "proto/kvlink_seal.h"

#include "base/err.h"

#include <xxhash.h>

#include <string.h>

enum { MAGIC = 0x31564b42 }; /* "BKV1" */

typedef struct Head {
    uint32_t magic, kind;
    uint64_t pool_base, pool_bytes, len;
    uint64_t hash; /* of the bytes, seeded with that of the fields before */
} Head;

static uint64_t hash_of(const Head *h, const void *bytes) {
    return XXH64(bytes, h->len, XXH64(h, offsetof(Head, hash), 0));
}

void *kvlink_seal_pack(KvSealKind kind, uint64_t pool_base, uint64_t pool_bytes, const void *bytes,
                       size_t len, size_t *sealed_len) {
    Head h = {MAGIC, kind, pool_base, pool_bytes, len, 0};
    char *sealed = xmalloc(sizeof h + len);
    h.hash = hash_of(&h, bytes);
    memcpy(sealed, &h, sizeof h);
    memcpy(sealed + sizeof h, bytes, len);
    *sealed_len = sizeof h + len;
    return sealed;
}

int kvlink_seal_unpack(KvSealKind kind, uint64_t pool_base, uint64_t pool_bytes, const void *sealed,
                       size_t sealed_len, const void **bytes, size_t *len) {
    Head h;
    if (!sealed || sealed_len <= sizeof h)
        return E_FORMAT;
    const char *inner = (const char *)sealed + sizeof h;
    memcpy(&h, sealed, sizeof h);
    if (h.magic != MAGIC || h.kind != kind || h.len != sealed_len - sizeof h ||
        h.hash != hash_of(&h, inner))
        return E_FORMAT;
    if (h.pool_base != pool_base || h.pool_bytes != pool_bytes)
        return E_MISMATCH;
    *bytes = inner;
    *len = h.len;
    return 0;
}
