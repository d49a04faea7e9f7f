/* What bus.c, bus_server.c and bus_client.c share. Loop thread only. */
#pragma once

#include "proto/bus.h"
#include "proto/bus_wire.h"

/* Messages that one end takes before other work of the loop gets its turn. */
enum { BUS_ROUND_MESSAGES = 512 };
enum { BUS_HELLO_MS = 5000 }; /* from the start of a connection to the end of its hellos */

struct BusPeer {
    BusServer *server; /* one of the two is set */
    BusClient *client;
    uint8_t id[BUS_WIRE_ID_MAX]; /* server: routing id of the connection */
    size_t id_len;
    Baton__Hello *hello; /* owned */
    void *user;
    bool up;     /* between BUS_UP and BUS_GONE */
    bool silent; /* BUS_SILENT was said last */
    bool dead;   /* server: to be removed at the end of the round, reason says why */
    char reason[BUS_REASON_MAX + 1];
    int64_t heard_ms;   /* when anything came last */
    int64_t greeted_ms; /* server: when its hello came */
    int n_probes;       /* server: probes since anything came */
};

/* Calls drain(arg) on every round of the loop before it sleeps. ZeroMQ's descriptor tells only of
 * changes, and any call may swallow the change: so each round asks the sockets themselves. While
 * drain returns true the loop does not sleep. */
typedef struct BusPump BusPump;
BusPump *bus_pump_new(Loop *loop, bool (*drain)(void *arg), void *arg);
/* One more round before the loop sleeps. For whoever used a socket outside of its drain: its drain
 * may have had its turn in this round. */
void bus_pump_again(BusPump *pump);
void bus_pump_free(BusPump *pump);

/* Makes the loop wake up when something may have happened on a ZeroMQ socket. NULL and E_IO when
 * the system cannot watch it. */
LoopFd *bus_watch(Loop *loop, void *socket, Err *err);

/* The time by which a tick is late when that is more than another tick, else 0: for so long this
 * process did not run, and could hear nobody. *tick_ms, of the tick before, becomes now. */
int64_t bus_paused_ms(int64_t *tick_ms, int64_t ping_ms);
/* That time does not count as silence of the peer. */
void bus_peer_excuse(BusPeer *peer, int64_t paused_ms);

/* Copies conf, or the default for NULL. E_INVAL when it makes no sense. */
int bus_conf_take(BusConf *out, const BusConf *conf, Err *err);
BusWireConf bus_conf_wire(const BusConf *conf);

int bus_server_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
                    Err *err);
int bus_client_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
                    Err *err);
