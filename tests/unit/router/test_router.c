/* Tests the whole router over real sockets: HTTP on one side, a prefill and a decode made of bus
 * servers on the other. The loop thread runs everything but the client, which is a thread of its
 * own and only records; the test judges afterwards. */
#include "router/router.h"

#include "base/clock.h"
#include "base/log.h"
#include "model/tok.h"
#include "proto/bus.h"
#include "proto/hello.h"
#include "../base/http_client.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define DIR "tests/models/tiny-glm52/fp8"

/* What the services do with a request. */
typedef enum Mode { ANSWER, BUSY, STUCK, HALF } Mode;

typedef struct Service {
    BusServer *bus;
    BusPeer *router; /* as the service sees it, or NULL */
    atomic_int n_cancels;
} Service;

static struct {
    Loop *loop;
    Router *router;
    Options opt;
    int port;
    Service prefill, decode;
    Tok *tok;
    Mode mode;
    uint64_t half; /* the latest request that was begun */
    /* What the client saw. */
    Buf head[8], body[8];
    int64_t took_ms;
    atomic_int n_prefills; /* requests that reached prefill */
} t;

/* ---- services ---- */

static uint32_t byte_id(char byte) {
    size_t n;
    for (int32_t id = 0; id < tok_size(t.tok); id++) {
        const char *bytes = tok_bytes(t.tok, id, &n);
        if (n == 1 && *bytes == byte)
            return (uint32_t)id;
    }
    fail_msg("no such token");
    return 0;
}

static void send_tokens(uint64_t request, char byte, Baton__Finish finish) {
    Baton__TokenOut out = BATON__TOKEN_OUT__INIT, *outs[] = {&out};
    Baton__TokenStep step = BATON__TOKEN_STEP__INIT, *steps[] = {&step};
    Baton__Tokens tokens = BATON__TOKENS__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    out.token = byte_id(byte);
    step.request = request;
    step.n_out = 1;
    step.out = outs;
    step.finish = finish;
    tokens.n_step = 1;
    tokens.step = steps;
    env.body_case = BATON__ENVELOPE__BODY_TOKENS;
    env.tokens = &tokens;
    assert_int_equal(bus_send(t.decode.router, &env, NULL, 0, NULL), 0);
}

static void send_failed(Service *s, uint64_t request, Baton__FailCode code, bool quiet) {
    Baton__Failed failed = BATON__FAILED__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    failed.request = request;
    failed.code = code;
    failed.reason = (char *)"a test";
    failed.quiet = quiet;
    env.body_case = BATON__ENVELOPE__BODY_FAILED;
    env.failed = &failed;
    bus_send(s->router, &env, NULL, 0, NULL);
}

static void send_grant(uint64_t request) {
    Baton__Grant grant = BATON__GRANT__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    grant.request = request;
    grant.ticket = 1;
    env.body_case = BATON__ENVELOPE__BODY_GRANT;
    env.grant = &grant;
    assert_int_equal(bus_send(t.decode.router, &env, NULL, 0, NULL), 0);
}

static void on_prefill(const Baton__Prefill *p) {
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    t.half = p->request;
    t.n_prefills++;
    if (t.mode == STUCK)
        return;
    done.request = p->request;
    env.body_case = BATON__ENVELOPE__BODY_PREFILL_DONE;
    env.prefill_done = &done;
    assert_int_equal(bus_send(t.prefill.router, &env, NULL, 0, NULL), 0);
    send_tokens(p->request, 'o', BATON__FINISH__FINISH_NONE);
    if (t.mode == ANSWER)
        send_tokens(p->request, 'k', BATON__FINISH__FINISH_STOP);
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    Service *s = arg;
    (void)peer, (void)blob, (void)blob_len;
    if (env->body_case == BATON__ENVELOPE__BODY_RESERVE && t.mode == BUSY) {
        send_failed(s, env->reserve->request, BATON__FAIL_CODE__FAIL_BUSY, false);
    } else if (env->body_case == BATON__ENVELOPE__BODY_RESERVE) {
        send_grant(env->reserve->request);
    } else if (env->body_case == BATON__ENVELOPE__BODY_PREFILL) {
        on_prefill(env->prefill);
    } else if (env->body_case == BATON__ENVELOPE__BODY_CANCEL) {
        s->n_cancels++;
        if (s == &t.prefill)
            send_failed(s, env->cancel->request, BATON__FAIL_CODE__FAIL_CANCELED, true);
    }
}

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    Service *s = arg;
    (void)reason;
    if (event == BUS_UP)
        s->router = peer;
    if (event == BUS_GONE)
        s->router = NULL;
}

