/* See peers.h. */
#include "prefill/peers.h"

#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>

static int connect_peer(PrefillPeers *all, const Baton__Grant *g, PrefillPeer **out, Err *err) {
    KvRemote remote = {.address = g->kv_address.data,
                       .address_len = g->kv_address.len,
                       .rkey = g->kv_rkey.data,
                       .rkey_len = g->kv_rkey.len,
                       .base = g->kv_base,
                       .bytes = g->kv_bytes};
    KvPeer *kv;
    if (all->n == PREFILL_PEERS_MAX)
        return err_set(err, E_BUSY, "KV goes to %d decodes already", all->n);
    int rc = kvlink_connect(all->link, &remote, &kv, err);
    if (rc)
        return rc;
    PrefillPeer *p = xcalloc(1, sizeof *p);
    *p = (PrefillPeer){.generation = g->generation, .kv = kv, .next = all->list};
    all->list = p;
    all->n++;
    stat_set(all->count, all->n);
    *out = p;
    return 0;
}

int prefill_peers_get(PrefillPeers *all, const Baton__Grant *g, PrefillPeer **out, Err *err) {
    PrefillPeer *p = all->list;
    int rc = 0;
    while (p && (p->generation != g->generation || p->failed))
        p = p->next;
    if (!p)
        rc = connect_peer(all, g, &p, err);
    if (rc)
        return rc;
    p->n_users++;
    *out = p;
    return 0;
}

void prefill_peers_put(PrefillPeer *p, int64_t now_ms) {
    CHECK(p->n_users > 0);
    p->n_users--;
    p->idle_ms = now_ms;
}

void prefill_peers_sweep(PrefillPeers *all, int64_t now_ms) {
    for (PrefillPeer **at = &all->list; *at;) {
        PrefillPeer *p = *at;
        bool unused = p->n_users == 0 && now_ms - p->idle_ms >= PREFILL_PEERS_KEEP_MS;
        if (p->kv && p->n_owed == 0 && (p->failed || unused)) {
            LOG_INFO("decode of generation %016" PRIx64 ": %s, disconnected", p->generation,
                     p->failed ? "writing to it failed" : "not used for a while");
            kvlink_disconnect(all->link, p->kv);
            p->kv = NULL;
        }
        if (!p->kv && p->n_users == 0) {
            *at = p->next;
            free(p);
            all->n--;
        } else {
            at = &p->next;
        }
    }
    stat_set(all->count, all->n);
}

void prefill_peers_done(PrefillPeers *all) {
    for (PrefillPeer *p; (p = all->list);) {
        all->list = p->next;
        free(p);
    }
}
