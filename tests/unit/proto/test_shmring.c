/* Rings in shared memory: calls and answers between two threads, and what either side does when
 * the other is gone, slow or hostile. Hostile ends speak the handshake themselves. */
#include "proto/shmring.h"

#include "base/clock.h"
#include "proto/shm_int.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

enum { SLOTS = 4, IN = 256, OUT = 128, GENERATION = 7, SOON_US = 2000000 };

typedef struct Fixture {
    char name[SHM_NAME_MAX + 1];
    ShmServer *server;
    ShmRing *ring;
    pthread_t worker;
    atomic_bool stop;
    bool runs;
} Fixture;

static ShmGeom geom(void) {
    return (ShmGeom){.generation = GENERATION, .in_bytes = IN, .out_bytes = OUT, .n_slots = SLOTS};
}

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    ShmGeom g = geom();
    Err err = {0};
    snprintf(f->name, sizeof f->name, "baton-test-%016llx", (unsigned long long)clock_unique());
    if (shmserver_open(&f->server, f->name, &g, &err) ||
        shmring_open(&f->ring, f->name, &g, 1000, &err))
        fail_msg("%s", err.text);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    atomic_store(&f->stop, true);
    shmserver_ring(f->server);
    if (f->runs)
        pthread_join(f->worker, NULL);
    shmring_close(f->ring);
    shmserver_close(f->server);
    free(f);
    return 0;
}

static void post(ShmRing *r, int slot, uint32_t a) {
    ShmHead h = {a, a + 1, a + 2, 0, ""};
    memset(shmring_in(r, slot), (int)a, IN);
    shmring_post(r, slot, &h);
}

/* The next call, which must come soon. */
static ShmCall take(Fixture *f) {
    ShmCall c;
    for (int64_t end = clock_now_ms() + 2000; !shmserver_take(f->server, &c);)
        assert_true(clock_now_ms() < end);
    return c;
}

/* ---- calls ---- */

static void *worker_main(void *arg) {
    Fixture *f = arg;
    while (!atomic_load(&f->stop)) {
        uint32_t bell = shmserver_bell(f->server);
        ShmCall c;
        bool any = false;
        while (shmserver_take(f->server, &c)) {
            any = true;
            memset(c.out, (int)c.head.a + 1, c.out_bytes);
            shmserver_answer(f->server, &c, c.head.a == 99, c.head.a == 99 ? "not 99" : NULL);
        }
        if (!any)
            shmserver_sleep(f->server, bell, 1000);
    }
    return NULL;
}

static void start_worker(Fixture *f) {
    assert_int_equal(pthread_create(&f->worker, NULL, worker_main, f), 0);
    f->runs = true;
}

/* In all slots, again and again, with pauses after which both sides sleep. */
static void test_answers(void **state) {
    Fixture *f = *state;
    start_worker(f);
    for (uint32_t i = 0; i < 2000; i++) {
        uint32_t a = i % 90;
        for (int s = 0; s < SLOTS; s++)
            post(f->ring, s, a + (uint32_t)s);
        for (int s = 0; s < SLOTS; s++) {
            ShmHead h;
            assert_true(shmring_wait(f->ring, s, SOON_US, SHM_SPIN_US));
            shmring_release(f->ring, s, &h);
            assert_int_equal(h.code, 0);
            const uint8_t *y = shmring_out(f->ring, s);
            assert_true(y[0] == a + (uint32_t)s + 1 && y[OUT - 1] == y[0]);
        }
        if (i % 500 == 499)
            usleep(20000);
    }
}

static void test_refusal_has_its_reason(void **state) {
    Fixture *f = *state;
    ShmHead h;
    start_worker(f);
    post(f->ring, 0, 99);
    assert_true(shmring_wait(f->ring, 0, SOON_US, SHM_SPIN_US));
    shmring_release(f->ring, 0, &h);
    assert_int_equal(h.code, 1);
    assert_string_equal(h.reason, "not 99");
}

static void test_wait_ends_in_time(void **state) {
    Fixture *f = *state;
    post(f->ring, 0, 1);
    int64_t begin = clock_now_us();
    while (clock_now_us() - begin < 100000)
        assert_false(shmring_wait(f->ring, 0, 100000 - (clock_now_us() - begin) + 1, SHM_SPIN_US));
    assert_true(clock_now_us() - begin < 1000000);
}

/* A taken call is not given out again, nor is anything else of its slot, before it is answered. */
static void test_no_slot_is_taken_twice(void **state) {
    Fixture *f = *state;
    ShmCall again;
    post(f->ring, 2, 5);
    ShmCall c = take(f);
    assert_int_equal(c.slot, 2);
    assert_int_equal(c.head.b, 6);
    for (int i = 0; i < 100; i++)
        assert_false(shmserver_take(f->server, &again));
    assert_false(shmring_done(f->ring, 2));
    shmserver_answer(f->server, &c, 0, NULL);
    assert_true(shmring_done(f->ring, 2));
    assert_false(shmserver_take(f->server, &again)); /* the caller has not released it */
}

