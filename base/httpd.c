/* An HTTP/1.1 server on the daemon's loop. Loop thread only.
 *
 * libmicrohttpd owns the sockets and their epoll set; the loop watches that set's descriptor and
 * one timer. The library runs in httpd_pump alone (and at the close), so a handler or an on_gone
 * never finds itself inside another one's request. A request that waits for its handler, or a
 * stream that waits for text, is suspended in the library, which then does not look at its socket:
 * the loop does (UV_DISCONNECT). */
#include "base/httpd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/http_linger.h"
#include "base/http_listen.h"

#include <microhttpd.h>

#include <ctype.h>
#include <string.h>
#include <unistd.h>

/* A refused upload of unknown length is read on to its end within these, so that its sender gets to
 * read the answer. */
#define DRAIN_MS        5000
#define DRAIN_BYTES_MAX (64 << 20)

#define STREAM_BLOCK_BYTES 16384

struct Httpd {
    Loop *loop;
    HttpdConf conf; /* host is not kept */
    HttpHandler handler;
    void *arg;
    struct MHD_Daemon *mhd;
    int port;
    bool quiesced, closing;
    bool resumed;  /* a connection was resumed since the library last ran */
    LoopFd *watch; /* the library's epoll set */
    uv_timer_t timer;
    HttpReq *reqs;
    int n_reqs;
    HttpLingers lingers;
};

struct HttpReq {
    HttpReq *prev, *next;
    Httpd *h;
    struct MHD_Connection *conn;
    char *method, *path;
    Buf body;
    bool too_large;
    bool unread;          /* answered before the body was read */
    size_t drained_bytes; /* of a body that is too large */
    int64_t drain_until_ms;

    bool handled;   /* the handler has run */
    bool finished;  /* the handler has given its answer, or was told that the client is gone */
    bool broken;    /* the connection has to be cut */
    bool suspended; /* in the library */
    bool queued;    /* the library has the response */
    LoopFd *watch;  /* the connection's socket, while the handler has something to do */
    LoopFn on_gone;
    void *gone_arg;

    struct HttpHeader *headers;
    struct MHD_Response *response; /* until queued */
    int status;

    Buf out; /* streamed text; the first out_done bytes are with the library */
    size_t out_done;
    bool ended; /* no more text comes */
};

typedef struct HttpHeader {
    struct HttpHeader *next;
    char *name, *value;
} HttpHeader;

/* ---- pumping the library ---- */

static void httpd_pump(Httpd *h);

static void on_timer(uv_timer_t *timer) {
    httpd_pump(timer->data);
}

static void on_epoll(void *arg, int events) {
    (void)events;
    httpd_pump(arg);
}

static void httpd_pump(Httpd *h) {
    h->resumed = false;
    MHD_run(h->mhd);
    MHD_UNSIGNED_LONG_LONG timeout_ms;
    if (h->resumed)
        uv_timer_start(&h->timer, on_timer, 0, 0);
    else if (MHD_get_timeout(h->mhd, &timeout_ms) == MHD_YES)
        uv_timer_start(&h->timer, on_timer, timeout_ms, 0);
    else
        uv_timer_stop(&h->timer);
}

static void req_resume(HttpReq *r) {
    if (!r->suspended)
        return;
    r->suspended = false;
    MHD_resume_connection(r->conn);
    r->h->resumed = true;
    uv_timer_start(&r->h->timer, on_timer, 0, 0);
}

static void req_suspend(HttpReq *r) {
    r->suspended = true;
    MHD_suspend_connection(r->conn);
}

/* ---- a request's life ---- */

static HttpReq *req_new(Httpd *h, struct MHD_Connection *conn, const char *method,
                        const char *path) {
    HttpReq *r = xcalloc(1, sizeof *r);
    r->h = h;
    r->conn = conn;
    r->method = xstrdup(method);
    r->path = xstrdup(path);
    r->next = h->reqs;
    if (r->next)
        r->next->prev = r;
    h->reqs = r;
    h->n_reqs++;
    return r;
}

static void req_free(HttpReq *r) {
    loop_fd_free(r->watch);
    if (r->prev)
        r->prev->next = r->next;
    else
        r->h->reqs = r->next;
    if (r->next)
        r->next->prev = r->prev;
    r->h->n_reqs--;
    if (r->response)
        MHD_destroy_response(r->response);
    while (r->headers) {
        HttpHeader *header = r->headers;
        r->headers = header->next;
        free(header->name);
        free(header->value);
        free(header);
    }
    buf_done(&r->body);
    buf_done(&r->out);
    free(r->method);
    free(r->path);
    free(r);
}

/* The handler has nothing left to do with the request. */
static void req_finish(HttpReq *r) {
    r->finished = true;
    loop_fd_free(r->watch);
    r->watch = NULL;
}

