/* Expert calls: answers, refusals, callers that go away, order. The bus is replaced by functions
 * that record what is sent. */
#include "expertd/serve.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MAX_SENT = 1024, GENERATION = 77, MAX_ROWS = 2 * STORE_SMALL_ROWS };

struct BusPeer {
    Baton__Hello hello;
};

typedef struct Sent {
    BusPeer *to;
    uint64_t call;
    Baton__FailCode code;
    char reason[128];
    size_t bytes;
    float first;
} Sent;

static Sent sent[MAX_SENT];
static int n_sent;

int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err) {
    (void)err;
    assert_true(n_sent < MAX_SENT);
    const Baton__ExpertReply *r = env->expert_reply;
    assert_int_equal(r->generation, GENERATION);
    Sent *s = &sent[n_sent++];
    *s = (Sent){.to = peer,
                .call = r->call,
                .code = r->code,
                .bytes = blob_len,
                .first = blob ? *(const float *)blob : 0};
    snprintf(s->reason, sizeof s->reason, "%s", r->reason ? r->reason : "");
    return 0;
}

const Baton__Hello *bus_peer_hello(const BusPeer *peer) {
    return &peer->hello;
}

typedef struct Fixture {
    Weights *weights;
    Store *store;
    Loop *loop;
    Serve *serve;
    BusPeer peer[2];
} Fixture;

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    Err err = {0};
    StoreConf conf = {.backend = "cpu",
                      .device = "4",
                      .shard = 0,
                      .n_shards = 2,
                      .threads = 1,
                      .max_rows = MAX_ROWS};
    assert_int_equal(weights_open(&f->weights, "tests/models/tiny-glm52/fp8", &err), 0);
    assert_int_equal(store_open(&f->store, f->weights, &conf, &err), 0);
    f->loop = loop_new();
    assert_int_equal(serve_open(&f->serve, f->loop, f->store, weights_shape(f->weights), MAX_ROWS,
                                GENERATION, NULL, &err),
                     0);
    for (int i = 0; i < 2; i++) {
        baton__hello__init(&f->peer[i].hello);
        f->peer[i].hello.name = (char *)"decode-0";
    }
    n_sent = 0;
    *state = f;
    return 0;
}

static void until_idle(Fixture *f) {
    for (int64_t end = clock_now_ms() + 20000; serve_n_waiting(f->serve) > 0;) {
        assert_true(clock_now_ms() < end);
        uv_run(loop_uv(f->loop), UV_RUN_NOWAIT);
    }
}

static int teardown(void **state) {
    Fixture *f = *state;
    until_idle(f);
    serve_close(f->serve);
    loop_free(f->loop);
    store_close(f->store);
    weights_close(f->weights);
    free(f);
    return 0;
}

typedef struct Message {
    uint64_t call, generation;
    uint32_t layer, n_rows, k;
    int32_t id;   /* of the first place; the others have further experts that are held */
    size_t extra; /* bytes too many */
    bool twice;   /* id in all places */
} Message;

static void send_call(Fixture *f, int peer, Message m) {
    size_t hidden = (size_t)weights_shape(f->weights)->hidden, n = m.n_rows, k = m.k;
    size_t bytes = n * (hidden + 2 * k) * 4 + m.extra;
    float *blob = xcalloc(1, bytes + 4);
    for (size_t i = 0; i < n * hidden; i++)
        blob[i] = 0.01f * (float)(i % 7);
    for (size_t i = 0; i < n * k; i++) {
        int place = (int)(i % k);
        ((int32_t *)(blob + n * hidden))[i] = place && !m.twice ? 4 + (5 + place) % 12 : m.id;
        blob[n * hidden + n * k + i] = 0.5f;
    }
    Baton__ExpertCall c = BATON__EXPERT_CALL__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    c.call = m.call, c.generation = m.generation, c.layer = m.layer, c.n_rows = m.n_rows, c.k = m.k;
    env.body_case = BATON__ENVELOPE__BODY_EXPERT_CALL;
    env.expert_call = &c;
    serve_on_message(f->serve, &f->peer[peer], &env, blob, bytes);
    free(blob);
}

static void test_answers_in_order(void **state) {
    Fixture *f = *state;
    for (uint64_t i = 0; i < 20; i++)
        send_call(f, (int)(i % 2), (Message){i, GENERATION, 2, 3, 2, 9, 0, false});
    until_idle(f);
    assert_int_equal(n_sent, 20);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(sent[i].call, i);
        assert_ptr_equal(sent[i].to, &f->peer[i % 2]);
        assert_int_equal(sent[i].code, BATON__FAIL_CODE__FAIL_NONE);
        assert_int_equal(sent[i].bytes, 3 * 256 * 4);
        assert_true(sent[i].first != 0 && sent[i].first == sent[0].first);
    }
}

