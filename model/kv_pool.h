/* Pages of a KV pool: who has them. Bookkeeping only; the bytes belong to whoever owns the pool's
 * memory. One thread (the loop).
 *
 * A page is free, used, or in quarantine: its address was given to a peer that may still write into
 * it. free + used + quarantined == total. */
#pragma once

#include "base/err.h"

#include <stdint.h>

typedef struct KvPool KvPool;

KvPool *kv_pool_new(int n_pages);
/* CHECKs that every page has come back. */
void kv_pool_free(KvPool *p);

/* Takes n pages, lowest ids first; E_NOMEM with the numbers when fewer are free (none is taken). */
int kv_pool_take(KvPool *p, int n, int32_t *page, Err *err);
/* Gives n used pages back. CHECKs that they are used. */
void kv_pool_give(KvPool *p, const int32_t *page, int n);
/* Used pages that a writer may still reach: not reused until kv_pool_release. */
void kv_pool_quarantine(KvPool *p, const int32_t *page, int n);
/* Quarantined pages whose writer is proven quiet become free. */
void kv_pool_release(KvPool *p, const int32_t *page, int n);

int kv_pool_total(const KvPool *p);
int kv_pool_n_free(const KvPool *p);
int kv_pool_n_used(const KvPool *p);
int kv_pool_n_quarantined(const KvPool *p);
/* Recounts from the page states and CHECKs the sum; for tests and idle moments. */
void kv_pool_check(const KvPool *p);
