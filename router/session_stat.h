/* The router's metrics about requests. Made once per process; updates from the loop thread. */
#pragma once

#include "base/stat.h"
#include "proto/baton.pb-c.h"

#include <stddef.h>
#include <stdint.h>

typedef struct SessionStat {
    StatCounter *complete, *refused, *failed, *gone; /* requests by outcome */
    StatCounter *retries, *tokens;
    StatGauge *running, *attempts, *dropped;
    StatHist *first_s, *total_s, *queue_s, *compute_s, *push_s;
} SessionStat;

void session_stat_init(SessionStat *s);
/* how: "complete", "refused", "failed" or "gone". */
void session_stat_end(SessionStat *s, const char *how, int64_t ms);
void session_stat_first(SessionStat *s, int64_t ms);
void session_stat_prefill(SessionStat *s, const Baton__PrefillDone *done);
void session_stat_tokens(SessionStat *s, size_t n);
void session_stat_retry(SessionStat *s);
void session_stat_running(SessionStat *s, int n);
void session_stat_attempts(SessionStat *s, int n, int n_dropped);
