/* The loop thread of a daemon: libuv, signals, posting from other threads, timers, systemd
 * notification and watchdog.
 *
 * A daemon has one Loop; the thread that calls loop_run owns every piece of the daemon's state.
 * Other threads reach it only by loop_post. SIGTERM and SIGINT call on_stop once (the daemon
 * drains, then calls loop_stop); a second signal ends the process at once with status 1, and so
 * does drain_deadline_ms. SIGPIPE is ignored. */
#pragma once

#include "base/err.h"

#include <uv.h>

#include <stdbool.h>
#include <stdint.h>

typedef struct Loop Loop;
typedef struct LoopTimer LoopTimer;
typedef struct LoopFd LoopFd;

typedef void (*LoopFn)(void *arg);
/* events: UV_READABLE | UV_WRITABLE | UV_DISCONNECT, or negative when polling failed */
typedef void (*LoopFdFn)(void *arg, int events);

Loop *loop_new(void);
/* All timers, fds and other handles must have been closed. Posted calls that still wait are
 * dropped. */
void loop_free(Loop *loop);
uv_loop_t *loop_uv(Loop *loop);

/* Runs until loop_stop, which is called on the loop thread. */
void loop_run(Loop *loop);
void loop_stop(Loop *loop);

/* on_stop is called on the loop thread at the first SIGTERM or SIGINT; systemd is told STOPPING=1.
 * One loop per process may ask. */
void loop_on_stop(Loop *loop, LoopFn on_stop, void *arg, int64_t drain_deadline_ms);

/* Calls fn(arg) soon on the loop thread, in the order of posting. Any thread. False when 65536
 * calls wait already or loop_free has begun. */
bool loop_post(Loop *loop, LoopFn fn, void *arg);

/* Calls fn(arg) after first_ms and then every repeat_ms (0: once; the timer still has to be
 * closed). */
LoopTimer *loop_timer_new(Loop *loop, int64_t first_ms, int64_t repeat_ms, LoopFn fn, void *arg);
/* No call happens after it returns. NULL is a no-op. */
void loop_timer_free(LoopTimer *timer);

/* Watches fd, which stays the caller's. NULL when the system cannot watch it, or another watch does
 * already. */
LoopFd *loop_fd_new(Loop *loop, int fd, int events, LoopFdFn fn, void *arg);
void loop_fd_events(LoopFd *watch, int events);
/* No call happens after it returns; the caller may close fd afterwards. NULL is a no-op. */
void loop_fd_free(LoopFd *watch);

/* systemd: READY=1 (once) or STATUS= text. Without a notify socket these do nothing. */
void loop_notify_ready(Loop *loop, const char *status);
void loop_notify_status(Loop *loop, const char *status);
/* Starts feeding the watchdog at half its period as long as alive(arg) holds. No-op when systemd
 * asked for none. */
void loop_notify_watchdog(Loop *loop, bool (*alive)(void *), void *arg);
