/* The lightning indexer of the fast host backend: scores over all positions of a token, then the
 * exact k best. Tokens are dealt out to ranks, since all ranks share the list. A rank takes them in
 * waves: neighbours of one sequence share the decoded keys of a page, spans of pages go to its
 * threads. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum {
    RUN_TOKENS = 8,  /* tokens that share the keys of a page */
    MAX_WAVE = 32,   /* tokens whose scores are kept at a time */
    SPAN_PAGES = 32, /* per chunk */
};

/* Neighbouring tokens of one sequence that need scores. */
typedef struct Run {
    int first, n; /* in the wave */
    int last_pos; /* the largest position among them */
} Run;

typedef struct Index {
    Dev *d;
    Tensor topk, q, w;
    int heads, slot, dim;
    int token[MAX_WAVE]; /* of the wave: rows of the batch */
    int n_runs, n_spans;
    Run run[MAX_WAVE];
    float *score; /* [wave, pitch] */
    size_t pitch;
} Index;

/* Dot products of one page with all heads. */
static size_t dots_floats(const Index *x) {
    return (size_t)x->heads * KV_PAGE_TOKENS;
}

/* Scores of one token for `rows` keys of a page, without the constant factor, which does not change
 * their order. */
static void score_page(const Index *x, int t, const float *keys, int rows, float *dots,
                       float *score) {
    const Kern *kern = x->d->kern;
    const float *key[KV_PAGE_TOKENS];
    for (int r = 0; r < rows; r++)
        key[r] = keys + r * x->dim;
    for (int r = 0; r < rows; r += KERN_TILE)
        kern->dots(key + r, cpu_min(rows - r, KERN_TILE), host_row(x->q, t), (size_t)x->dim,
                   x->heads, x->dim, dots + r, KV_PAGE_TOKENS);
    kern->relu_sum(score, dots, KV_PAGE_TOKENS, host_row(x->w, t), x->heads, rows);
}

/* One run of tokens and one span of pages. */
static void score_chunk(void *arg, int chunk, int thread) {
    const Index *x = arg;
    const Dev *d = x->d;
    const Run *run = &x->run[chunk / x->n_spans];
    int begin = chunk % x->n_spans * SPAN_PAGES * KV_PAGE_TOKENS,
        seq = d->seq[x->token[run->first]],
        end = cpu_min(begin + SPAN_PAGES * KV_PAGE_TOKENS, run->last_pos + 1);
    float *dots = cpu_scratch(d, thread), *buf = dots + dots_floats(x);
    for (int p = begin; p < end; p += KV_PAGE_TOKENS) {
        int rows = cpu_min(end - p, KV_PAGE_TOKENS);
        const float *keys = cpu_kv_keys(d, x->slot, host_page(d, seq, p), rows, buf);
        if (p + KV_PAGE_TOKENS < end)
            cpu_prefetch(d->kv_pool + kv_index_page_offset(&d->kv, x->slot,
                                                           host_page(d, seq, p + KV_PAGE_TOKENS)),
                         kv_index_page_bytes(&d->kv));
        for (int i = 0; i < run->n; i++) {
            int t = x->token[run->first + i];
            rows = cpu_min(d->pos[t] + 1 - p, KV_PAGE_TOKENS);
            if (rows > 0)
                score_page(x, t, keys, rows, dots,
                           x->score + (size_t)(run->first + i) * x->pitch + p);
        }
    }
}

static void select_chunk(void *arg, int chunk, int thread) {
    const Index *x = arg;
    int t = x->token[chunk], n = x->d->pos[t] + 1, k = x->topk.cols;
    int32_t *list = host_row_i32(x->topk, t);
    if (n > k) {
        cpu_top_k(x->score + (size_t)chunk * x->pitch, n, k, (uint32_t *)cpu_scratch(x->d, thread),
                  list);
        return;
    }
    for (int i = 0; i < k; i++)
        list[i] = i < n ? i : -1;
}

/* Cuts the wave into runs. */
static void find_runs(Index *x, int n) {
    const Dev *d = x->d;
    Run *run = NULL;
    x->n_runs = 0;
    for (int i = 0; i < n; i++) {
        int t = x->token[i], pos = d->pos[t];
        if (pos < x->topk.cols) { /* takes all of its positions */
            run = NULL;
            continue;
        }
        if (!run || run->n == RUN_TOKENS || d->seq[t] != d->seq[x->token[run->first]]) {
            run = &x->run[x->n_runs++];
            *run = (Run){.first = i};
        }
        run->n++;
        run->last_pos = pos > run->last_pos ? pos : run->last_pos;
    }
}

/* Scores and lists of the n tokens in x->token. */
static void wave(Index *x, int n) {
    Dev *d = x->d;
    int last = 0;
    find_runs(x, n);
    for (int i = 0; i < x->n_runs; i++)
        last = x->run[i].last_pos > last ? x->run[i].last_pos : last;
    x->pitch = ((size_t)last + KV_PAGE_TOKENS) & ~(size_t)15;
    x->n_spans = last / (SPAN_PAGES * KV_PAGE_TOKENS) + 1;
    x->score = cpu_work(d, (size_t)n * x->pitch);
    size_t select = cpu_top_k_work(last + 1),
           score = dots_floats(x) + (size_t)KV_PAGE_TOKENS * (size_t)x->dim;
    cpu_scratch_reserve(d, select > score ? select : score);
    pool_run(d->pool, x->n_runs * x->n_spans, score_chunk, x);
    pool_run(d->pool, n, select_chunk, x);
}

void cpu_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    Index x = {.d = d,
               .topk = topk,
               .q = q,
               .w = w,
               .heads = heads,
               .slot = index_slot,
               .dim = d->kv.index_dim};
    int size = cpu_min(RUN_TOKENS * pool_size(d->pool), MAX_WAVE), n = 0;
    for (int t = d->rank; t < d->batch.n_tok; t += d->group->n_ranks) {
        x.token[n++] = t;
        if (n == size || t + d->group->n_ranks >= d->batch.n_tok) {
            wave(&x, n);
            n = 0;
        }
    }
    host_barrier(d);
}
