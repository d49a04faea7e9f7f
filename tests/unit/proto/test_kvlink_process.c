/* The KV link between processes: what arrives, and that a receiver which dies, stops or is cut off
 * costs the writer an error in time and nothing else. */
#include "proto/kvlink.h"

#include "base/clock.h"
#include "kvlink_rig.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum {
    POOL = 16 << 20,
    LINK_MS = 1000,
    FAIL_MS = 2500,
    CHUNK = 1 << 20,
    PAGE = 41984,
    N_PAGES = 300
};

typedef struct Writer {
    Loop *loop;
    KvLink *link;
    KvPeer *peer;
    Child child;
    const char *transports;
} Writer;

static void connect_child(Writer *w, const char *devices, const char *netns) {
    Err err = {0};
    child_start(&w->child, w->transports, devices, POOL, netns);
    if (kvlink_connect(w->link, &w->child.remote, &w->peer, &err))
        fail_msg("%s", err.text);
}

static void writer_open(Writer *w, void **state, const char *devices) {
    *w = (Writer){.loop = loop_new(), .transports = *state};
    w->link = kvlink_rig_open(w->loop, w->transports, devices, POOL, LINK_MS, on_no_notice, NULL);
}

static void writer_close(Writer *w) {
    kvlink_close(w->link);
    loop_free(w->loop);
}

/* Pages one by one, each with its notice, each right on the other side. */
static void send_pages(Writer *w) {
    Done done = {0};
    for (uint64_t i = 0; i < N_PAGES; i++)
        assert_int_equal(rig_send(w->link, w->peer, (KvCheck){i * PAGE, PAGE - i % 100, i}, &done),
                         0);
    wait_done(w->loop, &done, N_PAGES);
    assert_int_equal(done.n_failed, 0);
    for (int i = 0; i < N_PAGES; i++)
        assert_true(child_verdict(&w->child));
}

static void test_pages_arrive_before_their_notices(void **state) {
    Writer w;
    writer_open(&w, state, "");
    connect_child(&w, "", NULL);
    send_pages(&w);
    child_stop(&w.child);
    writer_close(&w);
}

/* Writes as fast as it can until the peer is found to have failed, by a call or by what a call
 * began; returns how long that took. */
static int64_t write_until_failure(Writer *w, Done *done) {
    int64_t begin = clock_now_ms();
    int n = 0, rc = 0;
    for (uint64_t i = 0; done->n_failed == 0 && rc == 0; i++) {
        if (clock_now_ms() > begin + RIG_WAIT_MS)
            fail_msg("no failure shows");
        KvSeg seg = {i % 16 * CHUNK, i % 16 * CHUNK, CHUNK};
        if (n - done->n < 32) {
            rc = kvlink_put(w->link, w->peer, &seg, 1, NULL);
            if (rc == 0)
                rc = kvlink_notify(w->link, w->peer, "", 0, on_done, done, NULL);
            n += rc == 0;
        }
        turn(w->loop);
    }
    assert_true(rc == 0 || rc == E_PEER);
    int64_t spent = clock_now_ms() - begin;
    wait_done(w->loop, done, n); /* each of them ends */
    return spent;
}

static void replace_child(Writer *w) {
    connect_child(w, "", NULL);
    send_pages(w);
    child_stop(&w->child);
}

static void test_a_killed_receiver_is_noticed_and_replaced(void **state) {
    Writer w;
    writer_open(&w, state, "");
    for (int i = 0; i < 3; i++) {
        Done done = {0};
        connect_child(&w, "", NULL);
        send_pages(&w);
        for (int k = 0; k < 8; k++) { /* in flight at the moment of death */
            KvSeg seg = {0, 0, POOL};
            assert_int_equal(kvlink_put(w.link, w.peer, &seg, 1, NULL), 0);
        }
        kill(w.child.pid, SIGKILL);
        int64_t spent = write_until_failure(&w, &done);
        assert_in_range(spent, 0, FAIL_MS);
        assert_true(done.n_failed == 0 || done.status == E_PEER || done.status == E_DEADLINE);
        assert_int_equal(kvlink_notify(w.link, w.peer, "", 0, on_done, &done, NULL), E_PEER);
        child_kill(&w.child);
        kvlink_disconnect(w.link, w.peer);
        replace_child(&w);
    }
    writer_close(&w);
}

