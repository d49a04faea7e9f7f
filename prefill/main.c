/* baton-prefill: start, wiring and end. Everything is opened in order, measured and tested before
 * the service listens; whatever is wrong ends the process with one line and status 1. */
#include "prefill/conf.h"
#include "prefill/prefill.h"

#include "base/clock.h"
#include "base/life.h"
#include "base/log.h"
#include "daemon/pool.h"
#include "daemon/remote.h"
#include "model/place_live.h"
#include "proto/hello.h"
#include "proto/kvlink_fault.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct App {
    PrefillOpts opts;
    uint64_t generation;
    Loop *loop;
    Runtime runtime;
    Baton__Hello hello; /* borrows from opts and runtime */
    Remote *experts;
    KvLink *link;
    Stepper *stepper;
    ExpertWatch *watch;
    PlaceLive *place;
    Prefill prefill;
    bool prefill_open;
    BusServer *bus;
    LoopTimer *tick;
    Life *life;
} App;

/* ---- callbacks ---- */

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    App *a = arg;
    service_log_event(peer, event, reason);
    if (event == BUS_GONE)
        prefill_on_router_gone(&a->prefill, peer);
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    App *a = arg;
    (void)blob, (void)blob_len;
    prefill_on_message(&a->prefill, peer, env);
}

static void on_ping(void *arg, Baton__Pong *pong) {
    App *a = arg;
    prefill_on_ping(&a->prefill, pong);
}

/* Nobody has a reason to write here. */
static void on_notice(void *arg, const void *bytes, size_t len) {
    (void)arg, (void)bytes;
    LOG_WARN("a notice of %zu bytes, which prefill does not expect", len);
}

static void on_tick(void *arg) {
    App *a = arg;
    prefill_tick(&a->prefill);
}

static void on_ready_change(void *arg) {
    App *a = arg;
    if (a->bus)
        bus_server_announce(a->bus);
    if (a->life)
        life_changed(a->life);
}

static void on_idle(void *arg) {
    App *a = arg;
    life_idle(a->life);
}

static bool is_ready(void *arg, char *why, size_t n) {
    App *a = arg;
    const char *text;
    bool ready = prefill_ready(&a->prefill, &text);
    snprintf(why, n, "%s", text);
    return ready;
}

static bool is_alive(void *arg) {
    App *a = arg;
    return stepper_alive(a->stepper, a->opts.service.step_ms);
}

static void on_drain(void *arg) {
    App *a = arg;
    prefill_drain(&a->prefill);
}

static void on_abort(void *arg) {
    App *a = arg;
    prefill_abort(&a->prefill);
}

/* ---- start ---- */

static void fill_hello(App *a) {
    const Runtime *r = &a->runtime;
    baton__hello__init(&a->hello);
    a->hello.protocol = PROTOCOL_VERSION;
    a->hello.role = BATON__ROLE__ROLE_PREFILL;
    a->hello.name = a->opts.service.name;
    a->hello.generation = a->generation;
    a->hello.fingerprint = r->fingerprint;
    a->hello.model_id = r->model_id;
    a->hello.tokenizer_hash = r->tokenizer_hash;
    a->hello.tp = (uint32_t)a->opts.engine.tp;
    a->hello.page_tokens = KV_PAGE_TOKENS;
    a->hello.kv_dtype = (char *)r->kv_dtype;
    a->hello.max_context = (uint32_t)r->max_context;
    a->hello.hidden = (uint32_t)r->shape->hidden;
    a->hello.n_experts = (uint32_t)r->shape->n_experts;
    a->hello.model = a->opts.engine.name;
}

static int start_model(App *a, Err *err) {
    const EngineOpts *o = &a->opts.engine;
    int64_t begin = clock_now_ms();
    int rc = runtime_load(&a->runtime, o, err);
    if (rc)
        return rc;
    fill_hello(a);
    if (a->runtime.n_remote > 0)
        rc = remote_open(&a->experts, &a->runtime, o, &a->hello, err);
    if (rc)
        return err_wrap(err, "[experts] endpoints");
    ExpertPort port = remote_port(a->experts);
    rc = runtime_start(&a->runtime, o, (int)a->opts.step_tokens, (int)a->opts.max_running,
                       a->experts ? &port : NULL, err);
    if (rc)
        return rc;
    a->hello.kv_layout_hash = kv_layout_hash(&a->runtime.layout);
    LOG_INFO("model %s on %s, tp %d, %d remote experts, loaded and tested in %lld ms", o->dir,
             engine_backend(a->runtime.engine), (int)o->tp, a->runtime.n_remote,
             (long long)(clock_now_ms() - begin));
    return 0;
}

