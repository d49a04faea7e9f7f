/* What clients get when a peer failed them. Pure. */
#pragma once

#include "proto/baton.pb-c.h"
#include "router/api.h"

/* 503 with a time to come back. */
ApiError failure_unavailable(const char *code, const char *message, int64_t retry_after_ms);

/* A peer's word as a client's error. who: "prefill" or "decode". */
ApiError failure_of(const Baton__Failed *failed, const char *who);

/* Whether another attempt can help. */
bool failure_worth_again(Baton__FailCode code);