/* The caller goes while its call is computed: its memory stays for the worker, the late answer
 * harms nobody, and then the ring is gone. */
static void test_caller_goes_during_call(void **state) {
    Fixture *f = *state;
    post(f->ring, 0, 5);
    post(f->ring, 1, 6);
    ShmCall c = take(f), other;
    shmring_close(f->ring);
    f->ring = NULL;
    for (int64_t end = clock_now_ms() + 2000; !shmserver_gone(f->server, &c);)
        assert_true(clock_now_ms() < end);
    assert_int_equal(shmserver_n_rings(f->server), 0);
    assert_false(shmserver_take(f->server, &other)); /* what it posted besides is dropped */
    memset(c.out, 1, c.out_bytes);
    shmserver_answer(f->server, &c, 0, NULL);
    assert_false(shmserver_take(f->server, &other));
}

static void test_late_answer_misses_the_next_ring(void **state) {
    Fixture *f = *state;
    ShmGeom g = geom();
    post(f->ring, 0, 5);
    ShmCall c = take(f);
    shmring_close(f->ring);
    assert_int_equal(shmring_open(&f->ring, f->name, &g, 1000, NULL), 0);
    post(f->ring, 0, 40);
    memset(c.out, 1, c.out_bytes);
    shmserver_answer(f->server, &c, 0, NULL);
    assert_false(shmring_done(f->ring, 0));
    c = take(f);
    assert_int_equal(c.head.a, 40);
    shmserver_answer(f->server, &c, 0, NULL);
    assert_true(shmring_done(f->ring, 0));
}

/* ---- refused rings ---- */

static void open_fails(const char *name, const ShmGeom *g, const char *words) {
    ShmRing *r = NULL;
    Err err = {0};
    assert_true(shmring_open(&r, name, g, 1000, &err) != 0);
    assert_null(r);
    if (!strstr(err.text, words))
        fail_msg("'%s' has no '%s'", err.text, words);
}

static void test_refused_rings(void **state) {
    Fixture *f = *state;
    ShmGeom g = geom();
    open_fails("baton-test-nobody", &g, "cannot connect");
    g.generation++;
    open_fails(f->name, &g, "generation of another process");
    g = geom();
    g.in_bytes += 64;
    open_fails(f->name, &g, "size that does not fit");
    g = geom();
    g.out_bytes = OUT - 1;
    open_fails(f->name, &g, "size that does not fit");
}

/* A handshake of our own: what the daemon answers, or "closed". */
static void greet(const Fixture *f, const void *hello, size_t n, int memory, char *said) {
    struct sockaddr_un at;
    ShmWelcome w = {0};
    int bell = -1, s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(s, (struct sockaddr *)&at, shm_address(&at, f->name)), 0);
    assert_int_equal(shm_send(s, hello, n, memory), 0);
    if (shm_receive(s, &w, sizeof w, &bell))
        strcpy(said, "closed");
    else
        strcpy(said, w.refused);
    if (bell >= 0)
        close(bell);
    close(s);
}

static int memory_of(size_t n, int seals) {
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0 && ftruncate(fd, (off_t)n) == 0);
    assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

static void test_hostile_callers(void **state) {
    Fixture *f = *state;
    enum { ALL = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    ShmHello h = {SHM_MAGIC, geom()};
    size_t right = shm_ring_bytes(&h.geom);
    const struct {
        size_t bytes;
        int seals;
        const char *words;
    } bad[] = {
        {right, F_SEAL_GROW | F_SEAL_SEAL, "may change its size"},
        {right, F_SEAL_SHRINK | F_SEAL_SEAL, "may change its size"},
        {right, F_SEAL_SHRINK | F_SEAL_GROW, "may change its size"},
        {right, ALL | F_SEAL_WRITE, "cannot be written"},
        {right - 4096, ALL, "another size"},
        {right + 4096, ALL, "another size"},
    };
    char said[SHM_REASON_MAX + 1];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int fd = memory_of(bad[i].bytes, bad[i].seals);
        greet(f, &h, sizeof h, fd, said);
        close(fd);
        if (!strstr(said, bad[i].words))
            fail_msg("case %zu: '%s' has no '%s'", i, said, bad[i].words);
    }
    greet(f, &h, sizeof h, -1, said);
    assert_non_null(strstr(said, "may change its size"));
    greet(f, &h, sizeof h, STDIN_FILENO, said);
    assert_non_null(strstr(said, "may change its size"));
    greet(f, &h, sizeof h - 1, -1, said);
    assert_string_equal(said, "closed");
    h.magic++;
    greet(f, &h, sizeof h, -1, said);
    assert_string_equal(said, "not a ring of this version");
    assert_int_equal(shmserver_n_rings(f->server), 1); /* only the good one */
    start_worker(f);
    post(f->ring, 0, 1);
    assert_true(shmring_wait(f->ring, 0, SOON_US, SHM_SPIN_US));
}

