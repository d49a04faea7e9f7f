/* See weights_id.h. */
#include "model/weights_id.h"

#include <xxhash.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUTER_ROWS = 8 }; /* of each layer; all of them would be hundreds of megabytes to read */

typedef struct Id {
    const Weights *w;
    XXH3_state_t *hash;
    float *buf; /* wide enough for any vector and router row */
} Id;

/* A vector that is not there leaves its name out of the hash. */
static void add_vector(Id *d, const char *name, int n) {
    if (n < 1 || weights_vector(d->w, name, n, d->buf, NULL))
        return;
    XXH3_64bits_update(d->hash, name, strlen(name) + 1);
    XXH3_64bits_update(d->hash, d->buf, (size_t)n * sizeof *d->buf);
}

static void add_layer(Id *d, const Shape *s, int layer) {
    const struct {
        const char *name;
        int n;
    } vector[] = {{"input_layernorm.weight", s->hidden},
                  {"post_attention_layernorm.weight", s->hidden},
                  {"self_attn.q_a_layernorm.weight", s->q_lora},
                  {"self_attn.kv_a_layernorm.weight", s->kv_lora},
                  {"mlp.gate.e_score_correction_bias", s->n_experts}};
    char name[160];
    for (size_t i = 0; i < sizeof vector / sizeof *vector; i++) {
        snprintf(name, sizeof name, "model.layers.%d.%s", layer, vector[i].name);
        add_vector(d, name, vector[i].n);
    }
    MatView router;
    snprintf(name, sizeof name, "model.layers.%d.mlp.gate", layer);
    if (s->layer_dense[layer] || weights_matrix(d->w, name, s->n_experts, s->hidden, &router, NULL))
        return;
    for (int r = 0; r < ROUTER_ROWS && r < router.rows; r++) {
        mat_row_f32(&router, r, d->buf);
        XXH3_64bits_update(d->hash, d->buf, (size_t)router.cols * sizeof *d->buf);
    }
}

uint64_t weights_id_hash(const Weights *w) {
    const Shape *s = weights_shape(w);
    const int32_t dims[] = {s->n_layers,  s->n_mtp,     s->hidden,   s->vocab,
                            s->moe_inner, s->n_experts, s->n_active, s->n_shared};
    int wide = s->hidden;
    for (size_t i = 0; i < 3; i++) {
        int n = (const int[]){s->q_lora, s->kv_lora, s->n_experts}[i];
        wide = n > wide ? n : wide;
    }
    Id d = {w, XXH3_createState(), xcalloc((size_t)wide, sizeof(float))};
    CHECK(d.hash);
    XXH3_64bits_reset(d.hash);
    XXH3_64bits_update(d.hash, dims, sizeof dims);
    for (int l = 0; l < s->n_layers + s->n_mtp; l++)
        add_layer(&d, s, l);
    add_vector(&d, "model.norm.weight", s->hidden);
    uint64_t id = XXH3_64bits_digest(d.hash);
    XXH3_freeState(d.hash);
    free(d.buf);
    return id ? id : 1;
}
