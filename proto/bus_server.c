/* The listening end of the bus. Loop thread only.
 *
 * A peer is one connection, named by its routing id: greeted by its hello, up with its first Ping.
 * ZeroMQ does not say whose connection closed, so after each close every peer is probed with a
 * Ping: a send to a connection that has ended fails. */
#include "proto/bus_int.h"

#include "base/clock.h"
#include "proto/bus_frame.h"
#include "proto/bus_knock.h"
#include "proto/hello.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A close is seen a little before the connection's queue is taken down: probing is repeated. */
enum { PROBE_ROUNDS = 5, PROBE_EVERY_MS = 20 };
/* Probes to a peer that says nothing for ever, as a caller of experts between its calls may: what
 * it does not read stays bounded. */
enum { PROBES_UNHEARD_MAX = 64 };
enum { TICK_ROUNDS = 16 }; /* of messages, before peers are called silent */

struct BusServer {
    Loop *loop;
    char endpoint[256];
    Baton__Hello *hello; /* owned */
    BusConf conf;
    BusWireConf wire;
    BusCallbacks cb;
    void *context, *socket, *monitor;
    LoopFd *watch, *watch_monitor;
    BusPump *pump;
    LoopTimer *tick, *probe;
    int n_probe_rounds; /* left */
    int64_t tick_ms;    /* the last one */
    uint64_t ping_seq;
    BusPeer *peer[BUS_PEERS_MAX];
    int n_peers;
    bool any_dead;
    bool draining; /* messages are being taken, until there are none */
    BusWireMsg msg;
};

static void say(BusServer *s, BusPeer *peer, BusEvent event, const char *reason) {
    s->cb.on_event(s->cb.arg, peer, event, reason);
}

/* ---- peers ---- */

static BusPeer *find(const BusServer *s, const uint8_t *id, size_t id_len) {
    for (int i = 0; i < s->n_peers; i++)
        if (s->peer[i]->id_len == id_len && memcmp(s->peer[i]->id, id, id_len) == 0)
            return s->peer[i];
    return NULL;
}

/* Its removal is left to sweep(): callers further up may still hold it. */
static void mark_dead(BusServer *s, BusPeer *peer, const char *reason) {
    if (peer->dead)
        return;
    peer->dead = true;
    bus_frame_text(peer->reason, sizeof peer->reason, reason);
    s->any_dead = true;
}

static void sweep(BusServer *s) {
    while (s->any_dead) {
        s->any_dead = false;
        for (int i = 0; i < s->n_peers;) {
            BusPeer *peer = s->peer[i];
            if (!peer->dead) {
                i++;
                continue;
            }
            s->peer[i] = s->peer[--s->n_peers];
            if (peer->up)
                say(s, peer, BUS_GONE, peer->reason);
            hello_free(peer->hello);
            free(peer);
        }
    }
}

static int send_to(BusServer *s, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                   size_t blob_len, Err *err) {
    int rc = bus_wire_send(s->socket, &s->wire, peer->id, peer->id_len, env, blob, blob_len, err);
    if (rc == E_PEER)
        mark_dead(s, peer, "its connection closed");
    return rc;
}

/* After sends that may have come when the drain had had its turn. */
static void after_sends(BusServer *s) {
    if (!s->draining && (s->any_dead || bus_wire_readable(s->socket)))
        bus_pump_again(s->pump);
}

static void send_pong(BusServer *s, BusPeer *peer, uint64_t seq) {
    Baton__Pong pong = BATON__PONG__INIT;
    if (s->cb.on_ping)
        s->cb.on_ping(s->cb.arg, &pong);
    else
        pong.ready = true;
    pong.seq = seq;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_PONG;
    env.pong = &pong;
    send_to(s, peer, &env, NULL, 0, NULL);
}

static void send_ping(BusServer *s, BusPeer *peer) {
    Baton__Ping p = BATON__PING__INIT;
    p.seq = ++s->ping_seq;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_PING;
    env.ping = &p;
    send_to(s, peer, &env, NULL, 0, NULL);
}

/* ---- hello ---- */

static void refuse_id(BusServer *s, const BusWireMsg *m, const char *reason) {
    bus_wire_send_refuse(s->socket, &s->wire, m->id, m->id_len, reason);
}

/* The newest connection of a name is the one that counts. */
static void replace_older(BusServer *s, const Baton__Hello *h) {
    for (int i = 0; i < s->n_peers; i++) {
        BusPeer *old = s->peer[i];
        if (old->dead || old->hello->role != h->role || strcmp(old->hello->name, h->name) != 0)
            continue;
        char reason[BUS_REASON_MAX];
        snprintf(reason, sizeof reason, "another connection took the name %s", h->name);
        bus_wire_send_refuse(s->socket, &s->wire, old->id, old->id_len, reason);
        mark_dead(s, old, reason);
    }
    sweep(s);
}

