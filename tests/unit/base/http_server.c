/* The server of the HTTP tests. The loop thread runs the handlers. */
#include "http_server.h"

#include "base/buf.h"
#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <string.h>
#include <time.h>

Server srv;

typedef struct Work {
    HttpReq *req;
    LoopTimer *timer;
    int step;
} Work;

static void work_end(Work *w) {
    loop_timer_free(w->timer);
    free(w);
}

static void on_gone(void *arg) {
    work_end(arg);
    srv.n_gone++;
}

static Work *work_new(HttpReq *req, int64_t ms, LoopFn fn) {
    Work *w = xcalloc(1, sizeof *w);
    w->req = req;
    w->timer = fn ? loop_timer_new(srv.loop, ms, ms, fn, w) : NULL;
    http_on_gone(req, on_gone, w);
    return w;
}

static void reply_late(void *arg) {
    Work *w = arg;
    http_set_header(w->req, "X-Late", "yes");
    http_reply(w->req, 202, "text/plain", "late", 4);
    work_end(w);
}

static void stream_step(void *arg) {
    Work *w = arg;
    char text[32];
    int n = snprintf(text, sizeof text, "piece %d\n", w->step++);
    assert_true(http_stream_put(w->req, text, (size_t)n));
    if (w->step < 3)
        return;
    http_stream_end(w->req, strcmp(http_path(w->req), "/broken") != 0);
    work_end(w);
}

/* Puts until the stream refuses, 20 times over; then waits for room and ends. */
static void flood_step(void *arg) {
    Work *w = arg;
    char block[1000];
    if (w->step++ < 20) {
        memset(block, 'a' + w->step, sizeof block);
        while (http_stream_put(w->req, block, sizeof block))
            srv.n_accepted += sizeof block;
    } else if (http_stream_put(w->req, "end", 3)) {
        http_stream_end(w->req, true);
        work_end(w);
    }
}

static void echo(HttpReq *req) {
    Buf text = {0};
    size_t n;
    const char *body = http_body(req, &n), *tag = http_header(req, "x-tag");
    buf_printf(&text, "%s %s %s ", http_method(req), http_path(req), tag ? tag : "-");
    buf_put(&text, body, n);
    http_set_header(req, "X-Echo", "a\r\nX-Forged: 1");
    http_set_header(req, "X-Empty", "");
    http_reply(req, 200, "text/plain", text.data, text.len);
    buf_done(&text);
}

static void handle(void *arg, HttpReq *req) {
    assert_ptr_equal(arg, &srv);
    const char *path = http_path(req);
    if (http_too_large(req) && strcmp(path, "/late") == 0) {
        work_new(req, 50, reply_late);
    } else if (http_too_large(req)) {
        http_reply(req, 413, "text/plain", "too large", 9);
    } else if (strcmp(path, "/late") == 0) {
        work_new(req, 50, reply_late);
    } else if (strcmp(path, "/never") == 0) {
        work_new(req, 0, NULL);
        srv.n_waiting++;
    } else if (strcmp(path, "/stream") == 0 || strcmp(path, "/broken") == 0) {
        http_set_header(req, "Cache-Control", "no-cache");
        http_stream_begin(req, "text/event-stream");
        work_new(req, 20, stream_step);
    } else if (strcmp(path, "/open") == 0) {
        http_stream_begin(req, "text/event-stream");
        http_stream_put(req, "hello", 5);
        work_new(req, 0, NULL);
        srv.n_waiting++;
    } else if (strcmp(path, "/flood") == 0) {
        http_stream_begin(req, "text/plain");
        work_new(req, 5, flood_step);
    } else {
        echo(req);
    }
}

HttpdConf server_conf(void) {
    return (HttpdConf){.host = "127.0.0.1",
                       .listen_fd = -1,
                       .max_body_bytes = BODY_MAX,
                       .max_connections = 50,
                       .idle_timeout_ms = 1000,
                       .max_stream_bytes = STREAM_MAX};
}

int server_open(Httpd **out, const HttpdConf *conf, Err *err) {
    return httpd_open(out, srv.loop, conf, handle, &srv, err);
}

void server_start(const HttpdConf *conf) {
    Err err = {0};
    memset(&srv, 0, sizeof srv);
    srv.loop = loop_new();
    if (server_open(&srv.h, conf, &err))
        fail_msg("%s", err.text);
    srv.port = httpd_port(srv.h);
}

static void stop(void *arg) {
    loop_stop(arg);
}

static void too_long(void *arg) {
    (void)arg;
    fail_msg("the test hangs");
}

static void *client_main(void *arg) {
    void (**client)(void) = arg;
    (*client)();
    loop_post(srv.loop, stop, srv.loop);
    return NULL;
}

void server_serve(void (*client)(void)) {
    pthread_t thread;
    LoopTimer *limit = loop_timer_new(srv.loop, 40000, 0, too_long, NULL);
    pthread_create(&thread, NULL, client_main, &client);
    loop_run(srv.loop);
    pthread_join(thread, NULL);
    loop_timer_free(limit);
}

void server_stop(void) {
    httpd_close(srv.h);
    loop_free(srv.loop);
}

void server_run(const HttpdConf *conf, void (*client)(void)) {
    HttpdConf usual = server_conf();
    server_start(conf ? conf : &usual);
    server_serve(client);
    server_stop();
}

int64_t wait_for(atomic_int *value, int n) {
    int64_t start = clock_now_ms();
    while (atomic_load(value) < n) {
        if (clock_now_ms() - start > 5000)
            return -1;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return clock_now_ms() - start;
}

void sleep_ms(int ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}