/* For tests: the link misbehaves by configuration. */
static int add_faults(App *a, Err *err) {
    const PrefillOpts *o = &a->opts;
    KvFaultConf conf = {.loop = a->loop,
                        .rules = o->kv_faults,
                        .seed = (uint64_t)o->kv_seed,
                        .timeout_ms = o->service.kv_timeout_ms};
    if (!*o->kv_faults)
        return 0;
    if (engine_pool_on_device(a->runtime.engine))
        return err_set(err, E_UNSUPPORTED, "[test] kv_faults: needs a KV pool in host memory");
    LOG_WARN("the KV link misbehaves on purpose: %s", o->kv_faults);
    return kvlink_fault_new(&a->link, &a->link, &conf, err) ? err_wrap(err, "[test] kv_faults") : 0;
}

static int start_pool(App *a, Err *err) {
    double gb_per_s = 0;
    uint64_t bytes = kv_pool_bytes(&a->runtime.layout);
    KvMemory memory;
    int rc = pool_memory(&memory, &a->runtime, err);
    if (rc == 0)
        rc = service_open_link(&a->link, &a->opts.service, a->loop, bytes, &memory, on_notice, a,
                               &gb_per_s, err);
    if (rc)
        return rc;
    engine_kv_bind(a->runtime.engine, &a->runtime.layout, kvlink_pool(a->link, &bytes));
    LOG_INFO("KV pool: %lld pages, %lld tokens, %.1f MiB of %s memory, %s; the link measures %.2f "
             "GB/s over %s",
             (long long)a->runtime.layout.n_pages,
             (long long)a->runtime.layout.n_pages * KV_PAGE_TOKENS, (double)bytes / (1 << 20),
             memory.at ? "GPU" : "host", a->runtime.kv_dtype, gb_per_s,
             kvlink_selftest_transport(a->link));
    return add_faults(a, err);
}

static int start_prefill(App *a, Err *err) {
    const PrefillOpts *o = &a->opts;
    int rc = stepper_open(&a->stepper, a->loop, err);
    if (rc)
        return rc;
    ExpertWatchConf watch = {.loop = a->loop,
                             .stepper = a->stepper,
                             .probe = a->experts ? remote_probe : NULL,
                             .probe_arg = a->experts,
                             .on_change = on_ready_change,
                             .arg = a};
    a->watch = expert_watch_new(&watch);
    expert_watch_worked(a->watch); /* all have just said hello */
    PlaceLiveConf place = {.loop = a->loop,
                           .stepper = a->stepper,
                           .runtime = &a->runtime,
                           .record = o->engine.record,
                           .update_ms = o->engine.update_ms,
                           .on_note = remote_on_place};
    a->place = place_live_new(&place);
    PrefillConf conf = {
        .limits = {.max_waiting = (int)o->max_waiting,
                   .max_running = (int)o->max_running,
                   .step_tokens = (int)o->step_tokens,
                   .max_context = a->runtime.max_context,
                   .patience_ms = o->patience_ms,
                   .link_ms = o->service.kv_timeout_ms},
        .loop = a->loop,
        .runtime = &a->runtime,
        .stepper = a->stepper,
        .experts = a->watch,
        .link = a->link,
        .generation = a->generation,
        .on_ready = on_ready_change,
        .on_idle = on_idle,
        .arg = a,
    };
    prefill_init(&a->prefill, &conf);
    a->prefill_open = true;
    a->tick = loop_timer_new(a->loop, PREFILL_TICK_MS, PREFILL_TICK_MS, on_tick, a);
    return 0;
}

static int start_serving(App *a, Err *err) {
    const ServiceOpts *o = &a->opts.service;
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

/* The link goes before the bus: a router takes a closed bus for the word that nothing more is
 * written into the pages that decode granted. */
static void stop(App *a) {
    stepper_close(a->stepper);
    life_close(a->life);
    kvlink_close(a->link);
    bus_server_close(a->bus);
    expert_watch_free(a->watch);
    place_live_free(a->place);
    loop_timer_free(a->tick);
    if (a->prefill_open)
        prefill_done(&a->prefill);
    runtime_close(&a->runtime);
    remote_close(a->experts);
    loop_free(a->loop);
    conf_free(&PREFILL_CONF, &a->opts);
}

int main(int argc, char **argv) {
    static App app;
    App *a = &app;
    int status;
    if (conf_main(&PREFILL_CONF, argc, argv, &a->opts, &status))
        return status;
    service_log(&a->opts.service, "prefill");
    a->generation = clock_unique();
    a->loop = loop_new();
    Err err = {0};
    int rc = service_check(&a->opts.service, &err);
    if (rc == 0)
        rc = start_model(a, &err);
    if (rc == 0)
        rc = start_pool(a, &err);
    if (rc == 0)
        rc = start_prefill(a, &err);
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
