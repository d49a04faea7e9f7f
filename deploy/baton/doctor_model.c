/* See doctor_model.h. */
#include "deploy/baton/doctor_model.h"

#include <math.h>

void model_glm52(Shape *out) {
    *out = (Shape){.n_layers = 78,
                   .n_mtp = 1,
                   .hidden = 6144,
                   .vocab = 154880,
                   .max_positions = 1048576,
                   .n_heads = 64,
                   .q_lora = 2048,
                   .kv_lora = 512,
                   .nope = 192,
                   .rope = 64,
                   .v_dim = 256,
                   .dense_inner = 12288,
                   .moe_inner = 2048,
                   .n_experts = 256,
                   .n_active = 8,
                   .n_shared = 1,
                   .index_heads = 32,
                   .index_dim = 128,
                   .index_topk = 2048};
    for (int l = 0; l < out->n_layers; l++) {
        out->layer_dense[l] = l < 3;
        /* The first three layers own an indexer, then every fourth. */
        out->layer_has_index[l] = l < 3 || (l >= 6 && (l - 2) % 4 == 0);
        out->n_index_layers += out->layer_has_index[l];
    }
}

int model_moe_layers(const Shape *s) {
    int n = 0;
    for (int l = 0; l < s->n_layers; l++)
        n += !s->layer_dense[l];
    return n;
}

double model_expert_weights(const Shape *s) {
    return 3.0 * s->hidden * s->moe_inner;
}

/* Weights that have the stated bits, and those that always have 16. */
static double rest_weights(const Shape *s, double *wide) {
    double h = s->hidden, heads = s->n_heads, moe = model_moe_layers(s);
    double attention = h * s->q_lora + (double)s->q_lora * heads * (s->nope + s->rope) +
                       h * (s->kv_lora + s->rope) + s->kv_lora * heads * (s->nope + s->v_dim) +
                       heads * s->v_dim * h;
    double index =
        (double)s->q_lora * s->index_heads * s->index_dim + h * s->index_dim + h * s->index_heads;
    double dense = 3 * h * s->dense_inner * (s->n_layers - moe),
           shared = model_expert_weights(s) * s->n_shared * moe;
    *wide = h * s->vocab + h * s->n_experts * moe;
    return attention * s->n_layers + index * s->n_index_layers + dense + shared;
}

double model_rest_bytes(const Shape *s, double bits) {
    double wide, n = rest_weights(s, &wide);
    return n * bits / 8 + wide * 2;
}

double model_rest_held_bytes(const Shape *s, double bits) {
    return model_rest_bytes(s, bits) + 2.0 * s->hidden * s->vocab;
}

double model_distinct_experts(const Shape *s, double n) {
    return s->n_experts * (1 - pow(1 - (double)s->n_active / s->n_experts, n));
}

KvLayout model_kv_layout(const Shape *s, Dtype dtype) {
    return (KvLayout){.dtype = dtype,
                      .n_slots = s->n_layers,
                      .n_index = s->n_index_layers,
                      .kv_lora = s->kv_lora,
                      .rope = s->rope,
                      .index_dim = s->index_dim};
}

double model_kv_token_bytes(const Shape *s, Dtype dtype) {
    KvLayout l = model_kv_layout(s, dtype);
    return (double)kv_page_total_bytes(&l) / KV_PAGE_TOKENS;
}

double model_kv_read_bytes(const Shape *s, Dtype dtype, double context) {
    KvLayout l = model_kv_layout(s, dtype);
    double rows = context < s->index_topk ? context : s->index_topk;
    return rows * (double)kv_latent_row_bytes(&l) * s->n_layers +
           context * (double)kv_index_page_bytes(&l) / KV_PAGE_TOKENS * s->n_index_layers;
}
