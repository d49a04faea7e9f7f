/* An HTTP/1.1 server on the daemon's loop (libmicrohttpd driven by its epoll descriptor). Loop
 * thread only.
 *
 * Every request gets an HttpReq. The handler runs when the body is complete (or refused). It
 * answers at once with http_reply, or keeps the request and answers later, or streams:
 * http_stream_begin, http_stream_put as text comes, http_stream_end. A bounded amount of text waits
 * per stream; http_stream_put refuses more. When the client goes away first, on_gone is called once
 * and the request must not be used afterwards. A client that closes only its sending side counts as
 * gone. A handler that never answers is a bug; the server's shutdown ends such requests. */
#pragma once

#include "base/err.h"
#include "base/loop.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct Httpd Httpd;
typedef struct HttpReq HttpReq;

typedef void (*HttpHandler)(void *arg, HttpReq *req);

typedef struct HttpdConf {
    const char *host; /* address to bind: "127.0.0.1", "0.0.0.0", "::" */
    int port;         /* 0: any free port */
    int listen_fd; /* an already listening socket (socket activation), from then on the server's, or
                      -1 */
    size_t max_body_bytes; /* a larger body is read to its end or for a bounded time, then answered
                              with 413 */
    int max_connections;
    int64_t idle_timeout_ms;
    size_t max_stream_bytes; /* text that may wait for a slow client */
} HttpdConf;

/* Binds and starts serving with one handler for every path. E_IO with address and port when the
 * port is in use. */
int httpd_open(Httpd **out, Loop *loop, const HttpdConf *conf, HttpHandler handler, void *arg,
               Err *err);
/* Stops listening; running requests go on. */
void httpd_quiesce(Httpd *h);
int httpd_active(const Httpd *h); /* requests not yet finished */
/* Ends whatever runs (calling on_gone of requests that wait) and frees. */
void httpd_close(Httpd *h);
int httpd_port(const Httpd *h);

const char *http_method(const HttpReq *r);
const char *http_path(const HttpReq *r);
const char *http_header(const HttpReq *r,
                        const char *name);            /* case-insensitive; NULL when absent */
const char *http_body(const HttpReq *r, size_t *len); /* NUL-terminated, owned by the request */
bool http_too_large(const HttpReq *r); /* the body exceeded the limit and was dropped */

/* Headers for the answer, before http_reply or http_stream_begin; both strings are copied. */
void http_set_header(HttpReq *r, const char *name, const char *value);
/* Answers with a body (copied). The request is finished for the handler; do not use it again. */
void http_reply(HttpReq *r, int status, const char *content_type, const void *body, size_t len);
/* Sends 200 and keeps the body open. */
void http_stream_begin(HttpReq *r, const char *content_type);
/* Queues text. False when max_stream_bytes would be exceeded: the client is too slow, nothing was
 * queued. */
bool http_stream_put(HttpReq *r, const void *text, size_t len);
/* Finishes after the queued text. ok false: the connection is broken off, so that the client sees a
 * failure. */
void http_stream_end(HttpReq *r, bool ok);
/* fn(arg) is called when the client is gone before the answer was finished by the handler. */
void http_on_gone(HttpReq *r, LoopFn fn, void *arg);
