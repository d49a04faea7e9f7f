/* See kv_pool.h. Pages are taken lowest id first, so that a request's pages tend to be neighbours.
 * Loop thread. */
#include "model/kv_pool.h"

#include <stdlib.h>

typedef enum State { FREE, USED, QUARANTINED } State;

struct KvPool {
    int total, n_free, n_used, n_quarantined;
    int lowest;     /* no page below it is free */
    uint8_t *state; /* [total] */
};

KvPool *kv_pool_new(int n_pages) {
    CHECK(n_pages > 0);
    KvPool *p = xcalloc(1, sizeof *p);
    p->total = p->n_free = n_pages;
    p->state = xcalloc((size_t)n_pages, 1);
    return p;
}

void kv_pool_free(KvPool *p) {
    if (!p)
        return;
    kv_pool_check(p);
    CHECK(p->n_free == p->total);
    free(p->state);
    free(p);
}

int kv_pool_take(KvPool *p, int n, int32_t *page, Err *err) {
    CHECK(n >= 0);
    if (n > p->n_free)
        return err_set(err, E_NOMEM, "%d pages wanted, %d of %d free", n, p->n_free, p->total);
    int at = p->lowest;
    for (int i = 0; i < n; at++) {
        if (p->state[at] != FREE)
            continue;
        p->state[at] = USED;
        page[i++] = at;
    }
    p->lowest = at;
    p->n_free -= n;
    p->n_used += n;
    return 0;
}

static void move(KvPool *p, const int32_t *page, int n, State from, State to) {
    for (int i = 0; i < n; i++) {
        CHECK(page[i] >= 0 && page[i] < p->total);
        CHECK(p->state[page[i]] == from);
        p->state[page[i]] = (uint8_t)to;
        if (to == FREE && page[i] < p->lowest)
            p->lowest = page[i];
    }
}

void kv_pool_give(KvPool *p, const int32_t *page, int n) {
    move(p, page, n, USED, FREE);
    p->n_used -= n;
    p->n_free += n;
}

void kv_pool_quarantine(KvPool *p, const int32_t *page, int n) {
    move(p, page, n, USED, QUARANTINED);
    p->n_used -= n;
    p->n_quarantined += n;
}

void kv_pool_release(KvPool *p, const int32_t *page, int n) {
    move(p, page, n, QUARANTINED, FREE);
    p->n_quarantined -= n;
    p->n_free += n;
}

int kv_pool_total(const KvPool *p) {
    return p->total;
}

int kv_pool_n_free(const KvPool *p) {
    return p->n_free;
}

int kv_pool_n_used(const KvPool *p) {
    return p->n_used;
}

int kv_pool_n_quarantined(const KvPool *p) {
    return p->n_quarantined;
}

void kv_pool_check(const KvPool *p) {
    int n[3] = {0};
    for (int i = 0; i < p->total; i++) {
        CHECK(p->state[i] <= QUARANTINED);
        n[p->state[i]]++;
    }
    CHECK(n[FREE] == p->n_free && n[USED] == p->n_used && n[QUARANTINED] == p->n_quarantined);
    CHECK(p->n_free + p->n_used + p->n_quarantined == p->total);
}
