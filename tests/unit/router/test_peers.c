/* Tests router/peers.c with bus servers in the same loop: readiness, its reasons, pairs, choice. */
#include "router/peers.h"

#include "base/clock.h"
#include "base/log.h"
#include "proto/hello.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

typedef struct Service {
    BusServer *bus;
    bool ready;
    uint32_t free_pages;
    uint64_t queued_tokens;
} Service;

static struct {
    Loop *loop;
    Peers *peers;
    Service prefill, decode[2];
    bool (*until)(void);
    int n_reset;
} t;

static void on_ping(void *arg, Baton__Pong *pong) {
    const Service *s = arg;
    pong->ready = s->ready;
    pong->reason = (char *)"still loading";
    pong->free_pages = s->free_pages;
    pong->total_pages = 100;
    pong->queued_tokens = s->queued_tokens;
}

static void on_service_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    (void)arg, (void)peer, (void)event, (void)reason;
}

static void on_service_message(void *arg, BusPeer *peer, const Baton__Envelope *env,
                               const void *blob, size_t blob_len) {
    (void)arg, (void)peer, (void)env, (void)blob, (void)blob_len;
}

static void service_open(Service *s, Baton__Role role, const char *name, uint32_t page_tokens) {
    Err err = {0};
    Baton__Hello hello = BATON__HELLO__INIT;
    hello.protocol = PROTOCOL_VERSION;
    hello.role = role;
    hello.name = (char *)name;
    hello.generation = clock_unique();
    hello.page_tokens = page_tokens;
    hello.max_context = role == BATON__ROLE__ROLE_DECODE ? 500 : 800;
    BusCallbacks cb = {.arg = s,
                       .on_event = on_service_event,
                       .on_message = on_service_message,
                       .on_ping = on_ping};
    if (bus_server_open(&s->bus, t.loop, "tcp://127.0.0.1:*", &hello, NULL, &cb, &err))
        fail_msg("%s", err.text);
}

static void on_event(void *arg, Peer *peer, BusEvent event) {
    (void)arg, (void)peer;
    t.n_reset += event == BUS_RESET;
}

static void on_message(void *arg, Peer *peer, const Baton__Envelope *env) {
    (void)arg, (void)peer, (void)env;
    fail_msg("nothing is asked, nothing may be answered");
}

static int open_peers(const char *prefill, const char *decode, Err *err) {
    Baton__Hello hello = BATON__HELLO__INIT;
    hello.protocol = PROTOCOL_VERSION;
    hello.role = BATON__ROLE__ROLE_ROUTER;
    hello.name = (char *)"router-0";
    hello.generation = 1;
    BusConf conf = bus_conf_default();
    conf.ping_ms = 10;
    PeersCallbacks cb = {.on_event = on_event, .on_message = on_message};
    return peers_open(&t.peers, t.loop, prefill, decode, &hello, &conf, &cb, err);
}

static void too_long(void *arg) {
    (void)arg;
    fail_msg("the state that the test waits for does not come");
}

static void look(void *arg) {
    (void)arg;
    if (t.until())
        loop_stop(t.loop);
}

/* Runs the loop until it holds, at most 5 s. */
static void run_until(bool (*until)(void)) {
    t.until = until;
    LoopTimer *limit = loop_timer_new(t.loop, 5000, 0, too_long, NULL);
    LoopTimer *poll = loop_timer_new(t.loop, 1, 5, look, NULL);
    loop_run(t.loop);
    loop_timer_free(poll);
    loop_timer_free(limit);
}

static char why[400];

static bool ready(void) {
    return peers_ready(t.peers, why, sizeof why);
}

static bool not_ready(void) {
    return !ready();
}

static bool says_loading(void) {
    return !ready() && strstr(why, "still loading");
}

static bool says_no_fit(void) {
    return !ready() && strstr(why, "fits a ready decode: decode-") &&
           strstr(why, "has page_tokens 32, prefill-0 expects 64");
}

static bool says_role(void) {
    return !ready() && strstr(why, "role");
}

static bool two_decodes(void) {
    Peer *p, *d;
    return ready() && peers_pick(t.peers, 1, 2, NULL, NULL, &p, &d) &&
           peers_pick(t.peers, 1, 2, NULL, d, &p, &d);
}

static void start(uint32_t prefill_page, uint32_t decode_page) {
    Err err = {0};
    service_open(&t.prefill, BATON__ROLE__ROLE_PREFILL, "prefill-0", prefill_page);
    service_open(&t.decode[0], BATON__ROLE__ROLE_DECODE, "decode-0", decode_page);
    service_open(&t.decode[1], BATON__ROLE__ROLE_DECODE, "decode-1", decode_page);
    char decodes[300];
    snprintf(decodes, sizeof decodes, " %s, %s", bus_server_endpoint(t.decode[0].bus),
             bus_server_endpoint(t.decode[1].bus));
    if (open_peers(bus_server_endpoint(t.prefill.bus), decodes, &err))
        fail_msg("%s", err.text);
}

