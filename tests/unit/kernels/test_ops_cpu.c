/* What the fast host backends promise beyond single results: the same bits for a token alone and in
 * company, for one rank and two, for every thread count; odd matrices; long contexts. */
#include "tests/unit/kernels/ops_side.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 80, LONG = 6144, TOPK = 256, LORA = 128, ROPE = 16, DIM = 32 };

/* ---- products ---- */

/* x . W^T of all rows of x at once into `all`, and row by row into `each`. */
static void multiply(Side *s, const MatView *w, Tensor x, Tensor all, Tensor each) {
    Mat *m;
    assert_int_equal(s->ops->mat_load(s->dev, w, &m, NULL), 0);
    s->ops->linear(s->dev, all, x, m);
    for (int r = 0; r < x.rows; r++)
        s->ops->linear(s->dev, tensor_row(each, r), tensor_row(x, r), m);
    s->ops->mat_free(s->dev, m);
}

/* One view on every backend: near the reference, and all products of the fast ones with equal
 * bits. */
static void linear_case(Side *s, int n_sides, const MatView *w, int rows) {
    Tensor x = noise_tensor(rows, w->cols), first = tensor(rows, w->rows),
           want = tensor(rows, w->rows);
    multiply(&s[0], w, x, want, want);
    for (int b = 1; b < n_sides; b++) {
        Tensor all = tensor(rows, w->rows), each = tensor(rows, w->rows);
        multiply(&s[b], w, x, all, each);
        near(want, all, 1e-5);
        same(all, each);
        if (b == 1)
            multiply(&s[b], w, x, first, each);
        same(first, all);
        free(all.at), free(each.at);
    }
    free(x.at), free(first.at), free(want.at);
}

/* Slices that start and end anywhere, and rows on both sides of a border of the grid. */
static void test_linear_of_slices(void **state) {
    (void)state;
    static const int cut[][4] = {{0, 140, 0, 304},  {100, 40, 112, 144}, {126, 5, 100, 101},
                                 {127, 3, 37, 200}, {1, 1, 303, 1},      {5, 17, 16, 250}};
    Side s[4];
    int n = sides(s, ROWS, 64);
    for (int d = 0; d < 4; d++)
        for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
            if (DTYPES[d] == DT_NVFP4 && (cut[i][2] % 16 || cut[i][3] % 16))
                continue;
            Stored w = stored(DTYPES[d], 140, 304);
            MatView part = mat_rows(&w.view, cut[i][0], cut[i][1]),
                    slice = mat_cols(&part, cut[i][2], cut[i][3]);
            linear_case(s, n, &slice, 7);
            stored_done(&w);
        }
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* Shapes of GLM-5.2: the fused q_a and kv_a projection, whose rows are no multiple of the block,
 * and the router. */
static void test_linear_of_real_shapes(void **state) {
    (void)state;
    static const struct {
        Dtype dtype;
        int rows, cols;
    } shape[] = {{DT_F8E4M3, 2624, 6144}, {DT_BF16, 256, 6144}, {DT_NVFP4, 512, 6144}};
    Side s[4];
    int n = sides(s, ROWS, 64);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        Stored w = stored(shape[i].dtype, shape[i].rows, shape[i].cols);
        linear_case(s, n, &w.view, 2);
        stored_done(&w);
    }
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* A NaN in a weight comes out as NaN, and nowhere else; extreme scales keep their exact products.
 * Alone (decoded on the way) and in company (decoded first). */
