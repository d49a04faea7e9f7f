/* See batch.h. */
#include "model/batch.h"

#include <stdlib.h>
#include <string.h>

void batch_init(Batch *b, int max_tok, int max_seqs, int max_context) {
    size_t tok = (size_t)max_tok, seqs = (size_t)max_seqs;
    *b = (Batch){.max_tok = max_tok, .max_seqs = max_seqs, .page_stride = kv_pages_of(max_context)};
    b->row = xcalloc(seqs, sizeof *b->row);
    b->token = xcalloc(tok, sizeof *b->token);
    b->pos = xcalloc(tok, sizeof *b->pos);
    b->seq = xcalloc(tok, sizeof *b->seq);
    b->page_table = xcalloc(seqs * (size_t)b->page_stride, sizeof *b->page_table);
    batch_clear(b);
}

void batch_done(Batch *b) {
    free(b->row);
    free(b->token);
    free(b->pos);
    free(b->seq);
    free(b->page_table);
    *b = (Batch){0};
}

void batch_clear(Batch *b) {
    b->n_rows = 0;
    b->ops = (OpsBatch){.token = b->token,
                        .pos = b->pos,
                        .seq = b->seq,
                        .page_table = b->page_table,
                        .page_stride = b->page_stride};
}

void batch_add(Batch *b, const int32_t *token, int n, int pos0, const int32_t *page) {
    OpsBatch *o = &b->ops;
    int n_pages = kv_pages_of(pos0 + n);
    CHECK(n > 0 && o->n_tok + n <= b->max_tok && o->n_seq < b->max_seqs);
    CHECK(n_pages <= b->page_stride);
    for (int i = 0; i < n; i++) {
        b->token[o->n_tok + i] = token[i];
        b->pos[o->n_tok + i] = pos0 + i;
        b->seq[o->n_tok + i] = o->n_seq;
    }
    memcpy(b->page_table + (size_t)o->n_seq * (size_t)b->page_stride, page,
           (size_t)n_pages * sizeof *page);
    o->n_tok += n;
    o->n_seq++;
}

int batch_want(Batch *b, const Sampler *sampler, int draw) {
    CHECK(b->ops.n_tok > 0 && b->n_rows < b->max_seqs);
    b->row[b->n_rows] = (EngineRow){.row = b->ops.n_tok - 1, .sampler = sampler, .draw = draw};
    return b->n_rows++;
}
