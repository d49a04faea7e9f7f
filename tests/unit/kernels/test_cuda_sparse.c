/* The CUDA backend's index selection and sparse attention against the reference, on the pool that
 * the reference wrote; what must not be read is NaN. */
#include "tests/unit/kernels/cuda_side.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 600, CONTEXT = 1024, PAGES = CONTEXT / 64, LONG = 700, SHORT = 65 };

typedef struct Shape {
    int heads, lora, rope, index_heads, dim, topk;
} Shape;

static const Shape GLM = {16, 512, 64, 32, 128, 256}, ODD = {5, 128, 16, 6, 32, 100},
                   WIDE = {20, 384, 32, 40, 112, 130};
static const Dtype KV[3] = {DT_F32, DT_BF16, DT_F8E4M3};

/* Two sequences of LONG and SHORT positions on both sides. */
typedef struct Bench {
    Side ref, gpu;
    KvLayout layout;
    Shape shape;
    void *bytes, *on_gpu;
    int32_t tok[MAX_ROWS], pos[MAX_ROWS], seq[MAX_ROWS], table[2 * PAGES];
} Bench;

static void set_batch(const Bench *b, const Side *s, int first, int n) {
    s->ops->batch_set(s->dev,
                      &(OpsBatch){n, 2, b->tok, b->pos + first, b->seq + first, b->table, PAGES});
}

/* Latents of very different sizes, so that the scales of e4m3 are too. */
static void fill(Bench *b) {
    const Ops *ops = b->ref.ops;
    ops->kv_bind(b->ref.dev, &b->layout, b->bytes);
    for (int at = 0; at < LONG + SHORT;) {
        int n = LONG + SHORT - at < MAX_ROWS ? LONG + SHORT - at : MAX_ROWS;
        Tensor kv = noise_tensor(n, b->layout.kv_lora + b->layout.rope),
               key = noise_tensor(n, b->layout.index_dim);
        for (int i = 0; i < n; i++) {
            b->seq[i] = at + i >= LONG;
            b->pos[i] = b->seq[i] ? at + i - LONG : at + i;
            for (int c = 0; c < b->layout.kv_lora; c++)
                host_row(kv, i)[c] *= (float)(1 + i % 5) * (b->seq[i] ? 1e-3f : 1.0f);
        }
        set_batch(b, &b->ref, 0, n);
        ops->kv_write(b->ref.dev, 1, kv, 1, key);
        free(kv.at), free(key.at);
        at += n;
    }
}

static Bench bench_open(Dtype dtype, Shape shape) {
    Bench b = {.gpu = cuda_side(MAX_ROWS, CONTEXT),
               .ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT),
               .shape = shape,
               .layout = {.dtype = dtype,
                          .n_slots = 2,
                          .n_index = 2,
                          .kv_lora = shape.lora,
                          .rope = shape.rope,
                          .index_dim = shape.dim,
                          .n_pages = 2 * PAGES + 3}};
    uint64_t bytes = kv_pool_bytes(&b.layout);
    b.bytes = xmalloc(bytes);
    memset(b.bytes, 0xff, bytes);
    for (int i = 0; i < PAGES; i++) {
        b.table[i] = 2 * PAGES + 2 - i;
        b.table[PAGES + i] = i;
    }
    fill(&b);
    b.on_gpu = pool_to_gpu(&b.gpu, b.bytes, bytes);
    b.gpu.ops->kv_bind(b.gpu.dev, &b.layout, b.on_gpu);
    return b;
}

static void bench_close(Bench *b) {
    b->gpu.ops->pool_free(b->gpu.dev, b->on_gpu);
    side_close(&b->gpu);
    side_close(&b->ref);
    free(b->bytes);
}

/* The hard positions first: none before it, page borders, shorter than top-k, just longer. */
static void rows(Bench *b, int n) {
    const int32_t hard[] = {LONG - 1,         0, 63, 64, b->shape.topk - 1, b->shape.topk,
                            b->shape.topk + 1};
    for (int i = 0; i < n; i++) {
        b->seq[i] = i % 4 == 3;
        b->pos[i] = b->seq[i] ? i * 7 % SHORT : i < 7 ? hard[i] : i * 37 % LONG;
    }
}

/* ---- index selection ---- */

static void scores(const Bench *b, int row, Tensor q, Tensor w, double *score) {
    int dim = b->shape.dim;
    float key[256];
    for (int p = 0; p <= b->pos[row]; p++) {
        host_kv_key(b->ref.dev, 1, b->table[b->seq[row] * PAGES + p / 64], p % 64, key);
        score[p] = 0;
        for (int h = 0; h < b->shape.index_heads; h++) {
            double dot = 0;
            for (int i = 0; i < dim; i++)
                dot += (double)host_row(q, row)[h * dim + i] * key[i];
            score[p] += host_row(w, row)[h] * fmax(dot, 0);
        }
    }
}

