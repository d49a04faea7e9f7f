/* Whose tokens the next step computes: a pure function of a snapshot. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* A request with tokens left to compute. */
typedef struct PrefillSchedItem {
    int computed, total; /* prompt tokens */
    bool begun;          /* holds its pages */
    int pages;           /* that it takes when it begins */
    int64_t waited_ms;   /* since it arrived or had its last chunk */
    int index;           /* the caller's; rises with arrival */
} PrefillSchedItem;

typedef struct PrefillSchedView {
    int n;
    PrefillSchedItem *item; /* [n]; sorted by the policy */
    int free_pages;
    int n_begun, max_begun;
    int step_tokens;     /* tokens of one step */
    int max_chunks;      /* requests of one step */
    int page_tokens;     /* chunks end on a page's border where they can */
    int64_t patience_ms; /* whoever has waited longer comes first */
} PrefillSchedView;

typedef struct PrefillSchedChunk {
    int index, n_tokens; /* the next n_tokens of the request of that index */
} PrefillSchedChunk;

/* Shortest rest first, so that a long prompt does not hold up short ones; but a request that has
 * waited longer than patience comes before that, longest wait first, so that none starves: it gets
 * at least one chunk each patience + the steps of those that have waited longer still. Such a
 * request that cannot begin for want of pages lets no other begin. Writes at most max_chunks chunks
 * to out[] and returns how many; 0 when nothing can be computed. */
int prefill_sched_next(const PrefillSchedView *v, PrefillSchedChunk *out);
