/* Expert calls against small servers, each on a loop and thread of its own, that compute something
 * simple or misbehave on request. */
#include "proto/expertlink.h"

#include "base/clock.h"
#include "base/loop.h"
#include "proto/bus.h"
#include "proto/hello.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { HIDDEN = 8, K = 2, MAX_ROWS = 3, DEADLINE_MS = 1500 };

typedef enum Mood {
    MOOD_GOOD,
    MOOD_MUTE,      /* takes calls, never answers */
    MOOD_REFUSE,    /* answers with a failure */
    MOOD_SHORT,     /* answers with too few bytes */
    MOOD_STALE,     /* sends answers of other calls and generations first, and each answer twice */
    MOOD_NOT_READY, /* answers pings with not ready */
} Mood;

/* A fake expertd: y[row, i] = scale * sum over k of weight[row, k] * (expert[row, k] + x[row, i]),
 * where expert >= 0. */
typedef struct Fake {
    pthread_t thread;
    Loop *loop;
    BusServer *server;
    BusConf conf;
    Baton__Hello hello;
    char endpoint[128];
    float scale;
    _Atomic Mood mood;
    atomic_int n_calls;
    atomic_int max_rows_seen;
} Fake;

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    (void)arg;
    (void)peer;
    (void)event;
    (void)reason;
}

static void reply(BusPeer *peer, Baton__ExpertReply *r, const void *y, size_t bytes) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_EXPERT_REPLY;
    env.expert_reply = r;
    bus_send(peer, &env, y, bytes, NULL);
}

static void compute(const Fake *f, int n, const float *x, float *y) {
    const int32_t *expert = (const int32_t *)(x + n * HIDDEN);
    const float *weight = (const float *)(expert + n * K);
    for (int row = 0; row < n; row++)
        for (int i = 0; i < HIDDEN; i++) {
            float sum = 0;
            for (int k = 0; k < K; k++)
                if (expert[row * K + k] >= 0)
                    sum += weight[row * K + k] * ((float)expert[row * K + k] + x[row * HIDDEN + i]);
            y[row * HIDDEN + i] = f->scale * sum;
        }
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    Fake *f = arg;
    if (env->body_case != BATON__ENVELOPE__BODY_EXPERT_CALL)
        return;
    const Baton__ExpertCall *c = env->expert_call;
    atomic_fetch_add(&f->n_calls, 1);
    if ((int)c->n_rows > atomic_load(&f->max_rows_seen))
        atomic_store(&f->max_rows_seen, (int)c->n_rows);
    Baton__ExpertReply r = BATON__EXPERT_REPLY__INIT;
    r.call = c->call;
    r.generation = f->hello.generation;
    float x[MAX_ROWS * (HIDDEN + 2 * K)], y[MAX_ROWS * HIDDEN];
    bool sane = c->generation == f->hello.generation && c->k == K && c->n_rows <= MAX_ROWS &&
                c->layer == 3 && blob_len == c->n_rows * (HIDDEN + 2 * K) * sizeof(float);
    Mood mood = sane ? f->mood : MOOD_REFUSE;
    if (mood == MOOD_MUTE)
        return;
    if (mood == MOOD_REFUSE) {
        r.code = BATON__FAIL_CODE__FAIL_INVALID;
        r.reason = (char *)(sane ? "not\ntoday" : "call that makes no sense");
        reply(peer, &r, NULL, 0);
        return;
    }
    memcpy(x, blob, blob_len);
    compute(f, (int)c->n_rows, x, y);
    size_t bytes = c->n_rows * HIDDEN * sizeof *y;
    if (mood == MOOD_STALE) {
        float wrong[MAX_ROWS * HIDDEN];
        for (int i = 0; i < MAX_ROWS * HIDDEN; i++)
            wrong[i] = 1e9f;
        Baton__ExpertReply stale = r;
        stale.call = r.call - 10;
        reply(peer, &stale, wrong, bytes);
        stale.call = r.call + 1000;
        reply(peer, &stale, wrong, bytes);
        stale = r;
        stale.generation++;
        reply(peer, &stale, wrong, bytes);
        reply(peer, &r, y, bytes);
        reply(peer, &r, wrong, bytes);
        return;
    }
    reply(peer, &r, y, mood == MOOD_SHORT ? bytes - 4 : bytes);
}

static void on_ping(void *arg, Baton__Pong *pong) {
    Fake *f = arg;
    pong->ready = f->mood != MOOD_NOT_READY;
    pong->reason = (char *)(pong->ready ? "" : "loading");
}

