/* Each fault rule over two real links of this process: what the writer is told, what arrives, and
 * that the writer's own memory stays as it was. */
#include "proto/kvlink_fault.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { POOL = 1 << 16, PUT = 4096, LINK_MS = 5000, SILENCE_MS = 100, WAIT_MS = 20000 };

typedef struct Rig {
    Loop *loop;
    KvLink *reader, *writer; /* writer: behind the fault proxy */
    unsigned char *from, *to, before[POOL];
    KvPeer *peer;
    int n_notices;
    char notices[256]; /* one character each */
} Rig;

typedef struct Done {
    int n, status;
} Done;

static void on_done(void *arg, int status) {
    Done *d = arg;
    d->n++;
    d->status = status;
}

static void on_notice(void *arg, const void *bytes, size_t len) {
    Rig *r = arg;
    assert_int_equal(len, 1);
    assert_true(r->n_notices + 1 < (int)sizeof r->notices);
    r->notices[r->n_notices++] = *(const char *)bytes;
}

static KvLink *open_link(Rig *r) {
    Err err = {0};
    KvLink *l = NULL;
    KvLinkConf conf = {.loop = r->loop,
                       .pool_bytes = POOL,
                       .transports = "",
                       .devices = "",
                       .timeout_ms = LINK_MS,
                       .on_notice = on_notice,
                       .arg = r};
    if (kvlink_open(&l, &conf, &err))
        fail_msg("%s", err.text);
    return l;
}

static KvPeer *connect_peer(Rig *r) {
    Err err = {0};
    KvRemote remote;
    KvPeer *p = NULL;
    kvlink_describe(r->reader, &remote);
    if (kvlink_connect(r->writer, &remote, &p, &err))
        fail_msg("%s", err.text);
    return p;
}

static void rig_open(Rig *r, const char *rules, uint64_t seed) {
    Err err = {0};
    uint64_t bytes;
    memset(r, 0, sizeof *r);
    r->loop = loop_new();
    r->reader = open_link(r);
    r->writer = open_link(r);
    KvFaultConf conf = {r->loop, rules, seed, SILENCE_MS};
    if (kvlink_fault_new(&r->writer, &r->writer, &conf, &err))
        fail_msg("%s", err.text);
    r->to = kvlink_pool(r->reader, &bytes);
    r->from = kvlink_pool(r->writer, &bytes);
    assert_true(bytes >= POOL);
    for (int i = 0; i < POOL; i++)
        r->from[i] = (unsigned char)(1 + i * 31 % 251);
    memcpy(r->before, r->from, POOL);
    r->peer = connect_peer(r);
}

static void rig_close(Rig *r) {
    assert_memory_equal(r->from, r->before, POOL);
    kvlink_close(r->writer);
    kvlink_close(r->reader);
    loop_free(r->loop);
}

static void turn(Rig *r) {
    uv_run(loop_uv(r->loop), UV_RUN_NOWAIT);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void wait_done(Rig *r, const Done *d) {
    int64_t end = clock_now_ms() + WAIT_MS;
    while (d->n == 0) {
        assert_true(clock_now_ms() < end);
        turn(r);
    }
    assert_int_equal(d->n, 1);
}

static void wait_notices(Rig *r, int n) {
    int64_t end = clock_now_ms() + WAIT_MS;
    while (r->n_notices < n) {
        assert_true(clock_now_ms() < end);
        turn(r);
    }
}

/* Long enough for anything that is on its way within the host. */
static void rest(Rig *r) {
    for (int64_t end = clock_now_ms() + 50; clock_now_ms() < end;)
        turn(r);
}

static int put(Rig *r, uint64_t at) {
    KvSeg seg[2] = {{at, at, PUT / 2}, {at + PUT / 2, at + PUT / 2, PUT / 2}};
    return kvlink_put(r->writer, r->peer, seg, 2, NULL);
}

/* Notifies with character c and returns what done was told. */
static int notify(Rig *r, char c) {
    Done d = {0};
    int rc = kvlink_notify(r->writer, r->peer, &c, 1, on_done, &d, NULL);
    if (rc)
        return rc;
    wait_done(r, &d);
    return d.status;
}

static int flush(Rig *r) {
    Done d = {0};
    assert_int_equal(kvlink_flush(r->writer, r->peer, on_done, &d, NULL), 0);
    wait_done(r, &d);
    return d.status;
}

static int n_wrong(const Rig *r, uint64_t at) {
    int n = 0;
    for (int i = 0; i < PUT; i++)
        n += r->to[at + (uint64_t)i] != r->from[at + (uint64_t)i];
    return n;
}

/* A put and a notice that arrive as they should. */
static void expect_good(Rig *r, uint64_t at) {
    int before = r->n_notices;
    assert_int_equal(put(r, at), 0);
    assert_int_equal(notify(r, 'g'), 0);
    wait_notices(r, before + 1);
    assert_int_equal(n_wrong(r, at), 0);
}

static void connect_again(Rig *r) {
    kvlink_disconnect(r->writer, r->peer);
    r->peer = connect_peer(r);
}

/* ---- rules as text ---- */

static void test_bad_rules(void **state) {
    (void)state;
    static const char *const bad[][2] = {
        {"lose-page=1", "there is no fault rule \"lose-page\""},
        {"drop-notice=1,reset-all=1", "reset-all"},
        {"drop", "there is no fault rule \"drop\""},
        {"reset", "reset=N or %P"},
        {"reset=", "reset="},
        {"reset=0", "reset=0"},
        {"reset=-1", "reset=-1"},
        {"reset=1x", "reset=1x"},
        {"reset=99999999999999999999", "reset=9"},
        {"reset%101", "reset%101"},
        {"reset=1%5", "reset=1%5"},
        {"delay-notice%5", "delay-notice=MS"},
    };
    Rig r = {.loop = loop_new()};
    KvLink *inner = open_link(&r), *out = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        Err err = {0};
        KvFaultConf conf = {r.loop, bad[i][0], 1, SILENCE_MS};
        assert_int_equal(kvlink_fault_new(&out, &inner, &conf, &err), E_INVAL);
        assert_non_null(strstr(err.text, bad[i][1]));
        assert_null(out);
        assert_non_null(inner);
    }
    kvlink_close(inner);
    loop_free(r.loop);
}

