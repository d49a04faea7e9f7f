/* Index selection and sparse attention of the CUDA backend: operations to launches. Called on the
 * rank's thread. */
#include "kernels/cuda/cuda.h"

enum {
    SCORE_BYTES = 256 << 20, /* about: scores that are kept at a time */
    SHARE_FROM = 256,        /* rows: a prompt's chunk */
};

static CudaRows rows_from(const Dev *d, int first, int n) {
    CudaRows r = d->rows;
    r.pos += first;
    r.seq += first;
    r.rows = n;
    return r;
}

typedef struct Choice {
    Tensor topk, q, w;
    CudaIndex index;
    CudaTopk top;
    int wave; /* rows whose scores fit the workspace */
} Choice;

/* Scores and lists of rows [first, end). */
static void choose_rows(Dev *d, Choice *c, int first, int end) {
    for (int t = first; t < end; t += c->wave) {
        int n = end - t < c->wave ? end - t : c->wave;
        c->index.rows = rows_from(d, t, n);
        c->index.q = tensor_row(c->q, t).at;
        c->index.w = tensor_row(c->w, t).at;
        c->top.pos = c->index.rows.pos;
        c->top.list = tensor_row(c->topk, t).at;
        c->top.rows = n;
        cuda_index_scores(&c->index, d->stream);
        cuda_topk(&c->top, d->stream);
    }
}

/* Of a prompt's chunk each rank chooses for an equal share of the rows, and for the few that are
 * left over. Of a step's few rows everyone chooses for all: the inputs are the same bits on all
 * ranks, so are the lists, and that is sooner over than an exchange would be. */
static void choose(Dev *d, Choice *c, int n) {
    int ranks = cuda_n_ranks(d), share = n / ranks, k = c->topk.cols;
    if (ranks == 1 || n < SHARE_FROM || c->topk.ld != k) {
        choose_rows(d, c, 0, n);
        return;
    }
    Tensor part = tensor_row(c->topk, d->rank * share), all = tensor_row(c->topk, 0);
    choose_rows(d, c, d->rank * share, (d->rank + 1) * share);
    part.cols = part.ld = share * k;
    all.cols = all.ld = ranks * share * k;
    cuda_gather_cols(d, all, part);
    choose_rows(d, c, ranks * share, n);
}

void cuda_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    cuda_enter(d);
    size_t pages = ((size_t)d->conf.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS,
           pitch = pages * KV_PAGE_TOKENS, row_bytes = pitch * sizeof(float),
           wave = SCORE_BYTES / row_bytes;
    CHECK(d->kv.index_dim % 16 == 0 && d->kv.index_dim <= INDEX_MAX_DIM);
    wave = wave < 1 ? 1 : wave > (size_t)q.rows ? (size_t)q.rows : wave;
    float *score = cuda_work(d, CUDA_WORK_SCORE, wave * row_bytes);
    Choice c = {.topk = topk,
                .q = q,
                .w = w,
                .wave = (int)wave,
                .index = {.keys = cuda_key_pages(d, index_slot),
                          .q_ld = q.ld,
                          .w_ld = w.ld,
                          .heads = heads,
                          .dim = d->kv.index_dim,
                          .k = topk.cols,
                          .score = score,
                          .pitch = pitch,
                          .n_sm = d->n_sm},
                .top = {.score = score,
                        .pitch = pitch,
                        .list_ld = topk.ld,
                        .k = topk.cols,
                        .max_len = d->conf.max_context,
                        .n_sm = d->n_sm,
                        .work = cuda_work(d, CUDA_WORK_TOPK, cuda_topk_work_bytes())}};
    choose(d, &c, q.rows);
}

void cuda_mla_attend(Dev *d, Tensor out, Tensor q, Tensor topk, int heads, int slot, float scale) {
    cuda_enter(d);
    int lora = d->kv.kv_lora, rope = d->kv.rope;
    CHECK(lora % 16 == 0 && lora <= ATTN_MAX_LORA && rope % 8 == 0 && rope <= ATTN_MAX_ROPE);
    size_t work = cuda_attn_work_floats(heads, lora, topk.cols, d->n_sm) * sizeof(float);
    CudaAttn a = {.rows = rows_from(d, 0, q.rows),
                  .kv = cuda_latent_pages(d, slot),
                  .q = q.at,
                  .list = topk.at,
                  .out = out.at,
                  .q_ld = q.ld,
                  .list_ld = topk.ld,
                  .out_ld = out.ld,
                  .heads = heads,
                  .lora = lora,
                  .rope = rope,
                  .k = topk.cols,
                  .scale = scale,
                  .n_sm = d->n_sm,
                  .work = cuda_work(d, CUDA_WORK_ATTN, work)};
    cuda_attn(&a, d->stream);
}
