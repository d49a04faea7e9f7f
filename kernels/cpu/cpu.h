/* Internal to kernels/cpu: the device's private part and its operations. Each function runs on its
 * rank's thread. */
#pragma once

#include "kernels/cpu/kern.h"
#include "kernels/cpu/pool.h"
#include "kernels/host.h"

/* Working memory of each thread of the pool, at least `floats` numbers: grown at the first step
 * that needs it, then kept. */
void cpu_scratch_reserve(Dev *d, size_t floats);

static inline float *cpu_scratch(const Dev *d, int thread) {
    return d->scratch + (size_t)thread * d->scratch_len;
}

/* cpu_linear.c */
void cpu_linear(Dev *d, Tensor out, Tensor x, const Mat *w);
void cpu_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v);
void cpu_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v);
/* cpu_experts.c */
void cpu_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e);
/* cpu_attn.c */
void cpu_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale);
/* cpu_index.c */
void cpu_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot);
/* The k largest of score[n], lowest position first among equals, ascending into pos[k]; n > k.
 * bits: 2048 counters of working memory. */
void cpu_top_k(const float *score, int n, int k, uint32_t *bits, int32_t *pos);
