/* See peers.h. */
#include "router/peers.h"

#include "base/log.h"
#include "base/stat.h"
#include "proto/hello.h"
#include "router/route.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_PAGE_TOKENS = 64 };

/* One role's instances. */
typedef struct Group {
    Peer *peer; /* [n], in place for ever */
    int n;
} Group;

struct Peers {
    PeersCallbacks cb;
    Group prefill, decode;
    uint64_t pairs[ROUTE_MAX_NODES]; /* bit d of pairs[p]: their hellos fit */
    Err misfit;                      /* why the last pair that does not fit does not */
    StatGauge *up_prefill, *up_decode;
    bool closing;
};

static const char *role_name(const Peer *p) {
    return p->role == BATON__ROLE__ROLE_PREFILL ? "prefill" : "decode";
}

/* ---- state ---- */

static void refresh_pairs(Peers *all) {
    for (int p = 0; p < all->prefill.n; p++) {
        const Peer *prefill = &all->prefill.peer[p];
        all->pairs[p] = 0;
        for (int d = 0; d < all->decode.n; d++) {
            Peer *decode = &all->decode.peer[d];
            if (!prefill->hello || !decode->hello)
                continue;
            if (hello_check_pair(prefill->hello, decode->hello, &all->misfit) == 0)
                all->pairs[p] |= 1ull << d;
            else
                LOG_WARN("%s and %s do not fit: %s", prefill->endpoint, decode->endpoint,
                         all->misfit.text);
        }
    }
}

static int count_up(const Group *g) {
    int n = 0;
    for (int i = 0; i < g->n; i++)
        n += g->peer[i].state == PEER_UP;
    return n;
}

static void peer_set(Peers *all, Peer *p, PeerState state, const char *reason) {
    p->state = state;
    snprintf(p->reason, sizeof p->reason, "%s", reason ? reason : "");
    stat_set(all->up_prefill, count_up(&all->prefill));
    stat_set(all->up_decode, count_up(&all->decode));
}

static void peer_forget(Peers *all, Peer *p) {
    hello_free(p->hello);
    p->hello = NULL;
    p->bus = NULL;
    p->ready = false;
    p->free_pages = p->total_pages = p->load = 0;
    p->queued_tokens = 0;
    p->sent_pages = p->sent_requests = 0;
    p->sent_tokens = 0;
    refresh_pairs(all);
}

/* ---- from the bus ---- */

static bool wrong_role(const Peer *p) {
    return p->hello && p->hello->role != p->role;
}

static void on_up(Peers *all, Peer *p, BusPeer *bus) {
    peer_forget(all, p);
    p->bus = bus;
    p->hello = hello_copy(bus_peer_hello(bus));
    if (wrong_role(p)) {
        peer_set(all, p, PEER_REFUSED, "is of another role than the configuration says");
        LOG_ERR("%s: %s", p->endpoint, p->reason);
        return;
    }
    refresh_pairs(all);
    peer_set(all, p, PEER_UP, "has not said yet whether it is ready");
    LOG_INFO("%s: %s \"%s\" is up", p->endpoint, role_name(p), p->hello->name);
}

/* Heard again, on the same connection or on a new one: a refusal before it counts no more. */
static void on_heard(Peers *all, Peer *p) {
    if (!wrong_role(p))
        peer_set(all, p, PEER_UP, p->ready ? "" : "is not ready");
}

static void on_event(void *arg, BusPeer *bus, BusEvent event, const char *reason) {
    Peer *p = arg;
    Peers *all = p->all;
    if (all->closing)
        return;
    switch (event) {
    case BUS_UP:
        on_up(all, p, bus);
        return;
    case BUS_REFUSED:
        LOG_WARN("%s: refused: %s", p->endpoint, reason);
        peer_set(all, p, PEER_REFUSED, reason);
        return;
    case BUS_SILENT:
        LOG_WARN("%s: silent", p->endpoint);
        if (p->state != PEER_REFUSED) /* the refusal says more */
            peer_set(all, p, PEER_SILENT, "is silent");
        break;
    case BUS_BACK:
        LOG_INFO("%s: heard again", p->endpoint);
        on_heard(all, p);
        break;
    case BUS_RESET:
        LOG_WARN("%s: connected again", p->endpoint);
        on_heard(all, p);
        break;
    case BUS_GONE:
        LOG_WARN("%s: gone: %s", p->endpoint, reason);
        peer_forget(all, p);
        peer_set(all, p, PEER_DOWN, "is not connected");
        break;
    }
    all->cb.on_event(all->cb.arg, p, event);
}

