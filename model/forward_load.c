/* Finds each tensor of the model in a checkpoint, slices it for one rank and hands it to the
 * device. Runs on the rank's thread, at start; for a change of placement also between steps. */
#include "model/forward_int.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_MAX_LEN = 200 };

typedef struct Loader {
    Forward *f;
    const Weights *w;
    Err *err;
} Loader;

/* How a matrix is shared among ranks. */
typedef enum Cut { WHOLE, BY_ROWS, BY_COLS } Cut;

static int load_mat(Loader *l, const char *name, int rows, int cols, Cut cut, Mat **out) {
    const ForwardConf *c = &l->f->conf;
    MatView v;
    int rc = weights_matrix(l->w, name, rows, cols, &v, l->err);
    if (rc)
        return rc;
    if (cut == BY_ROWS)
        v = mat_rows(&v, rows / c->n_ranks * c->rank, rows / c->n_ranks);
    if (cut == BY_COLS)
        v = mat_cols(&v, cols / c->n_ranks * c->rank, cols / c->n_ranks);
    rc = l->f->ops->mat_load(l->f->dev, &v, out, l->err);
    return rc ? err_wrap(l->err, "%s", name) : 0;
}

static int load_vec(Loader *l, const char *name, int n, Tensor *out) {
    float *v = xmalloc((size_t)n * sizeof *v);
    int rc = weights_vector(l->w, name, n, v, l->err);
    if (rc == 0)
        rc = l->f->ops->tensor_new(l->f->dev, DT_F32, 1, n, out, l->err);
    if (rc == 0)
        l->f->ops->upload(l->f->dev, out, v);
    free(v);
    return rc;
}

/* "model.layers.3." + rest */
static const char *layer_name(char *buf, int layer, const char *rest) {
    snprintf(buf, NAME_MAX_LEN, "model.layers.%d.%s", layer, rest);
    return buf;
}

static int load_layer_mat(Loader *l, int layer, const char *rest, int rows, int cols, Cut cut,
                          Mat **out) {
    char name[NAME_MAX_LEN];
    return load_mat(l, layer_name(name, layer, rest), rows, cols, cut, out);
}

static int load_layer_vec(Loader *l, int layer, const char *rest, int n, Tensor *out) {
    char name[NAME_MAX_LEN];
    return load_vec(l, layer_name(name, layer, rest), n, out);
}

/* The first failing step ends a chain of loads. */
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        int try_rc = (expr);                                                                       \
        if (try_rc)                                                                                \
            return try_rc;                                                                         \
    } while (0)

static int load_attn(Loader *l, int i, Attn *a) {
    const Shape *s = &l->f->shape;
    int qk = s->nope + s->rope;
    TRY(load_layer_mat(l, i, "self_attn.q_a_proj", s->q_lora, s->hidden, WHOLE, &a->q_a));
    TRY(load_layer_vec(l, i, "self_attn.q_a_layernorm.weight", s->q_lora, &a->q_a_norm));
    TRY(load_layer_mat(l, i, "self_attn.q_b_proj", s->n_heads * qk, s->q_lora, BY_ROWS, &a->q_b));
    TRY(load_layer_mat(l, i, "self_attn.kv_a_proj_with_mqa", s->kv_lora + s->rope, s->hidden, WHOLE,
                       &a->kv_a));
    TRY(load_layer_vec(l, i, "self_attn.kv_a_layernorm.weight", s->kv_lora, &a->kv_a_norm));
    TRY(load_layer_mat(l, i, "self_attn.kv_b_proj", s->n_heads * (s->nope + s->v_dim), s->kv_lora,
                       BY_ROWS, &a->kv_b));
    TRY(load_layer_mat(l, i, "self_attn.o_proj", s->hidden, s->n_heads * s->v_dim, BY_COLS, &a->o));
    if (!s->layer_has_index[i])
        return 0;
    TRY(load_layer_mat(l, i, "self_attn.indexer.wq_b", s->index_heads * s->index_dim, s->q_lora,
                       WHOLE, &a->wq_b));
    TRY(load_layer_mat(l, i, "self_attn.indexer.wk", s->index_dim, s->hidden, WHOLE, &a->wk));
    TRY(load_layer_mat(l, i, "self_attn.indexer.weights_proj", s->index_heads, s->hidden, WHOLE,
                       &a->w_proj));
    TRY(load_layer_vec(l, i, "self_attn.indexer.k_norm.weight", s->index_dim, &a->k_norm_w));
    return load_layer_vec(l, i, "self_attn.indexer.k_norm.bias", s->index_dim, &a->k_norm_b);
}

