/* baton-expertd: start, wiring and end. The loop thread owns everything but the computation, which
 * serve's worker does. */
#include "expertd/serve.h"

#include "base/clock.h"
#include "base/conf.h"
#include "base/life.h"
#include "base/log.h"
#include "base/topo.h"
#include "model/selftest.h"
#include "proto/hello.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct Opts {
    char *name, *endpoint, *dir, *device, *backend, *admin_host;
    int64_t shard, n_shards, threads, node, max_rows, admin_port, drain_ms;
    int log_level;
} Opts;

typedef struct App {
    Opts opts;
    uint64_t generation;
    Loop *loop;
    Weights *weights;
    Baton__Hello hello; /* borrows from opts */
    Store *store;
    Serve *serve;
    BusServer *bus;
    Life *life;
    LoopTimer *drain_watch;
    bool draining;
} App;

static const LogLevel LEVELS[] = {LOG_LV_ERR, LOG_LV_WARN, LOG_LV_INFO, LOG_LV_DEBUG};

#define ROW(s, k, t, d, field, h)                                                                  \
    { .section = s, .key = k, .type = t, .def = d, .help = h, .offset = offsetof(Opts, field) }
#define RANGE(s, k, t, d, lo, hi, field, h)                                                        \
    {                                                                                              \
        .section = s, .key = k, .type = t, .def = d, .min = lo, .max = hi, .help = h,              \
        .offset = offsetof(Opts, field)                                                            \
    }

static const ConfOpt OPTIONS[] = {
    ROW("service", "name", CONF_STR, "expertd-0", name,
        "Name of this instance, unique among its kind."),
    ROW("service", "endpoint", CONF_STR, "tcp://127.0.0.1:7111", endpoint,
        "Where prefill and decode connect: tcp://HOST:PORT or ipc://PATH."),
    ROW("model", "dir", CONF_STR, NULL, dir, "Checkpoint directory."),
    ROW("experts", "device", CONF_STR, "none", device,
        "What prefill and decode keep on their devices, as their [experts] resident; this daemon "
        "holds the rest."),
    RANGE("experts", "shard", CONF_INT, "0", 0, 63, shard,
          "Which slice of every expert this daemon holds."),
    RANGE("experts", "shards", CONF_INT, "1", 1, 64, n_shards,
          "Into how many slices the experts are cut: the number of daemons."),
    RANGE("experts", "max_rows", CONF_INT, "512", 1, 8192, max_rows,
          "Tokens in one call; callers cut larger ones."),
    ROW("engine", "backend", CONF_STR, "cpu", backend, "\"cpu\", or \"ref\" for plain C."),
    RANGE("engine", "threads", CONF_INT, "0", 0, 1024, threads,
          "Compute threads; 0: the physical cores of the node that the process may use."),
    RANGE("engine", "node", CONF_INT, "-1", -1, 1023, node,
          "NUMA node to run on and to allocate from; -1: any."),
    ROW("admin", "host", CONF_STR, "127.0.0.1", admin_host,
        "Address of the HTTP port with /live, /ready and /metrics."),
    RANGE("admin", "port", CONF_INT, "9111", 0, 65535, admin_port, "Port of it; 0: any free one."),
    {.section = "log",
     .key = "level",
     .type = CONF_ENUM,
     .def = "info",
     .choices = "error|warn|info|debug",
     .help = "The least urgent lines that are written.",
     .offset = offsetof(Opts, log_level)},
    RANGE("limits", "drain_ms", CONF_MS, "10s", 0, 86400000, drain_ms,
          "After SIGTERM, how long accepted calls may go on."),
    {0},
};

static const ConfTable CONF = {
    .program = "baton-expertd",
    .about = "holds routed experts in host memory and computes them",
    .opts = OPTIONS,
};

/* ---- callbacks ---- */

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    App *a = arg;
    const char *name = peer ? bus_peer_hello(peer)->name : "a caller";
    if (event == BUS_GONE) {
        LOG_INFO("%s gone: %s", name, reason);
        serve_on_gone(a->serve, peer);
    } else if (event == BUS_REFUSED) {
        LOG_WARN("%s does not fit: %s", name, reason);
    } else if (event == BUS_UP) {
        LOG_INFO("%s connected", name);
    }
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    App *a = arg;
    serve_on_message(a->serve, peer, env, blob, blob_len);
}

static void on_ping(void *arg, Baton__Pong *pong) {
    App *a = arg;
    pong->ready = !a->draining;
    pong->reason = a->draining ? (char *)"draining" : (char *)"";
    pong->draining = a->draining;
    pong->waiting = (uint32_t)serve_n_waiting(a->serve);
    pong->capacity = SERVE_QUEUE;
}

static bool is_ready(void *arg, char *why, size_t n) {
    App *a = arg;
    snprintf(why, n, "%s", a->draining ? "draining" : "");
    return !a->draining;
}

static bool is_alive(void *arg) {
    App *a = arg;
    return serve_alive(a->serve);
}

static void on_drain_watch(void *arg) {
    App *a = arg;
    if (serve_n_waiting(a->serve) == 0)
        life_idle(a->life);
}