static void on_ping(void *arg, Baton__Pong *pong) {
    (void)arg;
    pong->ready = true;
    pong->free_pages = pong->total_pages = 100;
}

static void service_open(Service *s, Baton__Role role, const char *name) {
    Err err = {0};
    Baton__Hello hello = BATON__HELLO__INIT;
    hello.protocol = PROTOCOL_VERSION;
    hello.role = role;
    hello.name = (char *)name;
    hello.generation = clock_unique();
    hello.max_context = 1000;
    BusCallbacks cb = {
        .arg = s, .on_event = on_event, .on_message = on_message, .on_ping = on_ping};
    if (bus_server_open(&s->bus, t.loop, "tcp://127.0.0.1:*", &hello, NULL, &cb, &err))
        fail_msg("%s", err.text);
}

/* ---- the client's thread ---- */

/* Asks and keeps the answer as number i; headers end with \r\n each. */
static void ask(int i, const char *method_path, const char *headers, const char *body) {
    Buf request = {0};
    buf_printf(&request, "%s HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n%s\r\n%s", method_path,
               strlen(body), headers, body);
    int fd = client_connect(t.port);
    buf_clear(&t.head[i]);
    buf_clear(&t.body[i]);
    if (fd >= 0 && client_send(fd, request.data, request.len))
        client_read_answer(fd, &t.head[i], &t.body[i]);
    if (fd >= 0)
        close(fd);
    buf_done(&request);
}

static void sleep_ms(int ms) {
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, NULL);
}

static bool wait_ready(void) {
    for (int i = 0; i < 100; i++) {
        ask(7, "GET /ready", "", "");
        if (t.head[7].data && strstr(t.head[7].data, " 200 "))
            return true;
        sleep_ms(50);
    }
    return false;
}

static int64_t wait_count(atomic_int *count, int n) {
    int64_t begin = clock_now_ms();
    while (atomic_load(count) < n && clock_now_ms() - begin < 5000)
        sleep_ms(2);
    return clock_now_ms() - begin;
}

static void stop_loop(void *arg) {
    (void)arg;
    loop_stop(t.loop);
}

static void *client_main(void *arg) {
    void (**client)(void) = arg;
    if (wait_ready())
        (*client)();
    loop_post(t.loop, stop_loop, NULL);
    return NULL;
}

/* ---- frame ---- */

static void run(Mode mode, void (*client)(void)) {
    pthread_t thread;
    t.mode = mode;
    pthread_create(&thread, NULL, client_main, &client);
    loop_run(t.loop);
    pthread_join(thread, NULL);
    assert_non_null(t.head[7].data);
    assert_non_null(strstr(t.head[7].data, " 200 "));
}

static int setup(void **state) {
    Err err = {0};
    (void)state;
    memset(&t, 0, sizeof t);
    log_init("test", LOG_LV_ERR);
    assert_int_equal(tok_open(&t.tok, DIR "/tokenizer.json", &err), 0);
    t.loop = loop_new();
    service_open(&t.prefill, BATON__ROLE__ROLE_PREFILL, "prefill-0");
    service_open(&t.decode, BATON__ROLE__ROLE_DECODE, "decode-0");
    char prefill[200], decode[200];
    snprintf(prefill, sizeof prefill, "peers.prefill=%s", bus_server_endpoint(t.prefill.bus));
    snprintf(decode, sizeof decode, "peers.decode=%s", bus_server_endpoint(t.decode.bus));
    const char *overrides[] = {
        "model.dir=" DIR,     "model.name=tiny", "http.port=0", "http.max_body_bytes=20000",
        "limits.drain_ms=3s", prefill,           decode};
    if (conf_load(&options_table, NULL, overrides, 7, &t.opt, &err) ||
        router_open(&t.router, t.loop, &t.opt, &err))
        fail_msg("%s", err.text);
    t.port = router_port(t.router);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    router_close(t.router);
    bus_server_close(t.prefill.bus);
    bus_server_close(t.decode.bus);
    loop_free(t.loop);
    conf_free(&options_table, &t.opt);
    tok_close(t.tok);
    for (int i = 0; i < 8; i++) {
        buf_done(&t.head[i]);
        buf_done(&t.body[i]);
    }
    return 0;
}

