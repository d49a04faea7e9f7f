/* base/httpd: a server on its loop and a client thread on plain sockets, in one process. */
#include "base/httpd.h"

#include "base/buf.h"
#include "base/clock.h"
#include "http_client.h"
#include "http_server.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <netinet/in.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

/* What the client thread saw; zeroed by setup, asserted after serve. */
static struct {
    int rc[8];
    Buf head[8], body[8];
    int64_t ms[8];
} got;

static int setup(void **state) {
    (void)state;
    memset(&got, 0, sizeof got);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    for (int i = 0; i < 8; i++) {
        buf_done(&got.head[i]);
        buf_done(&got.body[i]);
    }
    return 0;
}

static void ask(int i, const char *request_line, const void *body, size_t n) {
    got.rc[i] = client_ask(srv.port, request_line, body, n, &got.head[i], &got.body[i]);
}

static void assert_answer(int i, const char *status_line, const char *body) {
    assert_int_equal(got.rc[i], 0);
    assert_int_equal(strncmp(got.head[i].data, status_line, strlen(status_line)), 0);
    assert_string_equal(got.body[i].data ? got.body[i].data : "", body);
}

/* ---- answers ---- */

static void ask_plain(void) {
    ask(0, "POST /a%20b?x=1", "payload", 7);
    ask(1, "GET /late", NULL, 0);
    ask(2, "BREW /tea", NULL, 0);
    ask(3, "DELETE /x", NULL, 0);
}

static void requests_are_answered(void **state) {
    (void)state;
    server_run(NULL, ask_plain);
    assert_answer(0, "HTTP/1.1 200 ", "POST /a b - payload");
    assert_answer(1, "HTTP/1.1 202 ", "late");
    assert_answer(2, "HTTP/1.1 200 ", "BREW /tea - ");
    assert_answer(3, "HTTP/1.1 200 ", "DELETE /x - ");
    assert_non_null(strstr(got.head[1].data, "X-Late: yes\r\n"));
    assert_non_null(strstr(got.head[0].data, "Content-Type: text/plain\r\n"));
    assert_non_null(strstr(got.head[0].data, "X-Echo: a  X-Forged: 1\r\n"));
    assert_null(strstr(got.head[0].data, "\nX-Forged"));
    assert_int_equal(srv.n_gone, 0);
}

static void ask_on_one_connection(void) {
    static const char pipelined[] =
        "GET /late HTTP/1.1\r\nHost: t\r\n\r\nPOST /b HTTP/1.1\r\nHost: t\r\nX-Tag: "
        "2\r\nContent-Length: 3\r\n\r\nxyz"
        "GET /stream HTTP/1.1\r\nHost: t\r\n\r\n";
    static const char head[] = "HEAD /h HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n";
    int fd = client_connect(srv.port);
    client_send(fd, pipelined, sizeof pipelined - 1);
    for (int i = 0; i < 3; i++)
        got.rc[i] = client_read_answer(fd, &got.head[i], &got.body[i]);
    client_send(fd, head, sizeof head - 1);
    got.rc[3] = client_read_all(fd, &got.head[3]);
    close(fd);
}

static void a_connection_serves_several_requests(void **state) {
    (void)state;
    server_run(NULL, ask_on_one_connection);
    assert_answer(0, "HTTP/1.1 202 ", "late");
    assert_answer(1, "HTTP/1.1 200 ", "POST /b 2 xyz");
    assert_answer(2, "HTTP/1.1 200 ", "piece 0\npiece 1\npiece 2\n");
    assert_int_equal(got.rc[3], 0);
    const char *end = strstr(got.head[3].data, "\r\n\r\n");
    assert_non_null(strstr(got.head[3].data, "Content-Length: 10\r\n")); /* "HEAD /h - " */
    assert_non_null(end);
    assert_string_equal(end, "\r\n\r\n"); /* and no body */
}

static void send_garbage(void) {
    static const char *const garbage[] = {
        "\x16\x03\x01\x02\x00\x01\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: -1\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"};
    for (size_t i = 0; i < sizeof garbage / sizeof *garbage; i++) {
        int fd = client_connect(srv.port);
        client_send(fd, garbage[i], strlen(garbage[i]));
        shutdown(fd, SHUT_WR);
        got.rc[1] += client_read_all(fd, &got.body[1]);
        close(fd);
    }
    ask(0, "GET /ok", NULL, 0);
}

