/* Internal to kernels/ref: the attention part of the reference backend. */
#pragma once

#include "kernels/host.h"

/* Sum of products in double, rounded once. */
float ref_dot(const float *a, const float *b, int n);

void ref_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v);
void ref_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v);
void ref_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot);
void ref_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale);