static void test_nan_and_extreme_scales(void **state) {
    (void)state;
    static const float extreme[] = {0x1p120f, 0x1.8p-140f, 0.0f, -3.0f, 0x1p-126f};
    Side s[4];
    int n = sides(s, ROWS, 64);
    Stored w = stored(DT_F8E4M3, 12, 272);
    for (int i = 0; i < 5; i++)
        for (int c = 0; c < 3; c++)
            ((float *)w.scale)[c] = c == 1 ? extreme[i] : 1.0f, linear_case(s, n, &w.view, 3);
    for (int c = 0; c < 3; c++)
        ((float *)w.scale)[c] = 1.0f;
    ((uint8_t *)w.data)[3 * 272 + 130] = 0x7f;
    ((uint8_t *)w.data)[10 * 272 + 271] = 0xff;
    Tensor x = noise_tensor(4, 272);
    for (int b = 0; b < n; b++) {
        Tensor all = tensor(4, 12), each = tensor(4, 12);
        multiply(&s[b], &w.view, x, all, each);
        for (int t = 0; t < 4; t++)
            for (int r = 0; r < 12; r++) {
                bool bad = r == 3 || r == 10;
                assert_int_equal(isnan(host_row(all, t)[r]) != 0, bad);
                assert_int_equal(isnan(host_row(each, t)[r]) != 0, bad);
            }
        free(all.at), free(each.at);
    }
    free(x.at);
    stored_done(&w);
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* Routed experts give a token the same bits whoever else is in the batch. */
static void test_experts_do_not_see_other_tokens(void **state) {
    (void)state;
    enum { E = 8, HID = 272, INNER = 144, K = 4, N = 33 };
    Side s[4];
    int n = sides(s, ROWS, 64);
    Stored part[3][E];
    MatView v[3][E];
    for (int p = 0; p < 3; p++)
        for (int e = 0; e < E; e++) {
            part[p][e] =
                stored(e % 2 ? DT_F8E4M3 : DT_NVFP4, p == 2 ? HID : INNER, p == 2 ? INNER : HID);
            v[p][e] = part[p][e].view;
        }
    Tensor x = noise_tensor(N, HID), w = noise_tensor(N, K), id = tensor(N, K);
    for (int t = 0; t < N; t++)
        for (int i = 0; i < K; i++)
            host_row_i32(id, t)[i] = 2 * i + (t * 5 + i) % 2;
    for (int b = 1; b < n; b++) {
        Experts *e;
        ExpertsView view = {E, v[0], v[1], v[2]};
        Tensor all = noise_tensor(N, HID), one = copy_tensor(all);
        assert_int_equal(s[b].ops->experts_load(s[b].dev, &view, &e, NULL), 0);
        s[b].ops->experts(s[b].dev, all, x, id, w, e);
        for (int t = 0; t < N; t++)
            s[b].ops->experts(s[b].dev, tensor_row(one, t), tensor_row(x, t), tensor_row(id, t),
                              tensor_row(w, t), e);
        same(all, one);
        s[b].ops->experts_free(s[b].dev, e);
        free(all.at), free(one.at);
    }
    for (int p = 0; p < 3; p++)
        for (int e = 0; e < E; e++)
            stored_done(&part[p][e]);
    free(x.at), free(w.at), free(id.at);
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* silu within 1e-6 of its value over the range of float exponents that matters. */
static void test_silu_is_accurate(void **state) {
    (void)state;
    enum { N = 4001 };
    Side s[4];
    int n = sides(s, ROWS, 64);
    Tensor g = tensor(1, N), one = tensor(1, N);
    for (int i = 0; i < N; i++)
        host_row(g, 0)[i] = (float)(i - N / 2) * 0.04f, host_row(one, 0)[i] = 1.0f;
    for (int b = 1; b < n; b++) {
        Tensor out = tensor(1, N);
        s[b].ops->silu_mul(s[b].dev, out, g, one);
        for (int i = 0; i < N; i++) {
            double x = host_row(g, 0)[i], want = x / (1.0 + exp(-x));
            assert_true(fabs(host_row(out, 0)[i] - want) <= 1e-6 * fabs(want) + 1e-35);
        }
        free(out.at);
    }
    free(g.at), free(one.at);
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* Numbers on, and one step beside, the middle between two e4m3 codes, and on those between two
 * bf16 numbers: rounded as the scalar conversions do. */
static void test_rounding_to_stored_numbers(void **state) {
    (void)state;
    static float x[127 * 6 + 22];
    int n = 0;
    for (int code = 0; code < 127; code++) {
        float mid = code < 126
                        ? (f8e4m3_to_f32((uint8_t)code) + f8e4m3_to_f32((uint8_t)(code + 1))) / 2
                        : 464.0f;
        float near_mid[3] = {mid, nextafterf(mid, 0), nextafterf(mid, 1e9f)};
        for (int i = 0; i < 6; i++)
            x[n++] = i % 2 ? -near_mid[i / 2] : near_mid[i / 2];
    }
    for (uint32_t i = 0; i < 22; i++) { /* bf16 ties, infinities, NaN with a low payload */
        uint32_t u = (i % 2 << 31) + (i < 16 ? 0x3f7f8000u + (i / 2 << 15) + i % 3 - 1
                                             : 0x7f7f8000u + (i - 16) / 2 * 0x8001u);
        memcpy(&x[n++], &u, 4);
    }
    const Kern *kern[2] = {ops_cpu("avx2") ? kern_avx2() : NULL,
                           ops_cpu("avx512") ? kern_avx512() : NULL};
    for (int k = 0; k < 2; k++) {
        uint8_t f8[sizeof x / 4], bf16[sizeof x / 2];
        if (!kern[k])
            continue;
        kern[k]->to_f8(x, n, 1.0f, f8);
        kern[k]->to_bf16(x, n, bf16);
        for (int i = 0; i < n; i++) {
            uint16_t half;
            memcpy(&half, bf16 + 2 * i, 2);
            assert_int_equal(f8[i], f32_to_f8e4m3(x[i]));
            assert_int_equal(half, f32_to_bf16(x[i]));
        }
    }
}

/* ---- a long sequence and a short one in a pool ---- */

typedef struct Pool {
    KvLayout layout;
    uint8_t *bytes;
    int32_t tok[ROWS], pos[ROWS], seq[ROWS], table[2 * (LONG / 64)];
    int n;
} Pool;

static Pool pool_new_for(Dtype dtype) {
    Pool p = {.layout = {.dtype = dtype,
                         .n_slots = 2,
                         .n_index = 2,
                         .kv_lora = LORA,
                         .rope = ROPE,
                         .index_dim = DIM,
                         .n_pages = LONG / 64 + 8}};
    p.bytes = xmalloc(kv_pool_bytes(&p.layout));
    memset(p.bytes, 0xff, kv_pool_bytes(&p.layout));
    for (int i = 0; i < LONG / 64; i++) {
        p.table[i] = LONG / 64 - 1 - i;
        p.table[LONG / 64 + i] = LONG / 64 + i % 8;
    }
    return p;
}

static OpsBatch batch_of(const Pool *p) {
    return (OpsBatch){p->n, 2, p->tok, p->pos, p->seq, p->table, LONG / 64};
}

static void add_token(Pool *p, int seq, int pos) {
    p->seq[p->n] = seq;
    p->pos[p->n++] = pos;
}

/* Writes positions [0, n) of both sequences, as many as 512 of the second, by the reference. */
static void fill(Pool *p, int n) {
    Side s = side_open(ops_ref(), 1, ROWS, LONG);
    s.ops->kv_bind(s.dev, &p->layout, p->bytes);
    for (int seq = 0; seq < 2; seq++)
        for (int at = 0; at < (seq ? 512 : n);) {
            for (p->n = 0; p->n < ROWS && at < (seq ? 512 : n); at++)
                add_token(p, seq, at);
            Tensor kv = noise_tensor(p->n, LORA + ROPE), key = noise_tensor(p->n, DIM);
            OpsBatch b = batch_of(p);
            s.ops->batch_set(s.dev, &b);
            s.ops->kv_write(s.dev, 1, kv, 1, key);
            free(kv.at), free(key.at);
        }
    side_close(&s);
    p->n = 0;
}

/* More tokens than a wave holds; both sequences interleaved; positions that take all, that see the
 * first page only, that end on borders of pages and spans. */
static void many_tokens(Pool *p) {
    static const int at[] = {0, 255, 256, 2047, 2048, 2049, 4095, 4096, 5000, 6000};
    for (int i = 0; i < 10; i++)
        add_token(p, 0, at[i]);
    for (int i = 0; i < 40; i++) /* a chunk of a prompt */
        add_token(p, 0, 4200 + i);
    for (int i = 0; i < 20; i++) /* alternating */
        add_token(p, i % 2, i % 2 ? 240 + 4 * i : 3000 - 100 * i);
}

enum { HEADS = 12, INDEX_HEADS = 6 };

typedef struct Inputs {
    Tensor iq, iw, q;
} Inputs;

static Inputs inputs_new(int n) {
    return (Inputs){noise_tensor(n, INDEX_HEADS * DIM), noise_tensor(n, INDEX_HEADS),
                    noise_tensor(n, HEADS * (LORA + ROPE))};
}

static void inputs_done(Inputs *in) {
    free(in->iq.at), free(in->iw.at), free(in->q.at);
}

/* Rows [from, from + n) of the pool's batch, as a batch of their own. */
static void attention(Side *s, const Pool *p, const Inputs *in, int from, int n, Tensor list,
                      Tensor out) {
    OpsBatch b = batch_of(p);
    b.n_tok = n, b.token += from, b.pos += from, b.seq += from;
    Tensor iq = tensor_head(tensor_row(in->iq, from), n),
           iw = tensor_head(tensor_row(in->iw, from), n),
           q = tensor_head(tensor_row(in->q, from), n);
    s->ops->kv_bind(s->dev, &p->layout, p->bytes);
    s->ops->batch_set(s->dev, &b);
    s->ops->index_select(s->dev, list, iq, iw, INDEX_HEADS, 1);
    s->ops->mla_attend(s->dev, out, q, list, HEADS, 1, 0.3f);
}

static void long_context_case(Dtype dtype) {
    Side s[4];
    int n = sides(s, ROWS, LONG);
    Pool p = pool_new_for(dtype);
    fill(&p, 6001);
    many_tokens(&p);
    Inputs in = inputs_new(p.n);
    Tensor list[4], out[4];
    for (int b = 0; b < n; b++) {
        list[b] = tensor(p.n, TOPK);
        out[b] = tensor(p.n, HEADS * LORA);
        attention(&s[b], &p, &in, 0, p.n, list[b], out[b]);
        same(list[0], list[b]);
        near(out[0], out[b], 1e-5);
        if (b > 1)
            same(out[1], out[b]);
    }
    for (int b = 1; b < n; b++)
        for (int t = 0; t < p.n; t += 3) {
            Tensor l = tensor(1, TOPK), o = tensor(1, HEADS * LORA);
            attention(&s[b], &p, &in, t, 1, l, o);
            same(tensor_row(list[b], t), l);
            same(tensor_row(out[b], t), o);
            free(l.at), free(o.at);
        }
    for (int b = 0; b < n; b++) {
        free(list[b].at), free(out[b].at);
        side_close(&s[b]);
    }
    inputs_done(&in);
    free(p.bytes);
}

static void test_long_context_f32(void **state) {
    (void)state;
    long_context_case(DT_F32);
}

static void test_long_context_bf16(void **state) {
    (void)state;
    long_context_case(DT_BF16);
}

static void test_long_context_fp8(void **state) {
    (void)state;
    long_context_case(DT_F8E4M3);
}

/* Equal scores everywhere: the first positions win. Large scores: all weight on one row, no
 * overflow. */
static void test_ties_and_sharp_softmax(void **state) {
    (void)state;
    Side s[4];
    int n = sides(s, ROWS, LONG);
    Pool p = pool_new_for(DT_BF16);
    fill(&p, 1000);
    add_token(&p, 0, 999);
    Inputs in = inputs_new(1);
    memset(in.iq.at, 0, (size_t)in.iq.ld * sizeof(float));
    for (int c = 0; c < in.q.cols; c++)
        host_row(in.q, 0)[c] *= 1e4f;
    Tensor want = tensor(1, HEADS * LORA);
    for (int b = 0; b < n; b++) {
        Tensor list = tensor(1, TOPK), out = tensor(1, HEADS * LORA);
        attention(&s[b], &p, &in, 0, 1, list, b ? out : want);
        for (int i = 0; i < TOPK; i++)
            assert_int_equal(host_row_i32(list, 0)[i], i);
        if (b)
            near(want, out, 1e-5);
        free(list.at), free(out.at);
    }
    free(want.at);
    inputs_done(&in);
    free(p.bytes);
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* ---- ranks ---- */

typedef struct Rank {
    const Ops *ops;
    Dev *dev;
    const Pool *pool;
    Inputs in;
    Tensor kv, key, list, out; /* list: one memory for all ranks */
    pthread_t thread;
} Rank;

static void *rank_main(void *arg) {
    Rank *r = arg;
    OpsBatch b = batch_of(r->pool);
    r->ops->kv_bind(r->dev, &r->pool->layout, r->pool->bytes);
    r->ops->batch_set(r->dev, &b);
    r->ops->kv_write(r->dev, 1, r->kv, 1, r->key);
    r->ops->index_select(r->dev, r->list, r->in.iq, r->in.iw, INDEX_HEADS, 1);
    r->ops->mla_attend(r->dev, r->out, r->in.q, r->list, HEADS, 1, 0.3f);
    return NULL;
}

/* One step on a group of ranks; out[i] is rank i's. */
static void ranks_run(const Ops *ops, int n_ranks, int threads, const Pool *p, Rank like,
                      Tensor *out) {
    Dev *dev[4];
    Rank rank[4];
    DevConf c = {.n_ranks = n_ranks,
                 .threads = threads,
                 .max_rows = ROWS,
                 .max_seqs = 2,
                 .max_context = LONG,
                 .index_topk = TOPK};
    assert_int_equal(ops->open(&c, dev, NULL), 0);
    for (int i = 0; i < n_ranks; i++) {
        rank[i] = like;
        rank[i].ops = ops, rank[i].dev = dev[i], rank[i].pool = p, rank[i].out = out[i];
        assert_int_equal(pthread_create(&rank[i].thread, NULL, rank_main, &rank[i]), 0);
    }
    for (int i = 0; i < n_ranks; i++)
        pthread_join(rank[i].thread, NULL);
    ops->close(dev, n_ranks);
}

/* The pool's bytes, lists and results do not depend on ranks and threads, and the bytes are the
 * reference's, whatever the numbers. */
static void ranks_case(Dtype dtype) {
    static const int shape[][2] = {{1, 1}, {2, 1}, {4, 2}, {1, 3}};
    Pool p = pool_new_for(dtype);
    size_t bytes = kv_pool_bytes(&p.layout);
    uint8_t *before = xmalloc(bytes), *want = xmalloc(bytes);
    fill(&p, 3000);
    for (int i = 0; i < 71; i++) /* over the borders of pages */
        add_token(&p, i >= 51, i >= 51 ? 512 + i - 51 : 3000 + i);
    memcpy(before, p.bytes, bytes);
    Rank like = {.in = inputs_new(p.n),
                 .kv = noise_tensor(p.n, LORA + ROPE),
                 .key = noise_tensor(p.n, DIM),
                 .list = tensor(p.n, TOPK)};
    static const float odd[] = {0.0f, -0.0f, 1e-42f, 1e30f, -3e38f, 0x1p-9f, 0x1.8p-10f, 447.99f};
    for (int i = 0; i < 8 * 9; i++)
        host_row(like.kv, i % 8)[7 * i] = host_row(like.key, i % 9)[i % DIM] = odd[i % 8];
    memset(host_row(like.kv, 20), 0, LORA * sizeof(float));
    memset(host_row(like.key, 20), 0, DIM * sizeof(float));
    Tensor first = tensor(p.n, HEADS * LORA), list, out[4];
    ranks_run(ops_ref(), 1, 1, &p, like, &first);
    list = copy_tensor(like.list);
    memcpy(want, p.bytes, bytes);
    for (int i = 0; i < 4 && ops_cpu(NULL); i++) {
        memcpy(p.bytes, before, bytes);
        for (int r = 0; r < 4; r++)
            out[r] = tensor(p.n, HEADS * LORA);
        ranks_run(ops_cpu(i == 0 && ops_cpu("avx2") ? "avx2" : NULL), shape[i][0], shape[i][1], &p,
                  like, out);
        assert_memory_equal(p.bytes, want, bytes);
        same(list, like.list);
        if (i == 0)
            memcpy(first.at, out[0].at, (size_t)p.n * (size_t)first.ld * sizeof(float));
        for (int r = 0; r < 4; r++) {
            if (r < shape[i][0])
                same(first, out[r]);
            free(out[r].at);
        }
    }
    inputs_done(&like.in);
    free(like.kv.at), free(like.key.at), free(like.list.at), free(list.at), free(first.at);
    free(before), free(want), free(p.bytes);
}

static void test_ranks_f32(void **state) {
    (void)state;
    ranks_case(DT_F32);
}

static void test_ranks_bf16(void **state) {
    (void)state;
    ranks_case(DT_BF16);
}

static void test_ranks_fp8(void **state) {
    (void)state;
    ranks_case(DT_F8E4M3);
}

/* Threads by default, and a name that no processor has. */
static void test_open(void **state) {
    (void)state;
    if (ops_cpu(NULL)) {
        Side s = side_open(ops_cpu(NULL), 0, 1, 64);
        assert_true(pool_size(s.dev->pool) >= 1);
        side_close(&s);
        assert_null(s.dev);
        side_close(&s);
    }
    assert_null(ops_cpu("sse"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear_of_slices),
        cmocka_unit_test(test_linear_of_real_shapes),
        cmocka_unit_test(test_nan_and_extreme_scales),
        cmocka_unit_test(test_experts_do_not_see_other_tokens),
        cmocka_unit_test(test_silu_is_accurate),
        cmocka_unit_test(test_rounding_to_stored_numbers),
        cmocka_unit_test(test_long_context_f32),
        cmocka_unit_test(test_long_context_bf16),
        cmocka_unit_test(test_long_context_fp8),
        cmocka_unit_test(test_ties_and_sharp_softmax),
        cmocka_unit_test(test_ranks_f32),
        cmocka_unit_test(test_ranks_bf16),
        cmocka_unit_test(test_ranks_fp8),
        cmocka_unit_test(test_open),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
