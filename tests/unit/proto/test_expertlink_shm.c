/* Expert calls through shared memory, against a daemon on threads of its own: room that is there
 * before it is needed, and how long a caller stays awake. */
#include "proto/expertlink.h"

#include "base/clock.h"
#include "base/loop.h"
#include "proto/bus.h"
#include "proto/hello.h"
#include "proto/shmring.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

enum { HIDDEN = 16, K = 2, MAX_ROWS = 64, MANY = 3 * MAX_ROWS, DEADLINE_MS = 5000 };

typedef struct Fixture {
    Loop *loop;
    BusServer *bus;
    ShmServer *shm;
    Baton__Hello hello;
    char name[SHM_NAME_MAX + 1];
    pthread_t loop_thread, worker;
    atomic_bool stop;
    atomic_int delay_us;
    ExpertLink *link;
} Fixture;

/* ---- the daemon: twice x ---- */

static void *worker_main(void *arg) {
    Fixture *f = arg;
    while (!atomic_load(&f->stop)) {
        uint32_t bell = shmserver_bell(f->shm);
        ShmCall c;
        if (!shmserver_take(f->shm, &c)) {
            shmserver_sleep(f->shm, bell, 1000);
            continue;
        }
        if (f->delay_us)
            usleep((unsigned)f->delay_us);
        const float *x = c.in;
        float *y = c.out;
        for (uint32_t i = 0; i < c.head.b * HIDDEN; i++)
            y[i] = 2 * x[i];
        shmserver_answer(f->shm, &c, 0, NULL);
    }
    return NULL;
}

static void on_event(void *arg, BusPeer *peer, BusEvent event, const char *reason) {
    (void)arg, (void)peer, (void)event, (void)reason;
}

static void on_message(void *arg, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                       size_t blob_len) {
    (void)arg, (void)peer, (void)env, (void)blob, (void)blob_len;
}

static void on_ping(void *arg, Baton__Pong *pong) {
    (void)arg;
    pong->ready = true;
    pong->reason = (char *)"";
}

static void *loop_main(void *arg) {
    Fixture *f = arg;
    loop_run(f->loop);
    return NULL;
}

static void on_stop(void *arg) {
    loop_stop(arg);
}

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    Err err = {0};
    uint64_t generation = clock_unique();
    snprintf(f->name, sizeof f->name, "baton-test-%016llx", (unsigned long long)generation);
    ShmGeom most = {.generation = generation,
                    .in_bytes = MAX_ROWS * (HIDDEN + 2 * EXPERTLINK_K_MAX) * 4,
                    .out_bytes = MAX_ROWS * HIDDEN * 4};
    if (shmserver_open(&f->shm, f->name, &most, &err))
        fail_msg("%s", err.text);
    baton__hello__init(&f->hello);
    f->hello.protocol = PROTOCOL_VERSION;
    f->hello.role = BATON__ROLE__ROLE_EXPERTD;
    f->hello.name = (char *)"expertd";
    f->hello.generation = generation;
    f->hello.hidden = HIDDEN;
    f->hello.n_shards = 1;
    f->hello.max_rows = MAX_ROWS;
    f->hello.shm = f->name;
    BusCallbacks cb = {.on_event = on_event, .on_message = on_message, .on_ping = on_ping};
    f->loop = loop_new();
    if (bus_server_open(&f->bus, f->loop, "tcp://127.0.0.1:*", &f->hello, NULL, &cb, &err))
        fail_msg("%s", err.text);
    char endpoint[128];
    snprintf(endpoint, sizeof endpoint, "%s", bus_server_endpoint(f->bus));
    assert_int_equal(pthread_create(&f->loop_thread, NULL, loop_main, f), 0);
    assert_int_equal(pthread_create(&f->worker, NULL, worker_main, f), 0);
    Baton__Hello self = BATON__HELLO__INIT;
    self.protocol = PROTOCOL_VERSION;
    self.role = BATON__ROLE__ROLE_DECODE;
    self.name = (char *)"decode-0";
    self.generation = clock_unique();
    const char *at = endpoint;
    if (expertlink_open(&f->link, &at, 1, &self, DEADLINE_MS, &err))
        fail_msg("%s", err.text);
    expertlink_transport(f->link, EXPERTLINK_SHM);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    expertlink_close(f->link);
    atomic_store(&f->stop, true);
    shmserver_ring(f->shm);
    pthread_join(f->worker, NULL);
    assert_true(loop_post(f->loop, on_stop, f->loop));
    pthread_join(f->loop_thread, NULL);
    bus_server_close(f->bus);
    loop_free(f->loop);
    shmserver_close(f->shm);
    free(f);
    return 0;
}

