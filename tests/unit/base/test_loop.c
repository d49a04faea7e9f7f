/* base/loop: posting, timers, descriptors, signals, systemd. */
#include "base/loop.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void stop(void *arg) {
    loop_stop(arg);
}

typedef struct Order {
    Loop *loop;
    int n, bad, expected;
} Order;

static Order order;
static int numbers[100000];

static void take_number(void *arg) {
    order.bad += *(int *)arg != order.n;
    if (++order.n == order.expected)
        loop_stop(order.loop);
}

static void *post_numbers(void *arg) {
    (void)arg;
    for (int i = 0; i < 100000; i++)
        while (!loop_post(order.loop, take_number, &numbers[i]))
            sched_yield();
    return NULL;
}

static void posts_run_in_order_on_the_loop(void **state) {
    (void)state;
    Loop *loop = loop_new();
    for (int i = 0; i < 100000; i++)
        numbers[i] = i;
    order = (Order){.loop = loop, .expected = 100000};
    pthread_t thread;
    pthread_create(&thread, NULL, post_numbers, NULL);
    loop_run(loop);
    pthread_join(thread, NULL);
    assert_int_equal(order.n, 100000);
    assert_int_equal(order.bad, 0);
    loop_free(loop);
}

static void posts_are_bounded(void **state) {
    (void)state;
    Loop *loop = loop_new();
    order = (Order){.loop = loop, .expected = 65536};
    for (int i = 0; i < 65536; i++)
        assert_true(loop_post(loop, take_number, &numbers[i]));
    assert_false(loop_post(loop, take_number, &numbers[0]));
    loop_run(loop);
    assert_int_equal(order.n, 65536);
    assert_true(loop_post(loop, take_number, &numbers[0])); /* room again; dropped by loop_free */
    loop_free(loop);
    assert_int_equal(order.n, 65536);
}

typedef struct Ticks {
    Loop *loop;
    LoopTimer *timer;
    int n;
} Ticks;

static void tick(void *arg) {
    Ticks *t = arg;
    if (++t->n == 3) {
        loop_timer_free(t->timer); /* from within its own call */
        loop_stop(t->loop);
    }
}

static void timers_repeat_until_freed(void **state) {
    (void)state;
    Loop *loop = loop_new();
    Ticks ticks = {.loop = loop};
    int64_t before = clock_now_ms();
    ticks.timer = loop_timer_new(loop, 20, 10, tick, &ticks);
    loop_run(loop);
    assert_true(clock_now_ms() - before >= 39);
    LoopTimer *later = loop_timer_new(loop, 40, 0, stop, loop);
    loop_run(loop);
    assert_int_equal(ticks.n, 3);
    loop_timer_free(later);
    loop_timer_free(NULL);
    loop_free(loop);
}

typedef struct Watch {
    Loop *loop;
    int events;
} Watch;

static void note_events(void *arg, int events) {
    Watch *w = arg;
    w->events = events;
    loop_stop(w->loop);
}

/* Runs the loop until an event or for ms and returns the events. */
static int events_within(Watch *w, int64_t ms) {
    w->events = 0;
    LoopTimer *deadline = loop_timer_new(w->loop, ms, 0, stop, w->loop);
    loop_run(w->loop);
    loop_timer_free(deadline);
    return w->events;
}

static void descriptors_are_watched(void **state) {
    (void)state;
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    Watch w = {.loop = loop_new()};
    LoopFd *watch = loop_fd_new(w.loop, fds[0], UV_READABLE, note_events, &w);
    assert_int_equal(events_within(&w, 20), 0);
    assert_null(
        loop_fd_new(w.loop, fds[0], UV_READABLE, note_events, &w)); /* one watch per descriptor */
    assert_int_equal(write(fds[1], "x", 1), 1);
    assert_int_equal(events_within(&w, 5000), UV_READABLE);
    loop_fd_events(watch, UV_DISCONNECT); /* unread bytes alone are not news */
    assert_int_equal(events_within(&w, 20), 0);
    shutdown(fds[1], SHUT_WR);
    assert_int_equal(events_within(&w, 5000), UV_DISCONNECT);
    loop_fd_events(watch, 0);
    assert_int_equal(events_within(&w, 20), 0);
    loop_fd_free(watch);
    close(fds[0]);
    close(fds[1]);
    assert_null(loop_fd_new(w.loop, fds[0], UV_READABLE, note_events, &w));
    loop_fd_free(NULL);
    loop_free(w.loop);
}

/* ---- signals: each case is a child process ---- */

typedef struct Child {
    Loop *loop;
    int signals_left;
    bool drain;
} Child;

