/* The bus over real sockets: both ends on one loop, or the other end in a process that is killed,
 * stopped and started again; and ends that do not keep to the protocol. */
#include "bus_test.h"

#include "base/clock.h"
#include "proto/bus_frame.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#include <cmocka.h>

enum { SOON_MS = 5000 };

typedef struct Fixture {
    Loop *loop;
    BusServer *server;
    BusClient *client;
    Seen at_server, at_client;
} Fixture;

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    f->loop = loop_new();
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    bus_client_close(f->client);
    bus_server_close(f->server);
    loop_free(f->loop);
    free(f);
    return 0;
}

static void open_server(Fixture *f, const char *endpoint, const BusConf *conf) {
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0");
    BusCallbacks cb = bus_test_callbacks(&f->at_server);
    Err err = {0};
    if (bus_server_open(&f->server, f->loop, endpoint, &h, conf, &cb, &err))
        fail_msg("%s", err.text);
}

static void open_client(Fixture *f, const char *endpoint, const BusConf *conf) {
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusCallbacks cb = bus_test_callbacks(&f->at_client);
    Err err = {0};
    if (bus_client_open(&f->client, f->loop, endpoint, &h, conf, &cb, &err))
        fail_msg("%s", err.text);
}

static void up(Fixture *f, const BusConf *conf) {
    open_server(f, "tcp://127.0.0.1:*", conf);
    open_client(f, bus_server_endpoint(f->server), conf);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 1, SOON_MS);
    bus_test_wait(f->loop, &f->at_server.n[BUS_UP], 1, SOON_MS);
}

/* ---- both ends on one loop ---- */

static void test_up_and_echo(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    f->at_server.echo = true;
    up(f, &conf);
    BusPeer *decode = f->at_client.peer, *router = f->at_server.peer;
    assert_true(bus_peer_up(decode) && bus_peer_up(router));
    assert_string_equal(bus_peer_hello(decode)->name, "decode-0");
    assert_string_equal(bus_peer_hello(router)->name, "router-0");
    bus_peer_set_user(decode, f);
    assert_ptr_equal(bus_peer_user(decode), f);
    uint8_t *blob = xcalloc(1, 3000000);
    blob[0] = 7;
    blob[2999999] = 9;
    assert_int_equal(bus_test_send_quiet(decode, 5, blob, 3000000), 0);
    free(blob);
    bus_test_wait(f->loop, &f->at_client.n_messages, 1, SOON_MS);
    assert_int_equal(f->at_client.last, 5);
    assert_int_equal(f->at_client.blob_len, 3000000);
    assert_int_equal(f->at_client.blob_first, 7);
    assert_int_equal(f->at_client.blob_last, 9);
    bus_test_run(f->loop, 3 * conf.silent_ms);
    assert_true(f->at_client.n_pongs >= 5 && f->at_client.pong_ready);
    assert_int_equal(f->at_client.n_events, 1);
    assert_int_equal(f->at_server.n_events, 1);
}

static void test_in_order(void **state) {
    Fixture *f = *state;
    f->at_server.echo = true;
    up(f, NULL);
    uint64_t sent = 0;
    while (sent < 10000) {
        if (bus_test_send_quiet(f->at_client.peer, sent, NULL, 0) == 0)
            sent++;
        else
            bus_test_run(f->loop, 2);
        /* Room for the answers: the server cannot queue more than its bound either. */
        if (sent % 1000 == 0)
            bus_test_wait(f->loop, &f->at_client.n_messages, (int)sent, SOON_MS);
    }
    assert_int_equal(f->at_client.n_messages, 10000);
    assert_true(f->at_server.in_order && f->at_client.in_order);
}

static void test_announce(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_conf_default();
    conf.ping_ms = 60000;
    conf.silent_ms = 60000;
    up(f, &conf);
    int before = f->at_client.n_pongs + 1; /* at most one answer to the first ping is under way */
    bus_test_run(f->loop, 50);
    bus_server_announce(f->server);
    bus_server_announce(f->server);
    bus_test_wait(f->loop, &f->at_client.n_pongs, before + 1, SOON_MS);
}

static void test_queue_is_bounded(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    conf.max_queued = 16;
    up(f, &conf);
    uint8_t *blob = xcalloc(1, 1 << 20);
    int rc = 0, n = 0;
    for (; n < 1000 && rc == 0; n++)
        rc = bus_test_send_quiet(f->at_client.peer, (uint64_t)n, blob, 1 << 20);
    free(blob);
    assert_int_equal(rc, E_BUSY);
    assert_true(n > 8 && n < 100); /* pings count too; some are on the way or at the reader */
    bus_test_wait(f->loop, &f->at_server.n_messages, n - 1, SOON_MS);
    assert_int_equal(bus_test_send_quiet(f->at_client.peer, 0, NULL, 0), 0);
}

