/* KV rows of the fast host backend: what host_kv.c does, with the same bits, but wider and spread
 * over ranks and threads. */
#include "kernels/cpu/cpu.h"

#include <float.h>
#include <math.h>

enum { WRITE_TOKENS = 16 }; /* per chunk */

static uint8_t *latent_at(const Dev *d, int slot, int seq, int pos) {
    return d->kv_pool + kv_latent_page_offset(&d->kv, slot, host_page(d, seq, pos)) +
           (uint64_t)(pos % KV_PAGE_TOKENS) * kv_latent_row_bytes(&d->kv);
}

void cpu_kv_prefetch(const Dev *d, int slot, int seq, int pos) {
    cpu_prefetch(latent_at(d, slot, seq, pos), kv_latent_row_bytes(&d->kv));
}

const float *cpu_kv_latent(const Dev *d, int slot, int seq, int pos, float *buf) {
    const KvLayout *l = &d->kv;
    const uint8_t *p = latent_at(d, slot, seq, pos);
    if (l->dtype == DT_F32)
        return (const float *)p;
    if (l->dtype == DT_BF16) {
        d->kern->from_bf16(p, l->kv_lora + l->rope, buf);
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

const float *cpu_kv_keys(const Dev *d, int index_slot, int64_t page, int rows, float *buf) {
    const KvLayout *l = &d->kv;
    const uint8_t *p = d->kv_pool + kv_index_page_offset(l, index_slot, page);
    if (l->dtype == DT_F32)
        return (const float *)p;
    if (l->dtype == DT_BF16) {
        d->kern->from_bf16(p, rows * l->index_dim, buf);
        return buf;
    }
    for (int r = 0; r < rows; r++) {
        float scale;
        memcpy(&scale, p + KV_PAGE_TOKENS * l->index_dim + 4 * r, 4);
        d->kern->from_f8(p + r * l->index_dim, l->index_dim, scale, buf + r * l->index_dim);
    }
    return buf;
}

/* ---- writing ---- */

typedef struct KvWrite {
    Dev *d;
    Tensor kv, key;
    int slot, index_slot; /* index_slot < 0: no keys */
} KvWrite;

static void put_latent(const Dev *d, uint8_t *p, const float *in) {
    const KvLayout *l = &d->kv;
    int groups = l->kv_lora / KV_SCALE_GROUP;
    uint8_t *scales = p + l->kv_lora;
    for (int g = 0; g < groups; g++) {
        const float *x = in + g * KV_SCALE_GROUP;
        float scale = fmaxf(d->kern->max_abs(x, KV_SCALE_GROUP) / 448.0f, FLT_MIN);
        memcpy(scales + 4 * g, &scale, 4);
        d->kern->to_f8(x, KV_SCALE_GROUP, scale, p + g * KV_SCALE_GROUP);
    }
    d->kern->to_bf16(in + l->kv_lora, l->rope, scales + 4 * groups);
}

static void put_key(const Dev *d, uint8_t *page, int row, const float *in) {
    int dim = d->kv.index_dim;
    float top = fmaxf(d->kern->max_abs(in, dim), 1e-4f), scale = exp2f(ceilf(log2f(top / 448.0f)));
    memcpy(page + KV_PAGE_TOKENS * dim + 4 * row, &scale, 4);
    d->kern->to_f8(in, dim, scale, page + row * dim);
}

static void put_token(const KvWrite *w, int t) {
    const Dev *d = w->d;
    const KvLayout *l = &d->kv;
    int row = d->pos[t] % KV_PAGE_TOKENS;
    int64_t page = host_page(d, d->seq[t], d->pos[t]);
    uint8_t *latent = latent_at(d, w->slot, d->seq[t], d->pos[t]);
    if (l->dtype == DT_F32)
        host_kv_put_latent(d, w->slot, page, row, host_row(w->kv, t));
    else if (l->dtype == DT_BF16)
        d->kern->to_bf16(host_row(w->kv, t), l->kv_lora + l->rope, latent);
    else
        put_latent(d, latent, host_row(w->kv, t));
    if (w->index_slot < 0)
        return;
    uint8_t *keys = d->kv_pool + kv_index_page_offset(l, w->index_slot, page);
    if (l->dtype == DT_F32)
        host_kv_put_key(d, w->index_slot, page, row, host_row(w->key, t));
    else if (l->dtype == DT_BF16)
        d->kern->to_bf16(host_row(w->key, t), l->index_dim, keys + 2 * row * l->index_dim);
    else
        put_key(d, keys, row, host_row(w->key, t));
}

/* Chunks go round the ranks; every rank holds all rows. */
static void write_chunk(void *arg, int chunk, int thread) {
    const KvWrite *w = arg;
    int t = (chunk * w->d->group->n_ranks + w->d->rank) * WRITE_TOKENS,
        end = cpu_min(t + WRITE_TOKENS, w->d->batch.n_tok);
    (void)thread;
    for (; t < end; t++)
        put_token(w, t);
}

void cpu_kv_write(Dev *d, int slot, Tensor kv, int index_slot, Tensor key) {
    KvWrite w = {d, kv, key, slot, index_slot};
    int round = WRITE_TOKENS * d->group->n_ranks;
    pool_run(d->pool, (d->batch.n_tok + round - 1) / round, write_chunk, &w);
    host_barrier(d);
}
