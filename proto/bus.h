/* The control plane: protobuf envelopes over ZeroMQ on the daemon's loop. Loop thread only.
 *
 * A service binds a BusServer (ROUTER); a router opens one BusClient (DEALER) per service. Each side says Hello first and checks the other's; a
 * mismatch is answered with Refuse on both sides and retried slowly. The client pings every ping_ms; either side calls its peer silent when
 * nothing came for silent_ms, and gone when its connection is closed (the process ended, or a new generation answers at the same endpoint).
 * Reconnecting is automatic with jitter. Sending never blocks: at most max_queued frames wait per peer. */
#pragma once

#include "base/err.h"
#include "base/loop.h"
#include "proto/baton.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct BusServer BusServer;
typedef struct BusClient BusClient;
typedef struct BusPeer BusPeer; /* the other end, as seen by the callbacks; valid from BUS_UP to the return of BUS_GONE */

typedef enum BusEvent {
    BUS_UP,      /* hello accepted on this side and on the peer's; messages may flow */
    BUS_SILENT,  /* nothing heard for silent_ms: it may be stopped, stuck or cut off; what it advertised stays in force */
    BUS_BACK,    /* heard again, same generation */
    BUS_GONE,    /* its process has ended (connection closed, or a newer generation answers): nothing of it can happen any more */
    BUS_REFUSED, /* one side refused; reason says which field */
} BusEvent;

typedef struct BusCallbacks {
    void *arg;
    void (*on_event)(void *arg, BusPeer *peer, BusEvent event, const char *reason);
    /* env and blob (a second frame, or NULL) are borrowed for the call. Hello, Refuse and Ping never get here; Pong does. */
    void (*on_message)(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len);
    /* Fills the answer to a Ping (server side): readiness and load. May be NULL. */
    void (*on_ping)(void *arg, Baton__Pong *pong);
} BusCallbacks;

typedef struct BusConf {
    int64_t ping_ms;    /* default 250 */
    int64_t silent_ms;  /* default 1500 */
    int max_queued;     /* default 4096 */
    size_t max_frame_bytes; /* default 256 MiB; larger frames from outside drop the connection */
} BusConf;

BusConf bus_conf_default(void);

/* Binds to endpoint ("tcp://0.0.0.0:7101", "ipc:///run/baton/decode-0"). hello is copied. E_IO names the endpoint when it is in use. */
int bus_server_open(BusServer **out, Loop *loop, const char *endpoint, const Baton__Hello *hello, const BusConf *conf, const BusCallbacks *cb, Err *err);
void bus_server_close(BusServer *s);
/* The endpoint really bound (with the port that the system chose for "tcp://127.0.0.1:*"). */
const char *bus_server_endpoint(const BusServer *s);
/* Sends Pong unasked to every peer that is up. */
void bus_server_announce(BusServer *s);

/* Starts connecting. The peer need not exist yet. */
int bus_client_open(BusClient **out, Loop *loop, const char *endpoint, const Baton__Hello *hello, const BusConf *conf, const BusCallbacks *cb, Err *err);
void bus_client_close(BusClient *c);

/* Packs and sends. E_BUSY when max_queued frames wait or the peer is not up: nothing was sent. blob may be NULL. */
int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len, Err *err);
const Baton__Hello *bus_peer_hello(const BusPeer *peer);
bool bus_peer_up(const BusPeer *peer); /* up and not silent */
/* A slot for the daemon's own state of this peer. */
void bus_peer_set_user(BusPeer *peer, void *user);
void *bus_peer_user(const BusPeer *peer);
