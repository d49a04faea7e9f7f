/* Configuration of baton-expertd. */
#pragma once

#include "base/conf.h"

#include <stdbool.h>

typedef struct ExpertdOpts {
    char *name, *endpoint, *dir, *files, *device, *backend, *admin_host;
    int64_t shard, n_shards, threads, node, max_rows, admin_port, drain_ms;
    double min_fraction;
    bool strict_speed, require_node, lock, oversubscribe, shm;
    int log_level; /* index into error|warn|info|debug */
} ExpertdOpts;

extern const ConfTable EXPERTD_CONF;