static void on_hello(BusServer *s, const BusWireMsg *m, const Baton__Hello *h) {
    Err err = {0};
    if (hello_check(s->hello, h, &err)) {
        refuse_id(s, m, err.text);
        say(s, NULL, BUS_REFUSED, err.text);
        return;
    }
    replace_older(s, h);
    if (s->n_peers == BUS_PEERS_MAX) {
        refuse_id(s, m, "too many connections");
        say(s, NULL, BUS_REFUSED, "too many connections");
        return;
    }
    BusPeer *peer = xcalloc(1, sizeof *peer);
    peer->server = s;
    memcpy(peer->id, m->id, m->id_len);
    peer->id_len = m->id_len;
    peer->hello = hello_copy(h);
    peer->heard_ms = peer->greeted_ms = clock_now_ms();
    s->peer[s->n_peers++] = peer;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_HELLO;
    env.hello = s->hello;
    send_to(s, peer, &env, NULL, 0, NULL);
}

/* ---- messages ---- */

static void on_stranger(BusServer *s, const BusWireMsg *m, const Baton__Envelope *env,
                        const char *wrong) {
    if (!env)
        refuse_id(s, m, wrong);
    else if (env->body_case == BATON__ENVELOPE__BODY_HELLO)
        on_hello(s, m, env->hello);
    else if (env->body_case != BATON__ENVELOPE__BODY_REFUSE)
        refuse_id(s, m, "a message came before the hello");
}

static void drop_peer(BusServer *s, BusPeer *peer, const char *reason) {
    bus_wire_send_refuse(s->socket, &s->wire, peer->id, peer->id_len, reason);
    mark_dead(s, peer, reason);
}

static void heard(BusServer *s, BusPeer *peer) {
    peer->heard_ms = clock_now_ms();
    peer->n_probes = 0;
    if (!peer->silent)
        return;
    peer->silent = false;
    say(s, peer, BUS_BACK, "");
}

static void on_peer(BusServer *s, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                    size_t len) {
    heard(s, peer);
    if (env->body_case == BATON__ENVELOPE__BODY_REFUSE) {
        char reason[BUS_REASON_MAX + 1];
        bus_frame_text(reason, sizeof reason, env->refuse->reason);
        mark_dead(s, peer, reason);
        say(s, NULL, BUS_REFUSED, reason);
    } else if (env->body_case == BATON__ENVELOPE__BODY_HELLO) {
        drop_peer(s, peer, "a second hello on one connection");
    } else if (env->body_case == BATON__ENVELOPE__BODY_PING) {
        if (!peer->up) {
            peer->up = true;
            say(s, peer, BUS_UP, "");
        }
        if (!peer->dead)
            send_pong(s, peer, env->ping->seq);
    } else if (!peer->up) {
        drop_peer(s, peer, "a message came before the first ping");
    } else {
        s->cb.on_message(s->cb.arg, peer, env, blob, len);
    }
}

static bool take_messages(BusServer *s) {
    for (int i = 0; i < BUS_ROUND_MESSAGES; i++) {
        if (!bus_wire_recv(s->socket, true, &s->msg))
            return false;
        BusPeer *peer = find(s, s->msg.id, s->msg.id_len);
        Err err = {0};
        size_t len;
        const void *blob = bus_wire_blob(&s->msg, &len);
        Baton__Envelope *env = bus_wire_unpack(&s->msg, &err);
        if (!peer)
            on_stranger(s, &s->msg, env, err.text);
        else if (peer->dead)
            ; /* its end has been decided: what it still sends is void */
        else if (env)
            on_peer(s, peer, env, blob, len);
        else
            drop_peer(s, peer, err.text);
        bus_frame_free(env);
        bus_wire_release(&s->msg);
        sweep(s);
    }
    return true;
}

static bool drain_messages(BusServer *s) {
    s->draining = true;
    bool more = take_messages(s);
    s->draining = false;
    return more;
}

/* ---- who is still there ---- */

static void probe_all(BusServer *s) {
    for (int i = 0; i < s->n_peers; i++)
        if (!s->peer[i]->dead)
            send_ping(s, s->peer[i]);
    sweep(s);
    after_sends(s);
}

static void on_probe(void *arg) {
    BusServer *s = arg;
    probe_all(s);
    if (--s->n_probe_rounds <= 0) {
        loop_timer_free(s->probe);
        s->probe = NULL;
    }
}

static void drain_monitor(BusServer *s) {
    bool closed = false;
    while (bus_wire_event(s->monitor))
        closed = true;
    if (!closed)
        return;
    probe_all(s);
    s->n_probe_rounds = PROBE_ROUNDS;
    if (!s->probe)
        s->probe = loop_timer_new(s->loop, PROBE_EVERY_MS, PROBE_EVERY_MS, on_probe, s);
}

static bool drain(void *arg) {
    BusServer *s = arg;
    bool more = drain_messages(s);
    drain_monitor(s);
    sweep(s); /* sends of the daemon since the last round may have found peers dead */
    return more;
}

