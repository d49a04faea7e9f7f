/* The order of operations of GLM-5, once, for every device and for prefill and decode. Each rank
 * runs it on a thread of its own; lines marked (all) are where ranks exchange data. n is the number
 * of tokens of the step, H the heads of this rank. */
#include "model/forward_int.h"

#include <math.h>
#include <stdlib.h>

/* The eps of the indexer's LayerNorm is fixed by the architecture; every other norm uses the
 * config's. */
static const float INDEX_NORM_EPS = 1e-6f;

/* Query and key of the lightning indexer, and the positions that this layer and the sharing layers
 * after it attend to. */
static void index_key(Forward *f, const Attn *a, Tensor h, Tensor key) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    op->linear(f->dev, key, h, a->wk);
    op->layer_norm(f->dev, key, key, a->k_norm_w, a->k_norm_b, INDEX_NORM_EPS);
    op->rope(f->dev, key, 1, s->index_dim, 0, s->rope, s->rope_theta);
}

static void index_positions(Forward *f, const Attn *a, int slot, Tensor h, Tensor q_r, int n) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    Tensor iq = tensor_head(f->work.iq, n), iw = tensor_head(f->work.iw, n);
    op->linear(f->dev, iq, q_r, a->wq_b);
    op->rope(f->dev, iq, s->index_heads, s->index_dim, 0, s->rope, s->rope_theta);
    op->linear(f->dev, iw, h, a->w_proj);
    op->index_select(f->dev, tensor_head(f->work.topk, n), iq, iw, s->index_heads,
                     slot); /* (all) */
}

/* y[n, hidden] = attention of h[n, hidden], this rank's heads only: the caller adds up the ranks.
 */
static void attention(Forward *f, int layer, Tensor h, Tensor y, int n, const ForwardProbe *probe) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    const Attn *a = &f->layer[layer].attn;
    Work *w = &f->work;
    int qk = s->nope + s->rope, slot = s->index_slot[layer];
    Tensor q_a = tensor_head(w->q_a, n), q = tensor_head(w->q, n), kv = tensor_head(w->kv, n),
           key = tensor_head(w->key, n);
    Tensor latent = tensor_cols(kv, 0, s->kv_lora), topk = tensor_head(w->topk, n);
    Tensor ql = tensor_head(w->ql, n), ol = tensor_head(w->ol, n), o = tensor_head(w->o, n);

    op->linear(f->dev, q_a, h, a->q_a);
    op->rms_norm(f->dev, q_a, q_a, a->q_a_norm, s->eps);
    op->linear(f->dev, q, q_a, a->q_b);
    op->rope(f->dev, q, f->heads, qk, s->nope, s->rope, s->rope_theta);

    op->linear(f->dev, kv, h, a->kv_a);
    op->rms_norm(f->dev, latent, latent, a->kv_a_norm, s->eps);
    op->rope(f->dev, kv, 1, s->kv_lora + s->rope, s->kv_lora, s->rope, s->rope_theta);
    if (a->wk)
        index_key(f, a, h, key);
    op->kv_write(f->dev, layer, kv, a->wk ? slot : -1, key); /* (all) */
    if (probe)
        op->mark(f->dev, layer & 1);

    if (a->wk)
        index_positions(f, a, slot, h, q_a, n);
    if (probe && a->wk)
        probe->on(probe->arg, FORWARD_TOPK, layer, &topk);

    op->mla_absorb(f->dev, ql, q, a->kv_b, f->heads, s->nope, s->v_dim);
    op->mla_attend(f->dev, ol, ql, topk, f->heads, layer, 1.0f / sqrtf((float)qk));
    op->mla_expand(f->dev, o, ol, a->kv_b, f->heads, s->nope, s->v_dim);
    op->linear(f->dev, y, o, a->o);
}

/* y = down . (silu(gate . h) * (up . h)), this rank's part of the inner dimension. */
static void gated_mlp(Forward *f, const Mlp *m, int inner, Tensor h, Tensor y, int n) {
    const Ops *op = f->ops;
    Tensor gate = tensor_head(f->work.gate, n), up = tensor_head(f->work.up, n);
    gate.cols = up.cols = inner;
    op->linear(f->dev, gate, h, m->gate);
    op->linear(f->dev, up, h, m->up);
    op->silu_mul(f->dev, gate, gate, up);
    op->linear(f->dev, y, gate, m->down);
}

/* Asks for the experts that no device holds; the answer is collected after the local ones are
 * computed. */
static int remote_post(Forward *f, int layer, Tensor h, Tensor id, Tensor weight, Err *err) {
    const Shape *s = &f->shape;
    const bool *resident = f->layer[layer].resident;
    int n = h.rows * s->n_active, n_remote = 0;
    f->ops->download(f->dev, &h, f->host_x);
    f->ops->download(f->dev, &id, f->host_id);
    f->ops->download(f->dev, &weight, f->host_weight);
    if (f->conf.counts)
        route_count_add(f->conf.counts, layer, f->host_id, n);
    for (int i = 0; i < n; i++) {
        bool remote = f->host_id[i] >= 0 && !resident[f->host_id[i]];
        f->host_id[i] = remote ? f->host_id[i] : -1;
        n_remote += remote;
    }
    if (f->conf.counts)
        route_count_pairs(f->conf.counts, n, n_remote);
    return f->port.post(f->port.arg, layer, h.rows, s->n_active, f->host_x, f->host_id,
                        f->host_weight, err);
}