static void test_no_rules(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, " , ", 1);
    expect_good(&r, 0);
    assert_int_equal(flush(&r), 0);
    rig_close(&r);
}

/* ---- notices ---- */

static void test_drop(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "drop-notice=2", 1);
    assert_int_equal(put(&r, 0), 0);
    assert_int_equal(notify(&r, 'a'), 0);
    assert_int_equal(n_wrong(&r, 0), 0); /* only the notice is lost */
    assert_int_equal(notify(&r, 'b'), 0);
    rest(&r);
    assert_int_equal(r.n_notices, 0);
    expect_good(&r, PUT);
    rig_close(&r);
}

static void test_duplicate(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "duplicate-notice=1", 1);
    assert_int_equal(notify(&r, 'a'), 0);
    assert_int_equal(notify(&r, 'b'), 0);
    wait_notices(&r, 3);
    rest(&r);
    assert_string_equal(r.notices, "aab");
    rig_close(&r);
}

static void test_delay(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "delay-notice=120", 1);
    int64_t begin = clock_now_ms();
    assert_int_equal(put(&r, 0), 0);
    assert_int_equal(notify(&r, 'a'), 0);
    wait_notices(&r, 1);
    assert_true(clock_now_ms() - begin >= 120);
    assert_int_equal(n_wrong(&r, 0), 0);
    rig_close(&r);
}

static void test_disconnect_while_delayed(void **state) {
    (void)state;
    Rig r;
    Done d = {0};
    rig_open(&r, "delay-notice=60000", 1);
    assert_int_equal(kvlink_notify(r.writer, r.peer, "a", 1, on_done, &d, NULL), 0);
    rest(&r);
    kvlink_disconnect(r.writer, r.peer);
    assert_int_equal(d.n, 0); /* never from within a call */
    wait_done(&r, &d);
    assert_int_equal(d.status, E_CANCELED);
    assert_int_equal(r.n_notices, 0);
    rig_close(&r);
}

static void test_close_while_held(void **state) {
    (void)state;
    Rig r;
    Done d = {0};
    rig_open(&r, "delay-notice=60000", 1);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(kvlink_notify(r.writer, r.peer, "a", 1, on_done, &d, NULL), 0);
        if (i == 1)
            rest(&r); /* some wait for their time, one for the link */
    }
    rig_close(&r);
    assert_int_equal(d.n, 0);
}

/* Which of 40 notices arrive. */
static void lossy(uint64_t seed, char out[256]) {
    Rig r;
    rig_open(&r, "drop-notice%50", seed);
    for (int i = 0; i < 40; i++)
        assert_int_equal(notify(&r, (char)('0' + i)), 0);
    rest(&r);
    memcpy(out, r.notices, sizeof r.notices);
    rig_close(&r);
}

static void test_chance_is_seeded(void **state) {
    (void)state;
    char a[256], b[256], c[256];
    lossy(7, a);
    lossy(7, b);
    lossy(8, c);
    assert_string_equal(a, b);
    assert_string_not_equal(a, c);
    assert_in_range(strlen(a), 8, 32);
}

/* ---- puts ---- */