static void garbage_does_not_hurt(void **state) {
    (void)state;
    server_run(NULL, send_garbage);
    assert_answer(0, "HTTP/1.1 200 ", "GET /ok - ");
    assert_null(got.body[1].data ? strstr(got.body[1].data, "HTTP/1.1 200") : NULL);
}

static void ask_slowly(void) {
    int fd = client_connect(srv.port);
    client_send(fd, "GET / HT", 8);
    int64_t start = clock_now_ms();
    client_read_all(fd, &got.body[0]);
    got.ms[0] = clock_now_ms() - start;
    close(fd);
}

static void idle_connections_are_closed(void **state) {
    (void)state;
    server_run(NULL, ask_slowly);
    assert_true(got.ms[0] >= 500 && got.ms[0] < 5000); /* the limit is 1 s, in whole seconds */
}

/* ---- streams ---- */

static void ask_streams(void) {
    ask(0, "GET /stream", NULL, 0);
    ask(1, "GET /broken", NULL, 0);
}

static void a_broken_stream_looks_broken(void **state) {
    (void)state;
    server_run(NULL, ask_streams);
    assert_answer(0, "HTTP/1.1 200 ", "piece 0\npiece 1\npiece 2\n");
    assert_non_null(strstr(got.head[0].data, "Content-Type: text/event-stream\r\n"));
    assert_non_null(strstr(got.head[0].data, "Cache-Control: no-cache\r\n"));
    assert_int_equal(got.rc[1], -1);
    assert_string_equal(got.body[1].data, "piece 0\npiece 1\npiece 2\n");
    assert_int_equal(srv.n_gone, 0);
}

static void read_flood_late(void) {
    static const char request[] = "GET /flood HTTP/1.1\r\nHost: t\r\n\r\n";
    int fd = client_connect(srv.port);
    client_send(fd, request, sizeof request - 1);
    sleep_ms(300);
    got.ms[0] = (int64_t)srv.n_accepted;
    got.rc[0] = client_read_answer(fd, &got.head[0], &got.body[0]);
    close(fd);
}

static void a_slow_reader_is_bounded_and_loses_nothing(void **state) {
    (void)state;
    server_run(NULL, read_flood_late);
    assert_int_equal(got.rc[0], 0);
    const Buf *b = &got.body[0];
    assert_int_equal(b->len, srv.n_accepted + 3);
    assert_string_equal(b->data + b->len - 3, "end");
    for (size_t i = 1; i + 3 < b->len; i++) /* in order: the letters only rise */
        assert_true(b->data[i] >= b->data[i - 1]);
    /* Beyond the queue there are only the kernel's socket buffers, some MiB each. */
    assert_true(got.ms[0] >= STREAM_MAX - 1000 && got.ms[0] < STREAM_MAX + (16 << 20));
}

/* ---- clients that leave ---- */

static int open_and_wait(const char *path, int n_waiting) {
    Buf request = {0};
    buf_printf(&request, "GET %s HTTP/1.1\r\nHost: t\r\n\r\n", path);
    int fd = client_connect(srv.port);
    client_send(fd, request.data, request.len);
    buf_done(&request);
    wait_for(&srv.n_waiting, n_waiting);
    return fd;
}

static void leave(void) {
    static const char *const paths[] = {"/never", "/open"};
    for (int i = 0; i < 2; i++) {
        int fd = open_and_wait(paths[i], i + 1);
        sleep_ms(50);
        got.rc[i] = srv.n_gone;
        close(fd);
        got.ms[i] = wait_for(&srv.n_gone, i + 1);
    }
    /* A reset, with a second request unread behind the first. */
    int fd = open_and_wait("/never", 3);
    client_send(fd, "GET /x HTTP/1.1\r\n\r\n", 19);
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){.l_onoff = 1}, sizeof(struct linger));
    close(fd);
    got.ms[2] = wait_for(&srv.n_gone, 3);
    /* In the middle of a flood that nobody reads. */
    fd = open_and_wait("/flood", 3);
    sleep_ms(60);
    close(fd);
    got.ms[3] = wait_for(&srv.n_gone, 4);
    ask(4, "GET /after", NULL, 0);
}

