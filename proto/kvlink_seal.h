/* An envelope for the two opaque byte strings that a KvLink publishes: its worker address and the
 * key of its pool. UCX asserts on an address that it cannot read and writes wherever a key and an
 * address tell it to, so that what arrives damaged, cut or mixed up must be refused before UCX sees
 * it. It guards against accidents; who may speak on the control plane is decided elsewhere. Pure
 * functions, any thread. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef enum KvSealKind { KV_SEAL_ADDRESS = 1, KV_SEAL_KEY } KvSealKind;

/* Returns a new envelope around `bytes`, which belong to a pool of pool_bytes at pool_base; the
 * caller frees it. */
void *kvlink_seal_pack(KvSealKind kind, uint64_t pool_base, uint64_t pool_bytes, const void *bytes,
                       size_t len, size_t *sealed_len);

/* Sets *bytes (inside `sealed`, any alignment) and *len. E_FORMAT when the envelope is not whole or
 * of another kind, E_MISMATCH when it belongs to another pool. */
int kvlink_seal_unpack(KvSealKind kind, uint64_t pool_base, uint64_t pool_bytes, const void *sealed,
                       size_t sealed_len, const void **bytes, size_t *len);
