/* The router's configuration. */
#pragma once

#include "base/conf.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct Options {
    char *name;
    char *http_host;
    int64_t http_port, max_body_bytes, max_connections, max_stream_bytes, idle_timeout_ms;
    char *model_dir, *model_name;
    int64_t max_context;
    char *prefill, *decode;
    int64_t ping_ms, silent_ms;
    int64_t max_requests, default_max_tokens;
    int64_t request_ms, parse_ms, reserve_ms, first_token_ms, stall_ms, retry_wait_ms, keep_ms;
    int64_t drain_ms;
    bool enable_thinking;
    int64_t threads, max_waiting;
    int log_level; /* index into error|warn|info|debug */
} Options;

extern const ConfTable options_table;
