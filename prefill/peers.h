/* The decodes that KV is written to: one KvPeer per generation, shared by its requests, kept for a
 * while after the last. Loop thread; the engine thread uses a KvPeer only while a step runs. */
#pragma once

#include "base/stat.h"
#include "proto/baton.pb-c.h"
#include "proto/kvlink.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct PrefillPeer PrefillPeer;
struct PrefillPeer {
    uint64_t generation;
    KvPeer *kv; /* NULL once disconnected */
    bool failed;
    int n_users;
    int n_owed;      /* users that still have something to queue: not disconnected before */
    int64_t idle_ms; /* since when nobody uses it */
    PrefillPeer *next;
};

typedef struct PrefillPeers {
    KvLink *link;
    PrefillPeer *list;
    int n;
    StatGauge *count;
} PrefillPeers;

enum { PREFILL_PEERS_MAX = 256, PREFILL_PEERS_KEEP_MS = 60000 };

/* The peer that a grant names, connected, with one more user. A peer that has failed is given up
 * and connected anew: one bad moment does not shut a decode out for ever. E_BUSY when there are too
 * many, else what the link says. */
int prefill_peers_get(PrefillPeers *all, const Baton__Grant *g, PrefillPeer **out, Err *err);
/* One user less; *p may be freed by the next sweep. */
void prefill_peers_put(PrefillPeer *p, int64_t now_ms);

/* Disconnects what has failed, and forgets what nobody has used for a while. Only while no step
 * runs. */
void prefill_peers_sweep(PrefillPeers *all, int64_t now_ms);
/* Forgets all. After the link is closed. */
void prefill_peers_done(PrefillPeers *all);