static void raise_term(void *arg) {
    (void)arg;
    kill(getpid(), SIGTERM);
}

static void child_stop(void *arg) {
    Child *c = arg;
    if (c->drain)
        loop_stop(c->loop);
    else if (--c->signals_left > 0)
        raise_term(NULL);
}

/* Exit status of a child that gets SIGTERM while its loop runs; 100 when on_stop leads to a clean
 * end. */
static int child_status(bool drain, int n_signals, int64_t deadline_ms) {
    pid_t pid = fork();
    if (pid == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(101);
        Child c = {.loop = loop_new(), .signals_left = n_signals, .drain = drain};
        loop_on_stop(c.loop, child_stop, &c, deadline_ms);
        LoopTimer *soon = loop_timer_new(c.loop, 10, 0, raise_term, NULL);
        loop_run(c.loop);
        loop_timer_free(soon);
        loop_free(c.loop);
        _exit(100);
    }
    int status;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void a_signal_starts_the_drain(void **state) {
    (void)state;
    assert_int_equal(child_status(true, 1, 30000), 100);
}

static void a_second_signal_ends_at_once(void **state) {
    (void)state;
    int64_t before = clock_now_ms();
    assert_int_equal(child_status(false, 2, 30000), 1);
    assert_true(clock_now_ms() - before < 10000);
}

static void the_drain_has_a_deadline(void **state) {
    (void)state;
    int64_t before = clock_now_ms();
    assert_int_equal(child_status(false, 1, 200), 1);
    assert_true(clock_now_ms() - before >= 200);
}

static void a_broken_pipe_is_an_error_not_a_death(void **state) {
    (void)state;
    int fds[2];
    Loop *loop = loop_new();
    assert_int_equal(pipe(fds), 0);
    close(fds[0]);
    assert_int_equal(write(fds[1], "x", 1), -1);
    close(fds[1]);
    loop_free(loop);
}

/* ---- systemd ---- */

static int open_notify_socket(void) {
    /* An abstract address, the name of this process: nothing is left behind. */
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int n = snprintf(addr.sun_path + 1, sizeof addr.sun_path - 1, "baton-test-%d", (int)getpid());
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n)),
                     0);
    struct timeval limit = {.tv_sec = 5};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    char name[sizeof addr.sun_path + 1];
    snprintf(name, sizeof name, "@%s", addr.sun_path + 1);
    setenv("NOTIFY_SOCKET", name, 1);
    return fd;
}

static void assert_notified(int fd, const char *expected) {
    char text[512];
    ssize_t n = recv(fd, text, sizeof text - 1, 0);
    assert_true(n >= 0);
    text[n] = '\0';
    assert_string_equal(text, expected);
}

static bool alive;

static bool is_alive(void *arg) {
    (void)arg;
    return alive;
}

static void systemd_is_told(void **state) {
    (void)state;
    Loop *loop = loop_new();
    loop_notify_ready(loop, "nobody listens");
    loop_free(loop);

    loop = loop_new();
    int fd = open_notify_socket();
    loop_notify_ready(loop, "serving\nREADY=0");
    assert_notified(fd, "READY=1\nSTATUS=serving");
    loop_notify_ready(loop, "again");
    assert_notified(fd, "STATUS=again");
    loop_notify_status(loop, "busy");
    assert_notified(fd, "STATUS=busy");

    char pid[32];
    snprintf(pid, sizeof pid, "%d", (int)getpid());
    setenv("WATCHDOG_PID", pid, 1);
    setenv("WATCHDOG_USEC", "40000", 1);
    loop_notify_watchdog(loop, is_alive, NULL);
    Watch w = {.loop = loop};
    alive = false;
    events_within(&w, 70);
    char text[64];
    assert_int_equal(recv(fd, text, sizeof text, MSG_DONTWAIT), -1); /* not alive, not fed */
    alive = true;
    events_within(&w, 70);
    assert_notified(fd, "WATCHDOG=1");
    assert_notified(fd, "WATCHDOG=1");
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    close(fd);
    loop_free(loop);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(posts_run_in_order_on_the_loop),
        cmocka_unit_test(posts_are_bounded),
        cmocka_unit_test(timers_repeat_until_freed),
        cmocka_unit_test(descriptors_are_watched),
        cmocka_unit_test(a_signal_starts_the_drain),
        cmocka_unit_test(a_second_signal_ends_at_once),
        cmocka_unit_test(the_drain_has_a_deadline),
        cmocka_unit_test(a_broken_pipe_is_an_error_not_a_death),
        cmocka_unit_test(systemd_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
