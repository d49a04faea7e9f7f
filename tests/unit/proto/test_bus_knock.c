/* What proves that a process has ended, and what does not: each outcome of a knock, and a client
 * of the bus whose way to a living server is blocked for a while. */
#include "proto/bus_knock.h"

#include "base/clock.h"
#include "bus_test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

enum { SOON_MS = 5000 };

typedef struct Answer {
    int n;
    bool refused;
} Answer;

static void on_answer(void *arg, bool refused) {
    Answer *a = arg;
    a->n++;
    a->refused = refused;
}

/* Whether the system refuses; the answer must come once. */
static bool knock(const char *endpoint, const char *address) {
    Loop *loop = loop_new();
    Answer a = {0};
    BusKnock *k = bus_knock_new(loop, endpoint, address, on_answer, &a);
    assert_int_equal(a.n, 0); /* never from within the call */
    bus_test_wait(loop, &a.n, 1, SOON_MS);
    bus_test_run(loop, 20);
    assert_int_equal(a.n, 1);
    bus_knock_free(k);
    loop_free(loop);
    return a.refused;
}

static int listen_tcp(char *endpoint, size_t n) {
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof addr;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr, len), 0);
    assert_int_equal(listen(fd, 8), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
    snprintf(endpoint, n, "tcp://some.host:%u", ntohs(addr.sin_port));
    return fd;
}

static void test_tcp(void **state) {
    (void)state;
    char endpoint[64];
    int fd = listen_tcp(endpoint, sizeof endpoint);
    assert_false(knock(endpoint, "127.0.0.1"));
    assert_false(knock(endpoint, "")); /* nothing is known of it */
    assert_false(knock(endpoint, "no.address"));
    close(fd);
    assert_true(knock(endpoint, "127.0.0.1"));
    assert_true(knock(endpoint, "::ffff:127.0.0.1"));
    /* No route, whatever the machine: the system itself says so. */
    assert_false(knock(endpoint, "255.255.255.255"));
}

static void test_ipc(void **state) {
    (void)state;
    const char *endpoint = bus_test_endpoint();
    assert_true(knock(endpoint, ""));
    Baton__Hello h = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0");
    Seen seen = {0};
    BusCallbacks cb = bus_test_callbacks(&seen);
    Loop *loop = loop_new();
    BusServer *s;
    assert_int_equal(bus_server_open(&s, loop, endpoint, &h, NULL, &cb, NULL), 0);
    assert_false(knock(endpoint, ""));
    bus_server_close(s);
    loop_free(loop);
    pid_t pid = bus_test_start_server(endpoint);
    assert_false(knock(endpoint, ""));
    bus_test_end(pid, SIGKILL); /* leaves its file behind */
    assert_true(knock(endpoint, ""));
    assert_true(knock("ipc://@baton-nobody-listens-here", ""));
    assert_false(knock("ipc:///dev/null/below-a-file", ""));
    assert_int_equal(bus_knock_ipc("ipc://"), EINVAL);
    assert_int_equal(bus_knock_ipc("tcp://127.0.0.1:1"), EINVAL);
}

static void test_given_up(void **state) {
    (void)state;
    Loop *loop = loop_new();
    Answer a = {0};
    bus_knock_free(bus_knock_new(loop, "ipc:///nowhere/bus", "", on_answer, &a));
    bus_knock_free(bus_knock_new(loop, "tcp://some.host:9", "127.0.0.1", on_answer, &a));
    bus_knock_free(NULL);
    bus_test_run(loop, 50);
    assert_int_equal(a.n, 0);
    loop_free(loop);
}

/* The file of a living server is out of reach when the client wants to connect again: that is no
 * proof of anything, and the same process is found again later. */
static void test_no_way_there(void **state) {
    (void)state;
    const char *endpoint = bus_test_endpoint(), *path = endpoint + 6;
    char aside[80];
    snprintf(aside, sizeof aside, "%s-aside", path);
    Loop *loop = loop_new();
    BusConf small = bus_test_conf(), large = bus_test_conf();
    small.max_frame_bytes = 4096;
    Seen at_server = {0}, at_client = {0};
    BusCallbacks cb_server = bus_test_callbacks(&at_server),
                 cb_client = bus_test_callbacks(&at_client);
    Baton__Hello decode = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0"),
                 router = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusServer *s;
    BusClient *c;
    assert_int_equal(bus_server_open(&s, loop, endpoint, &decode, &small, &cb_server, NULL), 0);
    assert_int_equal(bus_client_open(&c, loop, endpoint, &router, &large, &cb_client, NULL), 0);
    bus_test_wait(loop, &at_client.n[BUS_UP], 1, SOON_MS);
    bus_test_wait(loop, &at_server.n[BUS_UP], 1, SOON_MS);
    assert_int_equal(rename(path, aside), 0);
    assert_int_equal(symlink(path, path), 0); /* leads nowhere, but is there */
    uint8_t blob[5000] = {0};
    assert_int_equal(bus_test_send_quiet(at_client.peer, 0, blob, sizeof blob), 0);
    bus_test_wait(loop, &at_client.n[BUS_SILENT], 1, SOON_MS); /* the server closed on it */
    bus_test_run(loop, 300);                                   /* several vain attempts */
    assert_int_equal(at_client.n[BUS_GONE], 0);
    assert_int_equal(at_client.n_events, 2);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(aside, path), 0);
    bus_test_wait(loop, &at_client.n[BUS_RESET], 1, SOON_MS);
    assert_int_equal(at_client.n_events, 3);
    bus_server_close(s);
    assert_true(bus_test_wait(loop, &at_client.n[BUS_GONE], 1, SOON_MS) < 1000);
    bus_client_close(c);
    loop_free(loop);
}

/* A process known by a host name is knocked at by the address it had. */
static void test_host_name(void **state) {
    (void)state;
    Loop *loop = loop_new();
    BusConf conf = bus_test_conf();
    Seen at_server = {0}, at_client = {0};
    BusCallbacks cb_server = bus_test_callbacks(&at_server),
                 cb_client = bus_test_callbacks(&at_client);
    Baton__Hello decode = bus_test_hello(BATON__ROLE__ROLE_DECODE, "decode-0"),
                 router = bus_test_hello(BATON__ROLE__ROLE_ROUTER, "router-0");
    BusServer *s;
    BusClient *c;
    assert_int_equal(
        bus_server_open(&s, loop, "tcp://127.0.0.1:*", &decode, &conf, &cb_server, NULL), 0);
    char endpoint[300];
    snprintf(endpoint, sizeof endpoint, "tcp://localhost%s", strrchr(bus_server_endpoint(s), ':'));
    assert_int_equal(bus_client_open(&c, loop, endpoint, &router, &conf, &cb_client, NULL), 0);
    bus_test_wait(loop, &at_client.n[BUS_UP], 1, SOON_MS);
    bus_server_close(s);
    assert_true(bus_test_wait(loop, &at_client.n[BUS_GONE], 1, SOON_MS) < 1000);
    bus_client_close(c);
    loop_free(loop);
}

int main(int argc, char **argv) {
    bus_test_child(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tcp),       cmocka_unit_test(test_ipc),
        cmocka_unit_test(test_given_up),  cmocka_unit_test(test_no_way_there),
        cmocka_unit_test(test_host_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
