/* See place.h. */
#include "model/place.h"

#include <stdlib.h>
#include <string.h>

/* An exchange is worth it when the one that comes was used so much more than the one that goes;
 * less is noise, and sets would flap. */
static const double NEXT_FACTOR = 1.25, NEXT_MIN = 4;

/* ---- strategies ---- */

static int per_layer(const char *spec, int n_experts, Err *err) {
    char *end;
    if (!strcmp(spec, "all"))
        return n_experts;
    if (!strcmp(spec, "none"))
        return 0;
    long n = strtol(spec, &end, 10);
    if (spec[0] >= '0' && spec[0] <= '9' && !*end && n <= n_experts)
        return (int)n;
    return err_set(err, E_INVAL, "experts on the device: expected all, none or 0 to %d, got \"%s\"",
                   n_experts, spec);
}

/* The first `budget` experts of layers [from, to), layer by layer. */
static void fill_front(const Shape *s, int from, int to, int budget, bool *resident) {
    for (int l = from; l < to; l++)
        for (int e = 0; e < s->n_experts && !s->layer_dense[l] && budget > 0; e++, budget--)
            resident[l * s->n_experts + e] = true;
}

typedef struct Ranked {
    uint64_t count;
    int at; /* layer * n_experts + expert */
} Ranked;

static int by_count(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->count != y->count)
        return x->count > y->count ? -1 : 1;
    return x->at - y->at;
}

/* The `budget` most used experts of layers [from, to). */
static void fill_frequent(const Shape *s, int from, int to, int budget, const uint64_t *counts,
                          bool *resident) {
    int n = 0;
    Ranked *r = xcalloc((size_t)(to - from) * (size_t)s->n_experts + 1, sizeof *r);
    for (int i = from * s->n_experts; i < to * s->n_experts; i++)
        if (!s->layer_dense[i / s->n_experts])
            r[n++] = (Ranked){counts[i], i};
    qsort(r, (size_t)n, sizeof *r, by_count);
    for (int i = 0; i < n && i < budget; i++)
        resident[r[i].at] = true;
    free(r);
}

static void fill(const PlaceConf *c, const Shape *s, int from, int to, int n, bool *resident) {
    int moe = 0;
    for (int l = from; l < to; l++)
        moe += !s->layer_dense[l];
    if (c->strategy == PLACE_FREQUENCY)
        fill_frequent(s, from, to, n * moe, c->counts, resident);
    else if (c->strategy == PLACE_FRONT)
        fill_front(s, from, to, n * moe, resident);
    else
        for (int l = from; l < to; l++)
            fill_front(s, l, l + 1, n, resident);
}

int place_decide(const PlaceConf *c, const Shape *s, bool **resident, Err *err) {
    int layers = s->n_layers + s->n_mtp;
    if (c->strategy == PLACE_FILE) {
        if (!c->file || !*c->file)
            return err_set(err, E_INVAL, "strategy file: expected the path of a placement file");
        return place_read_file(c->file, s, resident, err);
    }
    int n = per_layer(c->resident, s->n_experts, err);
    if (n < 0)
        return n;
    if (c->strategy == PLACE_FREQUENCY && !c->counts)
        return err_set(err, E_INVAL,
                       "strategy frequency: expected a file of recorded counts; without one the "
                       "choice would be arbitrary");
    bool *r = xcalloc((size_t)layers * (size_t)s->n_experts, sizeof *r);
    for (int i = 0; i < layers * s->n_experts; i++)
        r[i] = s->layer_dense[i / s->n_experts];
    fill(c, s, 0, s->n_layers, n, r);
    fill(c, s, s->n_layers, layers, n, r);
    *resident = r;
    return 0;
}

int place_parse(const char *spec, const Shape *s, bool **resident, Err *err) {
    return place_decide(&(PlaceConf){.resident = spec}, s, resident, err);
}

/* ---- facts about a placement ---- */

int place_n_remote(const Shape *s, const bool *resident) {
    int n = 0;
    for (int i = 0; i < (s->n_layers + s->n_mtp) * s->n_experts; i++)
        n += !resident[i];
    return n;
}

int place_check_held(const Shape *s, const bool *resident, const uint8_t *held, size_t len,
                     const char *name, Err *err) {
    for (int i = 0; i < s->n_layers * s->n_experts; i++) {
        bool has = (size_t)i / 8 < len && held[i / 8] >> i % 8 & 1;
        if (!resident[i] && !has)
            return err_set(err, E_MISMATCH,
                           "%s does not hold expert %d of layer %d, which is not resident here",
                           name, i % s->n_experts, i / s->n_experts);
    }
    return 0;
}

double place_remote_share(int n_experts, const double *heat, const bool *resident) {
    double all = 0, remote = 0;
    for (int e = 0; e < n_experts; e++) {
        all += heat[e];
        remote += resident[e] ? 0 : heat[e];
    }
    return all > 0 ? remote / all : 0;
}

/* ---- the next set of a layer ---- */

int place_next(int n_experts, const double *heat, const bool *resident, bool *next) {
    memcpy(next, resident, (size_t)n_experts * sizeof *next);
    for (int n = 0;; n++) {
        int cold = -1, hot = -1;
        for (int e = 0; e < n_experts; e++) {
            if (next[e] && (cold < 0 || heat[e] < heat[cold]))
                cold = e;
            if (!next[e] && (hot < 0 || heat[e] > heat[hot]))
                hot = e;
        }
        if (cold < 0 || hot < 0 || heat[hot] < heat[cold] * NEXT_FACTOR ||
            heat[hot] < heat[cold] + NEXT_MIN)
            return n;
        next[cold] = false;
        next[hot] = true;
    }
}
