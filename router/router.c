/* See router.h. */
#include "router/router.h"

#include "base/clock.h"
#include "base/httpd.h"
#include "base/log.h"
#include "proto/hello.h"
#include "router/files.h"
#include "router/http.h"
#include "router/peers.h"
#include "router/session.h"
#include "router/work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* After the last answer, for its bytes to leave and for the peers to hear of cancellations. */
enum { FLUSH_MS = 1000, DRAIN_TICK_MS = 20 };

struct Router {
    const Options *opt;
    char *name; /* that clients use */
    Files files;
    ApiModel model;
    Loop *loop;
    Httpd *httpd;
    HttpFront front;
    Work *work;
    Peers *peers;
    Sessions *sessions;
    LoopTimer *tick, *drain;
    int64_t drain_end_ms, flush_end_ms;
    bool ready; /* as last told */
};

/* ---- what sessions need ---- */

static int64_t port_now(void *arg) {
    (void)arg;
    return clock_now_ms();
}

static void on_parsed(void *arg, ApiReq *req, const ApiError *error) {
    session_on_parsed(arg, req, error);
}

static void *port_parse(void *arg, Session *s, bool chat, const char *body, size_t len) {
    Router *r = arg;
    return work_submit(r->work, chat, body, len, on_parsed, s);
}

static void port_abandon(void *arg, void *job) {
    (void)arg;
    work_abandon(job);
}

static bool port_pick(void *arg, uint32_t n_prompt, uint32_t n_total, const Peer *not_prefill,
                      const Peer *not_decode, Peer **prefill, Peer **decode) {
    Router *r = arg;
    return peers_pick(r->peers, n_prompt, n_total, not_prefill, not_decode, prefill, decode);
}

static int port_send(void *arg, Peer *peer, const Baton__Envelope *env, Err *err) {
    (void)arg;
    return peers_send(peer, env, err);
}

static int port_max_context(void *arg) {
    Router *r = arg;
    return peers_max_context(r->peers, r->model.max_context);
}

/* ---- events ---- */

static bool is_ready(void *arg, char *why, size_t n) {
    Router *r = arg;
    if (sessions_draining(r->sessions)) {
        snprintf(why, n, "shutting down");
        return false;
    }
    return peers_ready(r->peers, why, n);
}

static void on_peer(void *arg, Peer *peer, BusEvent event) {
    Router *r = arg;
    sessions_on_peer(r->sessions, peer, event);
}

static void on_message(void *arg, Peer *peer, const Baton__Envelope *env) {
    Router *r = arg;
    sessions_on_message(r->sessions, peer, env);
}

/* Says it once when readiness has changed: to the log and to systemd. */
static void tell_readiness(Router *r) {
    char why[400] = "";
    bool ready = is_ready(r, why, sizeof why);
    if (ready == r->ready)
        return;
    r->ready = ready;
    if (ready) {
        loop_notify_ready(r->loop, "serving");
        LOG_INFO("ready: serving \"%s\" on port %d", r->model.name, httpd_port(r->httpd));
    } else {
        loop_notify_status(r->loop, why);
        LOG_WARN("not ready: %s", why);
    }
}

static void on_tick(void *arg) {
    Router *r = arg;
    sessions_tick(r->sessions);
    tell_readiness(r);
}

/* Ends the loop once everybody has been told. */
static void on_drain_tick(void *arg) {
    Router *r = arg;
    int64_t now = clock_now_ms();
    if (sessions_running(r->sessions) > 0 && now >= r->drain_end_ms) {
        LOG_WARN("%d requests outlast the drain, ending them", sessions_running(r->sessions));
        sessions_abort(r->sessions);
    }
    if (sessions_running(r->sessions) > 0)
        return;
    if (r->flush_end_ms == 0)
        r->flush_end_ms = now + FLUSH_MS;
    bool quiet = httpd_active(r->httpd) == 0 && sessions_attempts(r->sessions) == 0;
    if (quiet || now >= r->flush_end_ms)
        loop_stop(r->loop);
}

void router_stop(void *arg) {
    Router *r = arg;
    LOG_INFO("stopping: %d requests are running", sessions_running(r->sessions));
    sessions_drain(r->sessions);
    r->drain_end_ms = clock_now_ms() + r->opt->drain_ms;
    r->drain = loop_timer_new(r->loop, 0, DRAIN_TICK_MS, on_drain_tick, r);
}

/* ---- start ---- */

