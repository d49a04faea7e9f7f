/* See bus_test.h. */
#include "bus_test.h"

#include "base/clock.h"
#include "proto/hello.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

Baton__Hello bus_test_hello(Baton__Role role, const char *name) {
    Baton__Hello h = BATON__HELLO__INIT;
    h.protocol = PROTOCOL_VERSION;
    h.role = role;
    h.name = (char *)name;
    h.generation = clock_unique();
    h.page_tokens = 64;
    return h;
}

BusConf bus_test_conf(void) {
    BusConf c = bus_conf_default();
    c.ping_ms = 50;
    c.silent_ms = 300;
    return c;
}

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    Seen *s = arg;
    assert_non_null(reason);
    assert_true((peer == NULL) == (event == BUS_REFUSED));
    if (event == BUS_UP)
        s->peer = peer;
    if (event == BUS_GONE && s->peer == peer)
        s->peer = NULL;
    s->n[event]++;
    if (event == BUS_BACK && s->tells)
        bus_test_send_quiet(peer, 0, NULL, 0);
    if (s->n_events < SEEN_MAX) {
        s->event[s->n_events] = event;
        snprintf(s->reason[s->n_events++], sizeof *s->reason, "%s", reason);
    }
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    Seen *s = arg;
    assert_non_null(bus_peer_hello(peer));
    if (env->body_case == BATON__ENVELOPE__BODY_PONG) {
        s->n_pongs++;
        s->pong_ready = env->pong->ready;
        return;
    }
    assert_int_equal(env->body_case, BATON__ENVELOPE__BODY_QUIET);
    if (s->n_messages == 0)
        s->in_order = true;
    else if (env->quiet->request != s->last + 1)
        s->in_order = false;
    s->last = env->quiet->request;
    s->blob_len = blob_len;
    if (blob_len) {
        s->blob_first = *(const uint8_t *)blob;
        s->blob_last = ((const uint8_t *)blob)[blob_len - 1];
    }
    s->n_messages++;
    if (s->echo)
        bus_test_send_quiet(peer, env->quiet->request, blob, blob_len);
}

BusCallbacks bus_test_callbacks(Seen *seen) {
    return (BusCallbacks){.arg = seen, .on_event = on_event, .on_message = on_message};
}

int bus_test_send_quiet(BusPeer *peer, uint64_t request, const void *blob, size_t len) {
    Baton__Quiet q = BATON__QUIET__INIT;
    q.request = request;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_QUIET;
    env.quiet = &q;
    return bus_send(peer, &env, blob, len, NULL);
}

typedef struct Wait {
    Loop *loop;
    const int *value;
    int want;
    int64_t end_ms;
} Wait;

static void on_wait(void *arg) {
    Wait *w = arg;
    if ((w->value && *w->value >= w->want) || clock_now_ms() >= w->end_ms)
        loop_stop(w->loop);
}

int64_t bus_test_wait(Loop *loop, const int *value, int want, int64_t timeout_ms) {
    int64_t begin = clock_now_ms();
    Wait w = {loop, value, want, begin + timeout_ms};
    LoopTimer *t = loop_timer_new(loop, 0, 1, on_wait, &w);
    loop_run(loop);
    loop_timer_free(t);
    if (value)
        assert_true(*value >= want);
    return clock_now_ms() - begin;
}

void bus_test_run(Loop *loop, int64_t ms) {
    bus_test_wait(loop, NULL, 0, ms);
}

/* ---- processes ---- */

static char dir[] = "/tmp/baton-bus-XXXXXX";
static char path[64];

static void remove_dir(void) {
    unlink(path);
    rmdir(dir);
}

const char *bus_test_endpoint(void) {
    static char endpoint[80];
    if (!endpoint[0]) {
        assert_non_null(mkdtemp(dir));
        snprintf(path, sizeof path, "%s/bus", dir);
        snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
        atexit(remove_dir);
    }
    return endpoint;
}

/* The threads of a ZeroMQ context do not survive a fork: the child begins anew. */
static pid_t start(const char *what, const char *endpoint) {
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(ready[1], STDOUT_FILENO);
        execl("/proc/self/exe", "bus_test", what, endpoint, NULL);
        _exit(1);
    }
    close(ready[1]);
    char c;
    assert_int_equal(read(ready[0], &c, 1), 1);
    close(ready[0]);
    return pid;
}

pid_t bus_test_start_server(const char *endpoint) {
    return start("server", endpoint);
}

pid_t bus_test_start_client(const char *endpoint) {
    return start("client", endpoint);
}

void bus_test_child(int argc, char **argv) {
    if (argc != 3)
        return;
    Seen *seen = xcalloc(1, sizeof *seen);
    seen->echo = seen->tells = true;
    Loop *loop = loop_new();
    BusConf conf = bus_test_conf();
    BusCallbacks cb = bus_test_callbacks(seen);
    int rc;
    if (strcmp(argv[1], "server") == 0) {
        Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0");
        BusServer *s;
        rc = bus_server_open(&s, loop, argv[2], &h, &conf, &cb, NULL);
    } else {
        Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
        BusClient *c;
        rc = bus_client_open(&c, loop, argv[2], &h, &conf, &cb, NULL);
    }
    if (rc || write(STDOUT_FILENO, "r", 1) != 1)
        _exit(1);
    loop_run(loop);
    _exit(0);
}

void bus_test_end(pid_t pid, int sig) {
    kill(pid, sig);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}