static int setup(void **state) {
    (void)state;
    memset(&t, 0, sizeof t);
    log_init("test", LOG_LV_ERR);
    t.loop = loop_new();
    t.prefill.ready = t.decode[0].ready = t.decode[1].ready = true;
    t.decode[0].free_pages = 10;
    t.decode[1].free_pages = 20;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    peers_close(t.peers);
    bus_server_close(t.prefill.bus);
    bus_server_close(t.decode[0].bus);
    bus_server_close(t.decode[1].bus);
    loop_free(t.loop);
    return 0;
}

static void test_lists(void **state) {
    Err err = {0};
    (void)state;
    assert_int_equal(open_peers(" , ", "tcp://127.0.0.1:1", &err), E_INVAL);
    assert_non_null(strstr(err.text, "[peers] prefill"));
    assert_int_equal(open_peers("tcp://127.0.0.1:1", "", &err), E_INVAL);
    assert_non_null(strstr(err.text, "[peers] decode"));
    assert_int_not_equal(open_peers("tcp://127.0.0.1:1", "nonsense", &err), 0);
    char many[65 * 20] = "";
    for (int i = 0; i < 65; i++)
        strcat(many, "tcp://127.0.0.1:1,");
    assert_int_equal(open_peers("tcp://127.0.0.1:1", many, &err), E_LIMIT);
}

static void test_nobody(void **state) {
    Err err = {0};
    (void)state;
    assert_int_equal(open_peers("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", &err), 0);
    assert_false(ready());
    assert_non_null(strstr(why, "no prefill is ready: tcp://127.0.0.1:1 is not connected"));
    assert_non_null(strstr(why, "no decode is ready: tcp://127.0.0.1:2 is not connected"));
    Peer *p, *d;
    assert_false(peers_pick(t.peers, 1, 2, NULL, NULL, &p, &d));
}

static void test_ready(void **state) {
    (void)state;
    start(64, 64);
    run_until(two_decodes);
    assert_int_equal(peers_max_context(t.peers, 1000), 500);
    assert_int_equal(peers_max_context(t.peers, 100), 100);
    t.prefill.ready = false;
    run_until(says_loading);
    t.prefill.ready = true;
    run_until(ready);
    bus_server_close(t.prefill.bus);
    t.prefill.bus = NULL;
    run_until(not_ready);
    assert_non_null(strstr(why, "no prefill is ready"));
}

/* Pages sent since the last Pong count, so that a burst spreads. */
static void test_burst_spreads(void **state) {
    (void)state;
    start(64, 64);
    run_until(two_decodes);
    Peer *p, *d;
    int n[2] = {0, 0};
    for (int i = 0; i < 10; i++) {
        assert_true(peers_pick(t.peers, 10, 65, NULL, NULL, &p, &d)); /* two pages */
        n[d->index]++;
    }
    assert_true(n[0] >= 2 && n[1] > n[0]);
    assert_true(p->sent_tokens >= 100);
}

static void test_no_fit(void **state) {
    (void)state;
    start(64, 32);
    run_until(says_no_fit);
}

static void test_wrong_role(void **state) {
    Err err = {0};
    (void)state;
    service_open(&t.prefill, BATON__ROLE__ROLE_PREFILL, "prefill-0", 64);
    service_open(&t.decode[0], BATON__ROLE__ROLE_PREFILL, "prefill-1", 64);
    assert_int_equal(
        open_peers(bus_server_endpoint(t.prefill.bus), bus_server_endpoint(t.decode[0].bus), &err),
        0);
    run_until(says_role);
}

/* ---- a second router of the same name ---- */

static BusClient *rival_open(void) {
    Err err = {0};
    Baton__Hello hello = BATON__HELLO__INIT;
    hello.protocol = PROTOCOL_VERSION;
    hello.role = BATON__ROLE__ROLE_ROUTER;
    hello.name = (char *)"router-0";
    hello.generation = 2;
    BusCallbacks cb = {.on_event = on_service_event, .on_message = on_service_message};
    BusClient *rival;
    if (bus_client_open(&rival, t.loop, bus_server_endpoint(t.prefill.bus), &hello, NULL, &cb,
                        &err))
        fail_msg("%s", err.text);
    return rival;
}

/* It takes the name away; the peers are of use again once it has gone. */
static void test_refused_for_a_while(void **state) {
    (void)state;
    start(64, 64);
    run_until(ready);
    BusClient *rival = rival_open();
    run_until(not_ready);
    bus_client_close(rival);
    run_until(ready);
    assert_int_equal(t.n_reset, 1);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_lists),
        T(test_nobody),
        T(test_ready),
        T(test_burst_spreads),
        T(test_no_fit),
        T(test_wrong_role),
        T(test_refused_for_a_while),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
