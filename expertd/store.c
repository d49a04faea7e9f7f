/* Slices of experts and their computation. The daemon's worker thread is the only one that
 * computes. */
#include "expertd/store.h"

#include "model/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Store {
    StoreConf conf;
    Shape shape;
    const Ops *ops;
    Dev *dev;
    Experts *layer[SHAPE_MAX_LAYERS]; /* NULL on dense layers */
    bool *remote;                     /* [layers, n_experts] held here */
    bool *seen;                       /* [n_experts] by the call that runs */
    int n_held;
    uint64_t bytes;
    uint64_t layer_expert_bytes[SHAPE_MAX_LAYERS]; /* of one expert's slice */
};

static int slice(const Store *s, const Weights *w, int layer, int expert, MatView v[3], Err *err) {
    static const char *const part[3] = {"gate_proj", "up_proj", "down_proj"};
    int hidden = s->shape.hidden, inner = s->shape.moe_inner, share = inner / s->conf.n_shards,
        at = share * s->conf.shard;
    for (int p = 0; p < 3; p++) {
        char name[160];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s", layer, expert, part[p]);
        int rc =
            weights_matrix(w, name, p == 2 ? hidden : inner, p == 2 ? inner : hidden, &v[p], err);
        if (rc)
            return rc;
        if (p == 2 && v[p].dtype == DT_NVFP4 && share % NVFP4_GROUP)
            return err_set(err, E_UNSUPPORTED, "%s: %d columns per shard do not fill groups of %d",
                           name, share, NVFP4_GROUP);
        v[p] = p == 2 ? mat_cols(&v[p], at, share) : mat_rows(&v[p], at, share);
    }
    return 0;
}

static int load_layer(Store *s, const Weights *w, int layer, Err *err) {
    int n = s->shape.n_experts, rc = 0;
    MatView *v = xcalloc((size_t)n * 3, sizeof *v); /* all gates, all ups, all downs */
    for (int e = 0; e < n && rc == 0; e++) {
        MatView one[3];
        uint64_t bytes = 0;
        if (!s->remote[layer * n + e])
            continue;
        rc = slice(s, w, layer, e, one, err);
        for (int p = 0; p < 3 && rc == 0; p++) {
            v[p * n + e] = one[p];
            bytes += (uint64_t)one[p].rows * dtype_row_bytes(one[p].dtype, one[p].cols);
        }
        s->bytes += bytes;
        s->layer_expert_bytes[layer] = bytes;
        s->n_held++;
    }
    ExpertsView view = {n, v, v + n, v + 2 * n};
    if (rc == 0)
        rc = s->ops->experts_load(s->dev, &view, &s->layer[layer], err);
    free(v);
    return rc;
}

static int load_all(Store *s, const Weights *w, Err *err) {
    int layers = s->shape.n_layers + s->shape.n_mtp, n = s->shape.n_experts;
    int rc = place_parse(s->conf.device, &s->shape, &s->remote, err);
    for (int i = 0; i < layers * n && rc == 0; i++)
        s->remote[i] = !s->remote[i];
    for (int l = 0; l < layers && rc == 0; l++)
        if (!s->shape.layer_dense[l])
            rc = load_layer(s, w, l, err);
    if (rc == 0 && s->n_held == 0)
        rc = err_set(
            err, E_INVAL,
            "the callers' devices hold every expert (device = %s): nothing is left to serve",
            s->conf.device);
    return rc;
}

int store_open(Store **out, const Weights *w, const StoreConf *conf, Err *err) {
    const Shape *shape = weights_shape(w);
    if (conf->n_shards < 1 || conf->shard < 0 || conf->shard >= conf->n_shards)
        return err_set(err, E_INVAL, "shard %d of %d: expected 0 to count - 1", conf->shard,
                       conf->n_shards);
    if (shape->moe_inner % conf->n_shards)
        return err_set(err, E_UNSUPPORTED,
                       "moe_intermediate_size %d does not divide into %d shards", shape->moe_inner,
                       conf->n_shards);
    const Ops *ops = strcmp(conf->backend, "ref") == 0 ? ops_ref() : ops_cpu(NULL);
    if (!ops)
        return err_set(err, E_UNSUPPORTED,
                       "this processor runs neither AVX2 nor AVX-512; backend = ref works");
    Store *s = xcalloc(1, sizeof *s);
    s->conf = *conf;
    s->shape = *shape;
    s->ops = ops;
    s->seen = xcalloc((size_t)shape->n_experts, sizeof *s->seen);
    DevConf dc = {.n_ranks = 1,
                  .threads = conf->threads,
                  .max_rows = conf->max_rows,
                  .max_seqs = 1,
                  .max_context = 1,
                  .index_topk = 1};
    int rc = ops->open(&dc, &s->dev, err);
    if (rc == 0)
        rc = load_all(s, w, err);
    if (rc) {
        store_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

void store_close(Store *s) {
    if (!s)
        return;
    for (int l = 0; l < SHAPE_MAX_LAYERS; l++)
        if (s->layer[l])
            s->ops->experts_free(s->dev, s->layer[l]);
    s->ops->close(&s->dev, 1);
    free(s->remote);
    free(s->seen);
    free(s);
}

const Ops *store_ops(const Store *s) {
    return s->ops;
}

int store_n_experts(const Store *s) {
    return s->n_held;
}

uint64_t store_weight_bytes(const Store *s) {
    return s->bytes;
}

bool store_holds(const Store *s, int layer, int expert) {
    return layer >= 0 && layer < s->shape.n_layers + s->shape.n_mtp && expert >= 0 &&
           expert < s->shape.n_experts && s->remote[layer * s->shape.n_experts + expert];
}

/* The distinct experts of a call and what their slices weigh. */
static StoreWork weigh(Store *s, int layer, const int32_t *id, int n) {
    StoreWork work = {0};
    memset(s->seen, 0, (size_t)s->shape.n_experts * sizeof *s->seen);
    for (int i = 0; i < n; i++)
        if (id[i] >= 0 && !s->seen[id[i]]) {
            s->seen[id[i]] = true;
            work.n_experts++;
        }
    work.bytes = (uint64_t)work.n_experts * s->layer_expert_bytes[layer];
    return work;
}

StoreWork store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                        const float *weight, float *y, void (*between)(void *arg), void *arg) {
    int hidden = s->shape.hidden;
    (void)between; /* a call of this format runs in one piece */
    (void)arg;
    CHECK(n >= 1 && n <= s->conf.max_rows && s->layer[layer]);
    memset(y, 0, (size_t)n * (size_t)hidden * sizeof *y);
    Tensor ty = {y, DT_F32, n, hidden, hidden, true};
    Tensor tx = {(void *)x, DT_F32, n, hidden, hidden, true};
    Tensor tid = {(void *)id, DT_I32, n, k, k, true};
    Tensor tw = {(void *)weight, DT_F32, n, k, k, true};
    s->ops->experts(s->dev, ty, tx, tid, tw, s->layer[layer]);
    return weigh(s, layer, id, n * k);
}
