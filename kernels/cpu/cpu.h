/* Internal to kernels/cpu: the device's private part and its operations. Each function runs on its
 * rank's thread, which deals chunks out to the rank's pool. */
#pragma once

#include "kernels/cpu/kern.h"
#include "kernels/cpu/pool.h"
#include "kernels/host.h"

enum { CPU_CHUNK_ROWS = 16 }; /* rows of weights per chunk of a product */

/* Working memory, 64-byte aligned, grown at the first step that needs more, then kept. Contents are
 * lost when it grows. */

/* Of each thread of the pool, at least `floats` numbers. */
void cpu_scratch_reserve(Dev *d, size_t floats);
/* Of the rank, seen by all of its threads. */
float *cpu_work(Dev *d, size_t floats);

static inline float *cpu_scratch(const Dev *d, int thread) {
    return d->scratch + (size_t)thread * d->scratch_len;
}

static inline int cpu_min(int a, int b) {
    return a < b ? a : b;
}

/* Asks for memory that is read soon, into L2. */
static inline void cpu_prefetch(const void *p, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const char *)p + i, 0, 2);
}

/* Distance of dequantised rows of k numbers: whole cache lines, and not a multiple of 4096 bytes,
 * so that neighbours do not share a set of the L1 cache. */
static inline size_t cpu_row_pitch(int k) {
    return (((size_t)k + 15) & ~(size_t)15) + 16;
}

/* cpu_linear.c */

/* out[t * ld_out + i] = row r0 + i of w . x[t], for r0 + i < r1 <= r0 + CPU_CHUNK_ROWS and t < n.
 * scratch: CPU_CHUNK_ROWS * cpu_row_pitch(w->cols) numbers. */
void cpu_rows_dot(const Kern *kern, const MatView *w, int r0, int r1, const float *x, size_t ld_x,
                  int n, float *out, size_t ld_out, float *scratch);
void cpu_linear(Dev *d, Tensor out, Tensor x, const Mat *w);
void cpu_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v);
void cpu_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v);
/* cpu_experts.c */
void cpu_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e);
/* cpu_kv.c */

/* The latent row of a position as fp32: a pointer into the pool, or decoded into buf. */
const float *cpu_kv_latent(const Dev *d, int slot, int seq, int pos, float *buf);
/* Asks for a row that is decoded soon. */
void cpu_kv_prefetch(const Dev *d, int slot, int seq, int pos);
/* The first `rows` keys of a page as fp32 [rows, index_dim], in the same way. */
const float *cpu_kv_keys(const Dev *d, int index_slot, int64_t page, int rows, float *buf);
void cpu_kv_write(Dev *d, int slot, Tensor kv, int index_slot, Tensor key);
/* cpu_attn.c */
void cpu_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale);
/* cpu_index.c */
void cpu_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot);
/* cpu_topk.c */

/* Numbers of working memory that cpu_top_k needs for n scores. */
size_t cpu_top_k_work(int n);
/* The k largest of score[n], lowest position first among equals, ascending into pos[k]; 0 < k <= n.
 */
void cpu_top_k(const float *score, int n, int k, uint32_t *work, int32_t *pos);
