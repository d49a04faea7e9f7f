/* The lightning indexer of the fast host backend: scores over all positions of a token, then the
 * exact k best. Tokens are dealt out to ranks, since all ranks share the list, and within a rank to
 * its threads. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum { BUCKETS = 2048, RADIX_BITS = 11 };

/* ---- the k best ---- */

/* fp32 bits in an order that unsigned comparison follows; -0 and 0 are one value. */
static inline uint32_t sortable(float f) {
    uint32_t u;
    f += 0.0f;
    memcpy(&u, &f, 4);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Narrows `prefix` by one digit: the digit of the k-th largest among scores that share the prefix's
 * upper bits. *k becomes its rank there. */
static uint32_t next_digit(const float *score, int n, uint32_t prefix, int shift, int bits, int *k,
                           uint32_t *count) {
    uint32_t buckets = 1u << bits;
    memset(count, 0, buckets * sizeof *count);
    for (int i = 0; i < n; i++) {
        uint32_t s = sortable(score[i]);
        if (shift + bits == 32 || s >> (shift + bits) == prefix >> (shift + bits))
            count[(s >> shift) & (buckets - 1)]++;
    }
    uint32_t digit = buckets - 1;
    for (int above = 0;; digit--) {
        if (above + (int)count[digit] >= *k) {
            *k -= above;
            return prefix | digit << shift;
        }
        above += (int)count[digit];
    }
}

void cpu_top_k(const float *score, int n, int k, uint32_t *count, int32_t *pos) {
    int rank = k;
    uint32_t edge = next_digit(score, n, 0, 32 - RADIX_BITS, RADIX_BITS, &rank, count);
    edge = next_digit(score, n, edge, 32 - 2 * RADIX_BITS, RADIX_BITS, &rank, count);
    edge = next_digit(score, n, edge, 0, 32 - 2 * RADIX_BITS, &rank, count);
    /* everything above the edge, and the first `rank` of those on it */
    for (int i = 0, m = 0; m < k; i++) {
        uint32_t s = sortable(score[i]);
        if (s > edge || (s == edge && rank-- > 0))
            pos[m++] = i;
    }
}

/* ---- scores ---- */

typedef struct Index {
    Dev *d;
    Tensor topk, q, w;
    int heads, slot, dim;
    float factor;
} Index;

static size_t scores_len(const Dev *d) {
    return ((size_t)d->conf.max_context + KV_PAGE_TOKENS) & ~(size_t)15;
}

/* Keys of one page as fp32 [rows, dim]: in the pool, or converted into buf. */
static const float *page_keys(const Index *x, int64_t page, int rows, float *buf) {
    const KvLayout *l = &x->d->kv;
    const uint8_t *p = x->d->kv_pool + kv_index_page_offset(l, x->slot, page);
    if (l->dtype == DT_F32)
        return (const float *)p;
    if (l->dtype == DT_BF16) {
        x->d->kern->from_bf16(p, rows * x->dim, buf);
        return buf;
    }
    for (int r = 0; r < rows; r++) {
        float scale;
        memcpy(&scale, p + KV_PAGE_TOKENS * x->dim + 4 * r, 4);
        x->d->kern->from_f8(p + r * x->dim, x->dim, scale, buf + r * x->dim);
    }
    return buf;
}

/* score[rows] += of heads [h, h + n_h) for the keys of one page. */
static void add_heads(const Index *x, const float *q, const float *w, int n_h, const float *keys,
                      int rows, float *score) {
    float dot[KV_PAGE_TOKENS * KERN_TILE];
    const float *qs[KERN_TILE];
    for (int h = 0; h < n_h; h++)
        qs[h] = q + h * x->dim;
    x->d->kern->dots(qs, n_h, keys, (size_t)x->dim, rows, x->dim, dot, KERN_TILE);
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < n_h; h++)
            score[r] += w[h] * fmaxf(dot[r * KERN_TILE + h], 0.0f) * x->factor;
}

static void select_one(const Index *x, int t, float *scratch) {
    const Dev *d = x->d;
    int n = d->pos[t] + 1, k = x->topk.cols;
    int32_t *list = host_row_i32(x->topk, t);
    if (n <= k) {
        for (int i = 0; i < k; i++)
            list[i] = i < n ? i : -1;
        return;
    }
    float *score = scratch, *keys = scratch + scores_len(d);
    const float *q = host_row(x->q, t), *w = host_row(x->w, t);
    memset(score, 0, (size_t)n * sizeof *score);
    for (int p = 0; p < n; p += KV_PAGE_TOKENS) {
        int rows = n - p < KV_PAGE_TOKENS ? n - p : KV_PAGE_TOKENS;
        const float *page = page_keys(x, host_page(d, d->seq[t], p), rows, keys);
        for (int h = 0; h < x->heads; h += KERN_TILE)
            add_heads(x, q + h * x->dim, w + h, x->heads - h < KERN_TILE ? x->heads - h : KERN_TILE,
                      page, rows, score + p);
    }
    cpu_top_k(score, n, k, (uint32_t *)keys, list);
}

/* Neighbouring tokens go to different ranks: later tokens cost more. */
static void select_chunk(void *arg, int chunk, int thread) {
    const Index *x = arg;
    select_one(x, chunk * x->d->group->n_ranks + x->d->rank, cpu_scratch(x->d, thread));
}

void cpu_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    int n_ranks = d->group->n_ranks, mine = (d->batch.n_tok - d->rank + n_ranks - 1) / n_ranks;
    Index x = {d,
               topk,
               q,
               w,
               heads,
               index_slot,
               d->kv.index_dim,
               1.0f / sqrtf((float)heads * (float)d->kv.index_dim)};
    size_t keys = (size_t)KV_PAGE_TOKENS * (size_t)x.dim;
    cpu_scratch_reserve(d, scores_len(d) + (keys > BUCKETS ? keys : BUCKETS));
    pool_run(d->pool, mine, select_chunk, &x);
    host_barrier(d);
}
