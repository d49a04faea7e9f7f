/* The connecting end of the bus. Loop thread only.
 *
 * One ZeroMQ socket is one connection: when it ends the socket is closed, and after a jittered wait
 * a new one with a new routing id is made. The peer (a process) outlives its connections: its fate
 * is known when the system refuses a connection or another generation answers. ZeroMQ does not say
 * why a connection was not made, so after each failure bus_knock asks the system. */
#include "proto/bus_int.h"

#include "base/clock.h"
#include "proto/bus_frame.h"
#include "proto/bus_knock.h"
#include "proto/hello.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RETRY_FIRST_MS = 10, RETRY_MAX_MS = 1000, RETRY_REFUSED_MS = 2000 };

typedef enum State {
    STATE_WAITING,  /* no socket; `retry` is armed */
    STATE_GREETING, /* hello sent */
    STATE_UP,       /* hello accepted */
} State;

struct BusClient {
    Loop *loop;
    char *endpoint;
    Baton__Hello *hello; /* owned */
    BusConf conf;
    BusWireConf wire;
    BusCallbacks cb;
    void *context, *socket, *monitor;
    LoopFd *watch, *watch_monitor;
    BusPump *pump;
    LoopTimer *tick, *retry;
    BusKnock *knock;  /* NULL: none under way */
    char address[64]; /* numeric, of the last process that said hello; "" for a local one */
    State state;
    int64_t greet_by_ms; /* end of STATE_GREETING */
    int64_t retry_ms;    /* the next wait, before jitter */
    int64_t tick_ms;     /* the last one */
    uint64_t ping_seq;
    bool draining; /* messages are being taken, until there are none */
    BusPeer peer;  /* up: a process whose end has not been told yet, connected or not */
    BusWireMsg msg;
};

static void on_retry(void *arg);

static void say(BusClient *c, BusPeer *peer, BusEvent event, const char *reason) {
    c->cb.on_event(c->cb.arg, peer, event, reason);
}

/* ---- connections ---- */

static void disconnect(BusClient *c, bool last_word) {
    bus_knock_free(c->knock);
    c->knock = NULL;
    loop_fd_free(c->watch);
    loop_fd_free(c->watch_monitor);
    if (c->monitor)
        bus_wire_unmonitor(c->socket, c->monitor);
    bus_wire_close(c->socket, last_word);
    c->watch = c->watch_monitor = NULL;
    c->monitor = c->socket = NULL;
    c->state = STATE_WAITING;
}

/* Waits between half of ms and ms. */
static void retry_in(BusClient *c, int64_t ms) {
    int64_t wait = ms / 2 + (int64_t)(clock_unique() % (uint64_t)(ms / 2 + 1));
    loop_timer_free(c->retry);
    c->retry = loop_timer_new(c->loop, wait, 0, on_retry, c);
}

static void retry_later(BusClient *c) {
    retry_in(c, c->retry_ms);
    c->retry_ms = c->retry_ms * 2 < RETRY_MAX_MS ? c->retry_ms * 2 : RETRY_MAX_MS;
}

static void go_silent(BusClient *c, const char *reason) {
    if (!c->peer.up || c->peer.silent)
        return;
    c->peer.silent = true;
    say(c, &c->peer, BUS_SILENT, reason);
}

static void go_gone(BusClient *c, const char *reason) {
    if (!c->peer.up)
        return;
    c->peer.silent = true;
    say(c, &c->peer, BUS_GONE, reason);
    hello_free(c->peer.hello);
    c->peer = (BusPeer){.client = c};
}

static int send_envelope(BusClient *c, Baton__Envelope__BodyCase body, ProtobufCMessage *m) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = body;
    env.hello = (Baton__Hello *)m; /* every member of the union is a pointer to a message */
    return bus_wire_send(c->socket, &c->wire, NULL, 0, &env, NULL, 0, NULL);
}

