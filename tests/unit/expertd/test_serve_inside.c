/* Small calls inside of a large one, with expert files and on both ways of calls. The worker is
 * stopped at each opening of a large call until the test, which is the loop thread, lets it go on;
 * so what comes during a large call is certain. The bus is replaced by functions that record. */
#include "expertd/serve.h"
#include "proto/shmring.h"
#include "tests/unit/expertd/packed.h"

#include "base/clock.h"

#include <math.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    GENERATION = 77,
    HIDDEN = PACKED_HIDDEN,
    LARGE = 512, /* with K experts each more rows than one pass takes: two openings */
    SMALL = 3,
    K = 8,
    LAYER = 4,
    MAX_SENT = 64,
    SLOTS = 32,
    INSIDE = 8, /* small calls that one opening takes */
};

struct BusPeer {
    Baton__Hello hello;
};

static struct {
    uint64_t call;
    BusPeer *to;
    Baton__FailCode code;
    float *y;
    size_t bytes;
} sent[MAX_SENT];
static int n_sent;

int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err) {
    (void)err;
    assert_true(n_sent < MAX_SENT);
    sent[n_sent].call = env->expert_reply->call;
    sent[n_sent].to = peer;
    sent[n_sent].code = env->expert_reply->code;
    sent[n_sent].bytes = blob_len;
    sent[n_sent].y = blob ? memcpy(xmalloc(blob_len), blob, blob_len) : NULL;
    n_sent++;
    return 0;
}

const Baton__Hello *bus_peer_hello(const BusPeer *peer) {
    return &peer->hello;
}

/* ---- openings ---- */

static struct {
    sem_t reached, go;
    _Atomic bool stops; /* at each opening */
    _Atomic int n;      /* openings so far */
    void (*between)(void *arg);
    void *arg;
} opening;

StoreWork __real_store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                               const float *weight, float *y, void (*between)(void *arg),
                               void *arg);
StoreWork __wrap_store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                               const float *weight, float *y, void (*between)(void *arg),
                               void *arg);

static void on_opening(void *arg) {
    (void)arg;
    opening.n++;
    if (opening.stops) {
        sem_post(&opening.reached);
        sem_wait(&opening.go);
    }
    opening.between(opening.arg);
}

StoreWork __wrap_store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                               const float *weight, float *y, void (*between)(void *arg),
                               void *arg) {
    if (!between)
        return __real_store_compute(s, layer, n, k, x, id, weight, y, NULL, NULL);
    opening.between = between;
    opening.arg = arg;
    return __real_store_compute(s, layer, n, k, x, id, weight, y, on_opening, NULL);
}

static void wait_opening(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += 20;
    assert_int_equal(sem_timedwait(&opening.reached, &t), 0);
}

static void go_on(void) {
    sem_post(&opening.go);
}

/* ---- the daemon and its callers ---- */

typedef struct Rows {
    int n;
    float x[LARGE * HIDDEN];
    int32_t id[LARGE * K];
    float weight[LARGE * K];
    float want[LARGE * HIDDEN]; /* computed alone */
} Rows;

typedef struct Fixture {
    Store *store;
    Loop *loop;
    Serve *serve;
    BusPeer peer[2];
    ShmRing *ring;
    ShmGeom geom;
    Rows small, large;
} Fixture;

static Packed packed;

static void fill(const Fixture *f, Rows *r, int n) {
    r->n = n;
    for (int i = 0; i < n * HIDDEN; i++)
        r->x[i] = sinf((float)(i + n) * 0.37f);
    for (int i = 0; i < n * K; i++) {
        r->id[i] = (i / K + 2 * (i % K)) % 16;
        r->weight[i] = 0.1f * (float)(1 + i % 7);
    }
    store_compute(f->store, LAYER, n, K, r->x, r->id, r->weight, r->want, NULL, NULL);
}

static size_t payload(const Rows *r, void *to) {
    char *at = to;
    size_t x = (size_t)r->n * HIDDEN * 4, k = (size_t)r->n * K * 4;
    memcpy(at, r->x, x);
    memcpy(at + x, r->id, k);
    memcpy(at + x + k, r->weight, k);
    return x + 2 * k;
}

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    Err err = {0};
    char name[SHM_NAME_MAX + 1];
    static StoreConf conf;
    conf = (StoreConf){.files = packed.dir,
                       .device = "none",
                       .n_shards = 1,
                       .threads = 2,
                       .node = -1,
                       .max_rows = LARGE};
    assert_int_equal(store_open(&f->store, NULL, &conf, &err), 0);
    fill(f, &f->small, SMALL);
    fill(f, &f->large, LARGE);
    snprintf(name, sizeof name, "baton-test-%016llx", (unsigned long long)clock_unique());
    f->loop = loop_new();
    assert_int_equal(serve_open(&f->serve, f->loop, f->store, store_shape(f->store), LARGE,
                                GENERATION, name, &err),
                     0);
    f->geom = (ShmGeom){.generation = GENERATION,
                        .in_bytes = LARGE * (HIDDEN + 2 * K) * 4,
                        .out_bytes = LARGE * HIDDEN * 4,
                        .n_slots = SLOTS};
    assert_int_equal(shmring_open(&f->ring, name, &f->geom, 1000, &err), 0);
    for (int i = 0; i < 2; i++) {
        baton__hello__init(&f->peer[i].hello);
        f->peer[i].hello.name = (char *)"decode-0";
    }
    sem_init(&opening.reached, 0, 0);
    sem_init(&opening.go, 0, 0);
    opening.stops = true;
    opening.n = 0;
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
    opening.stops = false;
    go_on();
    shmring_close(f->ring);
    serve_close(f->serve);
    loop_free(f->loop);
    store_close(f->store);
    for (int i = 0; i < n_sent; i++)
        free(sent[i].y);
    n_sent = 0;
    free(f);
    return 0;
}