static void test_too_large(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    conf.max_frame_bytes = 4096;
    up(f, &conf);
    uint8_t blob[5000] = {0};
    assert_int_equal(bus_test_send_quiet(f->at_client.peer, 0, blob, sizeof blob), E_LIMIT);
    assert_int_equal(bus_test_send_quiet(f->at_client.peer, 0, blob, 4096), 0);
    bus_test_wait(f->loop, &f->at_server.n_messages, 1, SOON_MS);
}

/* A reader with a smaller bound than the writer drops the connection; it is made again. */
static void test_oversized_from_outside(void **state) {
    Fixture *f = *state;
    BusConf small = bus_test_conf(), large = bus_test_conf();
    small.max_frame_bytes = 4096;
    open_server(f, "tcp://127.0.0.1:*", &small);
    open_client(f, bus_server_endpoint(f->server), &large);
    bus_test_wait(f->loop, &f->at_server.n[BUS_UP], 1, SOON_MS);
    uint8_t blob[5000] = {0};
    assert_int_equal(bus_test_send_quiet(f->at_client.peer, 0, blob, sizeof blob), 0);
    bus_test_wait(f->loop, &f->at_server.n[BUS_UP], 2, SOON_MS);
    bus_test_wait(f->loop, &f->at_client.n[BUS_RESET], 1, SOON_MS);
    assert_int_equal(f->at_server.n_messages, 0);
    assert_int_equal(f->at_server.n[BUS_GONE], 1);
    assert_int_equal(f->at_client.n[BUS_GONE], 0); /* the process never ended */
    assert_int_equal(f->at_client.event[1], BUS_SILENT);
    assert_true(bus_peer_up(f->at_client.peer));
}

static void test_refused(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    open_server(f, "tcp://127.0.0.1:*", &conf);
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    h.page_tokens = 32;
    BusCallbacks cb = bus_test_callbacks(&f->at_client);
    assert_int_equal(
        bus_client_open(&f->client, f->loop, bus_server_endpoint(f->server), &h, &conf, &cb, NULL),
        0);
    bus_test_wait(f->loop, &f->at_client.n[BUS_REFUSED], 1, SOON_MS);
    const char *words = "router-0 has page_tokens 32, decode-0 expects 64";
    assert_string_equal(f->at_client.reason[0], words);
    assert_string_equal(f->at_server.reason[0], words);
    bus_test_run(f->loop, 500);
    assert_int_equal(f->at_client.n_events, 1); /* not at once again */
    bus_test_wait(f->loop, &f->at_client.n[BUS_REFUSED], 2, SOON_MS);
    assert_int_equal(f->at_client.n[BUS_UP] + f->at_server.n[BUS_UP], 0);
}

/* Two clients of one name: the newer one counts, the older one hears why. */
static void test_name_taken(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    up(f, &conf);
    Seen second = {0};
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusCallbacks cb = bus_test_callbacks(&second);
    BusClient *other;
    assert_int_equal(
        bus_client_open(&other, f->loop, bus_server_endpoint(f->server), &h, &conf, &cb, NULL), 0);
    bus_test_wait(f->loop, &second.n[BUS_UP], 1, SOON_MS);
    bus_test_wait(f->loop, &f->at_client.n[BUS_REFUSED], 1, SOON_MS);
    assert_string_equal(f->at_client.reason[1], "another connection took the name router-0");
    assert_int_equal(f->at_server.n[BUS_GONE], 1);
    bus_client_close(other);
}

static void test_closes(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    up(f, &conf);
    bus_client_close(f->client);
    f->client = NULL;
    assert_true(bus_test_wait(f->loop, &f->at_server.n[BUS_GONE], 1, SOON_MS) < 1000);
    open_client(f, bus_server_endpoint(f->server), &conf);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 2, SOON_MS);
    bus_server_close(f->server);
    f->server = NULL;
    assert_true(bus_test_wait(f->loop, &f->at_client.n[BUS_GONE], 1, SOON_MS) < 1000);
}

