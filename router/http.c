/* See http.h. */
#include "router/http.h"

#include "base/clock.h"
#include "model/chat_json.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const JSON = "application/json";

/* A request that a session works on. */
typedef struct Client {
    HttpReq *req;
    Session *session;
} Client;

void http_clean_id(const char *value, char out[65]) {
    size_t n = value ? strlen(value) : 0;
    out[0] = '\0';
    if (n < 1 || n > 64)
        return;
    for (size_t i = 0; i < n; i++)
        if (!isalnum((unsigned char)value[i]) && !strchr("._:-", value[i]))
            return;
    memcpy(out, value, n + 1);
}

static void set_retry_after(HttpReq *req, int64_t ms) {
    char text[32];
    if (ms <= 0)
        return;
    snprintf(text, sizeof text, "%" PRId64, (ms + 999) / 1000);
    http_set_header(req, "Retry-After", text);
}

static void reply_error(HttpReq *req, const ApiError *e) {
    Buf body = {0};
    answer_error(e, &body);
    set_retry_after(req, e->retry_after_ms);
    http_reply(req, e->status, JSON, body.data, body.len);
    buf_done(&body);
}

/* ---- what a session says ---- */

static void on_reply(void *arg, int status, int64_t retry_after_ms, const char *body, size_t len) {
    Client *c = arg;
    set_retry_after(c->req, retry_after_ms);
    http_reply(c->req, status, JSON, body, len);
    free(c);
}

static void on_stream_begin(void *arg) {
    Client *c = arg;
    http_set_header(c->req, "Cache-Control", "no-cache");
    http_set_header(c->req, "X-Accel-Buffering", "no");
    http_stream_begin(c->req, "text/event-stream");
}

static bool on_stream_put(void *arg, const char *text, size_t len) {
    Client *c = arg;
    return http_stream_put(c->req, text, len);
}

static void on_stream_end(void *arg, bool ok) {
    Client *c = arg;
    http_stream_end(c->req, ok);
    free(c);
}

static void on_gone(void *arg) {
    Client *c = arg;
    session_on_gone(c->session);
    free(c);
}

/* ---- paths ---- */

static void complete(HttpFront *f, HttpReq *req, const char *id, bool chat) {
    size_t len;
    const char *body = http_body(req, &len);
    Client *c = xcalloc(1, sizeof *c);
    c->req = req;
    SessionOut out = {.arg = c,
                      .reply = on_reply,
                      .stream_begin = on_stream_begin,
                      .stream_put = on_stream_put,
                      .stream_end = on_stream_end};
    Session *s = session_new(f->sessions, chat, body, len, id, &out);
    if (!s)
        return; /* answered, and c with it */
    c->session = s;
    http_on_gone(req, on_gone, c);
}

static void on_chat(HttpFront *f, HttpReq *req, const char *id) {
    complete(f, req, id, true);
}

static void on_completions(HttpFront *f, HttpReq *req, const char *id) {
    complete(f, req, id, false);
}

static void on_models(HttpFront *f, HttpReq *req, const char *id) {
    (void)id;
    Buf body = {0};
    buf_puts(&body, "{\"object\":\"list\",\"data\":[{\"id\":");
    chat_json_put_string(f->model->name, strlen(f->model->name), &body);
    buf_printf(&body,
               ",\"object\":\"model\",\"created\":%" PRId64
               ",\"owned_by\":\"baton\",\"max_model_len\":%d}]}",
               f->started_s, f->max_context(f->context_arg));
    http_reply(req, 200, JSON, body.data, body.len);
    buf_done(&body);
}

static void on_health(HttpFront *f, HttpReq *req, const char *id) {
    (void)id;
    char why[400] = "";
    if (f->ready(f->ready_arg, why, sizeof why)) {
        http_reply(req, 200, JSON, "{\"status\":\"ok\"}", 15);
        return;
    }
    ApiError e;
    api_refuse(&e, 503, "server_error", "not_ready", NULL, "%s", why);
    e.retry_after_ms = 1000;
    reply_error(req, &e);
}

static const struct {
    const char *path, *method;
    void (*fn)(HttpFront *f, HttpReq *req, const char *id);
} routes[] = {
    {"/v1/chat/completions", "POST", on_chat},
    {"/v1/completions", "POST", on_completions},
    {"/v1/models", "GET", on_models},
    {"/health", "GET", on_health},
};

static void refuse(HttpReq *req, int status, const char *code, const char *message) {
    ApiError e;
    api_refuse(&e, status, "invalid_request_error", code, NULL, "%s", message);
    reply_error(req, &e);
}

void http_handle(void *arg, HttpReq *req) {
    HttpFront *f = arg;
    const char *path = http_path(req), *method = http_method(req);
    char id[65];
    http_clean_id(http_header(req, "X-Request-Id"), id);
    if (!id[0])
        snprintf(id, sizeof id, "%016" PRIx64, clock_unique());
    http_set_header(req, "X-Request-Id", id);
    if (http_too_large(req)) {
        refuse(req, 413, "body_too_large", "the body is larger than this server takes");
        return;
    }
    if (admin_handle(req, f->ready, f->ready_arg))
        return;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(routes[i].path, path) != 0)
            continue;
        bool head = !strcmp(method, "HEAD") && !strcmp(routes[i].method, "GET");
        if (head || !strcmp(routes[i].method, method)) {
            routes[i].fn(f, req, id);
            return;
        }
        http_set_header(req, "Allow", !strcmp(routes[i].method, "GET") ? "GET, HEAD" : "POST");
        refuse(req, 405, "method_not_allowed", "this path does not take this method");
        return;
    }
    refuse(req, 404, "not_found", "no such path");
}