static void on_pong(Peer *p, const Baton__Pong *pong) {
    bool ready = pong->ready && !pong->draining;
    if (ready != p->ready)
        LOG_INFO("%s: %s%s%s", p->endpoint,
                 ready            ? "ready"
                 : pong->draining ? "draining"
                                  : "not ready",
                 !ready && pong->reason && *pong->reason ? ": " : "",
                 !ready && pong->reason ? pong->reason : "");
    p->ready = ready;
    p->free_pages = pong->free_pages;
    p->total_pages = pong->total_pages;
    p->load = pong->running + pong->waiting;
    p->queued_tokens = pong->queued_tokens;
    p->sent_pages = p->sent_requests = 0;
    p->sent_tokens = 0;
    const char *why = pong->draining ? "is draining" : pong->reason ? pong->reason : "";
    snprintf(p->reason, sizeof p->reason, "%s", ready ? "" : *why ? why : "is not ready");
}

static void on_message(void *arg, BusPeer *bus, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    Peer *p = arg;
    (void)bus, (void)blob, (void)blob_len;
    if (p->all->closing || p->state == PEER_REFUSED)
        return;
    if (env->body_case == BATON__ENVELOPE__BODY_PONG)
        on_pong(p, env->pong);
    else
        p->all->cb.on_message(p->all->cb.arg, p, env);
}

/* ---- opening ---- */

/* Splits list at commas into the group; spaces around an endpoint do not count. */
static int group_parse(Peers *all, Group *g, Baton__Role role, const char *what, const char *list,
                       Err *err) {
    g->peer = xcalloc(ROUTE_MAX_NODES, sizeof *g->peer);
    for (;;) {
        list += strspn(list, " ,");
        size_t n = strcspn(list, " ,");
        if (n == 0)
            break;
        if (g->n == ROUTE_MAX_NODES)
            return err_set(err, E_LIMIT, "[peers] %s: at most %d endpoints", what, ROUTE_MAX_NODES);
        Peer *p = &g->peer[g->n];
        p->all = all;
        p->role = role;
        p->index = g->n++;
        p->endpoint = xasprintf("%.*s", (int)n, list);
        snprintf(p->reason, sizeof p->reason, "is not connected");
        list += n;
    }
    return g->n ? 0 : err_set(err, E_INVAL, "[peers] %s: at least one endpoint is needed", what);
}

static int group_open(Group *g, Loop *loop, const Baton__Hello *hello, const BusConf *bus,
                      Err *err) {
    for (int i = 0; i < g->n; i++) {
        Peer *p = &g->peer[i];
        BusCallbacks cb = {.arg = p, .on_event = on_event, .on_message = on_message};
        int rc = bus_client_open(&p->client, loop, p->endpoint, hello, bus, &cb, err);
        if (rc)
            return rc;
    }
    return 0;
}

static void group_close(Group *g) {
    for (int i = 0; i < g->n; i++) {
        if (g->peer[i].client)
            bus_client_close(g->peer[i].client);
        hello_free(g->peer[i].hello);
        free(g->peer[i].endpoint);
    }
    free(g->peer);
}

int peers_open(Peers **out, Loop *loop, const char *prefill, const char *decode,
               const Baton__Hello *hello, const BusConf *bus, const PeersCallbacks *cb, Err *err) {
    Peers *all = xcalloc(1, sizeof *all);
    all->cb = *cb;
    const char *help = "Instances that are connected and heard";
    all->up_prefill = stat_gauge("baton_router_peers_up", "role=\"prefill\"", help);
    all->up_decode = stat_gauge("baton_router_peers_up", "role=\"decode\"", help);
    int rc = group_parse(all, &all->prefill, BATON__ROLE__ROLE_PREFILL, "prefill", prefill, err);
    if (rc == 0)
        rc = group_parse(all, &all->decode, BATON__ROLE__ROLE_DECODE, "decode", decode, err);
    if (rc == 0)
        rc = group_open(&all->prefill, loop, hello, bus, err);
    if (rc == 0)
        rc = group_open(&all->decode, loop, hello, bus, err);
    if (rc) {
        peers_close(all);
        return rc;
    }
    *out = all;
    return 0;
}