static void expect(int i, const char *status, const char *in_head, const char *in_body) {
    if (!t.head[i].data)
        fail_msg("answer %d did not come", i);
    if (!strstr(t.head[i].data, status) || !strstr(t.head[i].data, in_head))
        fail_msg("answer %d: %s", i, t.head[i].data);
    if (!t.body[i].data || !strstr(t.body[i].data, in_body))
        fail_msg("answer %d: %s", i, t.body[i].data ? t.body[i].data : "(empty)");
}

/* ---- tests ---- */

#define CHAT     "POST /v1/chat/completions"
#define MESSAGES "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define NO_THINK ",\"chat_template_kwargs\":{\"enable_thinking\":false}"

static void client_answers(void) {
    ask(0, CHAT, "X-Request-Id: my-1\r\n", MESSAGES NO_THINK "}");
    ask(1, CHAT, "X-Request-Id: bad id\r\n",
        MESSAGES NO_THINK ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    ask(2, "POST /v1/completions", "", "{\"model\":\"tiny\",\"prompt\":\"hi\"}");
    ask(3, CHAT, "", MESSAGES "}");
    ask(4, "GET /v1/models", "", "");
    ask(5, "GET /health", "", "");
    ask(6, "GET /metrics", "", "");
}

static void test_answers(void **state) {
    (void)state;
    run(ANSWER, client_answers);
    expect(0, " 200 ", "X-Request-Id: my-1", "\"content\":\"ok\"");
    expect(1, " 200 ", "text/event-stream", "\"content\":\"o\"");
    expect(1, " 200 ", "Cache-Control: no-cache", "\"choices\":[],\"usage\":{");
    expect(1, " 200 ", "X-Accel-Buffering: no", "data: [DONE]\n\n");
    assert_null(strstr(t.head[1].data, "bad id"));
    expect(2, " 200 ", "application/json", "\"text\":\"ok\"");
    expect(3, " 200 ", "application/json", "\"reasoning_content\":\"ok\",\"content\":\"\"");
    expect(4, " 200 ", "application/json", "\"id\":\"tiny\",\"object\":\"model\"");
    expect(4, " 200 ", "application/json", "\"max_model_len\":1000");
    expect(5, " 200 ", "application/json", "ok");
    expect(6, " 200 ", "text/plain", "baton_router_requests_total{outcome=\"complete\"} ");
}

static void client_refusals(void) {
    char large[20100] = "";
    memset(large, 'x', sizeof large - 1);
    ask(0, "GET /nowhere", "", "");
    ask(1, "GET /v1/chat/completions", "", "");
    ask(2, CHAT, "", large);
    ask(3, CHAT, "", "{\"model\":");
    ask(4, CHAT, "", MESSAGES ",\"max_tokens\":1000,\"stream\":true}");
    ask(5, CHAT, "", "{\"model\":\"tiny\",\"messages\":[{\"role\":\"user\",\"content\":5}]}");
    Buf prompt = {0};
    buf_puts(&prompt, "{\"model\":\"tiny\",\"prompt\":\"");
    for (int i = 0; i < 9000; i++)
        buf_puts(&prompt, "~^");
    buf_puts(&prompt, "\"}");
    ask(6, "POST /v1/completions", "", prompt.data);
    buf_done(&prompt);
}

static void client_wrong_methods(void) {
    ask(0, "GET /v1/completions", "", "");
    ask(1, "POST /v1/models", "", "{}");
    ask(2, "DELETE /health", "", "");
    ask(3, "PUT /ready", "", "");
    ask(4, CHAT, "Content-Type: image/png\r\n", MESSAGES NO_THINK "}"); /* tolerated */
}

static void test_wrong_methods(void **state) {
    (void)state;
    run(ANSWER, client_wrong_methods);
    expect(0, " 405 ", "Allow: POST\r\n", "method_not_allowed");
    expect(1, " 405 ", "Allow: GET, HEAD\r\n", "method_not_allowed");
    expect(2, " 405 ", "Allow: GET, HEAD\r\n", "method_not_allowed");
    expect(3, " 405 ", "Allow: GET, HEAD\r\n", "");
    expect(4, " 200 ", "application/json", "\"content\":\"ok\"");
}

static void test_refusals(void **state) {
    (void)state;
    run(ANSWER, client_refusals);
    expect(0, " 404 ", "", "not_found");
    expect(1, " 405 ", "Allow: POST", "method_not_allowed");
    expect(2, " 413 ", "", "body_too_large");
    expect(3, " 400 ", "", "invalid_json");
    expect(4, " 400 ", "application/json", "context_length_exceeded");
    expect(5, " 400 ", "", "\"param\":\"messages[0].content\"");
    expect(6, " 400 ", "", "context_length_exceeded");
    assert_int_equal(t.n_prefills, 0);
}

static void client_busy(void) {
    ask(0, CHAT, "", MESSAGES "}");
}

static void test_busy(void **state) {
    (void)state;
    run(BUSY, client_busy);
    expect(0, " 429 ", "Retry-After: 1", "no_capacity");
}

/* Leaves while prefill works. */
static void client_leaves(void) {
    const char *body = MESSAGES "}";
    char request[600];
    int n =
        snprintf(request, sizeof request,
                 CHAT " HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    int fd = client_connect(t.port);
    if (fd < 0 || !client_send(fd, request, (size_t)n))
        return;
    wait_count(&t.n_prefills, 1);
    close(fd);
    t.took_ms = wait_count(&t.prefill.n_cancels, 1) + wait_count(&t.decode.n_cancels, 1);
}

static void test_client_leaves(void **state) {
    (void)state;
    run(STUCK, client_leaves);
    assert_int_equal(t.prefill.n_cancels, 1);
    assert_int_equal(t.decode.n_cancels, 1);
    assert_true(t.took_ms < 1000);
}

static void kill_decode(void *arg) {
    (void)arg;
    bus_server_close(t.decode.bus);
    t.decode.bus = NULL;
}

/* Decode dies in the middle of a stream. */
static void client_sees_death(void) {
    const char *body = MESSAGES NO_THINK ",\"stream\":true}";
    char request[600];
    int n =
        snprintf(request, sizeof request,
                 CHAT " HTTP/1.1\r\nHost: t\r\nContent-Length: %zu\r\n\r\n%s", strlen(body), body);
    int fd = client_connect(t.port);
    if (fd < 0 || !client_send(fd, request, (size_t)n))
        return;
    wait_count(&t.n_prefills, 1);
    sleep_ms(100);
    int64_t begin = clock_now_ms();
    loop_post(t.loop, kill_decode, NULL);
    client_read_all(fd, &t.body[0]);
    t.took_ms = clock_now_ms() - begin;
    close(fd);
    ask(1, CHAT, "", MESSAGES "}");
    ask(2, "GET /ready", "", "");
    ask(3, "GET /live", "", "");
}

static void test_decode_dies(void **state) {
    (void)state;
    run(HALF, client_sees_death);
    assert_non_null(t.body[0].data);
    assert_non_null(strstr(t.body[0].data, "\"content\":\"o\""));
    assert_non_null(strstr(t.body[0].data, "data: {\"error\":"));
    assert_null(strstr(t.body[0].data, "[DONE]"));
    assert_null(strstr(t.body[0].data, "\"finish_reason\":\""));
    assert_true(t.took_ms < 2000);
    expect(1, " 503 ", "Retry-After", "not_ready");
    expect(2, " 503 ", "Retry-After", "no decode is ready");
    expect(3, " 200 ", "", "live");
}

static void drain(void *arg) {
    (void)arg;
    router_stop(t.router);
}

static void finish_held(void *arg) {
    (void)arg;
    send_tokens(t.half, 'k', BATON__FINISH__FINISH_STOP);
}

static void *client_holds(void *arg) {
    (void)arg;
    ask(0, CHAT, "", MESSAGES NO_THINK "}");
    return NULL;
}

static void client_drains(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, client_holds, NULL);
    wait_count(&t.n_prefills, 1);
    loop_post(t.loop, drain, NULL);
    ask(1, CHAT, "", MESSAGES "}");
    ask(2, "GET /ready", "", "");
    loop_post(t.loop, finish_held, NULL);
    pthread_join(thread, NULL);
}

static void test_drain(void **state) {
    (void)state;
    run(HALF, client_drains);
    expect(0, " 200 ", "", "\"content\":\"ok\"");
    expect(1, " 503 ", "Retry-After", "draining");
    expect(2, " 503 ", "Retry-After", "shutting down");
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_answers),       T(test_refusals),    T(test_wrong_methods), T(test_busy),
        T(test_client_leaves), T(test_decode_dies), T(test_drain),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
