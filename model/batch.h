/* One step's tokens as engine_step takes them, gathered sequence by sequence. Allocated once; a
 * step allocates nothing. Built by the loop thread, read by the engine's while the step runs. */
#pragma once

#include "kernels/ops.h"
#include "model/engine.h"

#include <stdint.h>

typedef struct Batch {
    OpsBatch ops;   /* borrows the arrays below */
    EngineRow *row; /* [max_seqs] rows whose logits are wanted */
    int n_rows;
    int max_tok, max_seqs, page_stride;
    int32_t *token, *pos, *seq; /* [max_tok] */
    int32_t *page_table;        /* [max_seqs, page_stride] */
} Batch;

/* For sequences of at most max_context positions. */
void batch_init(Batch *b, int max_tok, int max_seqs, int max_context);
void batch_done(Batch *b);
void batch_clear(Batch *b);

/* Adds n tokens of one sequence, the first at position pos0; page[] covers positions 0 to
 * pos0 + n - 1. Everything is copied. CHECKs the room. */
void batch_add(Batch *b, const int32_t *token, int n, int pos0, const int32_t *page);
/* Wants the draw-th answer token of the sequence added last, from its last row. Returns the index
 * in row[]; the sampler is borrowed until the step is done. */
int batch_want(Batch *b, const Sampler *sampler, int draw);