static void test_a_receiver_killed_before_it_answers(void **state) {
    Writer w;
    Done done = {0};
    writer_open(&w, state, "");
    child_start(&w.child, w.transports, "", POOL, NULL);
    kill(w.child.pid, SIGKILL);
    usleep(20000);
    assert_int_equal(kvlink_connect(w.link, &w.child.remote, &w.peer, NULL), 0);
    assert_in_range(write_until_failure(&w, &done), 0, FAIL_MS);
    child_kill(&w.child);
    kvlink_disconnect(w.link, w.peer);
    replace_child(&w);
    writer_close(&w);
}

static void test_a_stopped_receiver_is_given_up(void **state) {
    Writer w;
    Done done = {0};
    writer_open(&w, state, "");
    connect_child(&w, "", NULL);
    send_pages(&w);
    kill(w.child.pid, SIGSTOP);
    assert_in_range(write_until_failure(&w, &done), 0, FAIL_MS);
    assert_int_equal(done.status, E_DEADLINE);
    child_kill(&w.child);
    kvlink_disconnect(w.link, w.peer);
    replace_child(&w);
    writer_close(&w);
}

static void test_disconnect_from_a_stopped_receiver(void **state) {
    enum { N = 50 };
    Writer w;
    Done done = {0};
    writer_open(&w, state, "");
    connect_child(&w, "", NULL);
    send_pages(&w);
    kill(w.child.pid, SIGSTOP);
    for (int i = 0; i < N; i++) {
        KvSeg seg = {0, 0, POOL};
        assert_int_equal(kvlink_put(w.link, w.peer, &seg, 1, NULL), 0);
        for (int k = 0; k < 4; k++)
            assert_int_equal(kvlink_notify(w.link, w.peer, "", 0, on_done, &done, NULL), 0);
    }
    kvlink_disconnect(w.link, w.peer);
    wait_done(w.loop, &done, 4 * N);
    assert_true(done.n_failed > 0);
    assert_int_equal(done.status, E_CANCELED);
    child_kill(&w.child);
    replace_child(&w);
    assert_int_equal(done.n, 4 * N);
    writer_close(&w);
}

/* The receiver outlives writers that end in the middle of a put. */
static void test_a_dying_writer_leaves_the_receiver_alone(void **state) {
    Writer w;
    writer_open(&w, state, "");
    connect_child(&w, "", NULL);
    for (int i = 0; i < 5; i++) {
        KvSeg seg = {0, 0, POOL};
        for (int k = 0; k < 4; k++)
            assert_int_equal(kvlink_put(w.link, w.peer, &seg, 1, NULL), 0);
        usleep(5000u * (unsigned)i);
        kvlink_close(w.link);
        w.link = kvlink_rig_open(w.loop, w.transports, "", POOL, LINK_MS, on_no_notice, NULL);
        assert_int_equal(kvlink_connect(w.link, &w.child.remote, &w.peer, NULL), 0);
        send_pages(&w);
    }
    child_stop(&w.child);
    writer_close(&w);
}

typedef struct Heard {
    Loop *loop;
    pid_t from; /* of this writer; 0: of any other */
    int n;
} Heard;

static void on_heard(void *arg, const void *bytes, size_t len) {
    Heard *h = arg;
    pid_t from = 0;
    if (len == sizeof from)
        memcpy(&from, bytes, len);
    h->n += from == h->from;
}

static void wait_heard(Heard *h) {
    for (int64_t end = clock_now_ms() + RIG_WAIT_MS; h->n == 0; turn(h->loop))
        assert_true(clock_now_ms() < end);
}

