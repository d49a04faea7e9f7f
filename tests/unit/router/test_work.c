/* Tests router/work.c: prompts to ids on real threads, refusals, the bound, jobs given up. */
#include "router/work.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MANY = 200 };

static struct {
    Loop *loop;
    Tok *tok;
    Work *work;
    ApiModel model;
    int n_done, n_expected;
    ApiReq *req; /* of the latest */
    ApiError error;
} t;

static void drop_req(void) {
    if (t.req)
        api_done(t.req);
    free(t.req);
    t.req = NULL;
}

static void on_parsed(void *arg, ApiReq *req, const ApiError *error) {
    assert_ptr_equal(arg, &t);
    drop_req();
    t.req = req;
    t.error = *error;
    if (++t.n_done == t.n_expected)
        loop_stop(t.loop);
}

static void too_long(void *arg) {
    (void)arg;
    fail_msg("the workers do not answer");
}

/* Runs the loop until n jobs are done, at most 10 s. */
static void run(int n) {
    LoopTimer *limit = loop_timer_new(t.loop, 10000, 0, too_long, NULL);
    t.n_expected = n;
    if (t.n_done < n)
        loop_run(t.loop);
    loop_timer_free(limit);
}

static WorkJob *submit(bool chat, const char *body) {
    return work_submit(t.work, chat, body, strlen(body), on_parsed, &t);
}

static void parse(bool chat, const char *body) {
    t.n_done = 0;
    assert_non_null(submit(chat, body));
    run(1);
}

static void start(int n_threads, int max_waiting) {
    t.work = work_start(t.loop, &t.model, t.tok, n_threads, max_waiting);
}

static int setup(void **state) {
    Err err = {0};
    (void)state;
    memset(&t, 0, sizeof t);
    if (tok_open(&t.tok, "tests/models/tiny-glm52/fp8/tokenizer.json", &err))
        return -1;
    t.loop = loop_new();
    t.model = (ApiModel){.name = "m",
                         .max_context = 100,
                         .default_max_tokens = 20,
                         .n_tokens = tok_size(t.tok),
                         .temperature = 1,
                         .top_p = 1};
    return 0;
}

static int teardown(void **state) {
    (void)state;
    work_stop(t.work);
    drop_req();
    loop_free(t.loop);
    tok_close(t.tok);
    return 0;
}

#define CHAT(content) "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":" content "}]}"

/* The text is gone once it has become ids; ids that a client sends stay as they are. */
static void test_prompts(void **state) {
    (void)state;
    start(2, 10);
    parse(true, CHAT("\"hi\""));
    assert_non_null(t.req);
    assert_int_equal(t.req->ids[0], tok_added_id(t.tok, "[gMASK]"));
    assert_null(t.req->messages);
    parse(false, "{\"model\":\"m\",\"prompt\":\"<|user|>\"}");
    assert_int_equal(t.req->n_ids, 1);
    assert_int_equal(t.req->ids[0], tok_added_id(t.tok, "<|user|>"));
    assert_null(t.req->text);
    parse(false, "{\"model\":\"m\",\"prompt\":[5,6]}");
    assert_int_equal(t.req->n_ids, 2);
    assert_int_equal(t.req->ids[1], 6);
}

static void test_refusals(void **state) {
    Buf body = {0};
    (void)state;
    start(1, 10);
    parse(true, "{");
    assert_null(t.req);
    assert_string_equal(t.error.code, "invalid_json");
    parse(true, CHAT("5"));
    assert_null(t.req);
    assert_string_equal(t.error.code, "invalid_value");
    assert_string_equal(t.error.param, "messages[0].content");
    buf_puts(&body, "{\"model\":\"m\",\"prompt\":\"");
    for (int i = 0; i < 500; i++)
        buf_puts(&body, "~^");
    buf_puts(&body, "\"}");
    parse(false, body.data);
    assert_null(t.req);
    assert_string_equal(t.error.code, "context_length_exceeded");
    assert_string_equal(t.error.param, "prompt");
    buf_done(&body);
}

/* One in hand, two waiting at most: of many at once some are refused, and each of the others is
 * answered once. */
static void test_bound(void **state) {
    size_t n = 1 << 20;
    char *slow = xmalloc(n + 1);
    (void)state;
    memset(slow, ' ', n); /* keeps the thread busy: white space, then no JSON */
    slow[n] = '\0';
    start(1, 2);
    int taken = submit(true, slow) != NULL;
    for (int i = 0; i < MANY; i++)
        taken += submit(true, CHAT("\"hi\"")) != NULL;
    assert_true(taken >= 2 && taken <= MANY);
    run(taken);
    free(slow);
    assert_int_equal(t.n_done, taken);
}

/* Nobody hears of a job that was given up, in whatever state it was. */
static void test_abandon(void **state) {
    (void)state;
    start(2, MANY);
    for (int i = 0; i < MANY; i++) {
        WorkJob *job = submit(true, CHAT("\"hi\""));
        assert_non_null(job);
        if (i % 2)
            work_abandon(job);
    }
    run(MANY / 2);
    parse(true, CHAT("\"hi\""));
    assert_int_equal(t.n_done, 1);
}

/* Jobs that wait when it stops are dropped. */
static void test_stop(void **state) {
    (void)state;
    start(1, MANY);
    for (int i = 0; i < MANY; i++)
        assert_non_null(submit(true, CHAT("\"hi\"")));
    work_stop(t.work);
    t.work = NULL;
    assert_int_equal(t.n_done, 0);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {T(test_prompts), T(test_refusals), T(test_bound),
                                       T(test_abandon), T(test_stop)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
