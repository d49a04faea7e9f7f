/* See sched.h. */
#include "decode/sched.h"

#include <stdlib.h>

static uint32_t clamp_ms(double ms) {
    return ms < DECODE_RETRY_MIN_MS   ? DECODE_RETRY_MIN_MS
           : ms > DECODE_RETRY_MAX_MS ? DECODE_RETRY_MAX_MS
                                      : (uint32_t)ms;
}

static int by_tokens_left(const void *a, const void *b) {
    int x = ((const DecodeSchedRunning *)a)->tokens_left,
        y = ((const DecodeSchedRunning *)b)->tokens_left;
    return (x > y) - (x < y);
}

/* Milliseconds until `pages` pages and `places` places are free again, should every running request
 * use up its tokens. */
static double wait_ms(const DecodeSchedView *v, int pages, int places) {
    if (v->n_running == 0) /* only transfers hold pages: they may be over at any time */
        return DECODE_RETRY_MIN_MS;
    qsort(v->running, (size_t)v->n_running, sizeof *v->running, by_tokens_left);
    for (int i = 0; i < v->n_running; i++) {
        pages -= v->running[i].pages;
        places--;
        if (pages <= 0 && places <= 0)
            return v->running[i].tokens_left * v->step_ms;
    }
    return DECODE_RETRY_MAX_MS;
}

DecodeAdmit decode_sched_admit(const DecodeSchedView *v, int need_pages, uint32_t *retry_ms) {
    if (need_pages > v->total_pages)
        return DECODE_NEVER;
    int pages = need_pages - v->free_pages, places = v->active + 1 - v->max_active;
    if (pages <= 0 && places <= 0)
        return DECODE_ADMIT;
    *retry_ms = clamp_ms(wait_ms(v, pages, places));
    return DECODE_BUSY;
}

static int by_turn(const void *a, const void *b) {
    const DecodeSchedTurn *x = a, *y = b;
    return x->last != y->last ? (x->last > y->last) - (x->last < y->last)
                              : (x->index > y->index) - (x->index < y->index);
}

int decode_sched_step(DecodeSchedTurn *turn, int n, int max) {
    if (n <= max)
        return n;
    qsort(turn, (size_t)n, sizeof *turn, by_turn);
    return max;
}
