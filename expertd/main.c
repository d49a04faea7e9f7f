/* baton-expertd: start, wiring and end. The loop thread owns everything but the computation, which
 * serve's worker does. */
#include "expertd/conf.h"
#include "expertd/serve.h"
#include "expertd/speed.h"

#include "base/clock.h"
#include "base/life.h"
#include "base/log.h"
#include "base/stat.h"
#include "base/topo.h"
#include "model/selftest.h"
#include "proto/hello.h"
#include "proto/shmring.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct App {
    ExpertdOpts opts;
    uint64_t generation;
    Loop *loop;
    Weights *weights;
    Baton__Hello hello; /* borrows from opts and store, but for held */
    Store *store;
    Serve *serve;
    BusServer *bus;
    Life *life;
    LoopTimer *drain_watch;
    bool draining;
    char shm[SHM_NAME_MAX + 1]; /* abstract socket of shared memory; "": not offered */
    bool pin;                   /* there is a physical core for each compute thread */
} App;

static const LogLevel LEVELS[] = {LOG_LV_ERR, LOG_LV_WARN, LOG_LV_INFO, LOG_LV_DEBUG};

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
    serve_drain(a->serve);
    bus_server_announce(a->bus);
    a->drain_watch = loop_timer_new(a->loop, 1, 10, on_drain_watch, a);
}

static void on_abort(void *arg) {
    App *a = arg;
    LOG_WARN("%d calls not answered within [limits] drain_ms", serve_n_waiting(a->serve));
    life_idle(a->life);
}

/* ---- start ---- */

static void fill_held(App *a) {
    const Shape *s = store_shape(a->store);
    int n = (s->n_layers + s->n_mtp) * s->n_experts;
    a->hello.held.len = (size_t)(n + 7) / 8;
    a->hello.held.data = xcalloc(a->hello.held.len, 1);
    for (int i = 0; i < n; i++)
        if (store_holds(a->store, i / s->n_experts, i % s->n_experts))
            a->hello.held.data[i / 8] |= (uint8_t)(1 << i % 8);
}

static void fill_hello(App *a) {
    const Shape *s = store_shape(a->store);
    baton__hello__init(&a->hello);
    a->hello.protocol = PROTOCOL_VERSION;
    a->hello.role = BATON__ROLE__ROLE_EXPERTD;
    a->hello.name = a->opts.name;
    a->hello.generation = a->generation;
    a->hello.fingerprint = store_fingerprint(a->store);
    a->hello.model_id = store_model_id(a->store);
    a->hello.expert_hash = store_hash(a->store);
    a->hello.expert_format = (char *)store_format(a->store);
    a->hello.hidden = (uint32_t)s->hidden;
    a->hello.n_experts = (uint32_t)s->n_experts;
    a->hello.shard = (uint32_t)a->opts.shard;
    a->hello.n_shards = (uint32_t)a->opts.n_shards;
    a->hello.max_rows = (uint32_t)a->opts.max_rows;
    a->hello.shm = a->shm;
    fill_held(a);
}

/* Binds this thread, and so the threads it starts, to the node; and counts its cores when the
 * config does not. */
static int bind_node(App *a, Err *err) {
    Topo *topo;
    int rc = topo_open(&topo, err);
    if (rc)
        return rc;
    int cores = topo_n_cores(topo, (int)a->opts.node);
    if (a->opts.node >= 0)
        rc = topo_bind_node(topo, (int)a->opts.node, err);
    if (a->opts.threads == 0)
        a->opts.threads = cores;
    if (rc == 0 && a->opts.threads > cores && *a->opts.files && !a->opts.oversubscribe)
        rc = err_set(err, E_INVAL,
                     "[engine] threads is %d, this process may use %d physical cores of the node: "
                     "hardware threads and other nodes make it slower (oversubscribe = yes allows "
                     "it)",
                     (int)a->opts.threads, cores);
    a->pin = a->opts.threads <= cores;
    topo_close(topo);
    return rc;
}

/* What the memory really is, never what was asked for. */
static int report_memory(App *a, Err *err) {
    const NodeMem *m = store_memory(a->store);
    int node = (int)a->opts.node;
    NodeMemReport r = node_mem_report(m, node);
    double gib = 1u << 30;
    char where[64] = "on nodes that the system does not tell";
    if (r.node >= 0)
        snprintf(where, sizeof where, "%.2f GiB on node %d", (double)r.local_bytes / gib, r.node);
    LOG_INFO("memory: %.2f GiB, %.2f GiB in huge pages%s, %s, %s%s; %.2f GiB more for calls",
             (double)m->bytes / gib, (double)r.huge_bytes / gib, m->reserved ? " (reserved)" : "",
             where,
             m->bound   ? "bound"
             : node < 0 ? "any node will do"
                        : "not bound: ",
             m->unbound, (double)store_work_bytes(a->store) / gib);
    stat_set(stat_gauge("baton_expert_huge_bytes", "", "Weights in huge pages."),
             (double)r.huge_bytes);
    stat_set(stat_gauge("baton_expert_local_bytes", "", "Weights on the configured NUMA node."),
             (double)r.local_bytes);
    if (node >= 0 && *m->unbound)
        LOG_WARN("memory is not bound to node %d: %s", node, m->unbound);
    if (a->opts.require_node && node >= 0 && r.local_bytes < m->bytes)
        return err_set(err, E_MISMATCH,
                       "of %.2f GiB for node %d: %s, and [experts] require_node is set",
                       (double)m->bytes / gib, node, where);
    return 0;
}

