/* Metrics of the decode service. */
#pragma once

#include "base/stat.h"

typedef struct DecodeStats {
    StatGauge *running, *waiting, *free_pages, *used_pages, *quarantined_pages;
    StatCounter *requests, *refused, *failed, *canceled, *tokens, *late_notices, *bad_transfers;
    StatHist *step_s, *transfer_s, *verify_s, *batch_rows;
} DecodeStats;

void decode_stats_init(DecodeStats *s);