static void test_refusals_name_the_reason(void **state) {
    Fixture *f = *state;
    const struct {
        Message m;
        const char *part;
    } bad[] = {
        {{1, GENERATION + 1, 2, 3, 2, 9, 0, false}, "generation"},
        {{2, GENERATION, 0, 3, 2, 9, 0, false}, "layer"},
        {{3, GENERATION, 900, 3, 2, 9, 0, false}, "layer"},
        {{4, GENERATION, 2, MAX_ROWS + 1, 2, 9, 0, false}, "n_rows"},
        {{5, GENERATION, 2, 0, 2, 9, 0, false}, "n_rows"},
        {{6, GENERATION, 2, 3, 17, 9, 0, false}, "k out"},
        {{7, GENERATION, 2, 3, 2, 9, 4, false}, "another size"},
        {{8, GENERATION, 2, 3, 2, 3, 0, false}, "not hold"},
        {{9, GENERATION, 2, 3, 2, -7, 0, false}, "not hold"},
        {{10, GENERATION, 2, 3, 2, 9, 0, true}, "twice"},
    };
    int n = (int)(sizeof bad / sizeof *bad);
    for (int i = 0; i < n; i++)
        send_call(f, 0, bad[i].m);
    assert_int_equal(n_sent, n);
    for (int i = 0; i < n; i++) {
        assert_int_equal(sent[i].code, BATON__FAIL_CODE__FAIL_INVALID);
        assert_non_null(strstr(sent[i].reason, bad[i].part));
        assert_int_equal(sent[i].bytes, 0);
    }
    send_call(f, 0, (Message){11, GENERATION, 2, 1, 1, 9, 0, false});
    until_idle(f);
    assert_int_equal(sent[n_sent - 1].code, BATON__FAIL_CODE__FAIL_NONE);
}

static void test_queue_is_bounded(void **state) {
    Fixture *f = *state;
    for (uint64_t i = 0; i < SERVE_QUEUE + 60; i++)
        send_call(f, 0, (Message){i, GENERATION, 2, 8, 8, 9, 0, false});
    until_idle(f);
    int busy = 0;
    for (int i = 0; i < n_sent; i++)
        busy += sent[i].code == BATON__FAIL_CODE__FAIL_BUSY;
    assert_int_equal(n_sent, SERVE_QUEUE + 60);
    assert_true(busy > 0 && busy <= 60);
}

static void test_small_calls_go_ahead_of_large_ones(void **state) {
    Fixture *f = *state;
    for (uint64_t i = 0; i < 8; i++)
        send_call(f, 0, (Message){i, GENERATION, 2, MAX_ROWS, 8, 9, 0, false});
    send_call(f, 1, (Message){100, GENERATION, 2, 1, 8, 9, 0, false});
    until_idle(f);
    assert_int_equal(n_sent, 9);
    int place = 0;
    while (sent[place].call != 100)
        place++;
    assert_true(place < 8); /* the large ones before it ran when it came */
    uint64_t next = 0;
    for (int i = 0; i < 9; i++)
        if (i != place)
            assert_int_equal(sent[i].call, next++);
}

/* Callers of small calls never stop; the large one is answered all the same. */
static void test_a_large_call_gets_its_turn(void **state) {
    Fixture *f = *state;
    uint64_t id = 1;
    for (int i = 0; i < 100; i++)
        send_call(f, 1, (Message){id++, GENERATION, 2, 8, 8, 9, 0, false});
    send_call(f, 0, (Message){0, GENERATION, 2, MAX_ROWS, 8, 9, 0, false});
    while (id < 700) {
        if (serve_n_waiting(f->serve) < 100)
            send_call(f, 1, (Message){id++, GENERATION, 2, 8, 8, 9, 0, false});
        uv_run(loop_uv(f->loop), UV_RUN_NOWAIT);
    }
    until_idle(f);
    int place = 0;
    while (sent[place].call != 0)
        place++;
    assert_true(place <= 250);
}

static void test_draining_refuses_what_comes(void **state) {
    Fixture *f = *state;
    send_call(f, 0, (Message){1, GENERATION, 2, 8, 8, 9, 0, false});
    serve_drain(f->serve);
    send_call(f, 0, (Message){2, GENERATION, 2, 8, 8, 9, 0, false});
    until_idle(f);
    assert_int_equal(n_sent, 2);
    for (int i = 0; i < 2; i++)
        assert_int_equal(sent[i].code, sent[i].call == 1 ? BATON__FAIL_CODE__FAIL_NONE
                                                         : BATON__FAIL_CODE__FAIL_BUSY);
}

static void test_a_caller_that_is_gone_gets_nothing(void **state) {
    Fixture *f = *state;
    for (uint64_t i = 0; i < 8; i++)
        send_call(f, (int)(i % 2), (Message){i, GENERATION, 2, 8, 8, 9, 0, false});
    serve_on_gone(f->serve, &f->peer[0]);
    until_idle(f);
    assert_int_equal(n_sent, 4);
    for (int i = 0; i < 4; i++)
        assert_ptr_equal(sent[i].to, &f->peer[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_answers_in_order, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refusals_name_the_reason, setup, teardown),
        cmocka_unit_test_setup_teardown(test_queue_is_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_small_calls_go_ahead_of_large_ones, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_large_call_gets_its_turn, setup, teardown),
        cmocka_unit_test_setup_teardown(test_draining_refuses_what_comes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_caller_that_is_gone_gets_nothing, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
