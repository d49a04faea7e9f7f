/* The KV link between two links of one process: what arrives, in which order, what is refused, and
 * how work ends that is cut short. */
#include "proto/kvlink.h"

#include "base/clock.h"
#include "kvlink_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { POOL = 8 << 20, LINK_MS = 5000, ROUNDS = 1000, SLOT = 4099, SEGS = 500, FLIPS = 400 };

typedef struct Pair {
    Loop *loop;
    KvLink *reader, *writer;
    KvPeer *peer;
    unsigned char *from, *to;
    int n_notices, n_early; /* n_early: came before the bytes that they speak of */
    void *last;             /* bytes of the last notice; owned */
    size_t last_len;
} Pair;

static void on_notice(void *arg, const void *bytes, size_t len) {
    Pair *p = arg;
    KvCheck c;
    p->n_notices++;
    p->last = xrealloc(p->last, len + 1);
    p->last_len = len;
    memcpy(p->last, bytes, len);
    if (len == sizeof c) {
        memcpy(&c, bytes, sizeof c);
        p->n_early += !pattern_holds(p->to + c.at, c.bytes, c.seed);
    }
}

static void pair_open(Pair *p, const char *transports) {
    uint64_t bytes;
    memset(p, 0, sizeof *p);
    p->loop = loop_new();
    p->reader = kvlink_rig_open(p->loop, transports, "", POOL, LINK_MS, on_notice, p);
    p->writer = kvlink_rig_open(p->loop, transports, "", POOL, LINK_MS, on_no_notice, NULL);
    p->to = kvlink_pool(p->reader, &bytes);
    assert_int_equal(bytes, POOL);
    p->from = kvlink_pool(p->writer, &bytes);
    p->peer = kvlink_rig_connect(p->writer, p->reader);
}

static void pair_close(Pair *p) {
    kvlink_close(p->writer);
    kvlink_close(p->reader);
    loop_free(p->loop);
    free(p->last);
}

static void wait_notices(Pair *p, int n) {
    int64_t end = clock_now_ms() + RIG_WAIT_MS;
    for (; p->n_notices < n && clock_now_ms() < end; turn(p->loop))
        ;
    assert_int_equal(p->n_notices, n);
}

static const char *transports_of(void **state) {
    return *state;
}

static void test_segments_of_odd_sizes(void **state) {
    Pair p;
    Done done = {0};
    KvSeg seg[SEGS];
    unsigned char *want = xcalloc(1, POOL);
    pair_open(&p, transports_of(state));
    pattern_fill(p.from, POOL, 3);
    uint64_t at = 1;
    for (int i = 0; i < SEGS; i++) { /* apart by a byte, in the other order over there */
        uint64_t bytes = 1 + (uint64_t)i * 7919 % 16001;
        seg[i] = (KvSeg){at, POOL - at - bytes, bytes};
        memcpy(want + seg[i].remote, p.from + at, bytes);
        at += bytes + 1;
    }
    assert_true(at < POOL);
    assert_int_equal(kvlink_put(p.writer, p.peer, seg, SEGS, NULL), 0);
    assert_int_equal(kvlink_flush(p.writer, p.peer, on_done, &done, NULL), 0);
    wait_done(p.loop, &done, 1);
    assert_int_equal(done.n_failed, 0);
    assert_memory_equal(p.to, want, POOL);
    free(want);
    pair_close(&p);
}

static void test_payload_comes_before_its_notice(void **state) {
    Pair p;
    Done done = {0};
    pair_open(&p, transports_of(state));
    for (uint64_t i = 0; i < ROUNDS; i++)
        assert_int_equal(
            rig_send(p.writer, p.peer, (KvCheck){i * SLOT, 1 + i * 41 % SLOT, i}, &done), 0);
    wait_done(p.loop, &done, ROUNDS);
    assert_int_equal(done.n_failed, 0);
    wait_notices(&p, ROUNDS);
    assert_int_equal(p.n_early, 0);
    pair_close(&p);
}

static void test_notices_of_every_size(void **state) {
    static const size_t SIZES[] = {0, 1, 8191, 65537, KVLINK_NOTICE_MAX};
    Pair p;
    Done done = {0};
    unsigned char *bytes = xmalloc(KVLINK_NOTICE_MAX + 1);
    pattern_fill(bytes, KVLINK_NOTICE_MAX + 1, 9);
    pair_open(&p, transports_of(state));
    for (int i = 0; i < 5; i++) {
        assert_int_equal(kvlink_notify(p.writer, p.peer, bytes, SIZES[i], on_done, &done, NULL), 0);
        wait_done(p.loop, &done, i + 1);
        wait_notices(&p, i + 1);
        assert_int_equal(p.last_len, SIZES[i]);
        assert_memory_equal(p.last, bytes, SIZES[i]);
    }
    assert_int_equal(done.n_failed, 0);
    assert_int_equal(
        kvlink_notify(p.writer, p.peer, bytes, KVLINK_NOTICE_MAX + 1, on_done, &done, NULL),
        E_LIMIT);
    free(bytes);
    pair_close(&p);
}

