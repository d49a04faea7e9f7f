/* See store.h. */
#include "expertd/store.h"

#include "base/topo.h"
#include "expertd/store_checkpoint.h"
#include "expertd/store_files.h"
#include "expertd/store_int.h"
#include "model/expert_file.h"
#include "model/place.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One of the two holds the experts. */
struct Store {
    StoreConf conf;
    Shape shape;
    StoreCheckpoint *checkpoint;
    StoreFiles *files;
    uint64_t fingerprint, model_id;
    bool *held; /* [layers, n_experts] */
    int n_held;
    char format[32];
};

static int n_layers(const Store *s) {
    return s->shape.n_layers + s->shape.n_mtp;
}

/* ---- opening ---- */

int store_decide_held(const char *device, const Shape *s, bool **held, Err *err) {
    int n = (s->n_layers + s->n_mtp) * s->n_experts, left = 0;
    bool *h;
    int rc = place_parse(device, s, &h, err);
    for (int i = 0; i < n && rc == 0; i++)
        left += h[i] = !h[i];
    if (rc == 0 && left == 0) {
        free(h);
        rc = err_set(err, E_INVAL,
                     "the callers' devices hold every expert (device = %s): nothing is left to "
                     "serve",
                     device);
    }
    if (rc == 0)
        *held = h;
    return rc;
}

static int open_checkpoint(Store *s, const Weights *w, Err *err) {
    s->shape = *weights_shape(w);
    s->fingerprint = weights_fingerprint(w);
    s->model_id = weights_id(w);
    snprintf(s->format, sizeof s->format, "checkpoint");
    return store_checkpoint_open(&s->checkpoint, w, &s->conf, &s->held, err);
}

/* What a daemon needs to know of the model; the rest of the shape stays 0. */
static int open_files(Store *s, Err *err) {
    int rc = store_files_open(&s->files, &s->conf, &s->held, err);
    if (rc)
        return rc;
    const FilesHead *h = store_files_head(s->files);
    s->shape.n_layers = h->n_layers;
    s->shape.n_experts = h->n_experts;
    s->shape.n_active = h->n_active;
    s->shape.hidden = h->geom.hidden;
    s->shape.moe_inner = h->geom.inner;
    for (int l = 0; l < h->first_layer; l++)
        s->shape.layer_dense[l] = true;
    s->model_id = h->model_id;
    expert_file_format(s->format, sizeof s->format, &h->geom);
    return 0;
}

int store_open(Store **out, const Weights *w, const StoreConf *conf, Err *err) {
    if (conf->n_shards < 1 || conf->shard < 0 || conf->shard >= conf->n_shards)
        return err_set(err, E_INVAL, "shard %d of %d: expected 0 to count - 1", conf->shard,
                       conf->n_shards);
    Store *s = xcalloc(1, sizeof *s);
    s->conf = *conf;
    int rc = conf->files ? open_files(s, err) : open_checkpoint(s, w, err);
    if (rc) {
        store_close(s);
        return rc;
    }
    for (int i = 0; i < n_layers(s) * s->shape.n_experts; i++)
        s->n_held += s->held[i];
    *out = s;
    return 0;
}

void store_close(Store *s) {
    if (!s)
        return;
    store_checkpoint_close(s->checkpoint);
    store_files_close(s->files);
    free(s->held);
    free(s);
}

/* ---- facts ---- */

const Shape *store_shape(const Store *s) {
    return &s->shape;
}

uint64_t store_fingerprint(const Store *s) {
    return s->fingerprint;
}

uint64_t store_model_id(const Store *s) {
    return s->model_id;
}

uint64_t store_hash(const Store *s) {
    return s->files ? store_files_head(s->files)->hash : 0;
}

const char *store_format(const Store *s) {
    return s->format;
}

const char *store_kernel(const Store *s) {
    return s->files ? iq_isa_name(store_files_isa(s->files)) : store_ops(s)->name;
}

const Ops *store_ops(const Store *s) {
    return s->checkpoint ? store_checkpoint_ops(s->checkpoint) : NULL;
}

int store_n_experts(const Store *s) {
    return s->n_held;
}

uint64_t store_weight_bytes(const Store *s) {
    return s->files ? store_files_bytes(s->files) : store_checkpoint_bytes(s->checkpoint);
}

uint64_t store_work_bytes(const Store *s) {
    return s->files ? store_files_work_bytes(s->files) : 0;
}

StoreFiles *store_files(Store *s) {
    return s->files;
}

const NodeMem *store_memory(const Store *s) {
    return s->files ? store_files_memory(s->files) : NULL;
}

bool store_holds(const Store *s, int layer, int expert) {
    return layer >= 0 && layer < n_layers(s) && expert >= 0 && expert < s->shape.n_experts &&
           s->held[layer * s->shape.n_experts + expert];
}

/* ---- work ---- */

int store_selftest(Store *s, Err *err) {
    return store_files_selftest(s->files, err);
}

int store_pin_caller(const Store *s, Err *err) {
    Topo *topo;
    if (!s->files || !s->conf.pin)
        return 0;
    int rc = topo_open(&topo, err);
    if (rc)
        return rc;
    rc = topo_pin_core(topo, s->conf.node, 0, err);
    topo_close(topo);
    return rc;
}

StoreWork store_compute(Store *s, int layer, int n, int k, const float *x, const int32_t *id,
                        const float *weight, float *y, void (*between)(void *arg), void *arg) {
    CHECK(n >= 1 && n <= s->conf.max_rows && layer >= 0 && layer < n_layers(s));
    return s->files ? store_files_compute(s->files, layer, n, k, x, id, weight, y, between, arg)
                    : store_checkpoint_compute(s->checkpoint, layer, n, k, x, id, weight, y);
}
