/* Which prefill and which decode take a request: a pure function of a snapshot. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ROUTE_MAX_NODES = 64 };

/* One instance as last heard of, corrected by what this router sent it since. */
typedef struct RouteNode {
    bool usable; /* up, ready, not draining, not excluded for this request */
    uint32_t free_pages, total_pages;
    uint32_t load; /* requests running or waiting */
    uint64_t queued_tokens;
} RouteNode;

typedef struct RouteView {
    const RouteNode *prefill; /* [n_prefill] */
    const RouteNode *decode;  /* [n_decode] */
    int n_prefill, n_decode;
    /* Bit d of pairs[p]: prefill p can hand over to decode d. */
    const uint64_t *pairs; /* [n_prefill] */
} RouteView;

/* Picks the decode with most free pages after need_pages were taken (those with room first), the
 * less loaded on a tie; then, of the prefills that fit it, the one with the fewest queued tokens.
 * Ties go to the lower load, then to the lower index. Only pairs count. False when there is none.
 */
bool route_pick(const RouteView *view, uint32_t need_pages, int *prefill, int *decode);