void peers_close(Peers *all) {
    if (!all)
        return;
    all->closing = true;
    group_close(&all->prefill);
    group_close(&all->decode);
    free(all);
}

/* ---- asking ---- */

static RouteNode node_of(const Peer *p, const Peer *not_this) {
    uint32_t free_pages = p->free_pages > p->sent_pages ? p->free_pages - p->sent_pages : 0;
    return (RouteNode){.usable = p->state == PEER_UP && p->ready && p != not_this,
                       .free_pages = free_pages,
                       .total_pages = p->total_pages,
                       .load = p->load + p->sent_requests,
                       .queued_tokens = p->queued_tokens + p->sent_tokens};
}

bool peers_pick(Peers *all, uint32_t n_prompt, uint32_t n_total, const Peer *not_prefill,
                const Peer *not_decode, Peer **prefill, Peer **decode) {
    RouteNode p[ROUTE_MAX_NODES], d[ROUTE_MAX_NODES];
    uint32_t page_tokens = DEFAULT_PAGE_TOKENS;
    for (int i = 0; i < all->prefill.n; i++)
        p[i] = node_of(&all->prefill.peer[i], not_prefill);
    for (int i = 0; i < all->decode.n; i++) {
        const Peer *peer = &all->decode.peer[i];
        d[i] = node_of(peer, not_decode);
        if (peer->hello && peer->hello->page_tokens)
            page_tokens = peer->hello->page_tokens;
    }
    RouteView view = {.prefill = p,
                      .decode = d,
                      .n_prefill = all->prefill.n,
                      .n_decode = all->decode.n,
                      .pairs = all->pairs};
    uint32_t pages = n_total / page_tokens + (n_total % page_tokens != 0);
    int at_p, at_d;
    if (!route_pick(&view, pages, &at_p, &at_d))
        return false;
    *prefill = &all->prefill.peer[at_p];
    *decode = &all->decode.peer[at_d];
    (*prefill)->sent_tokens += n_prompt;
    (*prefill)->sent_requests++;
    (*decode)->sent_pages += pages;
    (*decode)->sent_requests++;
    return true;
}

int peers_send(Peer *peer, const Baton__Envelope *env, Err *err) {
    if (!peer->bus || peer->state == PEER_REFUSED)
        return err_set(err, E_PEER, "%s is not connected", peer->endpoint);
    return bus_send(peer->bus, env, NULL, 0, err);
}

int peers_max_context(const Peers *all, int limit) {
    const Group *groups[] = {&all->prefill, &all->decode};
    for (int g = 0; g < 2; g++)
        for (int i = 0; i < groups[g]->n; i++) {
            const Baton__Hello *hello = groups[g]->peer[i].hello;
            if (hello && hello->max_context && hello->max_context < (uint32_t)limit)
                limit = (int)hello->max_context;
        }
    return limit;
}

/* Appends the first reason why no instance of the group is ready; false when one is. */
static bool group_missing(const Group *g, const char *what, char *why, size_t n) {
    for (int i = 0; i < g->n; i++)
        if (g->peer[i].state == PEER_UP && g->peer[i].ready)
            return false;
    size_t len = strlen(why);
    snprintf(why + len, n - len, "%sno %s is ready: %s %s", len ? "; " : "", what,
             g->peer[0].endpoint, g->peer[0].reason);
    return true;
}

bool peers_ready(void *arg, char *why, size_t n) {
    Peers *all = arg;
    for (int p = 0; p < all->prefill.n; p++)
        for (int d = 0; d < all->decode.n; d++)
            if ((all->pairs[p] >> d & 1) && node_of(&all->prefill.peer[p], NULL).usable &&
                node_of(&all->decode.peer[d], NULL).usable)
                return true;
    why[0] = '\0';
    bool no_prefill = group_missing(&all->prefill, "prefill", why, n);
    if (!group_missing(&all->decode, "decode", why, n) && !no_prefill)
        snprintf(why, n, "no ready prefill fits a ready decode: %s", all->misfit.text);
    return false;
}
