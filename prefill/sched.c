/* See sched.h. */
#include "prefill/sched.h"

#include "base/err.h"

#include <stdlib.h>

typedef struct Turn {
    bool overdue;
    int64_t waited_ms;
    int left, index;
} Turn;

static int by_turn(const void *a, const void *b) {
    const Turn *x = a, *y = b;
    if (x->overdue != y->overdue)
        return x->overdue ? -1 : 1;
    if (x->overdue && x->waited_ms != y->waited_ms)
        return x->waited_ms > y->waited_ms ? -1 : 1;
    if (!x->overdue && x->left != y->left)
        return x->left < y->left ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

/* How many of its tokens an item gets from a budget; 0: a sliver that is not worth a chunk. */
static int chunk(const PrefillSchedView *v, const PrefillSchedItem *it, int budget, bool first) {
    int left = it->total - it->computed, end = it->computed + budget;
    if (left <= budget)
        return left;
    int border = end - end % v->page_tokens;
    if (border > it->computed)
        return border - it->computed;
    return first ? budget : 0;
}

int prefill_sched_next(const PrefillSchedView *v, PrefillSchedChunk *out) {
    Turn *turn = xmalloc((size_t)v->n * sizeof *turn + 1);
    for (int i = 0; i < v->n; i++) {
        const PrefillSchedItem *it = &v->item[i];
        turn[i] =
            (Turn){it->waited_ms >= v->patience_ms, it->waited_ms, it->total - it->computed, i};
    }
    qsort(turn, (size_t)v->n, sizeof *turn, by_turn);

    int n = 0, budget = v->step_tokens, free_pages = v->free_pages, begun = v->n_begun;
    bool may_begin = true;
    for (int i = 0; i < v->n && n < v->max_chunks && budget > 0; i++) {
        const PrefillSchedItem *it = &v->item[turn[i].index];
        bool fits = it->begun || (begun < v->max_begun && it->pages <= free_pages);
        if (!it->begun && (!fits || !may_begin)) {
            may_begin = may_begin && !turn[i].overdue;
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
        out[n++] = (PrefillSchedChunk){turn[i].index, tokens};
    }
    free(turn);
    return n;
}
