/* Configuration of baton-prefill. */
#pragma once

#include "base/conf.h"
#include "model/engine_conf.h"
#include "proto/service.h"

typedef struct PrefillOpts {
    EngineOpts engine;
    ServiceOpts service;
    int64_t step_tokens, max_running, max_waiting, patience_ms;
    char *kv_faults;
    int64_t kv_seed;
} PrefillOpts;

extern const ConfTable PREFILL_CONF;
