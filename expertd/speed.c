/* See speed.h. */
#include "expertd/speed.h"

#include "base/clock.h"
#include "base/stat.h"
#include "expertd/store_files.h"

#include <stdlib.h>
#include <string.h>

enum {
    READ_US = 60000,       /* at least so long is read */
    CALLS_US = 200000,     /* and computed */
    CACHES = 2,            /* slices of fewer caches' size say nothing about memory, */
    MEMORY_MIN = 64 << 20, /* nor do smaller ones, where no cache is known */
};

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* The best of several passes over a part that no cache holds. */
static double read_speed(Store *s) {
    double best = 0;
    int64_t begin = clock_now_us();
    do {
        double v = store_files_read(store_files(s));
        best = v > best ? v : best;
    } while (clock_now_us() - begin < READ_US);
    return best;
}

/* k random experts of the layer that are held. False when it has fewer. */
static bool choose(const Store *s, int layer, int k, uint64_t *state, int32_t *id) {
    int n = store_shape(s)->n_experts, held = 0, taken = 0;
    for (int e = 0; e < n; e++)
        held += store_holds(s, layer, e);
    for (int e = 0; e < n && taken < k; e++)
        if (store_holds(s, layer, e) && (int)(next_random(state) % (uint64_t)held--) < k - taken)
            id[taken++] = e;
    return taken == k;
}

static void call_speed(Store *s, Speed *out) {
    const Shape *shape = store_shape(s);
    int k = shape->n_active < SHAPE_MAX_TOPK_EXPERTS ? shape->n_active : SHAPE_MAX_TOPK_EXPERTS;
    float *x = xcalloc((size_t)shape->hidden * 2, sizeof *x), weight[SHAPE_MAX_TOPK_EXPERTS];
    int32_t id[SHAPE_MAX_TOPK_EXPERTS];
    uint64_t state = 0x9e3779b97f4a7c15ull, bytes = 0, calls = 0;
    int64_t us = 0, begin = clock_now_us();
    for (int i = 0; i < shape->hidden; i++)
        x[i] = (float)(next_random(&state) % 2001) / 1000 - 1;
    for (int i = 0; i < k; i++)
        weight[i] = 1.0f / (float)k;
    /* Layer after layer, as a step goes; each expert comes back only after all others. */
    for (int l = 0; clock_now_us() - begin < CALLS_US; l = (l + 1) % shape->n_layers) {
        if (shape->layer_dense[l] || !choose(s, l, k, &state, id)) {
            if (l == shape->n_layers - 1 && calls == 0)
                break; /* no layer has so many */
            continue;
        }
        int64_t from = clock_now_us();
        bytes += store_compute(s, l, 1, k, x, id, weight, x + shape->hidden, NULL, NULL).bytes;
        us += clock_now_us() - from;
        calls++;
    }
    free(x);
    if (us > 0) {
        out->kernel_gb_per_s = (double)bytes / 1e3 / (double)us;
        out->layer_us = (double)us / (double)calls;
    }
}

static void gauge(const char *name, const char *help, double v) {
    stat_set(stat_gauge(name, "", help), v);
}

Speed speed_measure(Store *s) {
    const Shape *shape = store_shape(s);
    uint64_t cache = CACHES * store_files_cache(store_files(s));
    Speed v = {.in_cache = store_weight_bytes(s) < (cache > MEMORY_MIN ? cache : MEMORY_MIN)};
    /* Tokens want every expert alike, those included that the callers hold. */
    v.token_bytes = (double)store_weight_bytes(s) / shape->n_experts * shape->n_active;
    v.memory_gb_per_s = read_speed(s);
    call_speed(s, &v);
    v.expected_tok_per_s = v.memory_gb_per_s * 1e9 / v.token_bytes;
    v.measured_tok_per_s = v.layer_us > 0 ? v.kernel_gb_per_s * 1e9 / v.token_bytes : 0;
    gauge("baton_expert_memory_gb_per_s", "Read bandwidth of the slices, measured at the start.",
          v.memory_gb_per_s);
    gauge("baton_expert_kernel_gb_per_s", "Weights per second of one-token calls at the start.",
          v.kernel_gb_per_s);
    gauge("baton_expert_expected_tok_per_s",
          "Ceiling of this shard at one stream: bandwidth over bytes per token.",
          v.expected_tok_per_s);
    return v;
}