/* The last part of a folder's name, without slashes at its end. */
static char *folder_name(const char *dir) {
    size_t end = strlen(dir);
    while (end > 1 && dir[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin > 0 && dir[begin - 1] != '/')
        begin--;
    return xasprintf("%.*s", (int)(end - begin), dir + begin);
}

static int open_model(Router *r, Err *err) {
    const Options *o = r->opt;
    int rc = files_open(&r->files, o->model_dir, err);
    if (rc)
        return rc;
    r->name = o->model_name[0] ? xstrdup(o->model_name) : folder_name(o->model_dir);
    const Files *f = &r->files;
    int context = f->max_positions;
    if (o->max_context > 0 && o->max_context < context)
        context = (int)o->max_context;
    r->model = (ApiModel){.name = r->name,
                          .max_context = context,
                          .default_max_tokens = (int)o->default_max_tokens,
                          .n_tokens = tok_size(f->tok),
                          .temperature = f->temperature,
                          .top_p = f->top_p,
                          .enable_thinking = o->enable_thinking,
                          .n_eos = f->n_eos,
                          .think_end = f->think_end};
    memcpy(r->model.eos, f->eos, sizeof r->model.eos);
    return 0;
}

static int open_peers(Router *r, Err *err) {
    Baton__Hello hello = BATON__HELLO__INIT;
    hello.protocol = PROTOCOL_VERSION;
    hello.role = BATON__ROLE__ROLE_ROUTER;
    hello.name = r->opt->name;
    hello.generation = clock_unique();
    hello.tokenizer_hash = r->files.tokenizer_hash;
    BusConf bus = bus_conf_default();
    bus.ping_ms = r->opt->ping_ms;
    bus.silent_ms = r->opt->silent_ms;
    PeersCallbacks cb = {.arg = r, .on_event = on_peer, .on_message = on_message};
    return peers_open(&r->peers, r->loop, r->opt->prefill, r->opt->decode, &hello, &bus, &cb, err);
}

static int open_sessions(Router *r) {
    const Options *o = r->opt;
    SessionPort port = {.arg = r,
                        .now_ms = port_now,
                        .parse = port_parse,
                        .abandon = port_abandon,
                        .pick = port_pick,
                        .send = port_send,
                        .max_context = port_max_context};
    SessionLimits limits = {.max_requests = (int)o->max_requests,
                            .request_ms = o->request_ms,
                            .parse_ms = o->parse_ms,
                            .reserve_ms = o->reserve_ms,
                            .first_token_ms = o->first_token_ms,
                            .stall_ms = o->stall_ms,
                            .retry_wait_ms = o->retry_wait_ms,
                            .keep_ms = o->keep_ms};
    return sessions_open(&r->sessions, &port, &limits, &r->model, r->files.tok);
}

static int open_http(Router *r, Err *err) {
    const Options *o = r->opt;
    r->front = (HttpFront){.sessions = r->sessions,
                           .model = &r->model,
                           .ready = is_ready,
                           .ready_arg = r,
                           .max_context = port_max_context,
                           .context_arg = r,
                           .started_s = clock_wall_s()};
    HttpdConf conf = {.host = o->http_host,
                      .port = (int)o->http_port,
                      .listen_fd = -1,
                      .max_body_bytes = (size_t)o->max_body_bytes,
                      .max_connections = (int)o->max_connections,
                      .idle_timeout_ms = o->idle_timeout_ms,
                      .max_stream_bytes = (size_t)o->max_stream_bytes};
    return httpd_open(&r->httpd, r->loop, &conf, http_handle, &r->front, err);
}

static int open_all(Router *r, Err *err) {
    int rc = open_model(r, err);
    if (rc)
        return rc;
    r->work = work_start(r->loop, &r->model, r->files.tok, (int)r->opt->threads,
                         (int)r->opt->max_waiting);
    rc = open_sessions(r);
    if (rc == 0)
        rc = open_peers(r, err);
    if (rc == 0)
        rc = open_http(r, err);
    if (rc == 0)
        r->tick = loop_timer_new(r->loop, SESSION_TICK_MS, SESSION_TICK_MS, on_tick, r);
    return rc;
}

int router_open(Router **out, Loop *loop, const Options *opt, Err *err) {
    Router *r = xcalloc(1, sizeof *r);
    r->loop = loop;
    r->opt = opt;
    int rc = open_all(r, err);
    if (rc) {
        router_close(r);
        return rc;
    }
    LOG_INFO("listening on %s port %d, model \"%s\", context %d tokens", opt->http_host,
             router_port(r), r->model.name, r->model.max_context);
    *out = r;
    return 0;
}

int router_port(const Router *r) {
    return httpd_port(r->httpd);
}

void router_close(Router *r) {
    if (!r)
        return;
    loop_timer_free(r->drain);
    loop_timer_free(r->tick);
    httpd_close(r->httpd); /* the sessions of clients still there end as gone */
    peers_close(r->peers);
    work_stop(r->work);
    sessions_close(r->sessions);
    files_close(&r->files);
    free(r->name);
    free(r);
}