/* A right list: ascending, as long as it must be, and nothing that was left out is better than what
 * was taken by more than the tolerance. */
static void check_list(const Bench *b, int row, const int32_t *list, const double *score) {
    int n = b->pos[row] + 1, k = b->shape.topk, taken = n < k ? n : k;
    double worst = INFINITY, best = -INFINITY, top = 0;
    bool in[CONTEXT] = {0};
    for (int i = 0; i < k; i++) {
        if (i >= taken) {
            assert_int_equal(list[i], -1);
            continue;
        }
        assert_true(list[i] >= 0 && list[i] < n && (i == 0 || list[i] > list[i - 1]));
        in[list[i]] = true;
        worst = fmin(worst, score[list[i]]);
    }
    for (int p = 0; p < n; p++) {
        top = fmax(top, fabs(score[p]));
        if (!in[p])
            best = fmax(best, score[p]);
    }
    if (best - worst > 1e-5 * top)
        fail_msg("row %d: %g left out for %g", row, best, worst);
}

static Tensor choose(const Bench *b, int first, int n, Tensor q, Tensor w) {
    const Side *s = &b->gpu;
    Tensor part_q = tensor_row(q, first), part_w = tensor_row(w, first), list;
    part_q.rows = part_w.rows = n;
    Tensor gq = to_gpu(s, part_q, 0), gw = to_gpu(s, part_w, 3);
    assert_int_equal(s->ops->tensor_shared(s->dev, DT_I32, n, b->shape.topk, &list, NULL), 0);
    set_batch(b, s, first, n);
    s->ops->index_select(s->dev, list, gq, gw, b->shape.index_heads, 1);
    Tensor host = from_gpu(s, list);
    s->ops->tensor_free(s->dev, &list);
    gpu_free(s, &gq, 0);
    gpu_free(s, &gw, 3);
    return host;
}

static void index_case(Dtype dtype, Shape shape, int n, float spread) {
    Bench b = bench_open(dtype, shape);
    rows(&b, n);
    Tensor q = noise_tensor(n, shape.index_heads * shape.dim),
           w = noise_tensor(n, shape.index_heads);
    for (int r = 0; r < n; r++) { /* clustered scores: all heads but one all but alike */
        for (int i = shape.dim; i < shape.index_heads * shape.dim; i++)
            host_row(q, r)[i] *= spread;
        for (int i = 0; i < shape.dim; i++)
            host_row(q, r)[i] *= 30;
    }
    double *score = xmalloc(CONTEXT * sizeof *score);
    Tensor list = choose(&b, 0, n, q, w), again = choose(&b, 0, n, q, w);
    same(list, again);
    for (int r = 0; r < n; r++) {
        scores(&b, r, q, w, score);
        check_list(&b, r, host_row_i32(list, r), score);
    }
    for (int r = 0; r < n; r += 17) {
        Tensor one = choose(&b, r, 1, q, w);
        same(tensor_row(list, r), one);
        free(one.at);
    }
    free(score), free(q.at), free(w.at), free(list.at), free(again.at);
    bench_close(&b);
}

static void test_index_selection(void **state) {
    (void)state;
    static const int counts[] = {1, 7, 65};
    for (int d = 0; d < 3; d++)
        for (int i = 0; i < 3; i++) {
            index_case(KV[d], GLM, counts[i], 1);
            index_case(KV[d], ODD, counts[i], 0.01f);
            index_case(KV[d], WIDE, counts[i], 1);
        }
}

/* A chunk that the ranks share: everyone has the lists that one rank alone makes. */

typedef struct Rank {
    const Bench *b;
    Dev *dev;
    int n;
    Tensor q, w, list;
} Rank;

static void *choose_on_rank(void *arg) {
    Rank *r = arg;
    Side s = {.ops = r->b->gpu.ops, .dev = r->dev};
    s.ops->kv_bind(s.dev, &r->b->layout, r->b->on_gpu);
    Tensor q = to_gpu(&s, r->q, 0), w = to_gpu(&s, r->w, 0), list;
    s.ops->tensor_shared(s.dev, DT_I32, r->n, r->b->shape.topk, &list, NULL);
    set_batch(r->b, &s, 0, r->n);
    s.ops->index_select(s.dev, list, q, w, r->b->shape.index_heads, 1);
    r->list = from_gpu(&s, list);
    s.ops->tensor_free(s.dev, &list);
    gpu_free(&s, &q, 0);
    gpu_free(&s, &w, 0);
    return NULL;
}

