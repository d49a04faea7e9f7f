/* See store_checkpoint.h. */
#include "expertd/store_checkpoint.h"

#include "expertd/store_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct StoreCheckpoint {
    const StoreConf *conf; /* the caller's */
    Shape shape;
    const Ops *ops;
    Dev *dev;
    Experts *layer[SHAPE_MAX_LAYERS]; /* NULL on dense layers */
    bool *seen;                       /* [n_experts] by the call that runs */
    uint64_t bytes;
    uint64_t layer_expert_bytes[SHAPE_MAX_LAYERS]; /* of one expert's slice */
};

static int slice(const StoreCheckpoint *s, const Weights *w, int layer, int expert, MatView v[3],
                 Err *err) {
    static const char *const part[3] = {"gate_proj", "up_proj", "down_proj"};
    int hidden = s->shape.hidden, inner = s->shape.moe_inner, share = inner / s->conf->n_shards,
        at = share * s->conf->shard;
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

static int load_layer(StoreCheckpoint *s, const Weights *w, const bool *held, int layer, Err *err) {
    int n = s->shape.n_experts, rc = 0;
    MatView *v = xcalloc((size_t)n * 3, sizeof *v); /* all gates, all ups, all downs */
    for (int e = 0; e < n && rc == 0; e++) {
        MatView one[3];
        uint64_t bytes = 0;
        if (!held[layer * n + e])
            continue;
        rc = slice(s, w, layer, e, one, err);
        for (int p = 0; p < 3 && rc == 0; p++) {
            v[p * n + e] = one[p];
            bytes += (uint64_t)one[p].rows * dtype_row_bytes(one[p].dtype, one[p].cols);
        }
        s->bytes += bytes;
        s->layer_expert_bytes[layer] = bytes;
    }
    ExpertsView view = {n, v, v + n, v + 2 * n};
    if (rc == 0)
        rc = s->ops->experts_load(s->dev, &view, &s->layer[layer], err);
    free(v);
    return rc;
}

static int load_all(StoreCheckpoint *s, const Weights *w, const bool *held, Err *err) {
    int rc = 0;
    for (int l = 0; l < s->shape.n_layers + s->shape.n_mtp && rc == 0; l++)
        if (!s->shape.layer_dense[l])
            rc = load_layer(s, w, held, l, err);
    return rc;
}

static int open_device(StoreCheckpoint *s, Err *err) {
    DevConf dc = {.n_ranks = 1,
                  .threads = s->conf->threads,
                  .max_rows = s->conf->max_rows,
                  .max_seqs = 1,
                  .max_context = 1,
                  .index_topk = 1};
    s->ops = strcmp(s->conf->backend, "ref") == 0 ? ops_ref() : ops_cpu(NULL);
    if (!s->ops)
        return err_set(err, E_UNSUPPORTED,
                       "this processor runs neither AVX2 nor AVX-512; backend = ref works");
    return s->ops->open(&dc, &s->dev, err);
}

int store_checkpoint_open(StoreCheckpoint **out, const Weights *w, const StoreConf *conf,
                          bool **held, Err *err) {
    const Shape *shape = weights_shape(w);
    if (shape->moe_inner % conf->n_shards)
        return err_set(err, E_UNSUPPORTED,
                       "moe_intermediate_size %d does not divide into %d shards", shape->moe_inner,
                       conf->n_shards);
    StoreCheckpoint *s = xcalloc(1, sizeof *s);
    bool *mine = NULL;
    s->conf = conf;
    s->shape = *shape;
    s->seen = xcalloc((size_t)shape->n_experts, sizeof *s->seen);
    int rc = open_device(s, err);
    if (rc == 0)
        rc = store_decide_held(conf->device, shape, &mine, err);
    if (rc == 0)
        rc = load_all(s, w, mine, err);
    if (rc) {
        free(mine);
        store_checkpoint_close(s);
        return rc;
    }
    *held = mine;
    *out = s;
    return 0;
}

void store_checkpoint_close(StoreCheckpoint *s) {
    if (!s)
        return;
    for (int l = 0; l < SHAPE_MAX_LAYERS; l++)
        if (s->layer[l])
            s->ops->experts_free(s->dev, s->layer[l]);
    if (s->ops)
        s->ops->close(&s->dev, 1);
    free(s->seen);
    free(s);
}

const Ops *store_checkpoint_ops(const StoreCheckpoint *s) {
    return s->ops;
}

uint64_t store_checkpoint_bytes(const StoreCheckpoint *s) {
    return s->bytes;
}

/* The distinct experts of a call and what their slices weigh. */
static StoreWork weigh(StoreCheckpoint *s, int layer, const int32_t *id, int n) {
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

StoreWork store_checkpoint_compute(StoreCheckpoint *s, int layer, int n, int k, const float *x,
                                   const int32_t *id, const float *weight, float *y) {
    int hidden = s->shape.hidden;
    CHECK(s->layer[layer]);
    memset(y, 0, (size_t)n * (size_t)hidden * sizeof *y);
    Tensor ty = {y, DT_F32, n, hidden, hidden, true};
    Tensor tx = {(void *)x, DT_F32, n, hidden, hidden, true};
    Tensor tid = {(void *)id, DT_I32, n, k, k, true};
    Tensor tw = {(void *)weight, DT_F32, n, k, k, true};
    s->ops->experts(s->dev, ty, tx, tid, tw, s->layer[layer]);
    return weigh(s, layer, id, n * k);
}
