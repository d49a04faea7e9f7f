/* What both ends of the bus have in common: configuration, the peer as a daemon sees it, and the
 * pump that drains sockets on the loop. Loop thread only. */
#include "proto/bus.h"

#include "base/clock.h"
#include "proto/bus_int.h"

#include <stdlib.h>

BusConf bus_conf_default(void) {
    return (BusConf){.ping_ms = 250,
                     .silent_ms = 1500,
                     .max_queued = 4096,
                     .max_frame_bytes = (size_t)256 << 20};
}

int bus_conf_take(BusConf *out, const BusConf *conf, Err *err) {
    BusConf c = conf ? *conf : bus_conf_default();
    if (c.ping_ms < 1 || c.silent_ms < c.ping_ms)
        return err_set(err, E_INVAL, "ping_ms must be positive and silent_ms not below it");
    if (c.max_queued < 1 || c.max_frame_bytes < 1024 || c.max_frame_bytes > INT64_MAX)
        return err_set(err, E_INVAL, "max_queued or max_frame_bytes out of range");
    *out = c;
    return 0;
}

BusWireConf bus_conf_wire(const BusConf *conf) {
    return (BusWireConf){conf->max_queued, conf->max_frame_bytes};
}

/* ---- peers ---- */

int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err) {
    return peer->server ? bus_server_send(peer, env, blob, blob_len, err)
                        : bus_client_send(peer, env, blob, blob_len, err);
}

const Baton__Hello *bus_peer_hello(const BusPeer *peer) {
    return peer->hello;
}

bool bus_peer_up(const BusPeer *peer) {
    return peer->up && !peer->silent && !peer->dead;
}

void bus_peer_set_user(BusPeer *peer, void *user) {
    peer->user = user;
}

void *bus_peer_user(const BusPeer *peer) {
    return peer->user;
}

/* ---- our own pauses ---- */

int64_t bus_paused_ms(int64_t *tick_ms, int64_t ping_ms) {
    int64_t now = clock_now_ms(), late = now - *tick_ms - ping_ms;
    *tick_ms = now;
    return late > ping_ms ? late : 0;
}

void bus_peer_excuse(BusPeer *peer, int64_t paused_ms) {
    int64_t now = clock_now_ms();
    peer->heard_ms = peer->heard_ms + paused_ms < now ? peer->heard_ms + paused_ms : now;
    peer->greeted_ms += paused_ms;
}

/* ---- pump ---- */

struct BusPump {
    uv_prepare_t prepare;
    uv_idle_t idle; /* active while there is more to take: the loop then does not sleep */
    bool (*drain)(void *arg);
    void *arg;
    bool again;
    int n_open; /* handles not yet closed */
    bool freed;
};

static void on_idle(uv_idle_t *idle) {
    (void)idle;
}

static void on_prepare(uv_prepare_t *prepare) {
    BusPump *pump = prepare->data;
    pump->again = false;
    bool more = pump->drain(pump->arg);
    if (pump->freed)
        return;
    if (more || pump->again)
        uv_idle_start(&pump->idle, on_idle);
    else
        uv_idle_stop(&pump->idle);
}

static void on_pump_closed(uv_handle_t *handle) {
    BusPump *pump = handle->data;
    if (--pump->n_open == 0)
        free(pump);
}

BusPump *bus_pump_new(Loop *loop, bool (*drain)(void *arg), void *arg) {
    BusPump *pump = xcalloc(1, sizeof *pump);
    pump->drain = drain;
    pump->arg = arg;
    pump->n_open = 2;
    CHECK(uv_prepare_init(loop_uv(loop), &pump->prepare) == 0);
    CHECK(uv_idle_init(loop_uv(loop), &pump->idle) == 0);
    pump->prepare.data = pump->idle.data = pump;
    uv_prepare_start(&pump->prepare, on_prepare);
    return pump;
}

void bus_pump_again(BusPump *pump) {
    pump->again = true;
    uv_idle_start(&pump->idle, on_idle);
}

void bus_pump_free(BusPump *pump) {
    if (!pump)
        return;
    pump->freed = true;
    uv_close((uv_handle_t *)&pump->prepare, on_pump_closed);
    uv_close((uv_handle_t *)&pump->idle, on_pump_closed);
}

/* The pump does the work in the same round; waking up is all that is needed here. */
static void on_fd(void *arg, int events) {
    (void)arg;
    (void)events;
}

LoopFd *bus_watch(Loop *loop, void *socket, Err *err) {
    LoopFd *watch = loop_fd_new(loop, bus_wire_fd(socket), UV_READABLE, on_fd, NULL);
    if (!watch)
        err_set(err, E_IO, "the system cannot watch a socket of the bus");
    return watch;
}
