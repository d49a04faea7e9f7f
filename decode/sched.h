/* Who is let in and who runs next: pure functions of a snapshot. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* A request that runs, as far as admission cares. */
typedef struct DecodeSchedRunning {
    int tokens_left; /* at most */
    int pages;
} DecodeSchedRunning;

typedef struct DecodeSchedView {
    int free_pages, total_pages;
    int active, max_active; /* requests that hold pages: reserved and running */
    double step_ms;         /* of late; 0: unknown */
    int n_running;
    DecodeSchedRunning *running; /* [n_running] */
} DecodeSchedView;

typedef enum DecodeAdmit {
    DECODE_ADMIT,
    DECODE_BUSY, /* not now; *retry_ms says when it may be worth trying again */
    DECODE_NEVER /* larger than the whole pool */
} DecodeAdmit;

enum { DECODE_RETRY_MIN_MS = 100, DECODE_RETRY_MAX_MS = 30000 };

/* A request is let in when a place and all its pages are there, for the whole answer at once: what
 * runs never waits for a page, so nothing can lock up. *retry_ms estimates when enough of the
 * running requests are over, shortest rest first; written for DECODE_BUSY only. Sorts running[]. */
DecodeAdmit decode_sched_admit(const DecodeSchedView *v, int need_pages, uint32_t *retry_ms);

/* A request that could take part in the next step. */
typedef struct DecodeSchedTurn {
    uint64_t last; /* number of the last turn it had; numbers rise with each turn of any request */
    int index;     /* the caller's */
} DecodeSchedTurn;

/* Which of n requests take part in the next step: all when they fit, else the max whose last turn
 * is longest ago. Sorts turn[] so that they come first, longest wait first: turns given in this
 * order go round. Returns how many. */
int decode_sched_step(DecodeSchedTurn *turn, int n, int max);