static void test_puts_outside_are_refused(void **state) {
    static const KvSeg BAD[] = {{POOL, 0, 1},       {0, POOL, 1},           {0, POOL - 10, 11},
                                {POOL - 10, 0, 11}, {0, 0, POOL + 1},       {1, 1, UINT64_MAX},
                                {UINT64_MAX, 0, 2}, {0, UINT64_MAX - 5, 10}};
    Pair p;
    Done done = {0};
    pair_open(&p, transports_of(state));
    memset(p.from, 0xee, POOL);
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        KvSeg two[2] = {{0, 0, 64}, BAD[i]};
        assert_int_equal(kvlink_put(p.writer, p.peer, two, 2, NULL), E_LIMIT);
    }
    assert_int_equal(kvlink_flush(p.writer, p.peer, on_done, &done, NULL), 0);
    wait_done(p.loop, &done, 1);
    assert_int_equal(done.n_failed, 0);
    for (int i = 0; i < POOL; i++)
        if (p.to[i])
            fail_msg("byte %d was written", i);
    pair_close(&p);
}

static int connect_to(Pair *p, KvRemote r) {
    KvPeer *peer = NULL;
    int rc = kvlink_connect(p->writer, &r, &peer, NULL);
    assert_true((rc == 0) == (peer != NULL));
    return rc;
}

static void test_damaged_addresses_are_refused(void **state) {
    Pair p;
    KvRemote r;
    Done done = {0};
    pair_open(&p, transports_of(state));
    kvlink_describe(p.reader, &r);
    unsigned char *bytes = xmalloc(r.address_len + r.rkey_len);
    unsigned char *address = bytes, *rkey = bytes + r.address_len;
    memcpy(address, r.address, r.address_len);
    memcpy(rkey, r.rkey, r.rkey_len);
    KvRemote copy = {address, r.address_len, rkey, r.rkey_len, r.base, r.bytes}, bad = copy;
    uint64_t random = 12345;
    for (int i = 0; i < FLIPS; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t at = (size_t)(random >> 33) % (r.address_len + r.rkey_len);
        unsigned char bit = (unsigned char)(1u << (random >> 61));
        bytes[at] ^= bit;
        assert_int_equal(connect_to(&p, copy), E_FORMAT);
        bytes[at] ^= bit;
    }
    for (size_t n = 0; n < r.address_len; n++) {
        bad.address_len = n;
        assert_int_equal(connect_to(&p, bad), E_FORMAT);
    }
    bad = (KvRemote){rkey, r.rkey_len, address, r.address_len, r.base, r.bytes};
    assert_int_equal(connect_to(&p, bad), E_FORMAT);
    bad = (KvRemote){NULL, r.address_len, NULL, r.rkey_len, r.base, r.bytes};
    assert_int_equal(connect_to(&p, bad), E_FORMAT);
    bad = copy;
    bad.base += 4096;
    assert_int_equal(connect_to(&p, bad), E_MISMATCH);
    bad = copy;
    bad.bytes *= 2;
    assert_int_equal(connect_to(&p, bad), E_MISMATCH);
    memset(bytes, 0x5a, r.address_len + r.rkey_len);
    assert_int_equal(connect_to(&p, copy), E_FORMAT);
    assert_int_equal(rig_send(p.writer, p.peer, (KvCheck){0, 100, 1}, &done), 0);
    wait_done(p.loop, &done, 1);
    assert_int_equal(done.n_failed, 0); /* the link is none the worse */
    free(bytes);
    pair_close(&p);
}

static void test_disconnect_ends_everything_once(void **state) {
    enum { N = 200 };
    Pair p;
    Done done[N] = {0};
    pair_open(&p, transports_of(state));
    for (int i = 0; i < N; i++) {
        KvSeg seg = {0, 0, POOL / 4};
        assert_int_equal(kvlink_put(p.writer, p.peer, &seg, 1, NULL), 0);
        assert_int_equal(i % 2 ? kvlink_flush(p.writer, p.peer, on_done, &done[i], NULL)
                               : kvlink_notify(p.writer, p.peer, "x", 1, on_done, &done[i], NULL),
                         0);
    }
    kvlink_disconnect(p.writer, p.peer);
    for (int i = 0; i < N; i++) {
        wait_done(p.loop, &done[i], 1);
        if (done[i].n_failed)
            assert_int_equal(done[i].status, E_CANCELED);
    }
    Done after = {0}; /* a new peer of the same receiver works */
    p.peer = kvlink_rig_connect(p.writer, p.reader);
    p.n_early = 0;
    assert_int_equal(rig_send(p.writer, p.peer, (KvCheck){SLOT, SLOT, 5}, &after), 0);
    wait_done(p.loop, &after, 1);
    assert_int_equal(after.n_failed, 0);
    for (int i = 0; i < N; i++)
        assert_int_equal(done[i].n, 1);
    pair_close(&p);
}

