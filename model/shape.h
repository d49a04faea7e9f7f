/* The model's shape: every field of config.json that matters, checked once at start.
 *
 * Covers GLM-5, 5.1, 5.2 and models of the same architecture. Whatever the code cannot do is
 * refused with the field's name and what was expected. Pure; any thread. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHAPE_MAX_LAYERS = 128, SHAPE_MAX_EOS = 8, SHAPE_MAX_TOPK_EXPERTS = 16 };

typedef struct Shape {
    int n_layers; /* decoder layers, without MTP */
    int n_mtp;    /* MTP layers stored after them: 0 or 1 */
    int hidden;
    int vocab; /* rows of the embedding, padding rows included */
    int max_positions;
    float eps;        /* rms_norm_eps, also for the latent norms */
    float rope_theta; /* interleaved pairs, no scaling */

    int n_heads;
    int q_lora, kv_lora;
    int nope, rope, v_dim; /* per head: query/key dims without and with rotation, value dims */

    int dense_inner; /* intermediate size of dense layers */
    int moe_inner;   /* of one expert */
    int n_experts, n_active, n_shared;
    float routed_scale;
    bool norm_topk;

    int index_heads, index_dim, index_topk;
    bool layer_dense[SHAPE_MAX_LAYERS];     /* [n_layers + n_mtp] dense MLP instead of MoE */
    bool layer_has_index[SHAPE_MAX_LAYERS]; /* [n_layers + n_mtp] owns an indexer; the others reuse
                                               the latest one before them */
    int index_slot[SHAPE_MAX_LAYERS]; /* dense numbering of the layers that own one, -1 elsewhere */
    int n_index_layers;               /* of the n_layers, without MTP */

    int eos[SHAPE_MAX_EOS];
    int n_eos;
} Shape;

/* Reads config.json. */
int shape_load(Shape *out, const char *path, Err *err);
/* The same from memory; json need not be NUL-terminated. */
int shape_parse(Shape *out, const char *json, size_t len, Err *err);

/* Whether tp ranks can share the model: heads, inner sizes, vocabulary; E_UNSUPPORTED names the
 * dimension and the value. */
int shape_check_tp(const Shape *s, int tp, Err *err);