static int report_speed(App *a, Err *err) {
    Speed v = speed_measure(a->store);
    double fraction = v.memory_gb_per_s > 0 ? v.kernel_gb_per_s / v.memory_gb_per_s : 0;
    LOG_INFO("speed: memory %.1f GB/s, experts %.1f GB/s (%.0f %%), %.0f us per layer of one token",
             v.memory_gb_per_s, v.kernel_gb_per_s, fraction * 100, v.layer_us);
    if (v.in_cache) {
        LOG_INFO("the slice fits in the cache: its speed says nothing about memory");
        return 0;
    }
    LOG_INFO("expected %.1f tok/s at 1 stream from this shard (%.2f GB per token), measured %.1f",
             v.expected_tok_per_s, v.token_bytes / 1e9, v.measured_tok_per_s);
    if (fraction >= a->opts.min_fraction)
        return 0;
    if (a->opts.strict_speed)
        return err_set(err, E_LIMIT,
                       "experts reach %.2f of the memory's bandwidth, [experts] min_fraction is "
                       "%.2f",
                       fraction, a->opts.min_fraction);
    LOG_WARN("SLOW: experts reach %.2f of the memory's bandwidth, less than %.2f: look for other "
             "load on the cores, too few threads (%d), memory without huge pages or on another "
             "node",
             fraction, a->opts.min_fraction, (int)a->opts.threads);
    return 0;
}

static int open_store(App *a, Err *err) {
    const ExpertdOpts *o = &a->opts;
    if (!*o->files == !*o->dir)
        return err_set(err, E_INVAL, "expected one of [model] dir and [experts] files, got %s",
                       *o->dir ? "both" : "neither");
    if (*o->dir && (o->require_node || o->lock || o->strict_speed || o->oversubscribe))
        return err_set(err, E_INVAL,
                       "require_node, lock, strict_speed and oversubscribe need [experts] files");
    if (o->require_node && o->node < 0)
        return err_set(err, E_INVAL, "[experts] require_node is set, but [engine] node names none");
    int rc = bind_node(a, err);
    if (rc == 0 && *o->dir)
        rc = weights_open(&a->weights, o->dir, err);
    StoreConf conf = {.files = *o->files ? o->files : NULL,
                      .backend = o->backend,
                      .device = o->device,
                      .shard = (int)o->shard,
                      .n_shards = (int)o->n_shards,
                      .threads = (int)o->threads,
                      .node = (int)o->node,
                      .pin = a->pin,
                      .lock = o->lock,
                      .max_rows = (int)o->max_rows};
    return rc ? rc : store_open(&a->store, a->weights, &conf, err);
}

/* What was loaded is tried before it serves. */
static int try_store(App *a, Err *err) {
    if (store_ops(a->store))
        return selftest_run(store_ops(a->store), store_shape(a->store), DT_F32, err);
    int rc = store_selftest(a->store, err);
    if (rc == 0)
        rc = report_memory(a, err);
    return rc ? rc : report_speed(a, err);
}

static int start_store(App *a, Err *err) {
    const ExpertdOpts *o = &a->opts;
    int64_t begin = clock_now_ms();
    int rc = open_store(a, err);
    if (rc)
        return rc;
    fill_hello(a);
    if (*o->files && !a->pin)
        LOG_WARN("%d threads are more than there are cores: they are not pinned", (int)o->threads);
    LOG_INFO("%s: shard %d of %d, %d experts, %.1f MiB, %s, %s, %d threads, loaded in %lld ms",
             *o->files ? o->files : o->dir, (int)o->shard, (int)o->n_shards,
             store_n_experts(a->store), (double)store_weight_bytes(a->store) / (1 << 20),
             store_format(a->store), store_kernel(a->store), (int)o->threads,
             (long long)(clock_now_ms() - begin));
    rc = try_store(a, err);
    if (rc)
        return rc;
    return serve_open(&a->serve, a->loop, a->store, store_shape(a->store), (int)o->max_rows,
                      a->generation, *a->shm ? a->shm : NULL, err);
}

static int start_serving(App *a, Err *err) {
    const ExpertdOpts *o = &a->opts;
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
    free(a->hello.held.data);
    conf_free(&EXPERTD_CONF, &a->opts);
}

int main(int argc, char **argv) {
    static App app;
    App *a = &app;
    int status;
    if (conf_main(&EXPERTD_CONF, argc, argv, &a->opts, &status))
        return status;
    log_init("expertd", LEVELS[a->opts.log_level]);
    a->generation = clock_unique();
    if (a->opts.shm)
        snprintf(a->shm, sizeof a->shm, "baton-expertd-%016llx", (unsigned long long)a->generation);
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