/* ---- calls ---- */

static void call(Fixture *f, int rows) {
    static float x[MANY * HIDDEN], sum[MANY * HIDDEN], weight[MANY * K];
    static int32_t expert[MANY * K];
    Err err = {0};
    for (int i = 0; i < rows * HIDDEN; i++)
        x[i] = (float)(i % 23);
    memset(sum, 0, sizeof sum);
    if (expertlink_post(f->link, 0, rows, K, x, expert, weight, &err) ||
        expertlink_wait(f->link, sum, &err))
        fail_msg("%s", err.text);
    for (int i = 0; i < rows * HIDDEN; i++)
        assert_true(sum[i] == 2 * x[i]);
}

static void test_room_grows(void **state) {
    Fixture *f = *state;
    size_t small, large;
    call(f, 1);
    assert_non_null(expertlink_memory(f->link, 0, &small));
    call(f, MANY);
    assert_non_null(expertlink_memory(f->link, 0, &large));
    assert_true(large > 3 * small);
}

static void test_reserved_room_is_there_before(void **state) {
    Fixture *f = *state;
    size_t bytes, later;
    expertlink_reserve(f->link, MANY);
    assert_null(expertlink_memory(f->link, 0, &bytes));
    assert_int_equal(expertlink_probe(f->link, NULL), 0);
    void *at = expertlink_memory(f->link, 0, &bytes);
    assert_non_null(at);
    for (int rows = 1; rows <= MANY; rows += 17) {
        call(f, rows);
        assert_ptr_equal(expertlink_memory(f->link, 0, &later), at);
        assert_int_equal(later, bytes);
    }
    call(f, MANY);
    assert_ptr_equal(expertlink_memory(f->link, 0, &later), at);
    /* More than can ever be posted is not more than one post's room. */
    expertlink_reserve(f->link, 1 << 20);
    assert_int_equal(expertlink_probe(f->link, NULL), 0);
    assert_non_null(expertlink_memory(f->link, 0, &later));
    assert_true(later > bytes);
    call(f, MANY);
}

/* How often the calling thread slept in n calls. */
static long sleeps(Fixture *f, int n, int rows) {
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    for (int i = 0; i < n; i++)
        call(f, rows);
    getrusage(RUSAGE_THREAD, &after);
    return after.ru_nvcsw - before.ru_nvcsw;
}

enum { N = 60 };

/* Whether this thread has its core for itself just now. */
static bool quiet(void) {
    int64_t begin = clock_now_us(), last = begin, now = begin, gap = 0;
    for (; now - begin < 100000; last = now) {
        sched_yield();
        now = clock_now_us();
        gap = now - last > gap ? now - last : gap;
    }
    return gap < 400;
}

/* Whether calls are waited for awake, on a core that nobody else wants: with others there is no
 * telling, and they are to sleep. */
static bool stays_awake(Fixture *f, int rows) {
    int tries = 0;
    for (int64_t end = clock_now_ms() + 15000; clock_now_ms() < end && tries < 5;) {
        bool before = quiet();
        if (sleeps(f, N, rows) < N / 2)
            return true;
        tries += before && quiet();
        usleep(1100000); /* until it is tried again */
    }
    if (tries < 2)
        skip();
    return false;
}

/* Calls of the usual length are waited for awake, whatever longer ones of another size take. */
static void test_awake_as_long_as_usual(void **state) {
    Fixture *f = *state;
    f->delay_us = 700;
    assert_true(stays_awake(f, 1));
    f->delay_us = 8000; /* longer than anybody should spin for */
    assert_true(sleeps(f, 5, MANY) >= 5);
    assert_true(sleeps(f, 10, MANY) >= 10);
    f->delay_us = 700;
    assert_true(stays_awake(f, 1));
    expertlink_spin(f->link, 300);
    assert_true(sleeps(f, N, 1) > N / 2);
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_room_grows),
        T(test_reserved_room_is_there_before),
        T(test_awake_as_long_as_usual),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