static void *fake_main(void *arg) {
    Fake *f = arg;
    loop_run(f->loop);
    return NULL;
}

/* What the next fakes say that they compute. */
static const char *format = "int4-g64-f16";
static uint64_t stored = 5;

static void fake_start(Fake *f, int shard, int n_shards, const char *endpoint) {
    *f = (Fake){.scale = (float)(shard + 1), .hello = BATON__HELLO__INIT};
    f->hello.protocol = PROTOCOL_VERSION;
    f->hello.role = BATON__ROLE__ROLE_EXPERTD;
    f->hello.name = (char *)"expertd";
    f->hello.generation = clock_unique();
    f->hello.hidden = HIDDEN;
    f->hello.shard = (uint32_t)shard;
    f->hello.n_shards = (uint32_t)n_shards;
    f->hello.max_rows = MAX_ROWS;
    f->hello.expert_format = (char *)format;
    f->hello.expert_hash = stored;
    f->conf = bus_conf_default();
    f->conf.ping_ms = 20;
    f->conf.silent_ms = 40;
    BusCallbacks cb = {
        .arg = f, .on_event = on_event, .on_message = on_message, .on_ping = on_ping};
    f->loop = loop_new();
    /* The system frees the address of a closed server a moment later. */
    Err err = {0};
    int rc = E_IO;
    for (int64_t end = clock_now_ms() + 3000; rc == E_IO && clock_now_ms() < end;)
        rc = bus_server_open(&f->server, f->loop, endpoint ? endpoint : "tcp://127.0.0.1:*",
                             &f->hello, &f->conf, &cb, &err);
    if (rc)
        fail_msg("%s", err.text);
    snprintf(f->endpoint, sizeof f->endpoint, "%s", bus_server_endpoint(f->server));
    assert_int_equal(pthread_create(&f->thread, NULL, fake_main, f), 0);
}

static void stop_loop(void *arg) {
    loop_stop(arg);
}

static void fake_stop(Fake *f) {
    if (!f->loop)
        return;
    assert_true(loop_post(f->loop, stop_loop, f->loop));
    pthread_join(f->thread, NULL);
    bus_server_close(f->server);
    loop_free(f->loop);
    f->loop = NULL;
}

/* ---- two daemons and a link to them ---- */

typedef struct Fixture {
    Fake fake[2];
    ExpertLink *link;
} Fixture;

static Baton__Hello self_hello(void) {
    Baton__Hello h = BATON__HELLO__INIT;
    h.protocol = PROTOCOL_VERSION;
    h.role = BATON__ROLE__ROLE_DECODE;
    h.name = (char *)"decode-0";
    h.generation = 1;
    h.hidden = HIDDEN;
    return h;
}

static int open_link(Fixture *f, Err *err) {
    const char *endpoints[] = {f->fake[0].endpoint, f->fake[1].endpoint};
    Baton__Hello self = self_hello();
    return expertlink_open(&f->link, endpoints, 2, &self, DEADLINE_MS, err);
}

/* The second shard is named first: sums go by shard all the same. */
static int setup(void **state) {
    format = "int4-g64-f16", stored = 5;
    Fixture *f = xcalloc(1, sizeof *f);
    fake_start(&f->fake[0], 1, 2, NULL);
    fake_start(&f->fake[1], 0, 2, NULL);
    *state = f;
    return 0;
}

static int setup_open(void **state) {
    setup(state);
    Err err = {0};
    if (open_link(*state, &err))
        fail_msg("%s", err.text);
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    expertlink_close(f->link);
    fake_stop(&f->fake[0]);
    fake_stop(&f->fake[1]);
    free(f);
    return 0;
}

enum { ROWS = 7 };

static void input(float *x, int32_t *expert, float *weight) {
    for (int i = 0; i < ROWS * HIDDEN; i++)
        x[i] = (float)(i % 13) * 0.25f;
    for (int i = 0; i < ROWS * K; i++) {
        expert[i] = i % 3 == 0 ? -1 : i % 5;
        weight[i] = (float)(i % 4) * 0.5f;
    }
}

static int call(Fixture *f, float *sum, Err *err) {
    float x[ROWS * HIDDEN], weight[ROWS * K];
    int32_t expert[ROWS * K];
    input(x, expert, weight);
    int rc = expertlink_post(f->link, 3, ROWS, K, x, expert, weight, err);
    int rc_wait = expertlink_wait(f->link, sum, rc ? NULL : err);
    if (rc)
        assert_int_equal(rc_wait, rc); /* a failed post makes its wait fail the same way */
    return rc_wait;
}

