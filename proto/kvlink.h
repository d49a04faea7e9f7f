/* The data plane: one-sided writes of KV bytes into another process's pool, then a notice.
 *
 * A KvLink owns a UCX worker and the thread that progresses it; every UCX object is touched by that
 * thread alone. Calls below may come from any thread: they enqueue and return. Callbacks run on the
 * daemon's loop. Order: the bytes of every put to a peer that precede a notice are in the peer's
 * memory before the notice is delivered there (flush, then send), whatever lanes they took.
 *
 * A link is a vtable, so that a fault proxy (kvlink_fault.h) can stand in front of the real one.
 * A peer that dies costs its partners an error and nothing else, but for one gap: UCX 1.13 aborts a
 * receiver whose writer vanishes in the milliseconds in which it connects over TCP. A link that is
 * closed waits for that moment to pass; a process that is killed cannot.
 * UCX gives no protection against late writes into memory that we registered: generations and page
 * quarantine are the caller's. */
#pragma once

#include "base/err.h"
#include "base/loop.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KVLINK_NOTICE_MAX = 1 << 20 };

typedef struct KvLink KvLink;
typedef struct KvPeer KvPeer;

/* What a writer needs to know of the memory it writes into; all borrowed. */
typedef struct KvRemote {
    const void *address; /* the owner's worker address, sealed (kvlink_seal.h) */
    size_t address_len;
    const void *rkey; /* and the key of its pool, sealed with base and bytes */
    size_t rkey_len;
    uint64_t base;  /* the owner's virtual address of the pool */
    uint64_t bytes; /* and its size: puts beyond it are refused */
} KvRemote;

/* One contiguous piece: from offset `local` of the link's pool to offset `remote` of the peer's. */
typedef struct KvSeg {
    uint64_t local, remote, bytes;
} KvSeg;

/* status 0 or E_PEER / E_DEADLINE / E_CANCELED */
typedef void (*KvDoneFn)(void *arg, int status);
typedef void (*KvNoticeFn)(void *arg, const void *bytes, size_t len);

typedef struct KvLinkOps {
    void *(*pool)(KvLink *l, uint64_t *bytes);
    void (*describe)(KvLink *l, KvRemote *out);
    int (*connect)(KvLink *l, const KvRemote *remote, KvPeer **out, Err *err);
    void (*disconnect)(KvLink *l, KvPeer *peer);
    int (*put)(KvLink *l, KvPeer *peer, const KvSeg *seg, int n, Err *err);
    int (*notify)(KvLink *l, KvPeer *peer, const void *bytes, size_t len, KvDoneFn done, void *arg,
                  Err *err);
    int (*flush)(KvLink *l, KvPeer *peer, KvDoneFn done, void *arg, Err *err);
    void (*close)(KvLink *l);
} KvLinkOps;

struct KvLink {
    const KvLinkOps *ops;
};

/* A GPU's memory as a pool: the caller's, from before kvlink_open until after kvlink_close. The
 * functions may be called from any thread: enter readies it for UCX's own calls, copy moves bytes
 * between the pool and host memory, or within the pool, and returns when they are there. */
typedef struct KvMemory {
    void *at; /* NULL: the link allocates host memory, zeroed, shareable on the host */
    void (*enter)(void *arg);
    void (*copy)(void *arg, void *to, const void *from, uint64_t bytes);
    void *arg;
} KvMemory;

typedef struct KvLinkConf {
    Loop *loop;          /* where callbacks run */
    uint64_t pool_bytes; /* memory that peers may write into and from which puts read */
    KvMemory memory;
    const char *transports; /* UCX_TLS by config: "" lets UCX choose. A link between GPUs takes what
                               writes from GPU to GPU; only transports that name tcp allow copies
                               through host memory instead */
    const char *devices;    /* UCX_NET_DEVICES; "" for all */
    int64_t timeout_ms;   /* a put, flush or notice that takes longer fails with E_DEADLINE and its
                             peer counts as failed */
    KvNoticeFn on_notice; /* called on the loop for each notice received */
    void *arg;
} KvLinkConf;

/* Opens a UCX link. E_IO or E_UNSUPPORTED with UCX's word, or that UCX does not know the memory for
 * a GPU's. */
int kvlink_open(KvLink **out, const KvLinkConf *conf, Err *err);

/* Measures a self-transfer of `bytes` through the link's own endpoint, in GB/s. At start only,
 * blocking; deadline 5 s. */
int kvlink_selftest(KvLink *l, uint64_t bytes, double *gb_per_s, Err *err);
/* The transport that UCX took for the last self-test, such as "posix" or "tcp"; "" when it did not
 * say. Borrowed until close. */
const char *kvlink_selftest_transport(KvLink *l);

/* Address of the pool in this process and its size. */
static inline void *kvlink_pool(KvLink *l, uint64_t *bytes) {
    return l->ops->pool(l, bytes);
}

/* What others need to write into the pool: lasts as long as the link. */
static inline void kvlink_describe(KvLink *l, KvRemote *out) {
    l->ops->describe(l, out);
}

/* Makes a peer. E_FORMAT or E_MISMATCH when *remote is not, whole, what its owner described; that
 * the owner cannot be reached shows at the first put. One peer per remote process and generation:
 * the caller caches them. */
static inline int kvlink_connect(KvLink *l, const KvRemote *remote, KvPeer **out, Err *err) {
    return l->ops->connect(l, remote, out, err);
}

/* Closes by force: pending work completes with E_CANCELED, then the peer is freed. After the last
 * of those callbacks nothing is written. */
static inline void kvlink_disconnect(KvLink *l, KvPeer *peer) {
    l->ops->disconnect(l, peer);
}

/* Queues n writes (seg is copied). The local bytes must not change until a later flush or notify is
 * done. E_LIMIT when a segment leaves either pool, E_BUSY when too much is queued, E_PEER when the
 * peer has failed. */
static inline int kvlink_put(KvLink *l, KvPeer *peer, const KvSeg *seg, int n, Err *err) {
    return l->ops->put(l, peer, seg, n, err);
}

/* After all earlier puts to this peer have arrived, delivers bytes (copied, at most
 * KVLINK_NOTICE_MAX) to its on_notice. done is called once, when sent or failed; puts before it
 * have ended by then. */
static inline int kvlink_notify(KvLink *l, KvPeer *peer, const void *bytes, size_t len,
                                KvDoneFn done, void *arg, Err *err) {
    return l->ops->notify(l, peer, bytes, len, done, arg, err);
}

/* done is called when all earlier puts to this peer have ended, well or badly. */
static inline int kvlink_flush(KvLink *l, KvPeer *peer, KvDoneFn done, void *arg, Err *err) {
    return l->ops->flush(l, peer, done, arg, err);
}

static inline void kvlink_close(KvLink *l) {
    if (l)
        l->ops->close(l);
}