static void test_close_with_work_pending(void **state) {
    Pair p;
    Done done = {0};
    pair_open(&p, transports_of(state));
    for (int i = 0; i < 100; i++) {
        KvSeg seg = {0, 0, POOL / 4};
        assert_int_equal(kvlink_put(p.writer, p.peer, &seg, 1, NULL), 0);
        assert_int_equal(kvlink_notify(p.writer, p.peer, "x", 1, on_done, &done, NULL), 0);
    }
    kvlink_close(p.writer);
    int n = done.n;
    for (int i = 0; i < 20; i++)
        turn(p.loop);
    assert_int_equal(done.n, n); /* nothing calls back into what is gone */
    kvlink_close(p.reader);
    loop_free(p.loop);
    free(p.last);
}

static int64_t cpu_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void test_idle_links_sleep(void **state) {
    enum { IDLE_S = 2 };
    Pair p;
    Done done = {0};
    pair_open(&p, transports_of(state));
    assert_int_equal(rig_send(p.writer, p.peer, (KvCheck){0, SLOT, 1}, &done), 0);
    wait_done(p.loop, &done, 1);
    int64_t begin = cpu_us();
    nanosleep(&(struct timespec){.tv_sec = IDLE_S}, NULL);
    assert_true(cpu_us() - begin < IDLE_S * 1000000 / 50); /* 2 % of a core for two links */
    pair_close(&p);
}

static void test_selftest_takes_the_transport_asked_for(void **state) {
    double gb_per_s = 0;
    Err err = {0};
    Loop *loop = loop_new();
    KvLink *l = kvlink_rig_open(loop, *state, "", POOL, LINK_MS, on_no_notice, NULL);
    assert_string_equal(kvlink_selftest_transport(l), "");
    for (int i = 0; i < 2; i++) {
        if (kvlink_selftest(l, POOL / 2, &gb_per_s, &err))
            fail_msg("%s", err.text);
        assert_true(gb_per_s > 0);
    }
    assert_string_equal(kvlink_selftest_transport(l), transports_of(state)[0] ? *state : "posix");
    kvlink_close(l);
    loop_free(loop);
}

static void test_unknown_transports_are_refused(void **state) {
    (void)state;
    Err err = {0};
    Loop *loop = loop_new();
    KvLink *l = NULL;
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = 1 << 16,
                       .transports = "nosuchtransport",
                       .devices = "",
                       .timeout_ms = LINK_MS,
                       .on_notice = on_no_notice};
    assert_int_equal(kvlink_open(&l, &conf, &err), E_UNSUPPORTED);
    assert_null(l);
    assert_non_null(strstr(err.text, "nosuchtransport"));
    loop_free(loop);
}

#define OVER(fn, transports)                                                                       \
    { #fn " over " transports, fn, NULL, NULL, transports[0] == 's' ? "" : transports }

int main(int argc, char **argv) {
    kvlink_rig_main(argc, argv);
    const struct CMUnitTest tests[] = {
        OVER(test_segments_of_odd_sizes, "shared memory"),
        OVER(test_segments_of_odd_sizes, "tcp"),
        OVER(test_payload_comes_before_its_notice, "shared memory"),
        OVER(test_payload_comes_before_its_notice, "tcp"),
        OVER(test_notices_of_every_size, "shared memory"),
        OVER(test_notices_of_every_size, "tcp"),
        OVER(test_puts_outside_are_refused, "shared memory"),
        OVER(test_damaged_addresses_are_refused, "shared memory"),
        OVER(test_damaged_addresses_are_refused, "tcp"),
        OVER(test_disconnect_ends_everything_once, "shared memory"),
        OVER(test_disconnect_ends_everything_once, "tcp"),
        OVER(test_close_with_work_pending, "shared memory"),
        OVER(test_close_with_work_pending, "tcp"),
        OVER(test_idle_links_sleep, "shared memory"),
        OVER(test_idle_links_sleep, "tcp"),
        OVER(test_selftest_takes_the_transport_asked_for, "shared memory"),
        OVER(test_selftest_takes_the_transport_asked_for, "tcp"),
        cmocka_unit_test(test_unknown_transports_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
