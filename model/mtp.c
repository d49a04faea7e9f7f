/* The multi-token-prediction layer: one more decoder layer over (embedding of the next token,
 * hidden state), used recurrently for drafts. Runs on the rank threads, like forward.c. */
#include "model/forward_int.h"

/* Maths: z = eh_proj . [norm(embed(token); enorm) | norm(hidden; hnorm)], then a complete decoder
 * layer with a KV slot and an indexer of its own, then norm(shared_head.norm) and the target's
 * head. The normed output is what the next draft step takes as hidden. */
int mtp_run(Forward *f, const OpsBatch *batch, Tensor hidden, const int32_t *logit_row,
            int n_logits, Tensor *state, Tensor *logits, Err *err) {
    const Ops *op = f->ops;
    const Shape *s = &f->shape;
    int n = batch->n_tok;
    CHECK(f->conf.mtp && n >= 1 && n <= f->conf.max_rows && hidden.rows == n);
    CHECK(n_logits >= 0 && n_logits <= f->conf.max_logits);
    Tensor x = tensor_head(f->work.x, n), pair = tensor_head(f->work.pair, n);
    Tensor left = tensor_cols(pair, 0, s->hidden), right = tensor_cols(pair, s->hidden, s->hidden);

    op->batch_set(f->dev, batch);
    op->embed(f->dev, x, f->embed);
    op->rms_norm(f->dev, left, x, f->mtp.enorm, s->eps);
    op->rms_norm(f->dev, right, hidden, f->mtp.hnorm, s->eps);
    op->linear(f->dev, x, pair, f->mtp.eh_proj);
    int rc = forward_layer(f, s->n_layers, n, NULL, err);
    *state = tensor_head(f->work.state, n);
    op->rms_norm(f->dev, *state, x, f->mtp.head_norm, s->eps);
    if (n_logits > 0)
        forward_head(f, *state, logit_row, n_logits, logits);
    return rc;
}
