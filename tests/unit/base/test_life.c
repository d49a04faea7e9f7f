/* From ready to exit: what admin and the callbacks see, and with which status a daemon ends. */
#include "base/life.h"

#include "base/log.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

typedef struct Fixture {
    Loop *loop;
    Life *life;
    bool ready;
    int n_ready, n_drain, n_abort;
    bool idle_at_drain, idle_at_abort;
} Fixture;

static bool is_ready(void *arg, char *why, size_t n) {
    Fixture *f = arg;
    f->n_ready++;
    snprintf(why, n, "%s", f->ready ? "" : "warming up");
    return f->ready;
}

static void drain(void *arg) {
    Fixture *f = arg;
    f->n_drain++;
    if (f->idle_at_drain)
        life_idle(f->life);
}

static void abort_all(void *arg) {
    Fixture *f = arg;
    f->n_abort++;
    if (f->idle_at_abort)
        life_idle(f->life);
}

static bool is_alive(void *arg) {
    (void)arg;
    return true;
}

static LifeConf conf_of(Fixture *f, int port, int64_t drain_ms) {
    return (LifeConf){.loop = f->loop,
                      .admin_host = "127.0.0.1",
                      .admin_port = port,
                      .drain_ms = drain_ms,
                      .ready = is_ready,
                      .drain = drain,
                      .abort = abort_all,
                      .alive = is_alive,
                      .arg = f};
}

static int setup(void **state) {
    Fixture *f = xcalloc(1, sizeof *f);
    log_init("test", LOG_LV_ERR);
    f->loop = loop_new();
    LifeConf conf = conf_of(f, 0, 50);
    assert_int_equal(life_open(&f->life, &conf, NULL), 0);
    *state = f;
    return 0;
}

static int teardown(void **state) {
    Fixture *f = *state;
    life_close(f->life);
    loop_free(f->loop);
    free(f);
    return 0;
}

static void terminate(void *arg) {
    (void)arg;
    raise(SIGTERM);
}

static void test_sigterm_drains_and_ends_with_0(void **state) {
    Fixture *f = *state;
    f->idle_at_drain = true;
    assert_true(loop_post(f->loop, terminate, NULL));
    loop_run(f->loop);
    assert_int_equal(f->n_drain, 1);
    assert_int_equal(f->n_abort, 0);
    assert_int_equal(life_status(f->life), 0);
}

static void test_what_does_not_end_in_time_is_ended(void **state) {
    Fixture *f = *state;
    f->idle_at_abort = true;
    assert_true(loop_post(f->loop, terminate, NULL));
    loop_run(f->loop);
    assert_int_equal(f->n_drain, 1);
    assert_int_equal(f->n_abort, 1);
    assert_int_equal(life_status(f->life), 0);
}

static void restart(void *arg) {
    Fixture *f = arg;
    life_restart(f->life, 3);
    life_restart(f->life, 4); /* the first reason counts, and drains once */
}

static void test_a_restart_ends_with_its_status(void **state) {
    Fixture *f = *state;
    f->idle_at_drain = true;
    assert_true(loop_post(f->loop, restart, f));
    loop_run(f->loop);
    assert_int_equal(f->n_drain, 1);
    assert_int_equal(life_status(f->life), 3);
}

static void test_a_port_in_use_is_refused(void **state) {
    Fixture *f = *state, other = {.loop = f->loop};
    Httpd *taken;
    Err err = {0};
    char port[16];
    HttpdConf http = {.host = "127.0.0.1",
                      .listen_fd = -1,
                      .max_body_bytes = 100,
                      .max_connections = 2,
                      .idle_timeout_ms = 1000,
                      .max_stream_bytes = 100};
    assert_int_equal(httpd_open(&taken, f->loop, &http, NULL, NULL, NULL), 0);
    LifeConf conf = conf_of(&other, httpd_port(taken), 50);
    snprintf(port, sizeof port, "%d", httpd_port(taken));
    assert_int_equal(life_open(&other.life, &conf, &err), E_IO);
    assert_non_null(strstr(err.text, port));
    httpd_close(taken);
}

static void test_readiness_is_asked_for(void **state) {
    Fixture *f = *state;
    int before = f->n_ready;
    f->ready = true;
    life_changed(f->life);
    assert_int_equal(f->n_ready, before + 1);
}

int main(void) {
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_sigterm_drains_and_ends_with_0), T(test_what_does_not_end_in_time_is_ended),
        T(test_a_restart_ends_with_its_status), T(test_a_port_in_use_is_refused),
        T(test_readiness_is_asked_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
