/* See route.h. */
#include "router/route.h"

static bool fits(const RouteView *v, int p, int d) {
    return v->prefill[p].usable && v->decode[d].usable && (v->pairs[p] >> d & 1);
}

static bool has_pair(const RouteView *v, int d) {
    for (int p = 0; p < v->n_prefill; p++)
        if (fits(v, p, d))
            return true;
    return false;
}

static bool decode_better(const RouteNode *a, const RouteNode *b, uint32_t need_pages) {
    bool a_room = a->free_pages >= need_pages, b_room = b->free_pages >= need_pages;
    if (a_room != b_room)
        return a_room;
    if (a->free_pages != b->free_pages)
        return a->free_pages > b->free_pages;
    return a->load < b->load;
}

static bool prefill_better(const RouteNode *a, const RouteNode *b) {
    if (a->queued_tokens != b->queued_tokens)
        return a->queued_tokens < b->queued_tokens;
    return a->load < b->load;
}

bool route_pick(const RouteView *v, uint32_t need_pages, int *prefill, int *decode) {
    int best_d = -1, best_p = -1;
    for (int d = 0; d < v->n_decode; d++)
        if (has_pair(v, d) &&
            (best_d < 0 || decode_better(&v->decode[d], &v->decode[best_d], need_pages)))
            best_d = d;
    if (best_d < 0)
        return false;
    for (int p = 0; p < v->n_prefill; p++)
        if (fits(v, p, best_d) &&
            (best_p < 0 || prefill_better(&v->prefill[p], &v->prefill[best_p])))
            best_p = p;
    *prefill = best_p;
    *decode = best_d;
    return true;
}