static int connect_socket(BusClient *c, Err *err) {
    c->socket = bus_wire_open(c->context, ZMQ_DEALER, &c->wire, err);
    if (!c->socket)
        return E_IO;
    int events = ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                 ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
    c->monitor = bus_wire_monitor(c->context, c->socket, events);
    if (!c->monitor)
        return err_set(err, E_IO, "cannot monitor a socket");
    if (zmq_connect(c->socket, c->endpoint) != 0)
        return err_set(err, E_INVAL, "cannot connect to %s: %s", c->endpoint, zmq_strerror(errno));
    if (!(c->watch = bus_watch(c->loop, c->socket, err)) ||
        !(c->watch_monitor = bus_watch(c->loop, c->monitor, err)))
        return E_IO;
    c->state = STATE_GREETING;
    c->greet_by_ms = clock_now_ms() + BUS_HELLO_MS;
    send_envelope(c, BATON__ENVELOPE__BODY_HELLO, &c->hello->base);
    return 0;
}

static void on_retry(void *arg) {
    BusClient *c = arg;
    loop_timer_free(c->retry);
    c->retry = NULL;
    Err err = {0};
    if (connect_socket(c, &err)) {
        disconnect(c, false);
        retry_later(c);
    }
}

/* The connection is of no use any more. */
static void lose(BusClient *c, const char *reason) {
    disconnect(c, false);
    retry_later(c);
    go_silent(c, reason);
}

/* We refuse: the other side is told why. */
static void refuse(BusClient *c, const char *reason) {
    bus_wire_send_refuse(c->socket, &c->wire, NULL, 0, reason);
    disconnect(c, true);
    retry_in(c, RETRY_REFUSED_MS);
    say(c, NULL, BUS_REFUSED, reason);
    go_silent(c, reason);
}

/* ---- messages ---- */

static void ping(BusClient *c) {
    Baton__Ping p = BATON__PING__INIT;
    p.seq = ++c->ping_seq;
    send_envelope(c, BATON__ENVELOPE__BODY_PING, &p.base);
}

static void on_hello(BusClient *c, const Baton__Hello *theirs) {
    Err err = {0};
    if (hello_check(c->hello, theirs, &err)) {
        if (c->peer.up && !hello_same_process(c->peer.hello, theirs))
            go_gone(c, "another generation answers");
        refuse(c, err.text);
        return;
    }
    c->state = STATE_UP;
    bus_knock_free(c->knock);
    c->knock = NULL;
    snprintf(c->address, sizeof c->address, "%s", bus_wire_address(&c->msg));
    c->retry_ms = RETRY_FIRST_MS;
    c->peer.heard_ms = clock_now_ms();
    ping(c); /* tells the server that its hello was accepted */
    if (c->peer.up && hello_same_process(c->peer.hello, theirs)) {
        c->peer.silent = false;
        say(c, &c->peer, BUS_RESET, "the connection was lost and made again");
        return;
    }
    go_gone(c, "another generation answers");
    c->peer =
        (BusPeer){.client = c, .hello = hello_copy(theirs), .up = true, .heard_ms = clock_now_ms()};
    say(c, &c->peer, BUS_UP, "");
}

static void on_refuse(BusClient *c, const Baton__Refuse *r) {
    char reason[BUS_REASON_MAX + 1];
    bus_frame_text(reason, sizeof reason, r->reason);
    disconnect(c, false);
    retry_in(c, RETRY_REFUSED_MS);
    say(c, NULL, BUS_REFUSED, reason);
    go_silent(c, reason);
}

/* Any frame shows that the process is alive. */
static void heard(BusClient *c) {
    c->peer.heard_ms = clock_now_ms();
    if (c->state != STATE_UP || !c->peer.silent)
        return;
    c->peer.silent = false;
    say(c, &c->peer, BUS_BACK, "");
}

static void on_envelope(BusClient *c, const Baton__Envelope *env, const void *blob, size_t len) {
    if (env->body_case == BATON__ENVELOPE__BODY_REFUSE) {
        on_refuse(c, env->refuse);
    } else if (c->state == STATE_GREETING) {
        if (env->body_case == BATON__ENVELOPE__BODY_HELLO)
            on_hello(c, env->hello);
        else
            refuse(c, "a message came before the hello");
    } else if (env->body_case == BATON__ENVELOPE__BODY_HELLO) {
        refuse(c, "a second hello on one connection");
    } else {
        heard(c);
        if (env->body_case != BATON__ENVELOPE__BODY_PING)
            c->cb.on_message(c->cb.arg, &c->peer, env, blob, len);
    }
}

/* Takes messages until there are none, the connection ends or the round is over; true for the last.
 */
