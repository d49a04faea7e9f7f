/* The bus and the loop it runs on: ends that work for each other in one round, and a process that
 * did not run for a while. */
#include "bus_test.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

enum { SOON_MS = 5000 };

/* ---- several ends on one loop ---- */

enum {
    N = 3,
    MIDDLE = 1
}; /* of the clients; whichever way a loop goes, one is before, one after */

/* Echoing servers on a thread of their own, and their clients on the thread of the test. */
typedef struct Ring {
    pthread_t thread;
    Loop *far, *near;
    BusServer *server[N];
    BusClient *client[N];
    Seen at_server[N], at_client[N];
    int n_late; /* answers that came after the middle one's */
} Ring;

static void *far_main(void *arg) {
    Ring *r = arg;
    loop_run(r->far);
    return NULL;
}

static void stop_loop(void *arg) {
    loop_stop(arg);
}

static Ring *ring; /* what the callbacks of the clients belong to */

static int send_pong(BusPeer *peer) {
    Baton__Pong pong = BATON__PONG__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_PONG; /* servers do not answer it */
    env.pong = &pong;
    return bus_send(peer, &env, NULL, 0, NULL);
}

/* While the middle client has its turn the others' answers arrive, and sending takes the news of
 * them off their descriptors. */
static void on_middle(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                      size_t blob_len) {
    (void)arg, (void)peer, (void)blob, (void)blob_len;
    if (env->body_case != BATON__ENVELOPE__BODY_QUIET)
        return;
    for (int i = 0; i < N; i++)
        if (i != MIDDLE)
            assert_int_equal(bus_test_send_quiet(ring->at_client[i].peer, 1, NULL, 0), 0);
    usleep(100000);
    for (int i = 0; i < N; i++)
        if (i != MIDDLE)
            assert_int_equal(send_pong(ring->at_client[i].peer), 0);
}

static void on_answer(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                      size_t blob_len) {
    (void)arg, (void)peer, (void)blob, (void)blob_len;
    if (env->body_case == BATON__ENVELOPE__BODY_QUIET && ++ring->n_late == N - 1)
        loop_stop(ring->near);
}

static void open_pair(Ring *r, int i, const BusConf *conf) {
    static const char *const names[N] = {"decode-0", "decode-1", "decode-2"};
    Baton__Hello decode = bus_test_hello(BATON__ROLE__ROLE_DECODE, names[i]),
                 router = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusCallbacks cb = bus_test_callbacks(&r->at_server[i]);
    r->at_server[i].echo = true;
    assert_int_equal(
        bus_server_open(&r->server[i], r->far, "tcp://127.0.0.1:*", &decode, conf, &cb, NULL), 0);
    cb = bus_test_callbacks(&r->at_client[i]);
    cb.on_message = i == MIDDLE ? on_middle : on_answer;
    assert_int_equal(bus_client_open(&r->client[i], r->near, bus_server_endpoint(r->server[i]),
                                     &router, conf, &cb, NULL),
                     0);
}

static void test_sends_hide_no_message(void **state) {
    (void)state;
    Ring *r = ring = xcalloc(1, sizeof *r);
    r->far = loop_new();
    r->near = loop_new();
    BusConf conf = bus_conf_default();
    conf.ping_ms = conf.silent_ms = 60000; /* nothing else wakes the loop */
    for (int i = 0; i < N; i++)
        open_pair(r, i, &conf);
    assert_int_equal(pthread_create(&r->thread, NULL, far_main, r), 0);
    for (int i = 0; i < N; i++)
        bus_test_wait(r->near, &r->at_client[i].n[BUS_UP], 1, SOON_MS);
    bus_test_run(r->near, 200); /* the servers have all seen the first pings */
    assert_int_equal(bus_test_send_quiet(r->at_client[MIDDLE].peer, 0, NULL, 0), 0);
    LoopTimer *give_up = loop_timer_new(r->near, SOON_MS, 0, stop_loop, r->near);
    int64_t begin = clock_now_ms();
    loop_run(r->near);
    assert_int_equal(r->n_late, N - 1);
    assert_true(clock_now_ms() - begin < SOON_MS / 2);
    loop_timer_free(give_up);
    assert_true(loop_post(r->far, stop_loop, r->far));
    pthread_join(r->thread, NULL);
    for (int i = 0; i < N; i++) {
        bus_client_close(r->client[i]);
        bus_server_close(r->server[i]);
    }
    loop_free(r->near);
    loop_free(r->far);
    free(r);
}

/* ---- a process that did not run ---- */

enum { PAUSES = 8 };

/* One complaint is let pass: this process may itself have been late on a busy machine. */
static void pauses_are_excused(Loop *loop, pid_t pid, Seen *seen, const BusConf *conf) {
    bus_test_wait(loop, &seen->n[BUS_UP], 1, SOON_MS);
    for (int i = 0; i < PAUSES; i++) {
        kill(pid, SIGSTOP);
        bus_test_run(loop, conf->silent_ms + 2 * conf->ping_ms);
        kill(pid, SIGCONT);
        bus_test_run(loop, 4 * conf->ping_ms);
    }
    assert_true(seen->n[BUS_BACK] >= PAUSES / 2); /* it did pause */
    assert_in_range(seen->n_messages, 0, 1);
    bus_test_end(pid, SIGKILL);
    bus_test_wait(loop, &seen->n[BUS_GONE], 1, SOON_MS);
}

/* A server that was stopped does not call its clients silent for what it could not hear. */
static void test_paused_server(void **state) {
    (void)state;
    Loop *loop = loop_new();
    BusConf conf = bus_test_conf();
    Seen seen = {0};
    BusCallbacks cb = bus_test_callbacks(&seen);
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusClient *c;
    pid_t pid = bus_test_start_server(bus_test_endpoint());
    assert_int_equal(bus_client_open(&c, loop, bus_test_endpoint(), &h, &conf, &cb, NULL), 0);
    pauses_are_excused(loop, pid, &seen, &conf);
    bus_client_close(c);
    loop_free(loop);
}

/* Nor does a client. */
static void test_paused_client(void **state) {
    (void)state;
    Loop *loop = loop_new();
    BusConf conf = bus_test_conf();
    Seen seen = {0};
    BusCallbacks cb = bus_test_callbacks(&seen);
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0");
    BusServer *s;
    assert_int_equal(bus_server_open(&s, loop, bus_test_endpoint(), &h, &conf, &cb, NULL), 0);
    pid_t pid = bus_test_start_client(bus_test_endpoint());
    pauses_are_excused(loop, pid, &seen, &conf);
    bus_server_close(s);
    loop_free(loop);
}

int main(int argc, char **argv) {
    bus_test_child(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sends_hide_no_message),
        cmocka_unit_test(test_paused_server),
        cmocka_unit_test(test_paused_client),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
