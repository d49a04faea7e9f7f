/* What a service with a KV pool is configured with beside its model, and the opening of its links:
 * sections [service], [kvlink], [admin], [log] and [limits] drain of its configuration. Start-up
 * only. */
#pragma once

#include "base/conf.h"
#include "proto/bus.h"
#include "proto/expertlink.h"
#include "proto/kvlink.h"

#include <stddef.h>
#include <stdint.h>

typedef struct ServiceOpts {
    char *name, *endpoint;
    char *transports, *devices;
    int64_t kv_timeout_ms;
    double min_gb_per_s;
    char *admin_host;
    int64_t admin_port;
    int log_level; /* index into SERVICE_LOG_LEVELS */
    int64_t drain_ms, step_ms;
} ServiceOpts;

#define SERVICE_LOG_LEVELS "error|warn|info|debug"

/* Rows for a ConfOpt array; the daemon's struct T holds a ServiceOpts named `field`. */
#define SERVICE_CONF_ROWS(T, field, default_name, default_endpoint, default_admin_port)            \
    {.section = "service",                                                                         \
     .key = "name",                                                                                \
     .type = CONF_STR,                                                                             \
     .def = default_name,                                                                          \
     .help = "Name of this instance, unique among its kind.",                                      \
     .offset = offsetof(T, field.name)},                                                           \
        {.section = "service",                                                                     \
         .key = "endpoint",                                                                        \
         .type = CONF_STR,                                                                         \
         .def = default_endpoint,                                                                  \
         .help = "Where routers connect: tcp://HOST:PORT or ipc://PATH.",                          \
         .offset = offsetof(T, field.endpoint)},                                                   \
        {.section = "kvlink",                                                                      \
         .key = "transports",                                                                      \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help =                                                                                   \
             "UCX transports, such as \"tcp,self\"; empty: UCX chooses. Pools in GPU memory go "   \
             "through host memory only when tcp is named.",                                        \
         .offset = offsetof(T, field.transports)},                                                 \
        {.section = "kvlink",                                                                      \
         .key = "devices",                                                                         \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help = "Network devices that UCX uses, such as \"mlx5_0:1\"; empty: all.",               \
         .offset = offsetof(T, field.devices)},                                                    \
        {.section = "kvlink",                                                                      \
         .key = "timeout_ms",                                                                      \
         .type = CONF_MS,                                                                          \
         .def = "10s",                                                                             \
         .min = 1,                                                                                 \
         .max = 600000,                                                                            \
         .help = "A write or notice that takes longer fails, and its peer with it.",               \
         .offset = offsetof(T, field.kv_timeout_ms)},                                              \
        {.section = "kvlink",                                                                      \
         .key = "min_gb_per_s",                                                                    \
         .type = CONF_REAL,                                                                        \
         .def = "0",                                                                               \
         .max = 1e6,                                                                               \
         .help = "The service does not start when its own KV link measures less.",                 \
         .offset = offsetof(T, field.min_gb_per_s)},                                               \
        {.section = "admin",                                                                       \
         .key = "host",                                                                            \
         .type = CONF_STR,                                                                         \
         .def = "127.0.0.1",                                                                       \
         .help = "Address of the HTTP port with /live, /ready and /metrics.",                      \
         .offset = offsetof(T, field.admin_host)},                                                 \
        {.section = "admin",                                                                       \
         .key = "port",                                                                            \
         .type = CONF_INT,                                                                         \
         .def = default_admin_port,                                                                \
         .max = 65535,                                                                             \
         .help = "Port of it; 0: any free one.",                                                   \
         .offset = offsetof(T, field.admin_port)},                                                 \
        {.section = "log",                                                                         \
         .key = "level",                                                                           \
         .type = CONF_ENUM,                                                                        \
         .def = "info",                                                                            \
         .choices = SERVICE_LOG_LEVELS,                                                            \
         .help = "The least urgent lines that are written.",                                       \
         .offset = offsetof(T, field.log_level)},                                                  \
        {.section = "limits",                                                                      \
         .key = "drain_ms",                                                                        \
         .type = CONF_MS,                                                                          \
         .def = "30s",                                                                             \
         .max = 86400000,                                                                          \
         .help = "After SIGTERM, how long running requests may go on.",                            \
         .offset = offsetof(T, field.drain_ms)},                                                   \
    {                                                                                              \
        .section = "limits", .key = "step_ms", .type = CONF_MS, .def = "60s", .min = 100,          \
        .max = 86400000,                                                                           \
        .help = "A step that takes longer counts as stuck: the systemd watchdog is not fed.",      \
        .offset = offsetof(T, field.step_ms)                                                       \
    }

/* Whether the name can stand in a hello; E_INVAL. */
int service_check(const ServiceOpts *o, Err *err);
/* Sets up the log for a daemon called `program`. */
void service_log(const ServiceOpts *o, const char *program);
/* One line for an event of the bus. */
void service_log_event(const BusPeer *peer, BusEvent event, const char *reason);

/* Opens the KV link with a pool of pool_bytes, in *memory or, where that has none, in host memory,
 * and measures it; *gb_per_s may be logged. E_LIMIT with both numbers when it is slower than
 * configured. */
int service_open_link(KvLink **out, const ServiceOpts *o, Loop *loop, uint64_t pool_bytes,
                      const KvMemory *memory, KvNoticeFn on_notice, void *arg, double *gb_per_s,
                      Err *err);

/* Connects to all endpoints of a comma-separated list, again and again until wait_ms have passed
 * while some do not answer. Each later call of the link takes at most timeout_ms. E_INVAL for an
 * empty list. */
int service_open_experts(ExpertLink **out, const char *endpoints, const Baton__Hello *self,
                         int64_t timeout_ms, int64_t wait_ms, Err *err);