static int load_mlp(Loader *l, int i, const char *prefix, int inner, Mlp *m) {
    int hidden = l->f->shape.hidden, n_ranks = l->f->conf.n_ranks;
    char rest[64];
    if (inner / n_ranks > l->f->max_inner)
        l->f->max_inner = inner / n_ranks;
    snprintf(rest, sizeof rest, "%sgate_proj", prefix);
    TRY(load_layer_mat(l, i, rest, inner, hidden, BY_ROWS, &m->gate));
    snprintf(rest, sizeof rest, "%sup_proj", prefix);
    TRY(load_layer_mat(l, i, rest, inner, hidden, BY_ROWS, &m->up));
    snprintf(rest, sizeof rest, "%sdown_proj", prefix);
    return load_layer_mat(l, i, rest, hidden, inner, BY_COLS, &m->down);
}

/* gate, up and down of one expert, cut for this rank */
static int expert_views(Loader *l, int layer, int expert, MatView v[3]) {
    static const char *const part[3] = {"gate_proj", "up_proj", "down_proj"};
    const Shape *s = &l->f->shape;
    const ForwardConf *c = &l->f->conf;
    int share = s->moe_inner / c->n_ranks;
    for (int p = 0; p < 3; p++) {
        char name[NAME_MAX_LEN];
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s", layer, expert, part[p]);
        bool down = p == 2;
        TRY(weights_matrix(l->w, name, down ? s->hidden : s->moe_inner,
                           down ? s->moe_inner : s->hidden, &v[p], l->err));
        if (down && v[p].dtype == DT_NVFP4 && share % NVFP4_GROUP)
            return err_set(l->err, E_UNSUPPORTED,
                           "%s: %d columns per rank do not fill groups of %d", name, share,
                           NVFP4_GROUP);
        v[p] = down ? mat_cols(&v[p], share * c->rank, share)
                    : mat_rows(&v[p], share * c->rank, share);
    }
    return 0;
}

/* The experts of layer i that resident[n_experts] names; NULL: all. */
static int load_experts(Loader *l, int i, const bool *resident, Experts **out) {
    Forward *f = l->f;
    int n = f->shape.n_experts, rc = 0;
    MatView *v = xcalloc((size_t)n * 3, sizeof *v); /* all gates, all ups, all downs */
    for (int e = 0; e < n && rc == 0; e++) {
        MatView one[3];
        if (resident && !resident[e])
            continue;
        rc = expert_views(l, i, e, one);
        for (int p = 0; p < 3 && rc == 0; p++)
            v[p * n + e] = one[p];
    }
    ExpertsView view = {n, v, v + n, v + 2 * n};
    if (rc == 0)
        rc = f->ops->experts_load(f->dev, &view, out, l->err);
    free(v);
    return rc;
}

static bool has_remote(const Shape *s, const bool *resident) {
    return memchr(resident, false, (size_t)s->n_experts * sizeof *resident) != NULL;
}

static bool *copy_resident(const Shape *s, const bool *resident) {
    size_t bytes = (size_t)s->n_experts * sizeof *resident;
    return memcpy(xmalloc(bytes), resident, bytes);
}

static int load_layer(Loader *l, int i) {
    Forward *f = l->f;
    const Shape *s = &f->shape;
    Layer *layer = &f->layer[i];
    TRY(load_layer_vec(l, i, "input_layernorm.weight", s->hidden, &layer->in_norm));
    TRY(load_layer_vec(l, i, "post_attention_layernorm.weight", s->hidden, &layer->post_norm));
    TRY(load_attn(l, i, &layer->attn));
    layer->has_mlp = s->layer_dense[i] || s->n_shared > 0;
    if (s->layer_dense[i])
        return load_mlp(l, i, "mlp.", s->dense_inner, &layer->mlp);
    if (layer->has_mlp)
        TRY(load_mlp(l, i, "mlp.shared_experts.", s->n_shared * s->moe_inner, &layer->mlp));
    TRY(load_layer_mat(l, i, "mlp.gate", s->n_experts, s->hidden, WHOLE, &layer->router));
    TRY(load_layer_vec(l, i, "mlp.gate.e_score_correction_bias", s->n_experts,
                       &layer->router_bias));
    if (f->conf.resident) {
        layer->resident = copy_resident(s, f->conf.resident + (size_t)i * (size_t)s->n_experts);
        f->any_remote |= has_remote(s, layer->resident);
    }
    return load_experts(l, i, layer->resident, &layer->experts);
}

