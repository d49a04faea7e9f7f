/* Metrics of the prefill service. */
#pragma once

#include "base/stat.h"

typedef struct PrefillStats {
    StatGauge *running, *waiting, *free_pages, *used_pages, *quarantined_pages, *queued_tokens,
        *peers;
    StatCounter *requests, *refused, *failed, *canceled, *tokens, *pushed_bytes;
    StatHist *step_s, *step_tokens, *queue_s, *compute_s, *push_s;
} PrefillStats;

void prefill_stats_init(PrefillStats *s);