/* Counts for a layer that has no remote experts. */
static void count_local(Forward *f, int layer, Tensor id) {
    RouteCount *c = f->conf.counts;
    int n = id.rows * f->shape.n_active;
    if (f->conf.count_all) {
        f->ops->download(f->dev, &id, f->host_id);
        route_count_add(c, layer, f->host_id, n);
    }
    route_count_pairs(c, n, 0);
}

static int remote_wait(Forward *f, Tensor y, Err *err) {
    f->ops->download(f->dev, &y, f->host_y);
    int rc = f->port.wait(f->port.arg, f->host_y, err);
    if (rc == 0)
        f->ops->upload(f->dev, &y, f->host_y);
    return rc;
}

static bool layer_is_remote(const Forward *f, int layer) {
    const Layer *l = &f->layer[layer];
    if (f->conf.rank != 0 || !l->resident)
        return false;
    for (int e = 0; e < f->shape.n_experts; e++)
        if (!l->resident[e])
            return true;
    return false;
}

/* y = shared experts + routed experts of h, this rank's part. */
static int experts(Forward *f, int layer, Tensor h, Tensor y, int n, const ForwardProbe *probe,
                   Err *err) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    const Layer *l = &f->layer[layer];
    Tensor score = tensor_head(f->work.score, n), id = tensor_head(f->work.id, n),
           weight = tensor_head(f->work.weight, n);
    bool remote = layer_is_remote(f, layer);
    int rc = 0;

    op->linear(f->dev, score, h, l->router);
    op->moe_route(f->dev, id, weight, score, l->router_bias, s->norm_topk, s->routed_scale);
    if (probe) {
        probe->on(probe->arg, FORWARD_ROUTE, layer, &id);
        probe->on(probe->arg, FORWARD_WEIGHT, layer, &weight);
    }
    if (remote)
        rc = remote_post(f, layer, h, id, weight, err);
    else if (f->conf.counts)
        count_local(f, layer, id);
    if (l->has_mlp)
        gated_mlp(f, &l->mlp, s->n_shared * s->moe_inner / f->conf.n_ranks, h, y, n);
    else
        op->clear(f->dev, y);
    op->experts(f->dev, y, h, id, weight, l->experts);
    if (remote && rc == 0)
        rc = remote_wait(f, y, err);
    return rc;
}

int forward_layer(Forward *f, int layer, int n, const ForwardProbe *probe, Err *err) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    const Layer *l = &f->layer[layer];
    Tensor x = tensor_head(f->work.x, n), h = tensor_head(f->work.h, n),
           y = tensor_head(f->work.y, n);
    int rc = 0;

    op->rms_norm(f->dev, h, x, l->in_norm, s->eps);
    attention(f, layer, h, y, n, probe);
    op->all_reduce(f->dev, y); /* (all) */
    op->add(f->dev, x, y);

    op->rms_norm(f->dev, h, x, l->post_norm, s->eps);
    if (s->layer_dense[layer])
        gated_mlp(f, &l->mlp, s->dense_inner / f->conf.n_ranks, h, y, n);
    else
        rc = experts(f, layer, h, y, n, probe, err);
    op->all_reduce(f->dev, y); /* (all) */
    op->add(f->dev, x, y);
    if (probe)
        probe->on(probe->arg, FORWARD_HIDDEN, layer, &x);
    return rc;
}

void forward_head(Forward *f, Tensor hidden, const int32_t *logit_row, int n_logits,
                  Tensor *logits) {
    const Ops *op = f->ops;
    Tensor rows = tensor_head(f->work.rows, n_logits), part = tensor_head(f->work.part, n_logits);
    *logits = tensor_head(f->work.logits, n_logits);
    op->gather_rows(f->dev, rows, hidden, logit_row, n_logits);
    op->linear(f->dev, part, rows, f->head);
    op->gather_cols(f->dev, *logits, part); /* (all) */
}

/* The device is let run on while this waits for a layer's KV: it has the next layer to do. */
static void show_kv(Forward *f, int layer, const ForwardProbe *probe) {
    if (!probe || layer < 0)
        return;
    f->ops->reach(f->dev, layer & 1);
    probe->on(probe->arg, FORWARD_KV, layer, NULL);
}

int forward_run(Forward *f, const OpsBatch *batch, const int32_t *logit_row, int n_logits,
                const ForwardProbe *probe, Tensor *logits, Err *err) {
    const Ops *op = f->ops;
    int n = batch->n_tok, rc = 0;
    CHECK(n >= 1 && n <= f->conf.max_rows);
    CHECK(n_logits >= 0 && n_logits <= f->conf.max_logits);
    Tensor x = tensor_head(f->work.x, n), final = tensor_head(f->work.final, n);

    if (f->conf.counts)
        route_count_tokens(f->conf.counts, n);
    op->batch_set(f->dev, batch);
    op->embed(f->dev, x, f->embed);
    for (int i = 0; i < f->shape.n_layers; i++) {
        int layer_rc = forward_layer(f, i, n, probe, rc ? NULL : err);
        rc = rc ? rc : layer_rc;
        show_kv(f, i - 1, probe);
    }
    show_kv(f, f->shape.n_layers - 1, probe);
    op->rms_norm(f->dev, final, x, f->final_norm, f->shape.eps);
    f->n_final = n;
    if (probe)
        probe->on(probe->arg, FORWARD_FINAL, f->shape.n_layers, &final);
    if (n_logits > 0)
        forward_head(f, final, logit_row, n_logits, logits);
    return rc;
}

Tensor forward_final(const Forward *f) {
    return tensor_head(f->work.final, f->n_final);
}