/* Once a writer is connected, it may die at any moment. */
static void test_killed_writers_leave_the_receiver_alone(void **state) {
    Heard heard = {.loop = loop_new()};
    Done done = {0};
    KvLink *reader = kvlink_rig_open(heard.loop, *state, "", POOL, LINK_MS, on_heard, &heard);
    for (unsigned i = 0; i < 8; i++) {
        Child c;
        child_start_writer(&c, *state, reader);
        heard.from = c.pid;
        heard.n = 0;
        wait_heard(&heard);
        usleep(3000 * i);
        child_kill(&c);
    }
    for (int64_t end = clock_now_ms() + 2 * LINK_MS; clock_now_ms() < end;)
        turn(heard.loop); /* meanwhile UCX finds out */
    heard.from = 0;
    heard.n = 0;
    KvLink *writer = kvlink_rig_open(heard.loop, *state, "", POOL, LINK_MS, on_no_notice, NULL);
    KvPeer *peer = kvlink_rig_connect(writer, reader);
    assert_int_equal(rig_send(writer, peer, (KvCheck){1, PAGE, 1}, &done), 0);
    wait_done(heard.loop, &done, 1);
    assert_int_equal(done.n_failed, 0);
    wait_heard(&heard);
    kvlink_close(writer);
    kvlink_close(reader);
    loop_free(heard.loop);
}

/* ---- between network namespaces ---- */

/* Runs a command in which every @ stands for the name of this test's namespace and every % for a
 * number of its own. */
static int sh(const char *name, const char *command) {
    char text[512];
    size_t n = 0;
    for (; *command && n + 20 < sizeof text; command++)
        if (*command == '@')
            n += (size_t)snprintf(text + n, sizeof text - n, "%s", name);
        else if (*command == '%')
            n += (size_t)snprintf(text + n, sizeof text - n, "%u", (unsigned)getpid() % 251);
        else
            text[n++] = *command;
    text[n] = 0;
    return system(text);
}

static bool cable_lay(const char *name) {
    return geteuid() == 0 && sh(name, "ip netns add @ 2>/dev/null && "
                                      "ip link add @a type veth peer name @b netns @ && "
                                      "ip addr add 10.213.%.1/30 dev @a && ip link set @a up && "
                                      "ip -n @ addr add 10.213.%.2/30 dev @b && "
                                      "ip -n @ link set lo up && ip -n @ link set @b up") == 0;
}

static void cable_name(char name[16]) {
    snprintf(name, 16, "kv%u", (unsigned)getpid() % 1000000);
}

/* After the test, however it ended. */
static int cable_remove(void **state) {
    char name[16];
    (void)state;
    cable_name(name);
    if (geteuid() == 0)
        sh(name, "ip link del @a 2>/dev/null; ip netns del @ 2>/dev/null");
    return 0;
}

static void test_a_cut_cable_is_noticed(void **state) {
    char name[16], here[20], there[20];
    Writer w;
    Done done = {0};
    cable_name(name);
    snprintf(here, sizeof here, "%sa", name);
    snprintf(there, sizeof there, "%sb", name);
    if (!cable_lay(name)) {
        print_message("skipped: network namespaces need root, iproute2 and veth\n");
        skip();
    }
    writer_open(&w, state, here);
    connect_child(&w, there, name);
    send_pages(&w);
    assert_int_equal(sh(name, "ip link set @a down"), 0);
    int64_t spent = write_until_failure(&w, &done);
    assert_in_range(spent, 0, FAIL_MS);
    assert_true(done.n_failed == 0 || done.status == E_PEER || done.status == E_DEADLINE);
    child_kill(&w.child);
    writer_close(&w);
}

#define OVER(fn, transports)                                                                       \
    { #fn " over " transports, fn, NULL, NULL, transports[0] == 's' ? "" : transports }
#define OVER_BOTH(fn) OVER(fn, "shared memory"), OVER(fn, "tcp")

int main(int argc, char **argv) {
    kvlink_rig_main(argc, argv);
    const struct CMUnitTest tests[] = {
        OVER_BOTH(test_pages_arrive_before_their_notices),
        OVER_BOTH(test_a_killed_receiver_is_noticed_and_replaced),
        OVER_BOTH(test_a_receiver_killed_before_it_answers),
        OVER_BOTH(test_a_stopped_receiver_is_given_up),
        OVER_BOTH(test_disconnect_from_a_stopped_receiver),
        OVER_BOTH(test_a_dying_writer_leaves_the_receiver_alone),
        OVER_BOTH(test_killed_writers_leave_the_receiver_alone),
        {"test_a_cut_cable_is_noticed over tcp", test_a_cut_cable_is_noticed, NULL, cable_remove,
         "tcp"},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