static void send_call(Fixture *f, int peer, uint64_t call, const Rows *r) {
    void *blob = xmalloc((size_t)r->n * (HIDDEN + 2 * K) * 4);
    Baton__ExpertCall c = BATON__EXPERT_CALL__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    c.call = call, c.generation = GENERATION, c.layer = LAYER, c.n_rows = (uint32_t)r->n, c.k = K;
    env.body_case = BATON__ENVELOPE__BODY_EXPERT_CALL;
    env.expert_call = &c;
    serve_on_message(f->serve, &f->peer[peer], &env, blob, payload(r, blob));
    free(blob);
}

static void post_call(Fixture *f, int slot, const Rows *r) {
    ShmHead head = {LAYER, (uint32_t)r->n, K, 0, ""};
    payload(r, shmring_in(f->ring, slot));
    shmring_post(f->ring, slot, &head);
}

/* A call that came as a message was answered, and with the bits that it has alone. */
static void sent_right(int at, uint64_t call, const Rows *r) {
    assert_true(at < n_sent);
    assert_int_equal(sent[at].call, call);
    assert_int_equal(sent[at].code, BATON__FAIL_CODE__FAIL_NONE);
    assert_int_equal(sent[at].bytes, (size_t)r->n * HIDDEN * 4);
    assert_memory_equal(sent[at].y, r->want, sent[at].bytes);
}

/* The same of a call in the ring; waits at most for timeout_us. */
static void done_right(Fixture *f, int slot, const Rows *r, int64_t timeout_us) {
    ShmHead head;
    int64_t end = clock_now_us() + timeout_us;
    while (!shmring_wait(f->ring, slot, 10000, SHM_SPIN_US))
        assert_true(clock_now_us() < end);
    shmring_release(f->ring, slot, &head);
    assert_int_equal(head.code, 0);
    assert_memory_equal(shmring_out(f->ring, slot), r->want, (size_t)r->n * HIDDEN * 4);
}

/* ---- tests ---- */

static void test_by_message(void **state) {
    Fixture *f = *state;
    send_call(f, 0, 1, &f->large);
    wait_opening();
    send_call(f, 1, 2, &f->small);
    send_call(f, 1, 3, &f->large); /* this one is for later */
    go_on();
    wait_opening();
    /* The first large call is half done; the small one is answered. */
    for (int64_t end = clock_now_ms() + 2000; n_sent == 0 && clock_now_ms() < end;)
        uv_run(loop_uv(f->loop), UV_RUN_NOWAIT);
    assert_int_equal(n_sent, 1);
    sent_right(0, 2, &f->small);
    assert_ptr_equal(sent[0].to, &f->peer[1]);
    opening.stops = false;
    go_on();
    until_idle(f);
    assert_int_equal(n_sent, 3);
    sent_right(1, 1, &f->large);
    sent_right(2, 3, &f->large);
    assert_int_equal(opening.n, 4);
}

static void test_in_a_ring(void **state) {
    Fixture *f = *state;
    post_call(f, 0, &f->large);
    wait_opening();
    post_call(f, 1, &f->small);
    go_on();
    wait_opening();
    done_right(f, 1, &f->small, 2000000);
    assert_false(shmring_done(f->ring, 0));
    send_call(f, 0, 9, &f->small); /* the other way, in the second opening */
    go_on();
    done_right(f, 0, &f->large, 20000000);
    until_idle(f);
    sent_right(0, 9, &f->small);
}

static void test_one_opening_takes_few(void **state) {
    Fixture *f = *state;
    enum { MANY = 2 * INSIDE + 3 };
    int done = 0;
    post_call(f, 0, &f->large);
    wait_opening();
    for (int i = 0; i < MANY; i++)
        post_call(f, 1 + i, &f->small);
    go_on();
    wait_opening();
    for (int i = 0; i < MANY; i++)
        done += shmring_done(f->ring, 1 + i);
    assert_int_equal(done, INSIDE);
    go_on();
    for (int i = 0; i < MANY; i++)
        done_right(f, 1 + i, &f->small, 20000000);
    done_right(f, 0, &f->large, 20000000);
}

/* Callers that go while their call is inside, or has others inside. */
static void test_callers_that_go(void **state) {
    Fixture *f = *state;
    send_call(f, 0, 1, &f->large);
    wait_opening();
    send_call(f, 1, 2, &f->small);
    post_call(f, 0, &f->small);
    serve_on_gone(f->serve, &f->peer[0]);
    shmring_close(f->ring); /* what it posted is nobody's */
    f->ring = NULL;
    opening.stops = false;
    go_on();
    until_idle(f);
    assert_int_equal(n_sent, 1);
    sent_right(0, 2, &f->small);
}

/* The end of the daemon while a large call stands at an opening: it is the last one computed. */
static void test_closing_at_an_opening(void **state) {
    Fixture *f = *state;
    post_call(f, 0, &f->large);
    send_call(f, 0, 1, &f->large);
    wait_opening();
    send_call(f, 1, 2, &f->small);
    opening.stops = false;
    go_on();
    serve_close(f->serve);
    f->serve = NULL;
    assert_int_equal(n_sent, 0); /* the loop has not run */
}

static int group_setup(void **state) {
    (void)state;
    packed_new(&packed, 4, 64);
    return 0;
}

static int group_teardown(void **state) {
    (void)state;
    packed_free(&packed);
    return 0;
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_by_message),
        T(test_in_a_ring),
        T(test_one_opening_takes_few),
        T(test_callers_that_go),
        T(test_closing_at_an_opening),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
