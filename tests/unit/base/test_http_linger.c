/* base/http_linger: late bytes are swallowed, the number and the end of lingering sockets are
 * bounded. */
#include "base/http_linger.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static Loop *loop;

static void stop(void *arg) {
    loop_stop(arg);
}

static void run_for(int64_t ms) {
    LoopTimer *timer = loop_timer_new(loop, ms, 0, stop, loop);
    loop_run(loop);
    loop_timer_free(timer);
}

/* Starts a linger on one end of a fresh pair, closes the owner's descriptor and returns the peer's.
 */
static int start(HttpLingers *all) {
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
    http_linger_start(all, fds[0]);
    close(fds[0]);
    return fds[1];
}

static void late_bytes_are_swallowed_until_the_peer_closes(void **state) {
    (void)state;
    HttpLingers all = {.loop = loop, .max = 4};
    static char bytes[100000];
    int peer = start(&all);
    for (int i = 0; i < 30; i++) {
        assert_true(send(peer, bytes, sizeof bytes, MSG_NOSIGNAL) > 0);
        run_for(10);
    }
    assert_int_equal(all.n, 1);
    close(peer);
    run_for(20);
    assert_int_equal(all.n, 0);
    assert_null(all.list);
}

static void there_are_never_more_than_max(void **state) {
    (void)state;
    HttpLingers all = {.loop = loop, .max = 2};
    int peers[3] = {start(&all), start(&all), start(&all)};
    assert_int_equal(all.n, 2);
    assert_int_equal(send(peers[0], "x", 1, MSG_NOSIGNAL), 1);
    assert_int_equal(send(peers[2], "x", 1, MSG_NOSIGNAL), -1); /* closed at once */
    close(peers[0]);
    run_for(20);
    int peer = start(&all); /* room again */
    assert_int_equal(all.n, 2);
    http_linger_stop_all(&all);
    assert_int_equal(all.n, 0);
    assert_int_equal(send(peers[1], "x", 1, MSG_NOSIGNAL), -1);
    close(peers[1]);
    close(peers[2]);
    close(peer);
}

static void a_peer_that_stays_is_cut_off(void **state) {
    (void)state;
    HttpLingers all = {.loop = loop, .max = 1};
    int peer = start(&all);
    run_for(4000);
    assert_int_equal(all.n, 1);
    run_for(2000);
    assert_int_equal(all.n, 0);
    assert_int_equal(send(peer, "x", 1, MSG_NOSIGNAL), -1);
    close(peer);
}

static int open_loop(void **state) {
    (void)state;
    loop = loop_new();
    return 0;
}

static int close_loop(void **state) {
    (void)state;
    loop_free(loop);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(late_bytes_are_swallowed_until_the_peer_closes),
        cmocka_unit_test(there_are_never_more_than_max),
        cmocka_unit_test(a_peer_that_stays_is_cut_off),
    };
    return cmocka_run_group_tests(tests, open_loop, close_loop);
}