static void a_client_that_leaves_is_noticed_at_once(void **state) {
    (void)state;
    server_run(NULL, leave);
    for (int i = 0; i < 2; i++)
        assert_int_equal(got.rc[i], i); /* not before it leaves */
    for (int i = 0; i < 4; i++)
        assert_true(got.ms[i] >= 0 && got.ms[i] < 1000);
    assert_answer(4, "HTTP/1.1 200 ", "GET /after - ");
    assert_int_equal(srv.n_gone, 4);
}

/* ---- bodies over the limit ---- */

static void send_large(void) {
    size_t n = 8 << 20;
    char *big = xcalloc(1, n);
    memset(big, 'x', n);
    ask(0, "POST /exact", big, BODY_MAX);
    ask(1, "POST /over", big, BODY_MAX + 1);
    ask(2, "POST /far", big, n); /* the whole body goes out before the answer is read */

    ask(6, "POST /late", big, n); /* the handler may take its time over a refusal too */

    static const char chunked[] =
        "POST /chunked HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n800000\r\n";
    int fd = client_connect(srv.port);
    got.rc[4] = client_send(fd, chunked, sizeof chunked - 1) && client_send(fd, big, n) &&
                client_send(fd, "\r\n0\r\n\r\n", 7);
    got.rc[3] = client_read_answer(fd, &got.head[3], &got.body[3]);
    close(fd);

    static const char expect[] = "POST /expect HTTP/1.1\r\nHost: t\r\nContent-Length: "
                                 "8388608\r\nExpect: 100-continue\r\n\r\n";
    fd = client_connect(srv.port);
    client_send(fd, expect, sizeof expect - 1);
    got.rc[5] = client_read_answer(fd, &got.head[5], &got.body[5]);
    close(fd);
    free(big);
}

static void a_large_body_gets_an_answer_that_can_be_read(void **state) {
    (void)state;
    server_run(NULL, send_large);
    assert_int_equal(got.rc[0], 0);
    assert_int_equal(got.body[0].len, strlen("POST /exact - ") + BODY_MAX);
    assert_answer(1, "HTTP/1.1 413 ", "too large");
    assert_answer(2, "HTTP/1.1 413 ", "too large");
    assert_true(got.rc[4]);
    assert_answer(3, "HTTP/1.1 413 ", "too large");
    assert_answer(6, "HTTP/1.1 202 ", "late");
    assert_answer(5, "HTTP/1.1 413 ", "too large"); /* and no 100 before it */
}

/* ---- start and stop ---- */

static void a_taken_port_is_named(void **state) {
    (void)state;
    HttpdConf conf = server_conf();
    server_start(&conf);
    Httpd *second = NULL;
    Err err = {0};
    char expected[100];
    conf.port = srv.port;
    snprintf(expected, sizeof expected, "cannot listen on 127.0.0.1:%d: address already in use",
             srv.port);
    assert_int_equal(server_open(&second, &conf, &err), E_IO);
    assert_string_equal(err.text, expected);
    assert_null(second);
    conf.port = 70000;
    assert_int_equal(server_open(&second, &conf, &err), E_IO);
    conf = (HttpdConf){.host = "not an address", .listen_fd = -1};
    assert_int_equal(server_open(&second, &conf, &err), E_IO);
    assert_int_equal(strncmp(err.text, "cannot listen on not an address:0: ", 35), 0);
    server_stop();
}

static void ask_once(void) {
    ask(0, "GET /once", NULL, 0);
}

static void every_kind_of_address_works(void **state) {
    (void)state;
    HttpdConf conf = server_conf();
    conf.host = "0.0.0.0";
    server_run(&conf, ask_once);
    assert_answer(0, "HTTP/1.1 200 ", "GET /once - ");
    teardown(NULL);
    setup(NULL);

    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    conf.listen_fd = socket(AF_INET, SOCK_STREAM, 0); /* blocking, as systemd hands it over */
    assert_int_equal(bind(conf.listen_fd, (struct sockaddr *)&addr, sizeof addr), 0);
    assert_int_equal(listen(conf.listen_fd, 8), 0);
    server_run(&conf, ask_once);
    assert_answer(0, "HTTP/1.1 200 ", "GET /once - ");
}

