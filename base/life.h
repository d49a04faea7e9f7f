/* The life of a daemon from ready to exit: tells admin and systemd whether it is ready, drains on
 * SIGTERM, and ends the loop. Loop thread only. */
#pragma once

#include "base/admin.h"
#include "base/loop.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Life Life;

typedef struct LifeConf {
    Loop *loop;
    const char *admin_host;
    int admin_port;
    int64_t drain_ms; /* how long what runs may go on after SIGTERM */
    AdminReadyFn ready;
    void (*drain)(void *arg); /* take nothing new; call life_idle once nothing runs */
    void (*abort)(void *arg); /* drain_ms have passed: end what runs, with an error */
    bool (*alive)(void *arg); /* the work makes progress: feeds the watchdog */
    void *arg;
} LifeConf;

/* Opens the admin port, takes the signals, and says READY. E_IO when the port is in use. */
int life_open(Life **out, const LifeConf *conf, Err *err);
/* NULL is a no-op. */
void life_close(Life *l);

/* Readiness may have changed: logs it and tells systemd if it did. */
void life_changed(Life *l);
/* Drains as SIGTERM does, then ends with `status`, so that systemd restarts the daemon. */
void life_restart(Life *l, int status);
/* Nothing runs any more after drain: ends the loop. */
void life_idle(Life *l);
/* The exit status of the process. */
int life_status(const Life *l);