/* A caller that writes anything anywhere hurts itself alone. */
static void test_scribbling_caller(void **state) {
    Fixture *f = *state;
    ShmGeom g = geom();
    ShmRing *good;
    assert_int_equal(shmring_open(&good, f->name, &g, 1000, NULL), 0);
    start_worker(f);
    size_t bytes;
    uint8_t *all = shmring_memory(f->ring, &bytes);
    unsigned seed = 1;
    for (int i = 0; i < 2000; i++) {
        for (int k = 0; k < 50; k++)
            all[(size_t)rand_r(&seed) % bytes] = (uint8_t)rand_r(&seed);
        post(f->ring, i % SLOTS, (uint32_t)rand_r(&seed));
        post(good, 0, 7);
        assert_true(shmring_wait(good, 0, SOON_US, SHM_SPIN_US));
        ShmHead h;
        shmring_release(good, 0, &h);
        assert_int_equal(*(uint8_t *)shmring_out(good, 0), 8);
    }
    shmring_close(good);
}

/* ---- hostile daemons ---- */

typedef struct Impostor {
    char name[SHM_NAME_MAX + 1];
    int listener, bell; /* bell: -1: none */
    const char *refused;
    uint64_t magic;
    pthread_t thread;
} Impostor;

static void *impostor_main(void *arg) {
    Impostor *p = arg;
    int s = accept(p->listener, NULL, NULL), memory;
    ShmHello h;
    ShmWelcome w = {.magic = p->magic};
    memset(w.refused, 'x', sizeof w.refused); /* no end */
    if (p->refused)
        snprintf(w.refused, sizeof w.refused, "%s", p->refused);
    if (shm_receive(s, &h, sizeof h, &memory) == 0)
        shm_send(s, &w, sizeof w, p->bell);
    if (memory >= 0)
        close(memory);
    close(s);
    return NULL;
}

static void impostor_is_refused(Impostor p, const char *words) {
    struct sockaddr_un at;
    ShmGeom g = geom();
    snprintf(p.name, sizeof p.name, "baton-test-%016llx", (unsigned long long)clock_unique());
    p.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(p.listener, (struct sockaddr *)&at, shm_address(&at, p.name)), 0);
    assert_int_equal(listen(p.listener, 1), 0);
    assert_int_equal(pthread_create(&p.thread, NULL, impostor_main, &p), 0);
    open_fails(p.name, &g, words);
    pthread_join(p.thread, NULL);
    close(p.listener);
    if (p.bell >= 0)
        close(p.bell);
}

static void test_hostile_daemons(void **state) {
    (void)state;
    enum { ALL = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
    size_t right = sizeof(BellShared);
    Impostor p = {.magic = SHM_MAGIC, .refused = "", .bell = memory_of(right, F_SEAL_GROW)};
    impostor_is_refused(p, "bell is memory that may change its size");
    p.bell = memory_of(1, ALL);
    impostor_is_refused(p, "bell is memory of another size");
    p.bell = -1;
    impostor_is_refused(p, "not understood");
    p.refused = NULL;
    impostor_is_refused(p, "refused: xxx");
    p.refused = "";
    p.magic++;
    p.bell = memory_of(right, ALL);
    impostor_is_refused(p, "not understood");
}

/* A daemon that never answers the handshake. */
static void test_mute_daemon(void **state) {
    (void)state;
    struct sockaddr_un at;
    ShmGeom g = geom();
    char name[SHM_NAME_MAX + 1];
    snprintf(name, sizeof name, "baton-test-%016llx", (unsigned long long)clock_unique());
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s, (struct sockaddr *)&at, shm_address(&at, name)), 0);
    assert_int_equal(listen(s, 1), 0);
    ShmRing *r = NULL;
    int64_t begin = clock_now_ms();
    assert_int_equal(shmring_open(&r, name, &g, 200, NULL), E_DEADLINE);
    assert_true(clock_now_ms() - begin < 1500);
    close(s);
}

/* Words of a slot that the daemon should leave alone do not end the caller. */
static void test_scribbling_daemon(void **state) {
    Fixture *f = *state;
    size_t bytes;
    uint8_t *all = shmring_memory(f->ring, &bytes);
    unsigned seed = 2;
    for (int i = 0; i < 2000; i++) {
        ShmHead h;
        for (int k = 0; k < 200; k++)
            all[(size_t)rand_r(&seed) % bytes] = (uint8_t)rand_r(&seed);
        post(f->ring, i % SLOTS, 1);
        memset(all, 0xff, bytes);
        shmring_wait(f->ring, i % SLOTS, 10, SHM_SPIN_US);
        shmring_release(f->ring, i % SLOTS, &h);
        assert_true(strlen(h.reason) <= SHM_REASON_MAX);
    }
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        T(test_answers),
        T(test_refusal_has_its_reason),
        T(test_wait_ends_in_time),
        T(test_no_slot_is_taken_twice),
        T(test_caller_goes_during_call),
        T(test_late_answer_misses_the_next_ring),
        T(test_refused_rings),
        T(test_hostile_callers),
        T(test_scribbling_caller),
        T(test_scribbling_daemon),
        cmocka_unit_test(test_hostile_daemons),
        cmocka_unit_test(test_mute_daemon),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
