/* Sparse MLA of the fast host backend. The positions of a token are walked in blocks: rows to fp32
 * (in place when the pool is fp32), scores of all heads, then a running softmax that rescales when
 * a larger score comes. The order is fixed by the token's own list. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum { BLOCK = 32 };

typedef struct Attend {
    Dev *d;
    Tensor out, q, topk;
    int heads, slot, lora, width;
    float scale;
    int split; /* heads are cut into so many chunks per token */
} Attend;

/* Per-thread memory: BLOCK rows, scores [heads, BLOCK]. */
static size_t attend_scratch(const Attend *a) {
    return (size_t)BLOCK * (size_t)(a->width + a->heads);
}

/* The latent row of a position as fp32: a pointer into the pool, or converted into buf. */
static const float *latent_row(const Attend *a, int seq, int pos, float *buf) {
    const Dev *d = a->d;
    const KvLayout *l = &d->kv;
    const uint8_t *p = d->kv_pool + kv_latent_page_offset(l, a->slot, host_page(d, seq, pos)) +
                       (uint64_t)(pos % KV_PAGE_TOKENS) * kv_latent_row_bytes(l);
    if (l->dtype == DT_F32)
        return (const float *)p;
    if (l->dtype == DT_BF16) {
        d->kern->from_bf16(p, a->width, buf);
        return buf;
    }
    const uint8_t *scales = p + l->kv_lora;
    int groups = l->kv_lora / KV_SCALE_GROUP;
    for (int g = 0; g < groups; g++) {
        float scale;
        memcpy(&scale, scales + 4 * g, 4);
        d->kern->from_f8(p + g * KV_SCALE_GROUP, KV_SCALE_GROUP, scale, buf + g * KV_SCALE_GROUP);
    }
    d->kern->from_bf16(scales + 4 * groups, l->rope, buf + l->kv_lora);
    return buf;
}

/* Folds n rows into one head's running softmax. score[n] is overwritten with the weights. */
static void fold(const Attend *a, float *acc, float *best, float *total, float *score,
                 const float *const *row, int n) {
    float top = *best;
    for (int j = 0; j < n; j++)
        top = fmaxf(top, score[j]);
    if (top > *best) {
        float shrink = expf(*best - top);
        for (int c = 0; c < a->lora; c++)
            acc[c] *= shrink;
        *total *= shrink;
        *best = top;
    }
    for (int j = 0; j < n; j++) {
        score[j] = expf(score[j] - top);
        *total += score[j];
    }
    a->d->kern->accumulate(acc, score, row, n, a->lora);
}

/* Heads [h0, h0 + n_h) of one token, n_h <= KERN_TILE. */
static void attend_heads(const Attend *a, int t, int h0, int n_h, float *scratch) {
    const int32_t *list = host_row_i32(a->topk, t);
    const float *q[KERN_TILE];
    float best[KERN_TILE], total[KERN_TILE] = {0}, *acc[KERN_TILE],
                           *score = scratch + (size_t)BLOCK * (size_t)a->width;
    for (int h = 0; h < n_h; h++) {
        q[h] = host_row(a->q, t) + (h0 + h) * a->width;
        acc[h] = host_row(a->out, t) + (h0 + h) * a->lora;
        best[h] = -INFINITY;
        memset(acc[h], 0, (size_t)a->lora * sizeof(float));
    }
    for (int i = 0; i < a->topk.cols;) {
        const float *row[BLOCK];
        float dot[KERN_TILE];
        int n = 0;
        for (; i < a->topk.cols && n < BLOCK; i++) {
            if (list[i] < 0)
                continue;
            row[n] = latent_row(a, a->d->seq[t], list[i], scratch + (size_t)n * (size_t)a->width);
            a->d->kern->dots(q, n_h, row[n], 0, 1, a->width, dot, KERN_TILE);
            for (int h = 0; h < n_h; h++)
                score[h * BLOCK + n] = dot[h] * a->scale;
            n++;
        }
        for (int h = 0; h < n_h && n > 0; h++)
            fold(a, acc[h], &best[h], &total[h], score + h * BLOCK, row, n);
    }
    for (int h = 0; h < n_h; h++)
        for (int c = 0; c < a->lora && total[h] > 0; c++)
            acc[h][c] /= total[h];
}

static void attend_chunk(void *arg, int chunk, int thread) {
    const Attend *a = arg;
    int t = chunk / a->split, h0 = chunk % a->split * KERN_TILE;
    attend_heads(a, t, h0, a->heads - h0 < KERN_TILE ? a->heads - h0 : KERN_TILE,
                 cpu_scratch(a->d, thread));
}

void cpu_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale) {
    int lora = d->kv.kv_lora;
    Attend a = {d,     out,
                q,     topk,
                heads, slot,
                lora,  lora + d->kv.rope,
                scale, (heads + KERN_TILE - 1) / KERN_TILE};
    cpu_scratch_reserve(d, attend_scratch(&a));
    pool_run(d->pool, q.rows * a.split, attend_chunk, &a);
}
