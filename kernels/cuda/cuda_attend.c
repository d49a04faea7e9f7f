/* Index selection and sparse attention of the CUDA backend: operations to launches. Called on the
 * rank's thread.
 *
 * Every rank chooses for itself: the inputs are the same bits on all of them, so are the lists, and
 * a step of a few tokens is over sooner than an exchange would be. */
#include "kernels/cuda/cuda.h"

enum { SCORE_BYTES = 256 << 20 }; /* about: scores that are kept at a time */

static CudaRows rows_from(const Dev *d, int first, int n) {
    CudaRows r = d->rows;
    r.pos += first;
    r.seq += first;
    r.rows = n;
    return r;
}

/* Rows first to first + n: scores, then lists. */
static void select_rows(Dev *d, Tensor topk, CudaIndex *index, CudaTopk *top, int first, int n) {
    const float *q = index->q, *w = index->w;
    index->rows = rows_from(d, first, n);
    index->q += (size_t)first * (size_t)index->q_ld;
    index->w += (size_t)first * (size_t)index->w_ld;
    top->pos = index->rows.pos;
    top->list = tensor_row(topk, first).at;
    top->rows = n;
    cuda_index_scores(index, d->stream);
    cuda_topk(top, d->stream);
    index->q = q;
    index->w = w;
}

void cuda_index_select(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    cuda_enter(d);
    int n = q.rows;
    size_t pitch =
               ((size_t)d->conf.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS * KV_PAGE_TOKENS,
           row_bytes = pitch * sizeof(float), wave = SCORE_BYTES / row_bytes;
    CHECK(d->kv.index_dim % 16 == 0 && d->kv.index_dim <= INDEX_MAX_DIM);
    wave = wave < 1 ? 1 : wave > (size_t)n ? (size_t)n : wave;
    float *score = cuda_work(d, CUDA_WORK_SCORE, wave * row_bytes);
    CudaIndex index = {.keys = cuda_key_pages(d, index_slot),
                       .q = q.at,
                       .w = w.at,
                       .q_ld = q.ld,
                       .w_ld = w.ld,
                       .heads = heads,
                       .dim = d->kv.index_dim,
                       .k = topk.cols,
                       .score = score,
                       .pitch = pitch,
                       .n_sm = d->n_sm};
    CudaTopk top = {.score = score,
                    .pitch = pitch,
                    .list_ld = topk.ld,
                    .k = topk.cols,
                    .max_len = d->conf.max_context,
                    .n_sm = d->n_sm,
                    .work = cuda_work(d, CUDA_WORK_TOPK, cuda_topk_work_bytes())};
    for (int first = 0; first < n; first += (int)wave)
        select_rows(d, topk, &index, &top, first, n - first < (int)wave ? n - first : (int)wave);
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