static int load_mtp(Loader *l) {
    const Shape *s = &l->f->shape;
    MtpWeights *m = &l->f->mtp;
    int i = s->n_layers;
    TRY(load_layer_mat(l, i, "eh_proj", s->hidden, 2 * s->hidden, WHOLE, &m->eh_proj));
    TRY(load_layer_vec(l, i, "enorm.weight", s->hidden, &m->enorm));
    TRY(load_layer_vec(l, i, "hnorm.weight", s->hidden, &m->hnorm));
    return load_layer_vec(l, i, "shared_head.norm.weight", s->hidden, &m->head_norm);
}

int forward_load_weights(Forward *f, const Weights *w, Err *err) {
    const Shape *s = &f->shape;
    Loader l = {f, w, err};
    if (f->conf.mtp && !s->n_mtp)
        return err_set(err, E_UNSUPPORTED,
                       "the checkpoint has no MTP layer (num_nextn_predict_layers is 0)");
    TRY(load_mat(&l, "model.embed_tokens", s->vocab, s->hidden, WHOLE, &f->embed));
    TRY(load_mat(&l, "lm_head", s->vocab, s->hidden, BY_ROWS, &f->head));
    TRY(load_vec(&l, "model.norm.weight", s->hidden, &f->final_norm));
    for (int i = 0; i < f->n_layers; i++)
        TRY(load_layer(&l, i));
    return f->conf.mtp ? load_mtp(&l) : 0;
}

int forward_place_load(Forward *f, int layer, const bool *resident, Err *err) {
    Loader l = {f, f->weights, err};
    CHECK(layer < f->n_layers && !f->shape.layer_dense[layer] && !f->next.resident);
    if (has_remote(&f->shape, resident) && !f->conf.port)
        return err_set(err, E_INVAL, "experts of layer %d cannot leave: no expertd", layer);
    int rc = load_experts(&l, layer, resident, &f->next.experts);
    if (rc)
        return rc;
    f->next.layer = layer;
    f->next.resident = copy_resident(&f->shape, resident);
    return 0;
}

void forward_place_swap(Forward *f, bool take) {
    NextPlace old = f->next;
    if (!old.resident)
        return;
    if (take) {
        Layer *l = &f->layer[old.layer];
        old = (NextPlace){old.layer, l->experts, l->resident};
        l->experts = f->next.experts;
        l->resident = f->next.resident;
    }
    f->ops->experts_free(f->dev, old.experts);
    free(old.resident);
    f->next = (NextPlace){0};
}

static void free_mats(Forward *f, Mat **m, int n) {
    for (int i = 0; i < n; i++)
        if (m[i])
            f->ops->mat_free(f->dev, m[i]);
}

static void free_vecs(Forward *f, Tensor *t, int n) {
    for (int i = 0; i < n; i++)
        if (t[i].at)
            f->ops->tensor_free(f->dev, &t[i]);
}

void forward_free_weights(Forward *f) {
    for (int i = 0; i < f->n_layers; i++) {
        Layer *y = &f->layer[i];
        Attn *a = &y->attn;
        free_mats(f,
                  (Mat *[]){a->q_a, a->q_b, a->kv_a, a->kv_b, a->o, a->wq_b, a->wk, a->w_proj,
                            y->mlp.gate, y->mlp.up, y->mlp.down, y->router},
                  12);
        free_vecs(f,
                  (Tensor[]){a->q_a_norm, a->kv_a_norm, a->k_norm_w, a->k_norm_b, y->in_norm,
                             y->post_norm, y->router_bias},
                  7);
        if (y->experts)
            f->ops->experts_free(f->dev, y->experts);
        free(y->resident);
    }
    free_mats(f, (Mat *[]){f->embed, f->head, f->mtp.eh_proj}, 3);
    free_vecs(f, (Tensor[]){f->final_norm, f->mtp.enorm, f->mtp.hnorm, f->mtp.head_norm}, 4);
}
