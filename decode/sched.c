/* See sched.h. */
#include "decode/sched.h"

#include "base/err.h"

#include <stdlib.h>
#include <string.h>

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
    size_t bytes = (size_t)v->n_running * sizeof *v->running;
    DecodeSchedRunning *order = xmalloc(bytes + 1);
    if (v->n_running > 0)
        memcpy(order, v->running, bytes);
    qsort(order, (size_t)v->n_running, sizeof *order, by_tokens_left);
    double ms = DECODE_RETRY_MAX_MS; /* what only transfers still hold has no estimate */
    for (int i = 0; i < v->n_running; i++) {
        pages -= order[i].pages;
        places--;
        if (pages <= 0 && places <= 0) {
            ms = order[i].tokens_left * v->step_ms;
            break;
        }
    }
    free(order);
    return v->n_running > 0 ? ms : DECODE_RETRY_MIN_MS;
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

typedef struct Turn {
    uint64_t last;
    int index;
} Turn;

static int by_turn(const void *a, const void *b) {
    const Turn *x = a, *y = b;
    return x->last != y->last ? (x->last > y->last) - (x->last < y->last)
                              : (x->index > y->index) - (x->index < y->index);
}

int decode_sched_step(const uint64_t *last_turn, int n, int max, int *out) {
    int take = n < max ? n : max;
    if (n <= max) {
        for (int i = 0; i < n; i++)
            out[i] = i;
        return take;
    }
    Turn *turn = xmalloc((size_t)n * sizeof *turn);
    for (int i = 0; i < n; i++)
        turn[i] = (Turn){last_turn[i], i};
    qsort(turn, (size_t)n, sizeof *turn, by_turn);
    for (int i = 0; i < take; i++)
        out[i] = turn[i].index;
    free(turn);
    return take;
}
