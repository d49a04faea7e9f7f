/* Reference attention: MLA in absorbed form and the sparse indexer, in plain C. Each function runs
 * on its rank's thread. */
#include "kernels/ref/ref.h"

#include <math.h>
#include <stdlib.h>

void ref_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v) {
    int lora = kv_b->view.cols, rope = out.cols / heads - lora;
    (void)d;
    float *row = xmalloc((size_t)lora * sizeof(float));
    double *sum = xmalloc((size_t)lora * sizeof(double));
    for (int t = 0; t < q.rows; t++)
        for (int h = 0; h < heads; h++) {
            const float *qh = host_row(q, t) + h * (nope + rope);
            float *oh = host_row(out, t) + h * (lora + rope);
            for (int c = 0; c < lora; c++)
                sum[c] = 0;
            for (int i = 0; i < nope; i++) {
                mat_row_f32(&kv_b->view, h * (nope + v) + i, row);
                for (int c = 0; c < lora; c++)
                    sum[c] += (double)qh[i] * row[c];
            }
            for (int c = 0; c < lora; c++)
                oh[c] = (float)sum[c];
            memcpy(oh + lora, qh + nope, (size_t)rope * sizeof(float));
        }
    free(sum);
    free(row);
}

void ref_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v) {
    int lora = kv_b->view.cols;
    (void)d;
    float *row = xmalloc((size_t)lora * sizeof(float));
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < v; j++) {
            mat_row_f32(&kv_b->view, h * (nope + v) + nope + j, row);
            for (int t = 0; t < x.rows; t++)
                host_row(out, t)[h * v + j] = ref_dot(host_row(x, t) + h * lora, row, lora);
        }
    free(row);
}

typedef struct Scored {
    float score;
    int32_t pos;
} Scored;

/* Highest score first, lowest position first among equals. */
static int by_score(const void *a, const void *b) {
    const Scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->pos < y->pos ? -1 : 1;
}

static int by_pos(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return x < y ? -1 : x > y;
}

/* One token's list: all of its positions when they fit, else the K best. */
static void select_one(Dev *d, int t, int32_t *list, int k, const float *q, const float *w,
                       int heads, int index_slot) {
    int n = d->pos[t] + 1, dim = d->kv.index_dim;
    if (n <= k) {
        for (int i = 0; i < k; i++)
            list[i] = i < n ? i : -1;
        return;
    }
    Scored *all = xmalloc((size_t)n * sizeof *all);
    float *key = xmalloc((size_t)dim * sizeof(float));
    for (int p = 0; p < n; p++) {
        host_kv_key(d, index_slot, host_page(d, d->seq[t], p), p % KV_PAGE_TOKENS, key);
        double score = 0;
        for (int h = 0; h < heads; h++)
            score += (double)w[h] * fmaxf(ref_dot(q + h * dim, key, dim), 0.0f);
        all[p] = (Scored){(float)(score / sqrt((double)heads * dim)), p};
    }
    qsort(all, (size_t)n, sizeof *all, by_score);
    for (int i = 0; i < k; i++)
        list[i] = all[i].pos;
    qsort(list, (size_t)k, sizeof *list, by_pos);
    free(key);
    free(all);
}

void ref_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    for (int t = d->rank; t < d->batch.n_tok; t += d->group->n_ranks)
        select_one(d, t, host_row_i32(topk, t), topk.cols, host_row(q, t), host_row(w, t), heads,
                   index_slot);
    host_barrier(d);
}

static void attend_one(const Dev *d, int seq, const int32_t *list, int k, const float *q, int slot,
                       float scale, float *out, double *sum, float *s) {
    int lora = d->kv.kv_lora, width = lora + d->kv.rope;
    float row[KV_ROW_MAX];
    CHECK(width <= KV_ROW_MAX);
    float best = -INFINITY;
    for (int i = 0; i < k; i++) {
        if (list[i] < 0)
            continue;
        host_kv_latent(d, slot, host_page(d, seq, list[i]), list[i] % KV_PAGE_TOKENS, row);
        s[i] = scale * ref_dot(q, row, width);
        best = fmaxf(best, s[i]);
    }
    double total = 0;
    for (int c = 0; c < lora; c++)
        sum[c] = 0;
    for (int i = 0; i < k; i++) {
        if (list[i] < 0)
            continue;
        host_kv_latent(d, slot, host_page(d, seq, list[i]), list[i] % KV_PAGE_TOKENS, row);
        double p = exp((double)s[i] - best);
        total += p;
        for (int c = 0; c < lora; c++)
            sum[c] += p * row[c];
    }
    for (int c = 0; c < lora; c++)
        out[c] = total > 0 ? (float)(sum[c] / total) : 0.0f;
}

void ref_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale) {
    int lora = d->kv.kv_lora, width = lora + d->kv.rope;
    double *sum = xmalloc((size_t)lora * sizeof(double));
    float *s = xmalloc((size_t)topk.cols * sizeof(float));
    for (int t = 0; t < q.rows; t++)
        for (int h = 0; h < heads; h++)
            attend_one(d, d->seq[t], host_row_i32(topk, t), topk.cols, host_row(q, t) + h * width,
                       slot, scale, host_row(out, t) + h * lora, sum, s);
    free(s);
    free(sum);
}