static void check_peer(BusServer *s, BusPeer *peer, int64_t now) {
    if (!peer->up) {
        if (now - peer->greeted_ms >= BUS_HELLO_MS)
            drop_peer(s, peer, "no ping came in time");
        return;
    }
    int64_t quiet_ms = now - peer->heard_ms;
    if (quiet_ms < s->conf.silent_ms)
        return;
    if (!peer->silent) {
        peer->silent = true;
        say(s, peer, BUS_SILENT, "nothing heard from it");
    }
    if (peer->n_probes < PROBES_UNHEARD_MAX &&
        quiet_ms >= (peer->n_probes + 1) * s->conf.silent_ms) {
        peer->n_probes++;
        send_ping(s, peer);
    }
}

static void on_tick(void *arg) {
    BusServer *s = arg;
    int64_t paused_ms = bus_paused_ms(&s->tick_ms, s->conf.ping_ms);
    for (int i = 0; i < s->n_peers; i++)
        bus_peer_excuse(s->peer[i], paused_ms);
    for (int i = 0; i < TICK_ROUNDS && drain(s); i++)
        ;
    int64_t now = clock_now_ms();
    for (int i = 0; i < s->n_peers; i++)
        if (!s->peer[i]->dead)
            check_peer(s, s->peer[i], now);
    sweep(s);
}

/* ---- open, close, send ---- */

int bus_server_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
                    Err *err) {
    if (peer->dead)
        return err_set(err, E_PEER, "connection ended: %s", peer->reason);
    int rc = send_to(peer->server, peer, env, blob, blob_len, err);
    after_sends(peer->server);
    return rc;
}

void bus_server_announce(BusServer *s) {
    for (int i = 0; i < s->n_peers; i++)
        if (bus_peer_up(s->peer[i]))
            send_pong(s, s->peer[i], 0);
    after_sends(s);
}

/* ZeroMQ takes over the file of a local socket without asking whether somebody listens on it. */
static bool ipc_in_use(const char *endpoint) {
    int rc = bus_knock_ipc(endpoint);
    return rc == 0 || rc == EAGAIN;
}

static int listen_on(BusServer *s, const char *endpoint, Err *err) {
    if (ipc_in_use(endpoint))
        return err_set(err, E_IO, "cannot listen on %s: address already in use", endpoint);
    s->socket = bus_wire_open(s->context, ZMQ_ROUTER, &s->wire, err);
    if (!s->socket)
        return E_IO;
    s->monitor = bus_wire_monitor(s->context, s->socket, ZMQ_EVENT_DISCONNECTED);
    if (!s->monitor)
        return err_set(err, E_IO, "cannot monitor a socket");
    if (zmq_bind(s->socket, endpoint) != 0) {
        int code = errno == EINVAL || errno == EPROTONOSUPPORT ? E_INVAL : E_IO;
        return err_set(err, code, "cannot listen on %s: %s", endpoint, zmq_strerror(errno));
    }
    size_t n = sizeof s->endpoint;
    if (zmq_getsockopt(s->socket, ZMQ_LAST_ENDPOINT, s->endpoint, &n) != 0)
        return err_set(err, E_INVAL, "endpoint %s is too long", endpoint);
    if (!(s->watch = bus_watch(s->loop, s->socket, err)) ||
        !(s->watch_monitor = bus_watch(s->loop, s->monitor, err)))
        return E_IO;
    return 0;
}

int bus_server_open(BusServer **out, Loop *loop, const char *endpoint, const Baton__Hello *hello,
                    const BusConf *conf, const BusCallbacks *cb, Err *err) {
    BusConf taken;
    int rc = bus_conf_take(&taken, conf, err);
    if (rc)
        return rc;
    BusServer *s = xcalloc(1, sizeof *s);
    s->loop = loop;
    s->hello = hello_copy(hello);
    s->conf = taken;
    s->wire = bus_conf_wire(&taken);
    s->cb = *cb;
    s->context = bus_wire_context_get();
    if ((rc = listen_on(s, endpoint, err))) {
        bus_server_close(s);
        return rc;
    }
    s->pump = bus_pump_new(loop, drain, s);
    s->tick_ms = clock_now_ms();
    s->tick = loop_timer_new(loop, taken.ping_ms, taken.ping_ms, on_tick, s);
    *out = s;
    return 0;
}

void bus_server_close(BusServer *s) {
    if (!s)
        return;
    loop_timer_free(s->tick);
    loop_timer_free(s->probe);
    bus_pump_free(s->pump);
    loop_fd_free(s->watch);
    loop_fd_free(s->watch_monitor);
    if (s->monitor)
        bus_wire_unmonitor(s->socket, s->monitor);
    bus_wire_close(s->socket, false);
    for (int i = 0; i < s->n_peers; i++) {
        hello_free(s->peer[i]->hello);
        free(s->peer[i]);
    }
    hello_free(s->hello);
    bus_wire_context_put();
    free(s);
}

const char *bus_server_endpoint(const BusServer *s) {
    return s->endpoint;
}
