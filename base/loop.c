/* The loop thread of a daemon. Everything here runs on that thread but loop_post and the signal
 * handler. */
#include "base/loop.h"

#include "base/log.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#define LOOP_POSTS_MAX 65536

typedef struct Post {
    LoopFn fn;
    void *arg;
} Post;

struct Loop {
    uv_loop_t uv;
    uv_async_t wake; /* posted calls wait, or a signal came */

    pthread_mutex_t lock; /* guards the next three */
    Post *posts;          /* [LOOP_POSTS_MAX], filled by loop_post */
    int n_posts;
    bool closed;
    Post *running; /* [LOOP_POSTS_MAX], changes places with posts */

    LoopFn on_stop;
    void *stop_arg;
    int64_t drain_deadline_ms;
    bool stopping; /* on_stop has been called */
    LoopTimer *drain_timer;

    bool ready;
    LoopTimer *watchdog_timer;
    bool (*alive)(void *);
    void *alive_arg;
};

struct LoopTimer {
    uv_timer_t uv;
    LoopFn fn;
    void *arg;
};

struct LoopFd {
    uv_poll_t uv;
    LoopFdFn fn;
    void *arg;
};

/* The loop that the process's signals go to, and how many came. Written by loop_on_stop and
 * loop_free, read by the handler. */
static Loop *_Atomic signal_loop;
static atomic_int n_signals;

static void on_signal(int signo) {
    (void)signo;
    if (atomic_fetch_add(&n_signals, 1) > 0)
        _exit(1); /* here and not on the loop, which may be stuck */
    Loop *loop = atomic_load(&signal_loop);
    if (loop)
        uv_async_send(&loop->wake);
}

static void on_drain_deadline(void *arg) {
    (void)arg;
    LOG_ERR("drain deadline passed, ending at once");
    _exit(1);
}

static void handle_stop(Loop *loop) {
    if (loop->stopping || atomic_load(&signal_loop) != loop || atomic_load(&n_signals) == 0)
        return;
    loop->stopping = true;
    loop->drain_timer = loop_timer_new(loop, loop->drain_deadline_ms, 0, on_drain_deadline, loop);
    sd_notify(0, "STOPPING=1");
    loop->on_stop(loop->stop_arg);
}

static void on_wake(uv_async_t *wake) {
    Loop *loop = wake->data;
    handle_stop(loop);
    pthread_mutex_lock(&loop->lock);
    Post *batch = loop->posts;
    int n = loop->n_posts;
    loop->posts = loop->running;
    loop->running = batch;
    loop->n_posts = 0;
    pthread_mutex_unlock(&loop->lock);
    for (int i = 0; i < n; i++)
        batch[i].fn(batch[i].arg);
}

Loop *loop_new(void) {
    Loop *loop = xcalloc(1, sizeof *loop);
    CHECK(uv_loop_init(&loop->uv) == 0);
    CHECK(uv_async_init(&loop->uv, &loop->wake, on_wake) == 0);
    loop->wake.data = loop;
    pthread_mutex_init(&loop->lock, NULL);
    loop->posts = xmalloc(LOOP_POSTS_MAX * sizeof *loop->posts);
    loop->running = xmalloc(LOOP_POSTS_MAX * sizeof *loop->running);
    signal(SIGPIPE, SIG_IGN);
    return loop;
}

void loop_free(Loop *loop) {
    if (!loop)
        return;
    Loop *mine = loop;
    if (atomic_compare_exchange_strong(&signal_loop, &mine, NULL)) {
        signal(SIGTERM, SIG_DFL);
        signal(SIGINT, SIG_DFL);
    }
    pthread_mutex_lock(&loop->lock);
    loop->closed = true;
    pthread_mutex_unlock(&loop->lock);
    loop_timer_free(loop->drain_timer);
    loop_timer_free(loop->watchdog_timer);
    uv_close((uv_handle_t *)&loop->wake, NULL);
    /* Two rounds: a handle's close callback may close one more. What is still open then was
     * forgotten by its owner. */
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    uv_run(&loop->uv, UV_RUN_NOWAIT);
    CHECK(uv_loop_close(&loop->uv) == 0);
    pthread_mutex_destroy(&loop->lock);
    free(loop->posts);
    free(loop->running);
    free(loop);
}

uv_loop_t *loop_uv(Loop *loop) {
    return &loop->uv;
}