/* Tells the handler, once, that its work is for nobody, and has the library cut the connection. */
static void req_gone(HttpReq *r) {
    bool tell = r->handled && !r->finished;
    req_finish(r);
    r->broken = true;
    buf_clear(&r->out);
    r->out_done = 0;
    req_resume(r);
    if (tell && r->on_gone)
        r->on_gone(r->gone_arg);
}

static void on_disconnect(void *arg, int events) {
    (void)events; /* half-closed, hung up or failed: nobody waits for the answer */
    req_gone(arg);
}

static int req_fd(const HttpReq *r) {
    return MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
}

static void on_completed(void *arg, struct MHD_Connection *conn, void **slot,
                         enum MHD_RequestTerminationCode code) {
    Httpd *h = arg;
    HttpReq *r = *slot;
    (void)conn, (void)code;
    if (!r)
        return;
    *slot = NULL;
    if (r->unread && !h->closing)
        http_linger_start(&h->lingers, req_fd(r));
    req_gone(r);
    req_free(r);
}

/* ---- reading a request ---- */

/* Whether the announced length of the body is over the limit. */
static bool announces_too_much(const HttpReq *r) {
    const char *length = http_header(r, "Content-Length");
    return length && strtoull(length, NULL, 10) > r->h->conf.max_body_bytes;
}

/* False when even the drain's bound is passed. */
static bool take_body(HttpReq *r, const char *bytes, size_t n) {
    size_t limit = r->h->conf.max_body_bytes;
    if (!r->too_large && n <= limit - r->body.len) {
        buf_put(&r->body, bytes, n);
        return true;
    }
    if (!r->too_large) {
        r->too_large = true;
        r->drain_until_ms = clock_now_ms() + DRAIN_MS;
        buf_done(&r->body);
    }
    r->drained_bytes += n;
    return r->drained_bytes <= DRAIN_BYTES_MAX && clock_now_ms() < r->drain_until_ms;
}

/* Hands the response to the library, or parks the request until there is one. */
static enum MHD_Result queue_or_wait(HttpReq *r) {
    if (r->broken)
        return MHD_NO;
    if (!r->finished && !r->watch) {
        r->watch = loop_fd_new(r->h->loop, req_fd(r), UV_DISCONNECT, on_disconnect, r);
        if (!r->watch)
            return MHD_NO; /* what cannot be watched cannot be cancelled */
    }
    if (!r->response) {
        req_suspend(r);
        return MHD_YES;
    }
    r->queued = true;
    enum MHD_Result ok = MHD_queue_response(r->conn, (unsigned)r->status, r->response);
    MHD_destroy_response(r->response);
    r->response = NULL;
    return ok;
}

static enum MHD_Result on_access(void *arg, struct MHD_Connection *conn, const char *url,
                                 const char *method, const char *version, const char *bytes,
                                 size_t *n, void **slot) {
    Httpd *h = arg;
    HttpReq *r = *slot;
    (void)version;
    if (h->closing)
        return MHD_NO;
    if (!r) {
        *slot = r = req_new(h, conn, method, url);
        if (!announces_too_much(r))
            return MHD_YES;
        r->too_large = r->unread = true;
    }
    if (*n > 0 && !r->unread) {
        bool ok = take_body(r, bytes, *n);
        *n = 0;
        return ok ? MHD_YES : MHD_NO;
    }
    if (!r->handled) {
        r->handled = true;
        h->handler(h->arg, r);
    }
    return queue_or_wait(r);
}

const char *http_method(const HttpReq *r) {
    return r->method;
}

const char *http_path(const HttpReq *r) {
    return r->path;
}

const char *http_header(const HttpReq *r, const char *name) {
    return MHD_lookup_connection_value(r->conn, MHD_HEADER_KIND, name);
}

const char *http_body(const HttpReq *r, size_t *len) {
    if (len)
        *len = r->body.len;
    return r->body.data ? r->body.data : "";
}

bool http_too_large(const HttpReq *r) {
    return r->too_large;
}

/* ---- answering ---- */

void http_set_header(HttpReq *r, const char *name, const char *value) {
    HttpHeader *header = xcalloc(1, sizeof *header);
    header->name = xstrdup(name);
    header->value = xstrdup(value);
    /* A value from outside must not be able to start a header of its own. */
    for (char *p = header->value; *p; p++)
        if (iscntrl((unsigned char)*p))
            *p = ' ';
    header->next = r->headers;
    r->headers = header;
}

static void add_header(struct MHD_Response *response, const char *name, const char *value) {
    if (value && *value) /* the library has no empty headers */
        CHECK(MHD_add_response_header(response, name, value) == MHD_YES);
}

static void respond(HttpReq *r, int status, const char *content_type,
                    struct MHD_Response *response) {
    CHECK(response);
    add_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, content_type);
    for (const HttpHeader *header = r->headers; header; header = header->next)
        add_header(response, header->name, header->value);
    if (r->h->quiesced)
        add_header(response, MHD_HTTP_HEADER_CONNECTION, "close");
    r->response = response;
    r->status = status;
    req_resume(r);
}