static void test_endpoints(void **state) {
    Fixture *f = *state;
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0");
    BusCallbacks cb = bus_test_callbacks(&f->at_server);
    BusServer *s = NULL;
    BusClient *c = NULL;
    Err err = {0};
    const char *const endpoint[] = {"tcp://127.0.0.1:*", bus_test_endpoint()};
    for (int i = 0; i < 2; i++) {
        BusServer *first;
        assert_int_equal(bus_server_open(&first, f->loop, endpoint[i], &h, NULL, &cb, &err), 0);
        const char *taken = bus_server_endpoint(first);
        assert_int_equal(bus_server_open(&s, f->loop, taken, &h, NULL, &cb, &err), E_IO);
        assert_non_null(strstr(err.text, taken));
        bus_server_close(first);
    }
    assert_int_equal(bus_server_open(&s, f->loop, "nonsense", &h, NULL, &cb, &err), E_INVAL);
    assert_int_equal(bus_client_open(&c, f->loop, "nonsense", &h, NULL, &cb, &err), E_INVAL);
    assert_null(s);
    assert_null(c);
}

/* ---- the other end is a process ---- */

static void test_server_killed_and_restarted(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    const char *endpoint = bus_test_endpoint();
    pid_t pid = bus_test_start_server(endpoint);
    open_client(f, endpoint, &conf);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 1, SOON_MS);
    uint64_t old = bus_peer_hello(f->at_client.peer)->generation;
    bus_test_end(pid, SIGKILL);
    assert_true(bus_test_wait(f->loop, &f->at_client.n[BUS_GONE], 1, SOON_MS) < 500);
    assert_null(f->at_client.peer);
    pid = bus_test_start_server(endpoint);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 2, SOON_MS);
    assert_int_not_equal(bus_peer_hello(f->at_client.peer)->generation, old);
    bus_test_end(pid, SIGKILL);
}

/* The new process listens before the client has looked: the old one is told gone all the same. */
static void test_server_replaced_at_once(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    const char *endpoint = bus_test_endpoint();
    pid_t pid = bus_test_start_server(endpoint);
    open_client(f, endpoint, &conf);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 1, SOON_MS);
    bus_test_end(pid, SIGKILL);
    pid = bus_test_start_server(endpoint);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 2, SOON_MS);
    assert_int_equal(f->at_client.n[BUS_GONE], 1);
    assert_int_equal(f->at_client.event[f->at_client.n_events - 1], BUS_UP);
    assert_int_equal(f->at_client.event[f->at_client.n_events - 2], BUS_GONE);
    bus_test_end(pid, SIGKILL);
}

static void test_server_stopped(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    const char *endpoint = bus_test_endpoint();
    pid_t pid = bus_test_start_server(endpoint);
    open_client(f, endpoint, &conf);
    bus_test_wait(f->loop, &f->at_client.n[BUS_UP], 1, SOON_MS);
    kill(pid, SIGSTOP);
    int64_t took = bus_test_wait(f->loop, &f->at_client.n[BUS_SILENT], 1, SOON_MS);
    assert_in_range(took, conf.silent_ms / 2, conf.silent_ms + 5 * conf.ping_ms);
    assert_false(bus_peer_up(f->at_client.peer));
    assert_int_equal(bus_test_send_quiet(f->at_client.peer, 1, NULL, 0), 0);
    kill(pid, SIGCONT);
    bus_test_wait(f->loop, &f->at_client.n[BUS_BACK], 1, SOON_MS);
    bus_test_wait(f->loop, &f->at_client.n_messages, 1, SOON_MS); /* nothing was lost */
    assert_true(bus_peer_up(f->at_client.peer));
    assert_int_equal(f->at_client.n_events, 3);
    bus_test_end(pid, SIGKILL);
}

static void test_client_killed(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    pid_t pid = bus_test_start_client(bus_test_endpoint());
    open_server(f, bus_test_endpoint(), &conf);
    bus_test_wait(f->loop, &f->at_server.n[BUS_UP], 1, SOON_MS);
    bus_test_end(pid, SIGKILL);
    assert_true(bus_test_wait(f->loop, &f->at_server.n[BUS_GONE], 1, SOON_MS) < 500);
    assert_int_equal(f->at_server.n[BUS_SILENT], 0);
}

static void test_client_stopped(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    pid_t pid = bus_test_start_client(bus_test_endpoint());
    open_server(f, bus_test_endpoint(), &conf);
    bus_test_wait(f->loop, &f->at_server.n[BUS_UP], 1, SOON_MS);
    kill(pid, SIGSTOP);
    int64_t took = bus_test_wait(f->loop, &f->at_server.n[BUS_SILENT], 1, SOON_MS);
    assert_in_range(took, conf.silent_ms / 2, conf.silent_ms + 5 * conf.ping_ms);
    kill(pid, SIGCONT);
    bus_test_wait(f->loop, &f->at_server.n[BUS_BACK], 1, SOON_MS);
    assert_int_equal(f->at_server.n[BUS_GONE], 0);
    kill(pid, SIGSTOP);
    bus_test_wait(f->loop, &f->at_server.n[BUS_SILENT], 2, SOON_MS);
    bus_test_end(pid, SIGKILL);
    assert_true(bus_test_wait(f->loop, &f->at_server.n[BUS_GONE], 1, SOON_MS) < 500);
}