void loop_run(Loop *loop) {
    uv_run(&loop->uv, UV_RUN_DEFAULT);
}

void loop_stop(Loop *loop) {
    uv_stop(&loop->uv);
}

void loop_on_stop(Loop *loop, LoopFn on_stop, void *arg, int64_t drain_deadline_ms) {
    loop->on_stop = on_stop;
    loop->stop_arg = arg;
    loop->drain_deadline_ms = drain_deadline_ms;
    loop->stopping = false;
    atomic_store(&n_signals, 0);
    atomic_store(&signal_loop, loop);
    struct sigaction act = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&act.sa_mask);
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
}

bool loop_post(Loop *loop, LoopFn fn, void *arg) {
    pthread_mutex_lock(&loop->lock);
    bool ok = !loop->closed && loop->n_posts < LOOP_POSTS_MAX;
    if (ok) {
        loop->posts[loop->n_posts++] = (Post){fn, arg};
        uv_async_send(&loop->wake);
    }
    pthread_mutex_unlock(&loop->lock);
    return ok;
}

static void on_timer(uv_timer_t *uv) {
    LoopTimer *timer = uv->data;
    timer->fn(timer->arg);
}

static void on_closed_free(uv_handle_t *handle) {
    free(handle->data);
}

LoopTimer *loop_timer_new(Loop *loop, int64_t first_ms, int64_t repeat_ms, LoopFn fn, void *arg) {
    LoopTimer *timer = xcalloc(1, sizeof *timer);
    timer->fn = fn;
    timer->arg = arg;
    CHECK(uv_timer_init(&loop->uv, &timer->uv) == 0);
    timer->uv.data = timer;
    /* libuv counts from the start of the loop's round, which may lie well before now. */
    uv_update_time(&loop->uv);
    uv_timer_start(&timer->uv, on_timer, first_ms > 0 ? (uint64_t)first_ms : 0,
                   repeat_ms > 0 ? (uint64_t)repeat_ms : 0);
    return timer;
}

void loop_timer_free(LoopTimer *timer) {
    if (timer)
        uv_close((uv_handle_t *)&timer->uv, on_closed_free);
}

static void on_fd(uv_poll_t *uv, int status, int events) {
    LoopFd *watch = uv->data;
    watch->fn(watch->arg, status < 0 ? status : events);
}

LoopFd *loop_fd_new(Loop *loop, int fd, int events, LoopFdFn fn, void *arg) {
    LoopFd *watch = xcalloc(1, sizeof *watch);
    watch->fn = fn;
    watch->arg = arg;
    if (uv_poll_init(&loop->uv, &watch->uv, fd) != 0) {
        free(watch);
        return NULL;
    }
    watch->uv.data = watch;
    loop_fd_events(watch, events);
    return watch;
}

void loop_fd_events(LoopFd *watch, int events) {
    if (events)
        uv_poll_start(&watch->uv, events, on_fd);
    else
        uv_poll_stop(&watch->uv);
}

void loop_fd_free(LoopFd *watch) {
    if (watch)
        uv_close((uv_handle_t *)&watch->uv, on_closed_free);
}

/* A notification is lines of NAME=value: text with a line break would smuggle in another one. */
static void notify(const char *state, const char *status) {
    char line[256];
    snprintf(line, sizeof line, "%s", status);
    line[strcspn(line, "\r\n")] = '\0';
    sd_notifyf(0, "%sSTATUS=%s", state, line);
}

void loop_notify_ready(Loop *loop, const char *status) {
    notify(loop->ready ? "" : "READY=1\n", status);
    loop->ready = true;
}

void loop_notify_status(Loop *loop, const char *status) {
    (void)loop;
    notify("", status);
}

static void on_watchdog(void *arg) {
    Loop *loop = arg;
    if (loop->alive(loop->alive_arg))
        sd_notify(0, "WATCHDOG=1");
}

void loop_notify_watchdog(Loop *loop, bool (*alive)(void *), void *arg) {
    uint64_t period_us;
    if (sd_watchdog_enabled(0, &period_us) <= 0 || loop->watchdog_timer)
        return;
    loop->alive = alive;
    loop->alive_arg = arg;
    int64_t half_ms = (int64_t)(period_us / 2000);
    loop->watchdog_timer = loop_timer_new(loop, 0, half_ms > 0 ? half_ms : 1, on_watchdog, loop);
}