static bool take_messages(BusClient *c, int max) {
    for (int i = 0; c->socket; i++) {
        if (i == max)
            return true;
        if (!bus_wire_recv(c->socket, false, &c->msg))
            return false;
        Err err = {0};
        size_t len;
        const void *blob = bus_wire_blob(&c->msg, &len);
        Baton__Envelope *env = bus_wire_unpack(&c->msg, &err);
        if (env)
            on_envelope(c, env, blob, len);
        else
            refuse(c, err.text);
        bus_frame_free(env);
        bus_wire_release(&c->msg);
    }
    return false;
}

static bool drain_messages(BusClient *c, int max) {
    c->draining = true;
    bool more = take_messages(c, max);
    c->draining = false;
    return more;
}

static void on_knock(void *arg, bool refused) {
    BusClient *c = arg;
    bus_knock_free(c->knock);
    c->knock = NULL;
    if (refused)
        go_gone(c, "nobody listens at its endpoint any more");
}

static void on_monitor(BusClient *c, int event) {
    if (event == ZMQ_EVENT_CLOSED) {
        lose(c, "no connection to it can be made");
        if (c->peer.up)
            c->knock = bus_knock_new(c->loop, c->endpoint, c->address, on_knock, c);
    } else if (event == ZMQ_EVENT_DISCONNECTED) {
        /* What arrived before the end still counts. */
        drain_messages(c, INT32_MAX);
        if (c->socket)
            lose(c, "its connection closed");
    } else {
        lose(c, "what answers does not speak ZeroMQ");
    }
}

static bool drain(void *arg) {
    BusClient *c = arg;
    bool more = drain_messages(c, BUS_ROUND_MESSAGES);
    if (!more && c->monitor) {
        int event = bus_wire_event(c->monitor);
        if (event)
            on_monitor(c, event);
    }
    return more;
}

static void on_tick(void *arg) {
    BusClient *c = arg;
    int64_t paused_ms = bus_paused_ms(&c->tick_ms, c->conf.ping_ms);
    bus_peer_excuse(&c->peer, paused_ms);
    c->greet_by_ms += paused_ms;
    drain(c);
    int64_t now = clock_now_ms();
    if (c->state == STATE_GREETING && now >= c->greet_by_ms) {
        lose(c, "no hello came in time");
    } else if (c->state == STATE_UP) {
        ping(c);
        if (now - c->peer.heard_ms >= c->conf.silent_ms)
            go_silent(c, "nothing heard from it");
    }
}

/* ---- open, close, send ---- */

int bus_client_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
                    Err *err) {
    BusClient *c = peer->client;
    if (c->state != STATE_UP || !peer->up)
        return err_set(err, E_BUSY, "not connected to %s now", c->endpoint);
    int rc = bus_wire_send(c->socket, &c->wire, NULL, 0, env, blob, blob_len, err);
    if (!c->draining && bus_wire_readable(c->socket))
        bus_pump_again(c->pump);
    return rc;
}

int bus_client_open(BusClient **out, Loop *loop, const char *endpoint, const Baton__Hello *hello,
                    const BusConf *conf, const BusCallbacks *cb, Err *err) {
    BusConf taken;
    int rc = bus_conf_take(&taken, conf, err);
    if (rc)
        return rc;
    BusClient *c = xcalloc(1, sizeof *c);
    c->loop = loop;
    c->endpoint = xstrdup(endpoint);
    c->hello = hello_copy(hello);
    c->conf = taken;
    c->wire = bus_conf_wire(&taken);
    c->cb = *cb;
    c->context = bus_wire_context_get();
    c->retry_ms = RETRY_FIRST_MS;
    c->peer.client = c;
    if ((rc = connect_socket(c, err))) {
        bus_client_close(c);
        return rc;
    }
    c->pump = bus_pump_new(loop, drain, c);
    c->tick_ms = clock_now_ms();
    c->tick = loop_timer_new(loop, taken.ping_ms, taken.ping_ms, on_tick, c);
    *out = c;
    return 0;
}

void bus_client_close(BusClient *c) {
    if (!c)
        return;
    loop_timer_free(c->tick);
    loop_timer_free(c->retry);
    bus_pump_free(c->pump);
    disconnect(c, false);
    hello_free(c->peer.hello);
    hello_free(c->hello);
    bus_wire_context_put();
    free(c->endpoint);
    free(c);
}
