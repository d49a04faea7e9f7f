/* See rig.h. */
#include "tests/support/rig.h"

#include <stdlib.h>
#include <string.h>

enum { LINE = 4096 }; /* bytes */

/* Fills the pool with NaN, in lines of numbers and what is left after the last one. */
static void poison(Rig *r) {
    size_t bytes = kv_pool_bytes(&r->layout), rest = bytes % LINE / 4;
    void *ones = xmalloc(bytes);
    memset(ones, 0xff, bytes);
    Tensor lines = {r->pool, DT_F32, (int)(bytes / LINE), LINE / 4, LINE / 4, false},
           last = {(char *)r->pool + bytes / LINE * LINE, DT_F32, 1, (int)rest, (int)rest, false};
    engine_put(r->engine, &lines, ones);
    if (rest > 0)
        engine_put(r->engine, &last, ones);
    free(ones);
}

int rig_open(Rig *r, const RigConf *c, Err *err) {
    memset(r, 0, sizeof *r);
    int rc = weights_open(&r->weights, c->dir, err);
    EngineConf ec = {
        .backend = c->backend ? c->backend : "cpu",
        .tp = c->tp ? c->tp : 1,
        .threads = c->threads ? c->threads : 1,
        .max_rows = c->max_rows ? c->max_rows : 512,
        .max_seqs = c->max_seqs ? c->max_seqs : 8,
        .max_context = c->max_context ? c->max_context : 4352,
        .max_logits = 64,
        .mtp = c->mtp,
        .kv_dtype = c->kv_dtype,
        .resident = c->resident,
        .port = c->port,
        .counts = c->counts,
        .count_all = c->counts != NULL,
        .ops = c->ops,
    };
    if (rc == 0)
        rc = engine_open(&r->engine, r->weights, &ec, err);
    if (rc) {
        weights_close(r->weights);
        return rc;
    }
    r->max_pages = (ec.max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    r->layout = engine_kv_layout(r->engine);
    r->layout.n_pages = r->max_pages * ec.max_seqs;
    rc = engine_pool_new(r->engine, kv_pool_bytes(&r->layout), &r->pool, err);
    if (rc) {
        engine_close(r->engine);
        weights_close(r->weights);
        return rc;
    }
    poison(r);
    r->pages = kv_pool_new((int)r->layout.n_pages);
    engine_kv_bind(r->engine, &r->layout, r->pool);
    return 0;
}

void rig_close(Rig *r) {
    engine_pool_free(r->engine, r->pool);
    engine_close(r->engine);
    weights_close(r->weights);
    kv_pool_free(r->pages);
}

static int pages_for(int tokens) {
    return (tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
}

RigSeq rig_seq_new(Rig *r, int max_tokens) {
    RigSeq s = {xcalloc((size_t)r->max_pages, sizeof(int32_t)), 0};
    Err err;
    int n = pages_for(max_tokens);
    int32_t *taken = xcalloc((size_t)n, sizeof *taken);
    CHECK(n <= r->max_pages && kv_pool_take(r->pages, n, taken, &err) == 0);
    for (int i = 0; i < n; i++) /* out of order: nothing may assume neighbours */
        s.page[i] = taken[n - 1 - i];
    free(taken);
    return s;
}

void rig_seq_free(Rig *r, RigSeq *s, int max_tokens) {
    kv_pool_give(r->pages, s->page, pages_for(max_tokens));
    free(s->page);
}

int rig_append(Rig *r, RigSeq *s, const int32_t *token, int n, int chunk, int want,
               const ForwardProbe *probe, Err *err) {
    int32_t *pos = xcalloc((size_t)chunk, sizeof *pos), *seq = xcalloc((size_t)chunk, sizeof *seq);
    EngineRow *rows = xcalloc((size_t)want + 1, sizeof *rows);
    int rc = 0;
    for (int at = 0; at < n && rc == 0;) {
        /* the last step is long enough to hold the wanted rows */
        int rest = n - at, m = rest <= chunk ? rest : rest - chunk < want ? rest - want : chunk;
        bool last = at + m == n;
        for (int i = 0; i < m; i++)
            pos[i] = s->n + i;
        for (int i = 0; last && i < want; i++)
            rows[i].row = m - want + i;
        OpsBatch b = {m, 1, token + at, pos, seq, s->page, r->max_pages};
        rc = engine_step(r->engine, &b, rows, last ? want : 0, probe, err);
        s->n += m;
        at += m;
    }
    free(rows);
    free(seq);
    free(pos);
    return rc;
}

int rig_mtp(Rig *r, RigSeq *s, const int32_t *token, int pos, int n, int hidden_row0,
            bool from_state, Err *err) {
    int32_t *at = xcalloc((size_t)n, sizeof *at), *seq = xcalloc((size_t)n, sizeof *seq),
            *row = xcalloc((size_t)n, sizeof *row);
    for (int i = 0; i < n; i++) {
        at[i] = pos + i;
        row[i] = hidden_row0 + i;
    }
    EngineRow want = {.row = n - 1};
    OpsBatch b = {n, 1, token, at, seq, s->page, r->max_pages};
    int rc = engine_mtp(r->engine, &b, row, from_state, &want, 1, err);
    free(at);
    free(seq);
    free(row);
    return rc;
}

int rig_argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}
