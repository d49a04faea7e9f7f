/* The control plane: protobuf envelopes over ZeroMQ on the daemon's loop. Loop thread only.
 *
 * A service binds a BusServer (ROUTER); a router opens one BusClient (DEALER) per service. Each
 * side says Hello first and checks the other's; a mismatch is answered with Refuse and retried
 * slowly. The client pings every ping_ms; either side calls its peer silent when nothing came for
 * silent_ms. A closed connection is noticed at once. The client then connects again: when the
 * system refuses, since nobody listens any more, or a new generation answers, the old process has
 * ended (BUS_GONE); when the same generation answers, only the connection was lost (BUS_RESET); any
 * other failure to connect says nothing, and the process stays silent. Reconnecting is automatic
 * with jitter. Sending never blocks: at most max_queued frames wait per peer.
 *
 * Callbacks may send, open other ends and close other ends, but not close the end that calls. */
#pragma once

#include "base/err.h"
#include "base/loop.h"
#include "proto/baton.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    BUS_ENVELOPE_MAX = 8 << 20, /* bytes of the first frame; a blob may be larger */
    BUS_PEERS_MAX = 1024,       /* connections of a server */
    BUS_REASON_MAX = 400        /* bytes of a reason that came from outside */
};

typedef struct BusServer BusServer;
typedef struct BusClient BusClient;
/* The other end, as seen by the callbacks; valid from BUS_UP to the return of BUS_GONE. */
typedef struct BusPeer BusPeer;

typedef enum BusEvent {
    BUS_UP,     /* hello accepted on this side and on the peer's; messages may flow */
    BUS_SILENT, /* nothing heard for silent_ms, or (client) the connection closed: it may be
                   stopped, stuck or cut off; what it advertised stays in force */
    BUS_BACK,   /* heard again on the same connection: nothing was lost */
    BUS_RESET,  /* client: the same process answers on a new connection. Frames of either direction
                   may have been lost: what was asked of it is to be given up, but it runs on */
    BUS_GONE,   /* client: its process has ended: nothing of it can happen any more. Server: its
                   connection has ended; nothing more comes from it or reaches it */
    BUS_REFUSED /* one side refused; reason says why. peer is NULL. Tried again every 2 s */
} BusEvent;

typedef struct BusCallbacks {
    void *arg;
    /* reason: a line without control characters, borrowed for the call; never NULL. */
    void (*on_event)(void *arg, BusPeer *peer, BusEvent event, const char *reason);
    /* env and blob (a second frame, or NULL) are borrowed for the call. Hello, Refuse and Ping
     * never get here; Pong does. What bus_frame_check promises holds for env. */
    void (*on_message)(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len);
    /* Server: fills the answer to a Ping (readiness and load); strings are borrowed until the next
     * call. NULL: always ready. */
    void (*on_ping)(void *arg, Baton__Pong *pong);
} BusCallbacks;

typedef struct BusConf {
    int64_t ping_ms;        /* default 250 */
    int64_t silent_ms;      /* default 1500 */
    int max_queued;         /* default 4096 */
    size_t max_frame_bytes; /* default 256 MiB; a larger frame closes its connection */
} BusConf;

BusConf bus_conf_default(void);

/* Binds to endpoint ("tcp://0.0.0.0:7101", "ipc:///run/baton/decode-0"). hello is copied; conf may
 * be NULL. E_IO names the endpoint when it is in use, E_INVAL when it makes no sense. */
int bus_server_open(BusServer **out, Loop *loop, const char *endpoint, const Baton__Hello *hello,
                    const BusConf *conf, const BusCallbacks *cb, Err *err);
/* No callback happens after it begins. NULL is a no-op. Clients take it for the end of the process:
 * nothing that a peer was granted or promised may be written afterwards. */
void bus_server_close(BusServer *s);
/* The endpoint really bound (with the port that the system chose for "tcp://127.0.0.1:*"). */
const char *bus_server_endpoint(const BusServer *s);
/* Sends Pong unasked to every peer that is up. */
void bus_server_announce(BusServer *s);

/* Starts connecting; the peer need not exist yet. E_INVAL for an endpoint that makes no sense. */
int bus_client_open(BusClient **out, Loop *loop, const char *endpoint, const Baton__Hello *hello,
                    const BusConf *conf, const BusCallbacks *cb, Err *err);
/* No callback happens after it begins. NULL is a no-op. */
void bus_client_close(BusClient *c);

/* Packs and sends. E_BUSY when max_queued frames wait or the connection is not there now, E_PEER
 * when it has ended (BUS_GONE follows), E_LIMIT when a frame is too large: nothing was sent. blob
 * may be NULL. */
int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err);
/* What the peer said of itself; valid as long as the peer. */
const Baton__Hello *bus_peer_hello(const BusPeer *peer);
/* Up and not silent. */
bool bus_peer_up(const BusPeer *peer);
/* A slot for the daemon's own state of this peer. */
void bus_peer_set_user(BusPeer *peer, void *user);
void *bus_peer_user(const BusPeer *peer);