/* ---- ends that do not keep to the protocol ---- */

typedef struct Raw {
    void *context, *socket;
} Raw;

static Raw raw_open(int type, const char *connect_to) {
    Raw r = {.context = zmq_ctx_new()};
    r.socket = zmq_socket(r.context, type);
    int zero = 0;
    zmq_setsockopt(r.socket, ZMQ_LINGER, &zero, sizeof zero);
    assert_int_equal(connect_to ? zmq_connect(r.socket, connect_to)
                                : zmq_bind(r.socket, "tcp://127.0.0.1:*"),
                     0);
    return r;
}

static void raw_close(Raw *r) {
    zmq_close(r->socket);
    zmq_ctx_term(r->context);
}

static void raw_envelope(Raw *r, Baton__Envelope__BodyCase body, ProtobufCMessage *m, int flags) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = body;
    env.hello = (Baton__Hello *)m;
    uint8_t bytes[1024];
    size_t n = baton__envelope__pack(&env, bytes);
    assert_int_equal(zmq_send(r->socket, bytes, n, flags), n);
}

static void raw_hello(Raw *r, const char *name) {
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_ROUTER, name);
    raw_envelope(r, BATON__ENVELOPE__BODY_HELLO, &h.base, 0);
}

static void raw_ping(Raw *r) {
    Baton__Ping p = BATON__PING__INIT;
    raw_envelope(r, BATON__ENVELOPE__BODY_PING, &p.base, 0);
}

/* Runs the loop until a Refuse comes; frames before it are skipped. */
static void raw_refused(Fixture *f, Raw *r, const char *words) {
    for (int64_t end = clock_now_ms() + SOON_MS; clock_now_ms() < end;) {
        uint8_t bytes[1024];
        bus_test_run(f->loop, 2);
        int n = zmq_recv(r->socket, bytes, sizeof bytes, ZMQ_DONTWAIT);
        if (n < 0)
            continue;
        Baton__Envelope *env = bus_frame_unpack(bytes, (size_t)n, NULL);
        assert_non_null(env);
        bool refuse = env->body_case == BATON__ENVELOPE__BODY_REFUSE;
        if (refuse)
            assert_string_equal(env->refuse->reason, words);
        bus_frame_free(env);
        if (refuse)
            return;
    }
    fail_msg("no refusal came");
}

static void test_strangers(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    up(f, &conf);
    Raw r = raw_open(ZMQ_DEALER, bus_server_endpoint(f->server));
    zmq_send(r.socket, "garbage\xff\xff", 9, 0);
    raw_refused(f, &r, "bytes that are no envelope");
    zmq_send(r.socket, "", 0, 0);
    raw_refused(f, &r, "envelope without a known body");
    raw_ping(&r);
    raw_refused(f, &r, "a message came before the hello");
    for (int i = 0; i < 5; i++)
        zmq_send(r.socket, "x", 1, i < 4 ? ZMQ_SNDMORE : 0);
    raw_refused(f, &r, "message of more than two frames");
    raw_hello(&r, "not a name");
    raw_refused(f, &r, "hello without a printable name of at most 63 characters");
    raw_close(&r);
    assert_int_equal(f->at_server.n_messages, 0);
    assert_int_equal(f->at_server.n[BUS_UP], 1);
    assert_true(bus_peer_up(f->at_client.peer)); /* others do not notice */
    assert_int_equal(f->at_client.n_events, 1);
}

static void test_peer_breaks_protocol(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    open_server(f, "tcp://127.0.0.1:*", &conf);
    Raw r = raw_open(ZMQ_DEALER, bus_server_endpoint(f->server));
    for (int i = 0; i < 4; i++) {
        raw_hello(&r, "router-1");
        raw_ping(&r);
        bus_test_wait(f->loop, &f->at_server.n[BUS_UP], i + 1, SOON_MS);
        Baton__Prefill p = BATON__PREFILL__INIT;
        if (i == 0)
            zmq_send(r.socket, "\x0a\xff", 2, 0);
        else if (i == 1)
            raw_hello(&r, "router-1");
        else if (i == 2)
            raw_envelope(&r, BATON__ENVELOPE__BODY_PREFILL, &p.base, 0);
        else
            zmq_send(r.socket, "\xfa\x07\x01x", 4, 0); /* a field of a later protocol */
        bus_test_wait(f->loop, &f->at_server.n[BUS_GONE], i + 1, SOON_MS);
        const char *const words[] = {"bytes that are no envelope",
                                     "a second hello on one connection", "prefill without sampling",
                                     "envelope without a known body"};
        raw_refused(f, &r, words[i]);
        assert_string_equal(f->at_server.reason[2 * i + 1], words[i]);
    }
    raw_hello(&r, "router-1");
    Baton__Quiet q = BATON__QUIET__INIT;
    raw_envelope(&r, BATON__ENVELOPE__BODY_QUIET, &q.base, 0);
    raw_refused(f, &r, "a message came before the first ping");
    raw_close(&r);
    assert_int_equal(f->at_server.n_messages, 0);
}

