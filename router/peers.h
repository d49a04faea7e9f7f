/* The prefill and decode instances that this router works with: connections, readiness, load. Loop
 * thread only. A Peer lives as long as Peers; what changes is its state. */
#pragma once

#include "proto/bus.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum PeerState {
    PEER_DOWN,    /* no process that has said hello */
    PEER_REFUSED, /* says hello, does not fit */
    PEER_SILENT,  /* connected, nothing heard for a while */
    PEER_UP,
} PeerState;

typedef struct Peers Peers;

typedef struct Peer {
    Peers *all;
    Baton__Role role;
    int index; /* within its role */
    char *endpoint;
    BusClient *client;
    BusPeer *bus;        /* NULL but when up or silent */
    Baton__Hello *hello; /* of the connected process, or NULL */
    PeerState state;
    char reason[200]; /* why it is not up, or up and not ready */
    bool ready;       /* by its last Pong */
    uint32_t free_pages, total_pages, load;
    uint64_t queued_tokens;
    /* What this router sent since the last Pong, which does not count it yet. */
    uint32_t sent_pages, sent_requests;
    uint64_t sent_tokens;
} Peer;

typedef struct PeersCallbacks {
    void *arg;
    /* event is BUS_SILENT, BUS_BACK, BUS_RESET or BUS_GONE. */
    void (*on_event)(void *arg, Peer *peer, BusEvent event);
    void (*on_message)(void *arg, Peer *peer, const Baton__Envelope *env);
} PeersCallbacks;

/* prefill and decode: endpoints separated by commas, at least one of each. hello is copied. E_INVAL
 * names the list. */
int peers_open(Peers **out, Loop *loop, const char *prefill, const char *decode,
               const Baton__Hello *hello, const BusConf *bus, const PeersCallbacks *cb, Err *err);
/* NULL is a no-op. No callback comes after it. */
void peers_close(Peers *all);

/* Whether a prefill and a decode are up, ready and fit each other; if not, why[n] says what is
 * missing. An AdminReadyFn. */
bool peers_ready(void *all, char *why, size_t n);

/* Chooses by route_pick for a prompt of n_prompt tokens and at most n_total with the answer,
 * leaving out not_prefill and not_decode (or NULL). False when no pair can serve. */
bool peers_pick(Peers *all, uint32_t n_prompt, uint32_t n_total, const Peer *not_prefill,
                const Peer *not_decode, Peer **prefill, Peer **decode);

/* As bus_send; E_PEER when the peer is not connected. */
int peers_send(Peer *peer, const Baton__Envelope *env, Err *err);

/* The least max_context that a connected peer states, or limit when none is less. */
int peers_max_context(const Peers *all, int limit);
