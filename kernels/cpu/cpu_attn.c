/* Sparse MLA of the fast host backend. The positions of a token are walked in blocks: rows to fp32
 * (in place when the pool is fp32), scores of all heads of the chunk, then a running softmax that
 * rescales when a larger score comes. The order is fixed by the token's own list. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum { BLOCK = KERN_LANES }; /* positions at a time: their rows fit L1 */

typedef struct Attend {
    Dev *d;
    Tensor out, q, topk;
    int heads, slot, lora, width;
    float scale;
    int n_heads, split; /* heads per chunk; chunks per token */
} Attend;

/* One chunk's place in the thread's scratch. */
typedef struct Space {
    float *rows;         /* [BLOCK, pitch] */
    float *score;        /* [n_heads, BLOCK] */
    float *best, *total; /* [n_heads] running maximum and sum of exponentials */
} Space;

static size_t space_floats(const Attend *a) {
    return BLOCK * cpu_row_pitch(a->width) + (size_t)a->n_heads * (BLOCK + 2);
}

static Space space_at(const Attend *a, float *scratch) {
    Space s = {.rows = scratch, .score = scratch + BLOCK * cpu_row_pitch(a->width)};
    s.best = s.score + a->n_heads * BLOCK;
    s.total = s.best + a->n_heads;
    return s;
}

/* The next positions of the list, at most BLOCK, as rows. Moves *at past them; returns how many. */
static int next_rows(const Attend *a, int t, int *at, const Space *s, const float **row) {
    const int32_t *list = host_row_i32(a->topk, t);
    int n = 0, k = a->topk.cols, seq = a->d->seq[t];
    for (; *at < k && n < BLOCK; ++*at) {
        if (*at + BLOCK < k && list[*at + BLOCK] >= 0)
            cpu_kv_prefetch(a->d, a->slot, seq, list[*at + BLOCK]);
        if (list[*at] < 0)
            continue;
        row[n] = cpu_kv_latent(a->d, a->slot, seq, list[*at],
                               s->rows + (size_t)n * cpu_row_pitch(a->width));
        n++;
    }
    return n;
}

/* Folds n rows into the heads' running results out[n_h, lora]. */
static void fold(const Attend *a, const Space *s, const float *q, int n_h, float *out,
                 const float *const *row, int n) {
    const Kern *kern = a->d->kern;
    for (int j = n; j < BLOCK; j++)
        for (int h = 0; h < n_h; h++)
            s->score[h * BLOCK + j] = -INFINITY;
    for (int j = 0; j < n; j += KERN_TILE)
        kern->dots(row + j, cpu_min(n - j, KERN_TILE), q, (size_t)a->width, n_h, a->width,
                   s->score + j, BLOCK);
    for (int h = 0; h < n_h; h++) {
        float shrink =
            kern->softmax_fold(s->score + h * BLOCK, a->scale, &s->best[h], &s->total[h]);
        if (shrink != 1.0f)
            kern->scale(out + h * a->lora, shrink, a->lora);
    }
    for (int h = 0; h < n_h; h += KERN_TILE) {
        float *acc[KERN_TILE];
        int m = cpu_min(n_h - h, KERN_TILE);
        for (int k = 0; k < m; k++)
            acc[k] = out + (h + k) * a->lora;
        kern->accumulate(acc, m, s->score + h * BLOCK, BLOCK, row, n, a->lora);
    }
}

static void attend_chunk(void *arg, int chunk, int thread) {
    const Attend *a = arg;
    int t = chunk / a->split, h0 = chunk % a->split * a->n_heads,
        n_h = cpu_min(a->heads - h0, a->n_heads), n;
    Space s = space_at(a, cpu_scratch(a->d, thread));
    float *out = host_row(a->out, t) + h0 * a->lora;
    const float *row[BLOCK];
    memset(out, 0, (size_t)n_h * (size_t)a->lora * sizeof *out);
    for (int h = 0; h < n_h; h++) {
        s.best[h] = -INFINITY;
        s.total[h] = 0;
    }
    for (int at = 0; (n = next_rows(a, t, &at, &s, row)) > 0;)
        fold(a, &s, host_row(a->q, t) + h0 * a->width, n_h, out, row, n);
    for (int h = 0; h < n_h; h++)
        if (s.total[h] > 0)
            a->d->kern->scale(out + h * a->lora, 1.0f / s.total[h], a->lora);
}

/* A row is decoded once for all heads of a chunk: as many as leave every thread two chunks. */
static int heads_per_chunk(int heads, int tokens, int threads) {
    int chunks = threads == 1 ? 1 : (2 * threads + tokens - 1) / tokens, n = heads / chunks;
    return n < KERN_TILE ? cpu_min(KERN_TILE, heads) : n / KERN_TILE * KERN_TILE;
}

void cpu_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale) {
    int lora = d->kv.kv_lora, n = heads_per_chunk(heads, q.rows, pool_size(d->pool));
    Attend a = {.d = d,
                .out = out,
                .q = q,
                .topk = topk,
                .heads = heads,
                .slot = slot,
                .lora = lora,
                .width = lora + d->kv.rope,
                .scale = scale,
                .n_heads = n,
                .split = (heads + n - 1) / n};
    cpu_scratch_reserve(d, space_floats(&a));
    pool_run(d->pool, q.rows * a.split, attend_chunk, &a);
}
