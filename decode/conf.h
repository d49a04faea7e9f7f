/* Configuration of baton-decode. */
#pragma once

#include "base/conf.h"
#include "model/engine_conf.h"
#include "proto/service.h"

typedef struct DecodeOpts {
    EngineOpts engine;
    ServiceOpts service;
    int64_t transfer_ms;
    double quarantine_budget;
    int64_t max_running, max_batch;
    bool verify;
} DecodeOpts;

extern const ConfTable DECODE_CONF;