/* Callers see not ready and go elsewhere or fail; what was accepted is still answered. */
static void on_drain(void *arg) {
    App *a = arg;
    a->draining = true;
    bus_server_announce(a->bus);
    a->drain_watch = loop_timer_new(a->loop, 1, 10, on_drain_watch, a);
}

static void on_abort(void *arg) {
    App *a = arg;
    LOG_WARN("%d calls not answered within [limits] drain_ms", serve_n_waiting(a->serve));
    life_idle(a->life);
}

/* ---- start ---- */

static void fill_hello(App *a) {
    const Shape *s = weights_shape(a->weights);
    baton__hello__init(&a->hello);
    a->hello.protocol = PROTOCOL_VERSION;
    a->hello.role = BATON__ROLE__ROLE_EXPERTD;
    a->hello.name = a->opts.name;
    a->hello.generation = a->generation;
    a->hello.fingerprint = weights_fingerprint(a->weights);
    a->hello.hidden = (uint32_t)s->hidden;
    a->hello.n_experts = (uint32_t)s->n_experts;
    a->hello.shard = (uint32_t)a->opts.shard;
    a->hello.n_shards = (uint32_t)a->opts.n_shards;
    a->hello.max_rows = (uint32_t)a->opts.max_rows;
}

/* Binds this thread, and so the threads it starts, to the node; and counts its cores when the
 * config does not. */
static int bind_node(App *a, Err *err) {
    Topo *topo;
    int rc = topo_open(&topo, err);
    if (rc)
        return rc;
    if (a->opts.node >= 0)
        rc = topo_bind_node(topo, (int)a->opts.node, err);
    if (a->opts.threads == 0)
        a->opts.threads = topo_n_cores(topo, (int)a->opts.node);
    topo_close(topo);
    return rc;
}

static int start_store(App *a, Err *err) {
    const Opts *o = &a->opts;
    int64_t begin = clock_now_ms();
    int rc = bind_node(a, err);
    if (rc == 0)
        rc = weights_open(&a->weights, o->dir, err);
    StoreConf conf = {.backend = o->backend,
                      .device = o->device,
                      .shard = (int)o->shard,
                      .n_shards = (int)o->n_shards,
                      .threads = (int)o->threads,
                      .max_rows = (int)o->max_rows};
    if (rc == 0)
        rc = store_open(&a->store, a->weights, &conf, err);
    if (rc == 0)
        rc = selftest_run(store_ops(a->store), weights_shape(a->weights), DT_F32, err);
    if (rc)
        return rc;
    fill_hello(a);
    LOG_INFO(
        "%s: shard %d of %d, %d experts, %.1f MiB, %s, %d threads, loaded and tested in %lld ms",
        o->dir, (int)o->shard, (int)o->n_shards, store_n_experts(a->store),
        (double)store_weight_bytes(a->store) / (1 << 20), store_ops(a->store)->name,
        (int)o->threads, (long long)(clock_now_ms() - begin));
    return serve_open(&a->serve, a->loop, a->store, weights_shape(a->weights), (int)o->max_rows,
                      a->generation, err);
}

static int start_serving(App *a, Err *err) {
    const Opts *o = &a->opts;
    BusCallbacks cb = {
        .arg = a, .on_event = on_event, .on_message = on_message, .on_ping = on_ping};
    int rc = bus_server_open(&a->bus, a->loop, o->endpoint, &a->hello, NULL, &cb, err);
    if (rc)
        return rc;
    LOG_INFO("%s, generation %016llx, listens on %s", o->name, (unsigned long long)a->generation,
             bus_server_endpoint(a->bus));
    LifeConf life = {.loop = a->loop,
                     .admin_host = o->admin_host,
                     .admin_port = (int)o->admin_port,
                     .drain_ms = o->drain_ms,
                     .ready = is_ready,
                     .drain = on_drain,
                     .abort = on_abort,
                     .alive = is_alive,
                     .arg = a};
    return life_open(&a->life, &life, err);
}

/* The server goes first, so that no call comes after serve has gone; the loop last, with whatever
 * was posted to it. */
static void stop(App *a) {
    loop_timer_free(a->drain_watch);
    life_close(a->life);
    bus_server_close(a->bus);
    serve_close(a->serve);
    loop_free(a->loop);
    store_close(a->store);
    weights_close(a->weights);
    conf_free(&CONF, &a->opts);
}

int main(int argc, char **argv) {
    static App app;
    App *a = &app;
    int status;
    if (conf_main(&CONF, argc, argv, &a->opts, &status))
        return status;
    log_init("expertd", LEVELS[a->opts.log_level]);
    a->generation = clock_unique();
    a->loop = loop_new();
    Err err = {0};
    int rc = start_store(a, &err);
    if (rc == 0)
        rc = start_serving(a, &err);
    if (rc) {
        LOG_ERR("cannot start: %s", err.text);
        status = 1;
    } else {
        loop_run(a->loop);
        status = life_status(a->life);
        LOG_INFO("ended");
    }
    stop(a);
    return status;
}