static void ipv6_takes_ipv4_too(void **state) {
    (void)state;
    int probe = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 any = {.sin6_family = AF_INET6};
    if (probe < 0 || bind(probe, (struct sockaddr *)&any, sizeof any) < 0)
        skip(); /* no IPv6 on this machine */
    close(probe);
    HttpdConf conf = server_conf();
    conf.host = "::";
    server_run(&conf, ask_once);
    assert_answer(0, "HTTP/1.1 200 ", "GET /once - ");
}

static void quiesce(void *arg) {
    (void)arg;
    httpd_quiesce(srv.h);
}

static void ask_across_quiesce(void) {
    static const char request[] = "GET /late HTTP/1.1\r\nHost: t\r\n\r\n";
    int fd = client_connect(srv.port), other = client_connect(srv.port);
    client_send(fd, request, sizeof request - 1);
    sleep_ms(20);
    loop_post(srv.loop, quiesce, NULL);
    got.rc[0] = client_read_answer(fd, &got.head[0], &got.body[0]);
    got.rc[1] = client_connect(srv.port);
    client_read_all(fd, &got.body[1]); /* the server closes: no more requests here */
    close(fd);
    close(other);
}

static void quiescing_finishes_what_runs(void **state) {
    (void)state;
    server_run(NULL, ask_across_quiesce);
    assert_answer(0, "HTTP/1.1 202 ", "late");
    assert_non_null(strcasestr(got.head[0].data, "\r\nConnection: close\r\n"));
    assert_int_equal(got.rc[1], -1);
    assert_int_equal(got.body[1].len, 0);
}

static int left_open[3];

static void leave_open(void) {
    left_open[0] = open_and_wait("/never", 1);
    left_open[1] = open_and_wait("/open", 2);
    left_open[2] = client_connect(srv.port);
    client_send(left_open[2], "POST /half HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\nhalf",
                55);
    sleep_ms(50);
}

static void closing_ends_what_runs(void **state) {
    (void)state;
    HttpdConf conf = server_conf();
    server_start(&conf);
    server_serve(leave_open);
    assert_int_equal(httpd_active(srv.h), 3);
    server_stop();
    assert_int_equal(srv.n_gone, 2); /* the third never reached the handler */
    for (int i = 0; i < 3; i++) {
        assert_true(client_read_all(left_open[i], &got.body[i]) <= 0);
        assert_true(got.body[i].len < 5 ||
                    strcmp(got.body[i].data + got.body[i].len - 5, "0\r\n\r\n") != 0);
        close(left_open[i]);
    }
}

static void leave_upload(void) {
    left_open[0] = client_connect(srv.port);
    client_send(left_open[0],
                "POST /big HTTP/1.1\r\nHost: t\r\nContent-Length: 900000\r\n\r\nstart", 60);
    got.rc[0] = client_read_answer(left_open[0], &got.head[0], &got.body[0]);
    sleep_ms(50);
    got.rc[1] = client_send(left_open[0], "more", 4);
}

static void closing_ends_lingering_uploads(void **state) {
    (void)state;
    server_run(NULL, leave_upload);
    assert_answer(0, "HTTP/1.1 413 ", "too large");
    assert_true(got.rc[1]);
    close(left_open[0]);
}

#define HTTP_TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        HTTP_TEST(requests_are_answered),
        HTTP_TEST(a_connection_serves_several_requests),
        HTTP_TEST(garbage_does_not_hurt),
        HTTP_TEST(idle_connections_are_closed),
        HTTP_TEST(a_broken_stream_looks_broken),
        HTTP_TEST(a_slow_reader_is_bounded_and_loses_nothing),
        HTTP_TEST(a_client_that_leaves_is_noticed_at_once),
        HTTP_TEST(a_large_body_gets_an_answer_that_can_be_read),
        HTTP_TEST(a_taken_port_is_named),
        HTTP_TEST(every_kind_of_address_works),
        HTTP_TEST(ipv6_takes_ipv4_too),
        HTTP_TEST(quiescing_finishes_what_runs),
        HTTP_TEST(closing_ends_what_runs),
        HTTP_TEST(closing_ends_lingering_uploads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