static void ranks_case(int n_ranks, int n) {
    enum { MOST = 4 };
    Bench b = bench_open(DT_F8E4M3, ODD);
    Dev *dev[MOST];
    Rank rank[MOST];
    pthread_t thread[MOST];
    DevConf c = {.n_ranks = n_ranks,
                 .max_rows = MAX_ROWS,
                 .max_seqs = 2,
                 .max_context = CONTEXT,
                 .index_topk = ODD.topk};
    assert_int_equal(b.gpu.ops->open(&c, dev, NULL), 0);
    rows(&b, n);
    Tensor q = noise_tensor(n, ODD.index_heads * ODD.dim), w = noise_tensor(n, ODD.index_heads),
           alone = choose(&b, 0, n, q, w);
    for (int r = 0; r < n_ranks; r++) {
        rank[r] = (Rank){.b = &b, .dev = dev[r], .n = n, .q = q, .w = w};
        assert_int_equal(pthread_create(&thread[r], NULL, choose_on_rank, &rank[r]), 0);
    }
    for (int r = 0; r < n_ranks; r++) {
        pthread_join(thread[r], NULL);
        same(alone, rank[r].list);
        free(rank[r].list.at);
    }
    b.gpu.ops->close(dev, n_ranks);
    free(q.at), free(w.at), free(alone.at);
    bench_close(&b);
}

static void test_ranks_choose_together(void **state) {
    (void)state;
    ranks_case(2, 31); /* each for all */
    ranks_case(2, 301);
    ranks_case(4, 263);
}

/* ---- attention ---- */

/* Lists over the row's positions: holes, a row of nothing but holes, one position only. */
static Tensor lists(const Bench *b, int n) {
    Tensor list = tensor(n, b->shape.topk);
    list.dtype = DT_I32;
    for (int r = 0; r < n; r++)
        for (int i = 0, p = 0; i < b->shape.topk; i++) {
            int step = 1 + b->pos[r] / b->shape.topk;
            bool hole =
                r == 1 || (r == 4 && i != 77) || (r % 3 == 0 && i % 5 == 2) || (r == 8 && i < 140);
            host_row_i32(list, r)[i] = hole || p > b->pos[r] ? -1 : p;
            p += step;
        }
    return list;
}

static Tensor attend(const Bench *b, const Side *s, int first, int n, Tensor q, Tensor list) {
    Tensor part = tensor_row(q, first), where = tensor_row(list, first);
    part.rows = where.rows = n;
    Tensor gq = to_gpu(s, part, 0), gl = to_gpu(s, where, 0),
           nothing = tensor(n, b->shape.heads * b->shape.lora), out = to_gpu(s, nothing, 0);
    set_batch(b, s, first, n);
    s->ops->mla_attend(s->dev, out, gq, gl, b->shape.heads, 1, 0.2f);
    Tensor host = from_gpu(s, out);
    gpu_free(s, &gq, 0), gpu_free(s, &gl, 0), gpu_free(s, &out, 0);
    free(nothing.at);
    return host;
}

/* Each row within the tolerance of its own largest. */
static void near_rows(Tensor want, Tensor got, double tolerance) {
    for (int r = 0; r < want.rows; r++)
        near(tensor_row(want, r), tensor_row(got, r), tolerance);
}

static void attention_case(Dtype dtype, Shape shape, int n) {
    Bench b = bench_open(dtype, shape);
    rows(&b, n);
    Tensor q = noise_tensor(n, shape.heads * (shape.lora + shape.rope)), list = lists(&b, n),
           want = tensor(n, shape.heads * shape.lora);
    set_batch(&b, &b.ref, 0, n);
    b.ref.ops->mla_attend(b.ref.dev, want, q, list, shape.heads, 1, 0.2f);
    Tensor got = attend(&b, &b.gpu, 0, n, q, list), again = attend(&b, &b.gpu, 0, n, q, list);
    near_rows(want, got, 1e-5);
    same(got, again);
    for (int c = 0; c < want.cols && n > 1; c++)
        assert_true(host_row(got, 1)[c] == 0);
    for (int r = 0; r < n; r += 8) { /* alone, in a grid of another shape */
        Tensor one = attend(&b, &b.gpu, r, 1, q, list);
        same(tensor_row(got, r), one);
        free(one.at);
    }
    free(q.at), free(list.at), free(want.at), free(got.at), free(again.at);
    bench_close(&b);
}

static void test_attention(void **state) {
    (void)state;
    for (int d = 0; d < 3; d++) {
        attention_case(KV[d], GLM, 9);
        attention_case(KV[d], ODD, 65);
        attention_case(KV[d], WIDE, 65);
        attention_case(KV[d], ODD, 1);
    }
}

static void test_attention_of_all_heads(void **state) {
    (void)state;
    Shape all = GLM;
    all.heads = 64;
    attention_case(DT_F8E4M3, all, 20);
    all.heads = 128;
    attention_case(DT_BF16, all, 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_selection),
        cmocka_unit_test(test_ranks_choose_together),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_of_all_heads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