/* Two good daemons of scale 1 and 2, on top of what was in sum. All values are exact in float. */
static void call_is_right(Fixture *f) {
    float x[ROWS * HIDDEN], weight[ROWS * K], sum[ROWS * HIDDEN];
    int32_t expert[ROWS * K];
    input(x, expert, weight);
    for (int i = 0; i < ROWS * HIDDEN; i++)
        sum[i] = (float)i;
    Err err = {0};
    if (call(f, sum, &err))
        fail_msg("%s", err.text);
    for (int i = 0; i < ROWS * HIDDEN; i++) {
        float want = 0;
        for (int k = 0; k < K; k++) {
            int at = i / HIDDEN * K + k;
            if (expert[at] >= 0)
                want += weight[at] * ((float)expert[at] + x[i]);
        }
        assert_true(sum[i] == (float)i + 3 * want);
    }
}

static void call_fails(Fixture *f, int code, const char *endpoint, const char *words) {
    float sum[ROWS * HIDDEN] = {0}, zero[ROWS * HIDDEN] = {0};
    Err err = {0};
    int64_t begin = clock_now_ms();
    assert_int_equal(call(f, sum, &err), code);
    assert_true(clock_now_ms() - begin < DEADLINE_MS + 300);
    assert_memory_equal(sum, zero, sizeof sum);
    assert_non_null(strstr(err.text, endpoint));
    if (!strstr(err.text, words))
        fail_msg("'%s' has no '%s'", err.text, words);
}

static void test_sum(void **state) {
    Fixture *f = *state;
    assert_int_equal(expertlink_hidden(f->link), HIDDEN);
    for (int i = 1; i <= 20; i++) {
        call_is_right(f);
        for (int d = 0; d < 2; d++) {
            assert_int_equal(f->fake[d].n_calls, 3 * i); /* 7 rows, 3 at a time */
            assert_int_equal(f->fake[d].max_rows_seen, MAX_ROWS);
        }
    }
    assert_int_equal(expertlink_probe(f->link, NULL), 0);
}

static void test_nothing_remote(void **state) {
    Fixture *f = *state;
    float x[HIDDEN] = {0}, weight[K] = {1, 1}, sum[HIDDEN] = {5};
    int32_t expert[K] = {-1, -1};
    assert_int_equal(expertlink_post(f->link, 3, 1, K, x, expert, weight, NULL), 0);
    assert_int_equal(expertlink_wait(f->link, sum, NULL), 0);
    assert_true(sum[0] == 5);
    assert_int_equal(f->fake[0].n_calls + f->fake[1].n_calls, 0);
    assert_int_equal(expertlink_wait(f->link, sum, NULL), E_INVAL);
}

static void test_stale_answers(void **state) {
    Fixture *f = *state;
    f->fake[0].mood = MOOD_STALE;
    for (int i = 0; i < 5; i++)
        call_is_right(f);
}

/* A post whose answers are never fetched does not disturb the next. */
static void test_given_up_post(void **state) {
    Fixture *f = *state;
    float x[ROWS * HIDDEN] = {9}, weight[ROWS * K] = {9};
    int32_t expert[ROWS * K] = {0};
    for (int i = 0; i < 5; i++) {
        assert_int_equal(expertlink_post(f->link, 3, ROWS, K, x, expert, weight, NULL), 0);
        call_is_right(f);
    }
}

static void test_refused_call(void **state) {
    Fixture *f = *state;
    f->fake[1].mood = MOOD_REFUSE;
    call_fails(f, E_PEER, f->fake[1].endpoint, "refuses the call: not?today");
    assert_int_equal(expertlink_probe(f->link, NULL), 0);
    f->fake[1].mood = MOOD_GOOD;
    call_is_right(f);
}

static void test_mute(void **state) {
    Fixture *f = *state;
    f->fake[0].mood = MOOD_MUTE;
    call_fails(f, E_DEADLINE, f->fake[0].endpoint, "no answer in time");
    f->fake[0].mood = MOOD_GOOD;
    call_is_right(f);
}

static void test_short_answer(void **state) {
    Fixture *f = *state;
    f->fake[0].mood = MOOD_SHORT;
    call_fails(f, E_PEER, f->fake[0].endpoint, "another size");
    f->fake[0].mood = MOOD_GOOD;
    call_is_right(f);
}

