/* bench_decode CHECKPOINT_DIR: tokens per second of the CPU backend against its floor.
 *
 * The floor of a decode step is the bytes it must read once (weights of all layers, n_active of
 * n_experts experts for each token of the batch at least once, KV of the chosen positions) over the
 * read bandwidth that this machine shows in the same run on a buffer of the same size. A model this
 * small lies in the caches, so the bandwidth is theirs. Every figure is a median. */
#include "base/clock.h"
#include "tests/support/rig.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 200, CONTEXT = 512 };

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, int n) {
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

/* ---- read bandwidth ---- */

typedef struct Reader {
    const uint64_t *at;
    size_t n;
    uint64_t sum;
    pthread_t thread;
} Reader;

static void *read_all(void *arg) {
    Reader *r = arg;
    uint64_t s[8] = {0};
    for (int round = 0; round < 4; round++)
        for (size_t i = 0; i + 8 <= r->n; i += 8)
            for (int k = 0; k < 8; k++)
                s[k] += r->at[i + (size_t)k];
    for (int k = 0; k < 8; k++)
        r->sum += s[k];
    return NULL;
}

/* GB/s of n_threads reading a buffer of `bytes` in equal parts again and again. */
static double read_bandwidth(size_t bytes, int n_threads) {
    uint64_t *buf = xaligned(bytes);
    double rate[7];
    Reader r[16] = {0};
    memset(buf, 1, bytes);
    for (int k = 0; k < 7; k++) {
        int64_t begin = clock_now_us();
        for (int i = 0; i < n_threads; i++) {
            r[i].n = bytes / 8 / (size_t)n_threads;
            r[i].at = buf + (size_t)i * r[i].n;
            CHECK(pthread_create(&r[i].thread, NULL, read_all, &r[i]) == 0);
        }
        for (int i = 0; i < n_threads; i++)
            pthread_join(r[i].thread, NULL);
        rate[k] = 4.0 * (double)bytes / (double)(clock_now_us() - begin) * 1e-3;
    }
    free(buf);
    return median(rate, 7);
}

/* ---- bytes of a step ---- */

static double mat_bytes(const Weights *w, const char *name, int rows, int cols) {
    MatView v;
    Err err = {0};
    if (weights_matrix(w, name, rows, cols, &v, &err)) {
        fprintf(stderr, "bench_decode: %s\n", err.text);
        exit(1);
    }
    return (double)v.row_bytes * rows;
}

static double layer_mat(const Weights *w, int layer, const char *rest, int rows, int cols) {
    char name[160];
    snprintf(name, sizeof name, "model.layers.%d.%s", layer, rest);
    return mat_bytes(w, name, rows, cols);
}

/* Weights that one token reads. */
static double token_bytes(const Weights *w) {
    const Shape *s = weights_shape(w);
    double sum = mat_bytes(w, "lm_head", s->vocab, s->hidden);
    for (int i = 0; i < s->n_layers; i++) {
        sum += layer_mat(w, i, "self_attn.q_a_proj", s->q_lora, s->hidden);
        sum += layer_mat(w, i, "self_attn.q_b_proj", s->n_heads * (s->nope + s->rope), s->q_lora);
        sum += layer_mat(w, i, "self_attn.kv_a_proj_with_mqa", s->kv_lora + s->rope, s->hidden);
        sum +=
            layer_mat(w, i, "self_attn.kv_b_proj", s->n_heads * (s->nope + s->v_dim), s->kv_lora);
        sum += layer_mat(w, i, "self_attn.o_proj", s->hidden, s->n_heads * s->v_dim);
        if (s->layer_has_index[i])
            sum += layer_mat(w, i, "self_attn.indexer.wq_b", s->index_heads * s->index_dim,
                             s->q_lora) +
                   layer_mat(w, i, "self_attn.indexer.wk", s->index_dim, s->hidden);
        const char *mlp = s->layer_dense[i] ? "mlp.gate_proj" : "mlp.shared_experts.gate_proj";
        sum += 3 * layer_mat(w, i, mlp,
                             s->layer_dense[i] ? s->dense_inner : s->n_shared * s->moe_inner,
                             s->hidden);
        if (!s->layer_dense[i])
            sum += s->n_active * 3 *
                       layer_mat(w, i, "mlp.experts.0.gate_proj", s->moe_inner, s->hidden) +
                   layer_mat(w, i, "mlp.gate", s->n_experts, s->hidden);
    }
    return sum;
}

/* KV that one token at CONTEXT positions reads: index keys of all, latent rows of the chosen. */
static double kv_bytes(const Shape *s, const KvLayout *l) {
    int chosen = CONTEXT < s->index_topk ? CONTEXT : s->index_topk;
    return s->n_index_layers * (double)kv_index_page_bytes(l) / KV_PAGE_TOKENS * CONTEXT +
           s->n_layers * (double)kv_latent_row_bytes(l) * chosen;
}

/* ---- steps ---- */

static double step_us(Rig *r, RigSeq *seq, int batch) {
    int32_t tok[64], pos[64], id[64],
        *table = xcalloc((size_t)batch * (size_t)r->max_pages, sizeof *table);
    EngineRow rows[64] = {0};
    double us[STEPS];
    Err err = {0};
    for (int b = 0; b < batch; b++) {
        memcpy(table + b * r->max_pages, seq[b].page, (size_t)r->max_pages * sizeof *table);
        tok[b] = 100 + b, id[b] = b, rows[b].row = b;
    }
    for (int k = 0; k < STEPS; k++) {
        for (int b = 0; b < batch; b++)
            pos[b] = CONTEXT;
        OpsBatch step = {batch, batch, tok, pos, id, table, r->max_pages};
        int64_t begin = clock_now_us();
        CHECK(engine_step(r->engine, &step, rows, batch, NULL, &err) == 0);
        us[k] = (double)(clock_now_us() - begin);
    }
    free(table);
    return median(us, STEPS);
}

static int run(const char *dir, int tp) {
    static const int batches[] = {1, 8, 32};
    Rig r;
    Err err = {0};
    RigConf conf = {.dir = dir, .tp = tp, .max_seqs = 32, .max_context = 1024, .kv_dtype = DT_BF16};
    if (rig_open(&r, &conf, &err)) {
        fprintf(stderr, "bench_decode: %s\n", err.text);
        return 1;
    }
    double weights = token_bytes(r.weights), kv = kv_bytes(engine_shape(r.engine), &r.layout);
    int cores = tp < 2 ? 1 : 2;
    double gb = read_bandwidth((size_t)weights, cores);
    RigSeq seq[32];
    int32_t prompt[CONTEXT];
    for (int b = 0; b < 32; b++) {
        for (int i = 0; i < CONTEXT; i++)
            prompt[i] = (i * 37 + b * 101) % 4000;
        seq[b] = rig_seq_new(&r, CONTEXT + 1);
        CHECK(rig_append(&r, &seq[b], prompt, CONTEXT, 512, 0, NULL, &err) == 0);
    }
    for (int i = 0; i < 3; i++) {
        double us = step_us(&r, seq, batches[i]),
               floor_us = (weights + batches[i] * kv) / gb * 1e-3;
        printf("| %s | %d | %d | %.0f | %.2f | %.0f | %.0f | %.2f |\n", engine_backend(r.engine),
               tp, batches[i], batches[i] / us * 1e6, (weights + batches[i] * kv) * 1e-6, floor_us,
               us, floor_us / us);
        fflush(stdout);
    }
    for (int b = 0; b < 32; b++)
        rig_seq_free(&r, &seq[b], CONTEXT + 1);
    rig_close(&r);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: bench_decode CHECKPOINT_DIR\n");
        return 2;
    }
    printf("| backend | tp | batch | tokens/s | MB read per step | floor us | step us | floor / "
           "step |\n|---|---|---|---|---|---|---|---|\n");
    for (int tp = 1; tp <= 4; tp *= 2)
        if (run(argv[1], tp))
            return 1;
    return 0;
}
