/* Opening and closing one rank of the model: shape checks, shared and private workspace. Runs on
 * the rank's thread, at start and end. */
#include "model/forward_int.h"

#include <stdlib.h>

KvLayout forward_kv_layout(const Shape *s, Dtype dtype, bool mtp) {
    bool has_mtp = mtp && s->n_mtp;
    return (KvLayout){
        .dtype = dtype,
        .n_slots = s->n_layers + (has_mtp ? 1 : 0),
        .n_index = s->n_index_layers + (has_mtp ? 1 : 0),
        .kv_lora = s->kv_lora,
        .rope = s->rope,
        .index_dim = s->index_dim,
    };
}

typedef struct Want {
    Tensor *t;
    Dtype dtype;
    int rows, cols;
} Want;

static int alloc_private(Forward *f, Err *err) {
    const Shape *s = &f->shape;
    Work *w = &f->work;
    int n = f->conf.max_rows, m = f->conf.max_logits, H = f->heads;
    const Want want[] = {
        {&w->x, DT_F32, n, s->hidden},
        {&w->h, DT_F32, n, s->hidden},
        {&w->y, DT_F32, n, s->hidden},
        {&w->q_a, DT_F32, n, s->q_lora},
        {&w->q, DT_F32, n, H * (s->nope + s->rope)},
        {&w->kv, DT_F32, n, s->kv_lora + s->rope},
        {&w->key, DT_F32, n, s->index_dim},
        {&w->iq, DT_F32, n, s->index_heads * s->index_dim},
        {&w->iw, DT_F32, n, s->index_heads},
        {&w->ql, DT_F32, n, H * (s->kv_lora + s->rope)},
        {&w->ol, DT_F32, n, H * s->kv_lora},
        {&w->o, DT_F32, n, H * s->v_dim},
        {&w->gate, DT_F32, n, f->max_inner},
        {&w->up, DT_F32, n, f->max_inner},
        {&w->score, DT_F32, n, s->n_experts},
        {&w->id, DT_I32, n, s->n_active},
        {&w->weight, DT_F32, n, s->n_active},
        {&w->final, DT_F32, n, s->hidden},
        {&w->rows, DT_F32, m, s->hidden},
        {&w->part, DT_F32, m, s->vocab / f->conf.n_ranks},
        {&w->pair, DT_F32, n, 2 * s->hidden},
        {&w->state, DT_F32, n, s->hidden},
    };
    int n_want = (int)(sizeof want / sizeof *want);
    for (int i = 0; i < n_want - (f->conf.mtp ? 0 : 2); i++) {
        int rc =
            f->ops->tensor_new(f->dev, want[i].dtype, want[i].rows, want[i].cols, want[i].t, err);
        if (rc)
            return rc;
    }
    return 0;
}

static void alloc_staging(Forward *f) {
    size_t n = (size_t)f->conf.max_rows, hidden = (size_t)f->shape.hidden,
           k = (size_t)f->shape.n_active;
    f->host_x = xmalloc(n * hidden * sizeof(float));
    f->host_y = xmalloc(n * hidden * sizeof(float));
    f->host_weight = xmalloc(n * k * sizeof(float));
    f->host_id = xmalloc(n * k * sizeof(int32_t));
}

static void free_work(Forward *f) {
    Work *w = &f->work;
    Tensor *all[] = {&w->x,     &w->h,    &w->y,    &w->q_a,    &w->q,    &w->kv,
                     &w->key,   &w->iq,   &w->iw,   &w->topk,   &w->ql,   &w->ol,
                     &w->o,     &w->gate, &w->up,   &w->score,  &w->id,   &w->weight,
                     &w->final, &w->rows, &w->part, &w->logits, &w->pair, &w->state};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->at)
            f->ops->tensor_free(f->dev, all[i]);
}

int forward_open(Forward **out, const Weights *w, const ForwardConf *conf, Err *err) {
    const Shape *s = weights_shape(w);
    int rc = shape_check_tp(s, conf->n_ranks, err);
    if (rc)
        return rc;
    Forward *f = xcalloc(1, sizeof *f);
    f->conf = *conf;
    f->shape = *s;
    f->weights = w;
    f->ops = conf->ops;
    f->dev = conf->dev;
    f->heads = s->n_heads / conf->n_ranks;
    f->n_layers = s->n_layers + (conf->mtp && s->n_mtp ? 1 : 0);
    f->layer = xcalloc((size_t)f->n_layers, sizeof *f->layer);
    if (conf->port)
        f->port = *conf->port;
    /* What ranks do together comes first, before anything that can fail on one of them alone. */
    rc = f->ops->tensor_shared(f->dev, DT_I32, conf->max_rows, s->index_topk, &f->work.topk, err);
    if (rc == 0)
        rc =
            f->ops->tensor_shared(f->dev, DT_F32, conf->max_logits, s->vocab, &f->work.logits, err);
    if (rc == 0)
        rc = forward_load_weights(f, w, err);
    if (rc == 0)
        rc = alloc_private(f, err);
    if (rc == 0 && f->any_remote && !conf->port)
        rc = err_set(err, E_INVAL,
                     "some experts are not on the device, but no expertd is configured");
    if (rc) {
        forward_close(f);
        return rc;
    }
    if (conf->rank == 0 && (conf->port || conf->counts))
        alloc_staging(f);
    *out = f;
    return 0;
}

void forward_close(Forward *f) {
    if (!f)
        return;
    forward_place_swap(f, false);
    forward_free_weights(f);
    free_work(f);
    free(f->host_x);
    free(f->host_y);
    free(f->host_weight);
    free(f->host_id);
    free(f->layer);
    free(f);
}