/* Probes until the answer is rc, which takes a moment after a daemon has ended. */
static void probe_until(Fixture *f, int rc, const char *words) {
    Err err = {0};
    for (int64_t end = clock_now_ms() + 3000; clock_now_ms() < end;) {
        err.text[0] = '\0';
        if (expertlink_probe(f->link, &err) == rc && strstr(err.text, words))
            return;
    }
    fail_msg("the last probe said '%s'", err.text);
}

static void test_death_and_return(void **state) {
    Fixture *f = *state;
    char endpoint[128];
    snprintf(endpoint, sizeof endpoint, "%s", f->fake[1].endpoint);
    fake_stop(&f->fake[1]);
    probe_until(f, E_PEER, "no connection can be made");
    call_fails(f, E_PEER, endpoint, "no connection can be made");
    fake_start(&f->fake[1], 0, 2, endpoint); /* a new generation */
    call_is_right(f);
    fake_stop(&f->fake[1]);
    fake_start(&f->fake[1], 0, 2, endpoint);
    probe_until(f, 0, "");
    call_is_right(f);
}

/* One that comes back computes as before, or is not asked. */
static void test_return_with_other_experts(void **state) {
    Fixture *f = *state;
    char endpoint[128];
    snprintf(endpoint, sizeof endpoint, "%s", f->fake[1].endpoint);
    fake_stop(&f->fake[1]);
    format = "int8-g64-f16";
    fake_start(&f->fake[1], 0, 2, endpoint);
    probe_until(f, E_MISMATCH, "computes experts as int8-g64-f16, before it was int4-g64-f16");
    call_fails(f, E_MISMATCH, endpoint, "answers would differ");
    assert_int_equal(f->fake[1].n_calls, 0);
    fake_stop(&f->fake[1]);
    format = "int4-g64-f16", stored = 6;
    fake_start(&f->fake[1], 0, 2, endpoint);
    probe_until(f, E_MISMATCH,
                "has other expert files (0000000000000006) than before (0000000000000005)");
    call_fails(f, E_MISMATCH, endpoint, "though all are int4-g64-f16");
    fake_stop(&f->fake[1]);
    stored = 5;
    fake_start(&f->fake[1], 0, 2, endpoint);
    probe_until(f, 0, "");
    call_is_right(f);
}

/* It ends while a call waits for it: noticed well before the deadline. */
static void test_death_during_call(void **state) {
    Fixture *f = *state;
    float x[HIDDEN] = {1}, weight[K] = {1}, sum[HIDDEN] = {0};
    int32_t expert[K] = {1, 1};
    f->fake[1].mood = MOOD_MUTE;
    assert_int_equal(expertlink_post(f->link, 3, 1, K, x, expert, weight, NULL), 0);
    while (f->fake[1].n_calls == 0)
        ;
    fake_stop(&f->fake[1]);
    int64_t begin = clock_now_ms();
    Err err = {0};
    assert_int_equal(expertlink_wait(f->link, sum, &err), E_PEER);
    assert_true(clock_now_ms() - begin < DEADLINE_MS / 2);
    assert_non_null(strstr(err.text, "its connection closed"));
}

static void test_probe_says_not_ready(void **state) {
    Fixture *f = *state;
    Err err = {0};
    f->fake[0].mood = MOOD_NOT_READY;
    assert_int_equal(expertlink_probe(f->link, &err), E_PEER);
    assert_non_null(strstr(err.text, "not ready: loading"));
    f->fake[0].mood = MOOD_GOOD;
    assert_int_equal(expertlink_probe(f->link, NULL), 0);
}

/* Pings of the server pile up while nobody reads them; the next call is not disturbed. */
static void test_long_silence(void **state) {
    Fixture *f = *state;
    for (int64_t end = clock_now_ms() + 500; clock_now_ms() < end;)
        ;
    call_is_right(f);
}

static void test_limits(void **state) {
    Fixture *f = *state;
    enum { MANY = MAX_ROWS * EXPERTLINK_CALLS_MAX };
    float *x = xcalloc((MANY + 1) * HIDDEN, sizeof *x), *weight = xcalloc((MANY + 1) * K, 4);
    float *sum = xcalloc(MANY * HIDDEN, sizeof *sum);
    int32_t *expert = xcalloc((MANY + 1) * K, 4);
    assert_int_equal(expertlink_post(f->link, 3, MANY + 1, K, x, expert, weight, NULL), E_LIMIT);
    assert_int_equal(expertlink_post(f->link, 3, MANY, K, x, expert, weight, NULL), 0);
    assert_int_equal(expertlink_wait(f->link, sum, NULL), 0);
    assert_int_equal(expertlink_post(f->link, 3, 0, K, x, expert, weight, NULL), E_INVAL);
    assert_int_equal(expertlink_post(f->link, -1, 1, K, x, expert, weight, NULL), E_INVAL);
    free(x);
    free(weight);
    free(sum);
    free(expert);
    call_is_right(f);
}