void http_reply(HttpReq *r, int status, const char *content_type, const void *body, size_t len) {
    DCHECK(!r->finished && !r->response && !r->queued);
    req_finish(r);
    respond(r, status, content_type,
            MHD_create_response_from_buffer(len, (void *)(uintptr_t)body, MHD_RESPMEM_MUST_COPY));
}

static ssize_t on_stream_read(void *arg, uint64_t pos, char *to, size_t room) {
    HttpReq *r = arg;
    (void)pos;
    size_t n = r->out.len - r->out_done;
    if (n == 0 && r->broken)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    if (n == 0 && r->ended)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        req_suspend(r);
        return 0;
    }
    if (n > room)
        n = room;
    memcpy(to, r->out.data + r->out_done, n);
    r->out_done += n;
    if (r->out_done == r->out.len) {
        buf_clear(&r->out);
        r->out_done = 0;
    }
    return (ssize_t)n;
}

void http_stream_begin(HttpReq *r, const char *content_type) {
    DCHECK(!r->finished && !r->response && !r->queued);
    respond(r, MHD_HTTP_OK, content_type,
            MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, on_stream_read,
                                              r, NULL));
}

bool http_stream_put(HttpReq *r, const void *text, size_t len) {
    DCHECK(!r->finished);
    size_t waiting = r->out.len - r->out_done;
    if (len > r->h->conf.max_stream_bytes || waiting > r->h->conf.max_stream_bytes - len)
        return false;
    if (len == 0)
        return true;
    /* What the library took makes room once it outweighs the rest, so that moving costs less than
     * it frees. */
    if (r->out_done > waiting) {
        memmove(r->out.data, r->out.data + r->out_done, waiting);
        r->out.len = waiting;
        r->out_done = 0;
    }
    buf_put(&r->out, text, len);
    if (r->queued)
        req_resume(r);
    return true;
}

void http_stream_end(HttpReq *r, bool ok) {
    DCHECK(!r->finished);
    req_finish(r);
    r->ended = true;
    r->broken = !ok;
    if (r->queued)
        req_resume(r);
}

void http_on_gone(HttpReq *r, LoopFn fn, void *arg) {
    r->on_gone = fn;
    r->gone_arg = arg;
}

/* ---- the server ---- */

int httpd_open(Httpd **out, Loop *loop, const HttpdConf *conf, HttpHandler handler, void *arg,
               Err *err) {
    int fd = conf->listen_fd;
    int rc = fd >= 0 ? 0 : http_listen_open(conf->host, conf->port, &fd, err);
    if (rc)
        return rc;
    Httpd *h = xcalloc(1, sizeof *h);
    h->loop = loop;
    h->conf = *conf;
    h->conf.host = NULL;
    h->handler = handler;
    h->arg = arg;
    h->port = http_listen_port(fd);
    h->lingers = (HttpLingers){.loop = loop, .max = conf->max_connections};
    int64_t idle_s = (conf->idle_timeout_ms + 999) / 1000;
    h->mhd = MHD_start_daemon(MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, on_access, h,
                              MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED,
                              on_completed, h, MHD_OPTION_CONNECTION_LIMIT,
                              (unsigned)conf->max_connections, MHD_OPTION_CONNECTION_TIMEOUT,
                              (unsigned)(idle_s > 0 ? idle_s : 1), MHD_OPTION_END);
    if (!h->mhd) {
        rc = err_set(err, E_NOMEM, "cannot start the HTTP library on port %d", h->port);
        free(h);
        close(fd);
        return rc;
    }
    CHECK(uv_timer_init(loop_uv(loop), &h->timer) == 0);
    h->timer.data = h;
    int epoll_fd = MHD_get_daemon_info(h->mhd, MHD_DAEMON_INFO_EPOLL_FD)->epoll_fd;
    h->watch = loop_fd_new(loop, epoll_fd, UV_READABLE, on_epoll, h);
    CHECK(h->watch);
    httpd_pump(h);
    *out = h;
    return 0;
}

void httpd_quiesce(Httpd *h) {
    if (h->quiesced)
        return;
    h->quiesced = true;
    int fd = MHD_quiesce_daemon(h->mhd);
    if (fd != MHD_INVALID_SOCKET)
        close(fd);
}

int httpd_active(const Httpd *h) {
    return h->n_reqs;
}

int httpd_port(const Httpd *h) {
    return h->port;
}

static void on_timer_closed(uv_handle_t *timer) {
    free(timer->data);
}

void httpd_close(Httpd *h) {
    if (!h)
        return;
    h->closing = true;
    httpd_quiesce(h);
    for (HttpReq *r = h->reqs; r; r = r->next)
        req_gone(r);
    /* The library wants no suspended connection when it stops: one round takes the resumed ones up.
     */
    MHD_run(h->mhd);
    loop_fd_free(h->watch);
    MHD_stop_daemon(h->mhd);
    http_linger_stop_all(&h->lingers);
    CHECK(h->n_reqs == 0);
    uv_close((uv_handle_t *)&h->timer, on_timer_closed);
}
