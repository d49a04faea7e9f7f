/* See admin.h. The loop thread owns everything here. */
#include "base/admin.h"

#include "base/buf.h"
#include "base/stat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ADMIN_MAX_BODY = 4096, ADMIN_MAX_CONNECTIONS = 32, ADMIN_IDLE_MS = 30000, WHY_MAX = 512 };

struct Admin {
    Httpd *http;
    AdminReadyFn ready;
    void *arg;
};

static void reply_text(HttpReq *req, int status, const char *type, const char *text) {
    http_reply(req, status, type, text, strlen(text));
}

/* Appends s as a JSON string. Reasons may quote a peer's words, cut anywhere: what is not ASCII
 * becomes '?', so that the answer is JSON whatever they are. */
static void put_json_string(Buf *out, const char *s) {
    buf_puts(out, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            buf_printf(out, "\\%c", c);
        else if (c < 0x20)
            buf_printf(out, "\\u%04x", c);
        else if (c >= 0x7f)
            buf_puts(out, "?");
        else
            buf_put(out, s, 1);
    }
    buf_puts(out, "\"");
}

static void reply_ready(HttpReq *req, AdminReadyFn ready, void *arg) {
    char why[WHY_MAX] = "";
    if (!ready || ready(arg, why, sizeof why)) {
        reply_text(req, 200, "application/json", "{\"ready\": true}\n");
        return;
    }
    Buf body = {0};
    buf_puts(&body, "{\"ready\": false, \"reason\": ");
    put_json_string(&body, why);
    buf_puts(&body, "}\n");
    http_set_header(req, "Retry-After", "1");
    reply_text(req, 503, "application/json", body.data);
    buf_done(&body);
}

static void reply_metrics(HttpReq *req) {
    Buf body = {0};
    stat_render(&body);
    http_reply(req, 200, "text/plain; version=0.0.4", body.data ? body.data : "", body.len);
    buf_done(&body);
}

bool admin_handle(HttpReq *req, AdminReadyFn ready, void *arg) {
    const char *path = http_path(req), *method = http_method(req);
    bool live = !strcmp(path, "/live"), is_ready = !strcmp(path, "/ready");
    if (!live && !is_ready && strcmp(path, "/metrics") != 0)
        return false;
    if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0) {
        http_set_header(req, "Allow", "GET, HEAD");
        reply_text(req, 405, "text/plain", "method not allowed\n");
    } else if (live) {
        reply_text(req, 200, "application/json", "{\"live\": true}\n");
    } else if (is_ready) {
        reply_ready(req, ready, arg);
    } else {
        reply_metrics(req);
    }
    return true;
}

static void on_request(void *arg, HttpReq *req) {
    Admin *a = arg;
    if (!admin_handle(req, a->ready, a->arg))
        reply_text(req, 404, "text/plain", "not found\n");
}

int admin_open(Admin **out, Loop *loop, const char *host, int port, AdminReadyFn ready, void *arg,
               Err *err) {
    Admin *a = xcalloc(1, sizeof *a);
    a->ready = ready;
    a->arg = arg;
    HttpdConf conf = {.host = host,
                      .port = port,
                      .listen_fd = -1,
                      .max_body_bytes = ADMIN_MAX_BODY,
                      .max_connections = ADMIN_MAX_CONNECTIONS,
                      .idle_timeout_ms = ADMIN_IDLE_MS,
                      .max_stream_bytes = ADMIN_MAX_BODY};
    int rc = httpd_open(&a->http, loop, &conf, on_request, a, err);
    if (rc) {
        free(a);
        return rc;
    }
    *out = a;
    return 0;
}

int admin_port(const Admin *a) {
    return httpd_port(a->http);
}

void admin_close(Admin *a) {
    if (!a)
        return;
    httpd_close(a->http);
    free(a);
}