/* ---- opening ---- */

static void open_fails(Fixture *f, int code, const char *words) {
    Err err = {0};
    int64_t begin = clock_now_ms();
    assert_int_equal(open_link(f, &err), code);
    assert_true(clock_now_ms() - begin < DEADLINE_MS + 300);
    assert_null(f->link);
    if (!strstr(err.text, words))
        fail_msg("'%s' has no '%s'", err.text, words);
}

static void test_open_wrong_shards(void **state) {
    Fixture *f = *state;
    fake_stop(&f->fake[1]);
    fake_start(&f->fake[1], 1, 2, NULL);
    open_fails(f, E_MISMATCH, "holds shard 1, as does the one at");
    fake_stop(&f->fake[1]);
    fake_start(&f->fake[1], 0, 3, NULL);
    open_fails(f, E_MISMATCH, "is one of 3 shards, 2 are configured");
    fake_stop(&f->fake[1]);
    format = "checkpoint";
    fake_start(&f->fake[1], 0, 2, NULL);
    open_fails(f, E_MISMATCH, "computes experts as checkpoint, another one as int4-g64-f16");
    fake_stop(&f->fake[1]);
    format = "int4-g64-f16", stored = 9;
    fake_start(&f->fake[1], 0, 2, NULL);
    open_fails(f, E_MISMATCH, "(0000000000000009) than another one (0000000000000005)");
}

static void test_open_nobody(void **state) {
    Fixture *f = *state;
    snprintf(f->fake[1].endpoint, sizeof f->fake[1].endpoint, "ipc:///nowhere/expertd-1");
    open_fails(f, E_PEER, "expertd at ipc:///nowhere/expertd-1: no connection can be made");
}

static void test_open_mismatch(void **state) {
    Fixture *f = *state;
    const char *endpoints[] = {f->fake[0].endpoint, f->fake[1].endpoint};
    Baton__Hello self = self_hello();
    self.hidden = 16;
    Err err = {0};
    assert_int_equal(expertlink_open(&f->link, endpoints, 2, &self, DEADLINE_MS, &err), E_PEER);
    assert_non_null(strstr(err.text, "decode-0 has hidden 16, expertd expects 8"));
    self.hidden = 0;
    self.name = (char *)"";
    assert_int_equal(expertlink_open(&f->link, endpoints, 2, &self, DEADLINE_MS, &err), E_PEER);
    self = self_hello();
    assert_int_equal(expertlink_open(&f->link, endpoints, 0, &self, DEADLINE_MS, &err), E_INVAL);
}

/* A listener that never says anything. */
static void test_open_dumb(void **state) {
    Fixture *f = *state;
    Fake other;
    fake_start(&other, 0, 2, NULL);
    assert_true(loop_post(other.loop, stop_loop, other.loop));
    pthread_join(other.thread, NULL);
    const char *endpoints[] = {f->fake[0].endpoint, other.endpoint};
    Baton__Hello self = self_hello();
    Err err = {0};
    int64_t begin = clock_now_ms();
    assert_int_equal(expertlink_open(&f->link, endpoints, 2, &self, DEADLINE_MS, &err), E_DEADLINE);
    assert_in_range(clock_now_ms() - begin, DEADLINE_MS - 50, DEADLINE_MS + 300);
    assert_non_null(strstr(err.text, other.endpoint));
    bus_server_close(other.server);
    loop_free(other.loop);
}

#define T(name)      cmocka_unit_test_setup_teardown(name, setup, teardown)
#define T_OPEN(name) cmocka_unit_test_setup_teardown(name, setup_open, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T_OPEN(test_sum),
        T_OPEN(test_nothing_remote),
        T_OPEN(test_stale_answers),
        T_OPEN(test_given_up_post),
        T_OPEN(test_refused_call),
        T_OPEN(test_mute),
        T_OPEN(test_short_answer),
        T_OPEN(test_death_and_return),
        T_OPEN(test_return_with_other_experts),
        T_OPEN(test_death_during_call),
        T_OPEN(test_probe_says_not_ready),
        T_OPEN(test_long_silence),
        T_OPEN(test_limits),
        T(test_open_wrong_shards),
        T(test_open_nobody),
        T(test_open_mismatch),
        T(test_open_dumb),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
