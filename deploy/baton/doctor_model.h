/* What a model's shape costs: bytes of its parts, per token and in all. Pure but for reading
 * config.json. */
#pragma once

#include "kernels/kv_layout.h"
#include "model/shape.h"

/* GLM-5.2 itself, for hosts where no checkpoint lies. */
void model_glm52(Shape *out);

int model_moe_layers(const Shape *s); /* without MTP */
double model_expert_weights(const Shape *s);
/* Bytes of everything but routed experts: read for each token, and held (with the embedding). bits
 * of the matrices; head, router and embedding have 16. */
double model_rest_bytes(const Shape *s, double bits);
double model_rest_held_bytes(const Shape *s, double bits);
/* Distinct routed experts of one layer that n independent tokens choose. */
double model_distinct_experts(const Shape *s, double n);
/* KV of one token over all layers as stored, and what one token at context reads. */
KvLayout model_kv_layout(const Shape *s, Dtype dtype);
double model_kv_token_bytes(const Shape *s, Dtype dtype);
double model_kv_read_bytes(const Shape *s, Dtype dtype, double context);