static void test_corrupt(void **state) {
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) {
        Rig r;
        rig_open(&r, "corrupt-page=2", seed);
        expect_good(&r, 0);
        assert_int_equal(put(&r, PUT), 0);
        assert_int_equal(notify(&r, 'x'), 0);
        wait_notices(&r, 2);
        assert_int_equal(n_wrong(&r, PUT), 1);
        expect_good(&r, PUT); /* written anew it is whole */
        rig_close(&r);
    }
}

/* Equal bytes cannot be damaged by one another: the next put is. */
static void test_corrupt_equal_bytes(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "corrupt-page=1", 1);
    memset(r.from, 9, PUT);
    memcpy(r.before, r.from, POOL);
    expect_good(&r, 0);
    assert_int_equal(put(&r, PUT), 0);
    assert_int_equal(flush(&r), 0);
    assert_int_equal(n_wrong(&r, PUT), 1);
    expect_good(&r, PUT);
    rig_close(&r);
}

static void test_fail_after(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "fail-after=2", 1);
    expect_good(&r, 0);
    assert_int_equal(put(&r, PUT), E_PEER);
    assert_int_equal(put(&r, PUT), E_PEER);
    assert_int_equal(notify(&r, 'x'), E_PEER);
    assert_int_equal(flush(&r), 0);
    rest(&r);
    assert_int_equal(r.n_notices, 1);
    assert_int_equal(n_wrong(&r, PUT), PUT);
    connect_again(&r);
    expect_good(&r, PUT);
    rig_close(&r);
}

static void test_reset(void **state) {
    (void)state;
    Rig r;
    Done early = {0};
    rig_open(&r, "reset=2", 1);
    expect_good(&r, 0);
    assert_int_equal(put(&r, PUT), 0); /* taken, and lost */
    assert_int_equal(kvlink_flush(r.writer, r.peer, on_done, &early, NULL), 0);
    assert_int_equal(put(&r, PUT), E_PEER);
    assert_int_equal(notify(&r, 'x'), E_PEER);
    wait_done(&r, &early);
    assert_int_equal(early.status, E_PEER);
    assert_int_equal(flush(&r), E_PEER);
    assert_int_equal(n_wrong(&r, PUT), PUT);
    connect_again(&r);
    expect_good(&r, PUT);
    rig_close(&r);
}

static void test_disconnect_after_reset(void **state) {
    (void)state;
    Rig r;
    Done d = {0};
    rig_open(&r, "reset=1", 1);
    assert_int_equal(put(&r, 0), 0);
    assert_int_equal(kvlink_flush(r.writer, r.peer, on_done, &d, NULL), 0);
    connect_again(&r);
    wait_done(&r, &d);
    assert_int_equal(d.status, E_CANCELED);
    expect_good(&r, 0);
    rig_close(&r);
}

/* ---- connections ---- */

static void test_silence_ends_at_its_time(void **state) {
    (void)state;
    Rig r;
    rig_open(&r, "silence=1", 1);
    int64_t begin = clock_now_ms();
    assert_int_equal(put(&r, 0), 0);
    assert_int_equal(notify(&r, 'x'), E_DEADLINE);
    assert_true(clock_now_ms() - begin >= SILENCE_MS);
    assert_int_equal(put(&r, 0), E_PEER);
    assert_int_equal(flush(&r), E_PEER);
    assert_int_equal(n_wrong(&r, 0), PUT);
    assert_int_equal(r.n_notices, 0);
    connect_again(&r);
    expect_good(&r, 0);
    rig_close(&r);
}

static void test_silence_ends_at_disconnect(void **state) {
    (void)state;
    Rig r;
    Done d = {0}, e = {0};
    rig_open(&r, "silence=1", 1);
    assert_int_equal(kvlink_notify(r.writer, r.peer, "a", 1, on_done, &d, NULL), 0);
    assert_int_equal(kvlink_flush(r.writer, r.peer, on_done, &e, NULL), 0);
    connect_again(&r);
    wait_done(&r, &d);
    wait_done(&r, &e);
    assert_int_equal(d.status, E_CANCELED);
    assert_int_equal(e.status, E_CANCELED);
    expect_good(&r, 0);
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_rules),
        cmocka_unit_test(test_no_rules),
        cmocka_unit_test(test_drop),
        cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_delay),
        cmocka_unit_test(test_disconnect_while_delayed),
        cmocka_unit_test(test_close_while_held),
        cmocka_unit_test(test_chance_is_seeded),
        cmocka_unit_test(test_corrupt),
        cmocka_unit_test(test_corrupt_equal_bytes),
        cmocka_unit_test(test_fail_after),
        cmocka_unit_test(test_reset),
        cmocka_unit_test(test_disconnect_after_reset),
        cmocka_unit_test(test_silence_ends_at_its_time),
        cmocka_unit_test(test_silence_ends_at_disconnect),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