/* A server that answers hello with rubbish is refused, and tried again slowly. */
static void test_bad_server(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    Raw r = raw_open(ZMQ_ROUTER, NULL);
    char endpoint[128];
    size_t n = sizeof endpoint;
    zmq_getsockopt(r.socket, ZMQ_LAST_ENDPOINT, endpoint, &n);
    open_client(f, endpoint, &conf);
    uint8_t id[255], bytes[1024];
    int id_len = zmq_recv(r.socket, id, sizeof id, 0);
    assert_int_equal(id_len, 9);
    assert_true(zmq_recv(r.socket, bytes, sizeof bytes, 0) > 0);
    zmq_send(r.socket, id, (size_t)id_len, ZMQ_SNDMORE);
    zmq_send(r.socket, "\xff\xff\xff", 3, 0);
    bus_test_wait(f->loop, &f->at_client.n[BUS_REFUSED], 1, SOON_MS);
    assert_string_equal(f->at_client.reason[0], "bytes that are no envelope");
    bus_test_run(f->loop, 100);
    assert_int_equal(zmq_recv(r.socket, id, sizeof id, 0), id_len);
    assert_true(zmq_recv(r.socket, bytes, sizeof bytes, 0) >
                0); /* our Refuse left before the end */
    Baton__Envelope *env = bus_frame_unpack(bytes, 2 + bytes[1], NULL);
    assert_non_null(env);
    assert_int_equal(env->body_case, BATON__ENVELOPE__BODY_REFUSE);
    bus_frame_free(env);
    raw_close(&r);
}

/* Something that is no ZeroMQ at all. */
static void test_http_on_the_bus_port(void **state) {
    Fixture *f = *state;
    BusConf conf = bus_test_conf();
    up(f, &conf);
    Raw r = raw_open(ZMQ_STREAM, bus_server_endpoint(f->server));
    uint8_t id[255];
    int n = zmq_recv(r.socket, id, sizeof id, 0);
    for (int i = 0; i < 50; i++) {
        zmq_send(r.socket, id, (size_t)n, ZMQ_SNDMORE | ZMQ_DONTWAIT);
        zmq_send(r.socket, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27, ZMQ_DONTWAIT);
    }
    bus_test_run(f->loop, 300);
    raw_close(&r);
    assert_true(bus_peer_up(f->at_client.peer));
    assert_int_equal(f->at_client.n_events + f->at_server.n_events, 2);
}

/* A frame of few bytes that names much memory. */
static void test_frame_memory(void **state) {
    (void)state;
    size_t n = 4 << 20;
    uint8_t *body = xmalloc(n + 16), *at = body;
    *at++ = 9 << 3 | 2; /* tokens */
    for (size_t v = n; v; v >>= 7)
        *at++ = (uint8_t)((v & 0x7f) | (v > 0x7f ? 0x80 : 0));
    for (size_t i = 0; i < n; i += 2) {
        *at++ = 1 << 3 | 2; /* an empty step */
        *at++ = 0;
    }
    Err err = {0};
    assert_null(bus_frame_unpack(body, (size_t)(at - body), &err));
    assert_int_equal(err.code, E_FORMAT);
    free(body);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(int argc, char **argv) {
    bus_test_child(argc, argv);
    const struct CMUnitTest tests[] = {
        T(test_up_and_echo),
        T(test_in_order),
        T(test_announce),
        T(test_queue_is_bounded),
        T(test_too_large),
        T(test_oversized_from_outside),
        T(test_refused),
        T(test_name_taken),
        T(test_closes),
        T(test_endpoints),
        T(test_server_killed_and_restarted),
        T(test_server_replaced_at_once),
        T(test_server_stopped),
        T(test_client_killed),
        T(test_client_stopped),
        T(test_strangers),
        T(test_peer_breaks_protocol),
        T(test_bad_server),
        T(test_http_on_the_bus_port),
        cmocka_unit_test(test_frame_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
