/* The experts that this daemon holds, its slice of each, and their computation: from a checkpoint
 * in its own format, or from expert files in the integer format. Opened on the loop thread; the
 * daemon's worker thread is the only one that computes. */
#pragma once

#include "base/err.h"
#include "expertd/node_mem.h"
#include "kernels/ops.h"
#include "model/weights.h"

typedef struct Store Store;

/* Calls of at most so many rows may run inside of a larger one. */
enum { STORE_SMALL_ROWS = 64 };

/* Borrowed for the life of the store. */
typedef struct StoreConf {
    const char *files;   /* directory of expert files; NULL: a checkpoint */
    const char *backend; /* checkpoint: "cpu" or "ref" */
    const char *device;  /* what the callers keep on their devices ("none", "8", ...): the store
                            holds the rest */
    int shard, n_shards; /* slice of the inner dimension of each expert */
    int threads;         /* checkpoint: 0: all physical cores allowed; files: at least 1 */
    int node;            /* NUMA node of memory and threads; -1: any */
    bool pin;            /* files: threads to physical cores */
    bool lock;           /* files: weights locked into memory */
    int max_rows;        /* tokens per call */
} StoreConf;

/* w is the checkpoint, which must outlive the store; NULL with conf->files. E_UNSUPPORTED when the
 * slices do not fit the model's dimensions. */
int store_open(Store **out, const Weights *w, const StoreConf *conf, Err *err);
void store_close(Store *s);

/* Hidden size, layers, experts and which layers are dense; of expert files nothing else. */
const Shape *store_shape(const Store *s);
uint64_t store_fingerprint(const Store *s);  /* of the checkpoint; 0 with files */
uint64_t store_model_id(const Store *s);     /* weights_id */
uint64_t store_hash(const Store *s);         /* of what the files store; 0 of a checkpoint */
const char *store_format(const Store *s);    /* "checkpoint", "int4-g128-f16", ... */
const char *store_kernel(const Store *s);    /* what computes: "cpu-avx512", "amx", ... */
const Ops *store_ops(const Store *s);        /* checkpoint: the backend taken; NULL with files */
int store_n_experts(const Store *s);         /* held, over all layers */
uint64_t store_weight_bytes(const Store *s); /* of the slices as stored */
uint64_t store_work_bytes(const Store *s);   /* with files: what calls may take beside; else 0 */
const NodeMem *store_memory(const Store *s); /* with files; else NULL */

/* Whether (layer, expert) is held. Any values may be asked. */
bool store_holds(const Store *s, int layer, int expert);

/* With files: what was chosen to compute against plain C, on the first loaded expert. They differ
 * in SiLU's last bit, and so now and then in one activation's code. E_MISMATCH says by how much. */
int store_selftest(Store *s, Err *err);

/* Pins the calling thread, the one that will compute, as the first of the compute threads. */
int store_pin_caller(const Store *s, Err *err);

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
