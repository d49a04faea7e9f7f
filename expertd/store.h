/* The experts that this daemon holds: its slice of each, on a host device of its own. Opened on the
 * loop thread, used by the worker thread. */
#pragma once

#include "base/err.h"
#include "kernels/ops.h"
#include "model/weights.h"

typedef struct Store Store;

/* Calls of at most so many rows may run inside of a larger one. */
enum { STORE_SMALL_ROWS = 64 };

typedef struct StoreConf {
    const char *backend; /* "cpu" or "ref" */
    const char *device;  /* what the callers keep on their devices ("none", "8", ...): the store
                            holds the rest */
    int shard, n_shards; /* slice of the inner dimension of each expert */
    int threads;         /* 0: all physical cores allowed */
    int max_rows;        /* tokens per call */
} StoreConf;

/* w must outlive the store. E_UNSUPPORTED when the slices do not fit the model's dimensions. */
int store_open(Store **out, const Weights *w, const StoreConf *conf, Err *err);
void store_close(Store *s);

const Ops *store_ops(const Store *s);        /* the backend taken */
int store_n_experts(const Store *s);         /* held, over all layers */
uint64_t store_weight_bytes(const Store *s); /* of the slices as stored */

/* Whether (layer, expert) is held. Any values may be asked. */
bool store_holds(const Store *s, int layer, int expert);

/* What one call did. */
typedef struct StoreWork {
    int n_experts;  /* distinct ones */
    uint64_t bytes; /* of weights that they have */
} StoreWork;

/* y[n, hidden] = sum of weight * expert(x) over the held slice; x[n, hidden], id[n, k] (-1: empty;
 * none twice in a row), weight[n, k], 1 <= n <= max_rows. ids have been checked with store_holds.
 *
 * between (NULL: none) is called now and then during calls of more than STORE_SMALL_ROWS, where the
 * format allows it: it may call store_compute with at most STORE_SMALL_ROWS rows. */
StoreWork store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                        const float *weight, float *y, void (*between)(void *arg), void *arg);
