/* See conf.h. */
#include "expertd/conf.h"

#include <stddef.h>

#define ROW(s, k, t, d, field, h)                                                                  \
    {                                                                                              \
        .section = s, .key = k, .type = t, .def = d, .help = h,                                    \
        .offset = offsetof(ExpertdOpts, field)                                                     \
    }
#define RANGE(s, k, t, d, lo, hi, field, h)                                                        \
    {                                                                                              \
        .section = s, .key = k, .type = t, .def = d, .min = lo, .max = hi, .help = h,              \
        .offset = offsetof(ExpertdOpts, field)                                                     \
    }

static const ConfOpt OPTIONS[] = {
    ROW("service", "name", CONF_STR, "expertd-0", name,
        "Name of this instance, unique among its kind."),
    ROW("service", "endpoint", CONF_STR, "tcp://127.0.0.1:7111", endpoint,
        "Where prefill and decode connect: tcp://HOST:PORT or ipc://PATH."),
    ROW("model", "dir", CONF_STR, "", dir,
        "Checkpoint directory, for experts in its own format; either this or [experts] files."),
    ROW("experts", "files", CONF_STR, "", files,
        "Directory of expert files that `baton pack` made: 4 or 8 bits, computed with AMX, AVX-512 "
        "VNNI or AVX2. No checkpoint is needed then."),
    ROW("experts", "device", CONF_STR, "none", device,
        "What prefill and decode keep on their devices, as their [experts] resident with strategy "
        "uniform; this daemon holds the rest. With another strategy or with update_ms: none."),
    RANGE("experts", "shard", CONF_INT, "0", 0, 63, shard,
          "Which slice of every expert this daemon holds."),
    RANGE("experts", "shards", CONF_INT, "1", 1, 64, n_shards,
          "Into how many slices the experts are cut: the number of daemons."),
    RANGE("experts", "max_rows", CONF_INT, "512", 1, 8192, max_rows,
          "Tokens in one call; callers cut larger ones."),
    RANGE("experts", "min_fraction", CONF_REAL, "0.5", 0, 1, min_fraction,
          "Files: below this fraction of the memory's measured bandwidth the daemon warns."),
    ROW("experts", "strict_speed", CONF_BOOL, "no", strict_speed,
        "Files: below min_fraction the daemon does not start."),
    ROW("experts", "require_node", CONF_BOOL, "no", require_node,
        "Files: memory that is not all on [engine] node is an error."),
    ROW("service", "shm", CONF_BOOL, "yes", shm,
        "Calls of callers on this host go through shared memory."),
    ROW("experts", "lock", CONF_BOOL, "no", lock, "Files: locks the weights into memory."),
    ROW("engine", "backend", CONF_STR, "cpu", backend,
        "Checkpoint: \"cpu\", or \"ref\" for plain C."),
    ROW("engine", "oversubscribe", CONF_BOOL, "no", oversubscribe,
        "Files: more threads than physical cores are allowed; they are not pinned then."),
    RANGE("engine", "threads", CONF_INT, "0", 0, 1024, threads,
          "Compute threads; 0: the physical cores of the node that the process may use."),
    RANGE("engine", "node", CONF_INT, "-1", -1, 1023, node,
          "NUMA node to run on and to allocate from; -1: any."),
    ROW("admin", "host", CONF_STR, "127.0.0.1", admin_host,
        "Address of the HTTP port with /live, /ready and /metrics."),
    RANGE("admin", "port", CONF_INT, "9111", 0, 65535, admin_port, "Port of it; 0: any free one."),
    {.section = "log",
     .key = "level",
     .type = CONF_ENUM,
     .def = "info",
     .choices = "error|warn|info|debug",
     .help = "The least urgent lines that are written.",
     .offset = offsetof(ExpertdOpts, log_level)},
    RANGE("limits", "drain_ms", CONF_MS, "10s", 0, 86400000, drain_ms,
          "After SIGTERM, how long accepted calls may go on."),
    {0},
};

const ConfTable EXPERTD_CONF = {
    .program = "baton-expertd",
    .about = "holds routed experts in host memory and computes them",
    .opts = OPTIONS,
};
