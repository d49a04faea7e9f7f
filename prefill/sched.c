/* See sched.h. */
#include "prefill/sched.h"

#include <stdlib.h>

static int left(const PrefillSchedItem *it) {
    return it->total - it->computed;
}

static int by_arrival(const PrefillSchedItem *x, const PrefillSchedItem *y) {
    return (x->index > y->index) - (x->index < y->index);
}

static int by_wait(const void *a, const void *b) {
    const PrefillSchedItem *x = a, *y = b;
    return x->waited_ms != y->waited_ms ? (x->waited_ms > y->waited_ms ? -1 : 1) : by_arrival(x, y);
}

static int by_rest(const void *a, const void *b) {
    const PrefillSchedItem *x = a, *y = b;
    return left(x) != left(y) ? (left(x) < left(y) ? -1 : 1) : by_arrival(x, y);
}

/* Sorts the items into the order in which they get tokens; returns how many are overdue. */
static int order(const PrefillSchedView *v) {
    int n = 0;
    qsort(v->item, (size_t)v->n, sizeof *v->item, by_wait);
    while (n < v->n && v->item[n].waited_ms >= v->patience_ms)
        n++;
    qsort(v->item + n, (size_t)(v->n - n), sizeof *v->item, by_rest);
    return n;
}

/* How many of its tokens an item gets from a budget; 0: a sliver that is not worth a chunk. */
static int chunk(const PrefillSchedView *v, const PrefillSchedItem *it, int budget, bool first) {
    int end = it->computed + budget;
    if (left(it) <= budget)
        return left(it);
    int border = end - end % v->page_tokens;
    if (border > it->computed)
        return border - it->computed;
    return first ? budget : 0;
}

int prefill_sched_next(const PrefillSchedView *v, PrefillSchedChunk *out) {
    if (v->n == 0)
        return 0;
    int n = 0, budget = v->step_tokens, free_pages = v->free_pages, begun = v->n_begun;
    int n_overdue = order(v);
    bool may_begin = true;
    for (int i = 0; i < v->n && n < v->max_chunks && budget > 0; i++) {
        const PrefillSchedItem *it = &v->item[i];
        bool fits = begun < v->max_begun && it->pages <= free_pages;
        if (!it->begun && !(fits && may_begin)) {
            may_begin = may_begin && i >= n_overdue;
            continue;
        }
        int tokens = chunk(v, it, budget, n == 0);
        if (tokens == 0)
            continue;
        if (!it->begun) {
            begun++;
            free_pages -= it->pages;
        }
        budget -= tokens;
        out[n++] = (PrefillSchedChunk){it->index, tokens};
    }
    return n;
}
