/* baton-router. The main thread is the loop. */
#include "base/log.h"
#include "base/loop.h"
#include "router/options.h"
#include "router/router.h"

static bool alive(void *arg) {
    (void)arg; /* the loop turns, or nobody asks */
    return true;
}

int main(int argc, char **argv) {
    static const LogLevel levels[] = {LOG_LV_ERR, LOG_LV_WARN, LOG_LV_INFO, LOG_LV_DEBUG};
    static Options opt;
    Router *router = NULL;
    Err err = {0};
    int status = 0;
    if (conf_main(&options_table, argc, argv, &opt, &status))
        return status;
    log_init("router", levels[opt.log_level]);
    Loop *loop = loop_new();
    if (router_open(&router, loop, &opt, &err)) {
        LOG_ERR("cannot start: %s", err.text);
        status = 1;
    } else {
        loop_on_stop(loop, router_stop, router, opt.drain_ms + ROUTER_STOP_MS);
        loop_notify_watchdog(loop, alive, NULL);
        loop_run(loop);
        LOG_INFO("stopped");
    }
    router_close(router);
    loop_free(loop);
    conf_free(&options_table, &opt);
    return status;
}
