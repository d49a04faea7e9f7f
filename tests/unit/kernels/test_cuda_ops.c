/* Matrices, linear layers, norms, rotation, routing, KV rows and ranks of the CUDA backend against
 * the reference: poisoned outputs, odd shapes and slices, every stored format, equal bits in every
 * batch and in every run. */
#include "kernels/kv_hash.h"
#include "tests/unit/kernels/cuda_side.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 96, CONTEXT = 1024, PAGES = CONTEXT / 64 };

static void *must_load(const Side *s, const MatView *v) {
    Mat *m;
    Err err;
    if (s->ops->mat_load(s->dev, v, &m, &err))
        fail_msg("%s", err.text);
    return m;
}

/* x . W^T on one side, in a poisoned wider tensor on the GPU. */
static Tensor gpu_linear(const Side *s, Tensor x, const Mat *m, int out_cols, int shift) {
    Tensor nan = tensor(x.rows, out_cols), in = to_gpu(s, x, shift), out = to_gpu(s, nan, shift);
    s->ops->linear(s->dev, out, in, m);
    Tensor host = from_gpu(s, out);
    gpu_free(s, &in, shift);
    gpu_free(s, &out, shift);
    free(nan.at);
    return host;
}

static Tensor ref_linear(const Side *s, Tensor x, const MatView *v) {
    Mat *m = must_load(s, v);
    Tensor out = tensor(x.rows, v->rows);
    s->ops->linear(s->dev, out, x, m);
    s->ops->mat_free(s->dev, m);
    return out;
}

static void linear_case(const Side *ref, const Side *gpu, const MatView *v, int rows, int shift) {
    Tensor x = noise_tensor(rows, v->cols), want = ref_linear(ref, x, v);
    Mat *m = must_load(gpu, v);
    Tensor got = gpu_linear(gpu, x, m, v->rows, shift),
           again = gpu_linear(gpu, x, m, v->rows, shift);
    near(want, got, 1e-5);
    same(got, again);
    gpu->ops->mat_free(gpu->dev, m);
    free(x.at), free(want.at), free(got.at), free(again.at);
}

/* Every path of the products: up to 4, 8, 16, 32 tokens and more, aligned and not. */
static void test_linear(void **state) {
    (void)state;
    static const int shape[][3] = {{1, 16, 16},    {2, 33, 250},   {3, 1, 7},     {4, 130, 304},
                                   {7, 131, 1040}, {16, 64, 2048}, {17, 67, 208}, {32, 200, 384},
                                   {65, 67, 208},  {96, 20, 1000}, {33, 300, 512}};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int d = 0; d < 4; d++) {
            if (DTYPES[d] == DT_NVFP4 && shape[i][2] % 16)
                continue;
            Stored w = stored(DTYPES[d], shape[i][1], shape[i][2]);
            linear_case(&ref, &gpu, &w.view, shape[i][0], i % 2 ? 4 : 1);
            stored_done(&w);
        }
    side_close(&ref);
    side_close(&gpu);
}

/* Slices as ranks cut them, and at odd places: blocks of scales begin within them. */
static void test_slices(void **state) {
    (void)state;
    static const int cut[][4] = {{0, 64, 0, 512},
                                 {64, 64, 128, 128},
                                 {100, 41, 112, 272},
                                 {17, 150, 48, 16},
                                 {130, 3, 496, 16}};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    for (int d = 0; d < 4; d++) {
        Stored w = stored(DTYPES[d], 260, 512);
        for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
            MatView rows = mat_rows(&w.view, cut[i][0], cut[i][1]),
                    part = mat_cols(&rows, cut[i][2], cut[i][3]);
            linear_case(&ref, &gpu, &part, 1 + (int)i * 9, 4);
        }
        stored_done(&w);
    }
    side_close(&ref);
    side_close(&gpu);
}

/* A matrix that does not fit a staging buffer at once. */
static void test_a_large_matrix(void **state) {
    (void)state;
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    Stored w = stored(DT_F8E4M3, 4300, 6144);
    MatView part = mat_rows(&w.view, 36, 4200);
    linear_case(&ref, &gpu, &part, 2, 4);
    stored_done(&w);
    side_close(&ref);
    side_close(&gpu);
}

/* A token's result has the same bits alone and among others, whatever path the number takes. */
static void test_rows_do_not_see_each_other(void **state) {
    (void)state;
    static const int count[] = {1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT);
    for (int d = 0; d < 4; d++) {
        Stored w = stored(DTYPES[d], 4288, 1552);
        Mat *m = must_load(&gpu, &w.view);
        Tensor x = noise_tensor(65, 1552), all = gpu_linear(&gpu, x, m, 4288, 4);
        for (size_t i = 0; i < sizeof count / sizeof *count; i++) {
            Tensor some = gpu_linear(&gpu, tensor_head(x, count[i]), m, 4288, 4);
            same(tensor_head(all, count[i]), some);
            free(some.at);
        }
        gpu.ops->mat_free(gpu.dev, m);
        stored_done(&w);
        free(x.at), free(all.at);
    }
    side_close(&gpu);
}

/* Columns that cancel: the tolerance is relative to the row, not to the products. */
static void test_products_of_unlike_sizes(void **state) {
    (void)state;
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    Stored w = stored(DT_BF16, 48, 640);
    Tensor x = noise_tensor(3, 640);
    for (int c = 0; c < 640; c++) {
        host_row(x, 0)[c] *= powf(10, (float)(c % 30 - 20));
        host_row(x, 1)[c] = c == 300 ? 1e30f : host_row(x, 1)[c] * 1e25f;
        host_row(x, 2)[c] *= 1e-30f;
    }
    Tensor want = ref_linear(&ref, x, &w.view);
    Mat *m = must_load(&gpu, &w.view);
    Tensor got = gpu_linear(&gpu, x, m, 48, 4);
    for (int r = 0; r < 3; r++)
        near(tensor_row(want, r), tensor_row(got, r), 1e-5);
    gpu.ops->mat_free(gpu.dev, m);
    stored_done(&w);
    free(x.at), free(want.at), free(got.at);
    side_close(&ref);
    side_close(&gpu);
}

/* ---- the latent space ---- */

typedef struct Heads {
    int n, heads, nope, rope, v, lora;
} Heads;

static void heads_case(const Side *ref, const Side *gpu, Dtype dtype, Heads h) {
    Stored whole = stored(dtype, 24 + h.heads * (h.nope + h.v), h.lora);
    MatView w = mat_rows(&whole.view, 24, h.heads * (h.nope + h.v));
    Tensor q = noise_tensor(h.n, h.heads * (h.nope + h.rope)),
           x = noise_tensor(h.n, h.heads * h.lora), ql = tensor(h.n, h.heads * (h.lora + h.rope)),
           o = tensor(h.n, h.heads * h.v);
    Mat *m = must_load(gpu, &w), *rm = must_load(ref, &w);
    Tensor gq = to_gpu(gpu, q, 4), gx = to_gpu(gpu, x, 4), gql = to_gpu(gpu, ql, 4),
           go = to_gpu(gpu, o, 4);
    gpu->ops->mla_absorb(gpu->dev, gql, gq, m, h.heads, h.nope, h.v);
    gpu->ops->mla_expand(gpu->dev, go, gx, m, h.heads, h.nope, h.v);
    Tensor got_ql = from_gpu(gpu, gql), got_o = from_gpu(gpu, go);
    ref->ops->mla_absorb(ref->dev, ql, q, rm, h.heads, h.nope, h.v);
    ref->ops->mla_expand(ref->dev, o, x, rm, h.heads, h.nope, h.v);
    near(ql, got_ql, 1e-5);
    near(o, got_o, 1e-5);

    Tensor one_ql = tensor_head(gql, 1), one_o = tensor_head(go, 1); /* alone: the same bits */
    gpu->ops->mla_absorb(gpu->dev, one_ql, tensor_head(gq, 1), m, h.heads, h.nope, h.v);
    gpu->ops->mla_expand(gpu->dev, one_o, tensor_head(gx, 1), m, h.heads, h.nope, h.v);
    Tensor a = from_gpu(gpu, one_ql), b = from_gpu(gpu, one_o);
    same(tensor_head(got_ql, 1), a);
    same(tensor_head(got_o, 1), b);
    Tensor *all[] = {&gq, &gx, &gql, &go};
    for (int i = 0; i < 4; i++)
        gpu_free(gpu, all[i], 4);
    gpu->ops->mat_free(gpu->dev, m);
    ref->ops->mat_free(ref->dev, rm);
    stored_done(&whole);
    free(q.at), free(x.at), free(ql.at), free(o.at), free(got_ql.at), free(got_o.at), free(a.at),
        free(b.at);
}

static void test_absorb_and_expand(void **state) {
    (void)state;
    static const Heads h[] = {
        {5, 3, 24, 8, 20, 256}, {1, 2, 192, 64, 256, 512}, {17, 4, 32, 16, 48, 144}};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    for (int d = 0; d < 4; d++)
        for (size_t i = 0; i < sizeof h / sizeof *h; i++)
            heads_case(&ref, &gpu, DTYPES[d], h[i]);
    side_close(&ref);
    side_close(&gpu);
}

/* ---- rows ---- */

static void batch(const Side *s, const int32_t *tok, const int32_t *pos, int n) {
    static const int32_t seq[MAX_ROWS],
        page[PAGES] = {3, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    s->ops->batch_set(s->dev, &(OpsBatch){n, 1, tok, pos, seq, page, PAGES});
}

/* Bit for bit what the host dequantises. */
static void test_embed_and_gather(void **state) {
    (void)state;
    enum { N = 9, VOCAB = 70, HIDDEN = 304 };
    static const int32_t tok[N] = {0, 69, 3, 16, 15, 17, 3, 64, 33}, pos[N] = {0},
                         row[N] = {8, 0, 3, 3, 1, 7, 2, 5, 4};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    for (int d = 0; d < 4; d++) {
        Stored w = stored(DTYPES[d], VOCAB, HIDDEN);
        Tensor want = tensor(N, HIDDEN), nan = tensor(N, HIDDEN), out = to_gpu(&gpu, nan, 1),
               taken = to_gpu(&gpu, nan, 2);
        Mat *m = must_load(&gpu, &w.view), *rm = must_load(&ref, &w.view);
        batch(&ref, tok, pos, N);
        batch(&gpu, tok, pos, N);
        ref.ops->embed(ref.dev, want, rm);
        gpu.ops->embed(gpu.dev, out, m);
        gpu.ops->gather_rows(gpu.dev, taken, out, row, N);
        Tensor got = from_gpu(&gpu, out), got_taken = from_gpu(&gpu, taken);
        same(want, got);
        for (int r = 0; r < N; r++)
            same(tensor_row(want, row[r]), tensor_row(got_taken, r));
        gpu_free(&gpu, &out, 1);
        gpu_free(&gpu, &taken, 2);
        gpu.ops->mat_free(gpu.dev, m);
        ref.ops->mat_free(ref.dev, rm);
        stored_done(&w);
        free(want.at), free(nan.at), free(got.at), free(got_taken.at);
    }
    side_close(&ref);
    side_close(&gpu);
}

/* out[i] of the operations on rows, on one side. */
enum { ROW_OPS = 6, N_ROWS = 7, COLS = 777, HEAD = 48 };

static void row_ops(const Side *s, Tensor x, Tensor w, Tensor b, Tensor q, Tensor g,
                    Tensor out[ROW_OPS]) {
    const Ops *op = s->ops;
    op->rms_norm(s->dev, out[0], x, w, 1e-5f);
    op->layer_norm(s->dev, out[1], x, w, b, 1e-6f);
    op->silu_mul(s->dev, out[2], g, x);
    op->rope(s->dev, q, 2, HEAD, 8, 32, 8e6f);
    op->clear(s->dev, out[4]);
    op->add(s->dev, out[4], x);
    op->add(s->dev, out[4], g);
    op->rms_norm(s->dev, out[5], out[4], w, 1e-5f);
    op->rms_norm(s->dev, out[4], out[4], w, 1e-5f); /* in place */
    out[3] = q;
}

static void test_rows_of_numbers(void **state) {
    (void)state;
    static const int32_t tok[N_ROWS] = {0}, pos[N_ROWS] = {0, 1, 5, 63, 64, 1000, 1023};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    Tensor in[5] = {noise_tensor(N_ROWS, COLS), noise_tensor(1, COLS), noise_tensor(1, COLS),
                    noise_tensor(N_ROWS, 2 * HEAD), noise_tensor(N_ROWS, COLS)},
           dev[5], out[ROW_OPS], dev_out[ROW_OPS], nan = tensor(N_ROWS, COLS);
    host_row(in[4], 0)[0] = -120.0f, host_row(in[4], 0)[1] = 120.0f;
    for (int i = 0; i < 5; i++)
        dev[i] = to_gpu(&gpu, in[i], 3);
    for (int i = 0; i < ROW_OPS; i++) {
        out[i] = i == 3 ? (Tensor){0} : tensor(N_ROWS, COLS);
        dev_out[i] = i == 3 ? (Tensor){0} : to_gpu(&gpu, nan, 3);
    }
    batch(&ref, tok, pos, N_ROWS);
    batch(&gpu, tok, pos, N_ROWS);
    row_ops(&ref, in[0], in[1], in[2], in[3], in[4], out);
    row_ops(&gpu, dev[0], dev[1], dev[2], dev[3], dev[4], dev_out);
    for (int i = 0; i < ROW_OPS; i++) {
        Tensor got = from_gpu(&gpu, dev_out[i]);
        for (int r = 0; r < N_ROWS; r++)
            near(tensor_row(out[i], r), tensor_row(got, r), 1e-5);
        if (i == 4) {
            Tensor apart = from_gpu(&gpu, dev_out[5]);
            same(apart, got);
            free(apart.at);
        }
        free(got.at);
        if (i != 3) {
            gpu_free(&gpu, &dev_out[i], 3);
            free(out[i].at);
        }
    }
    for (int i = 0; i < 5; i++) {
        gpu_free(&gpu, &dev[i], 3);
        free(in[i].at);
    }
    free(nan.at);
    side_close(&ref);
    side_close(&gpu);
}

/* Angles far out, where floats have lost them. */
static void test_rope_at_a_million(void **state) {
    (void)state;
    enum { FAR = 1 << 20 };
    static const int32_t tok[1] = {0}, pos[1] = {FAR - 1}, seq[1] = {0};
    static int32_t page[FAR / 64];
    Side gpu = cuda_side(1, FAR), ref = side_open(ops_ref(), 1, 1, FAR);
    Tensor x = noise_tensor(1, 64), dev = to_gpu(&gpu, x, 0);
    Side *side[2] = {&ref, &gpu};
    for (int i = 0; i < 2; i++) {
        side[i]->ops->batch_set(side[i]->dev, &(OpsBatch){1, 1, tok, pos, seq, page, FAR / 64});
        side[i]->ops->rope(side[i]->dev, i ? dev : x, 1, 64, 0, 64, 8e6f);
    }
    Tensor got = from_gpu(&gpu, dev);
    near(x, got, 1e-6);
    gpu_free(&gpu, &dev, 0);
    free(x.at), free(got.at);
    side_close(&ref);
    side_close(&gpu);
}

/* ---- routing ---- */

/* Random logits, tight ones, ties, logits near -30 and +10 under a bias of 11. */
static void test_routing(void **state) {
    (void)state;
    enum { N = 65, E = 256, K = 8 };
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    Tensor logits = noise_tensor(N, E), bias = tensor(1, E), id = tensor(N, K), w = tensor(N, K);
    id.dtype = DT_I32;
    for (int e = 0; e < E; e++) {
        host_row(bias, 0)[e] = 11.0f + 0.01f * (float)(e % 5);
        host_row(logits, 0)[e] = -30.0f - (float)(e % 2);
        host_row(logits, 1)[e] = e == 7 ? 10.0f : -200.0f;
        host_row(logits, 2)[e] = 0;
        host_row(logits, 3)[e] = 1.0f + 1e-6f * noise();
        host_row(logits, 4)[e] = (float)(e % 3);
    }
    Tensor g = to_gpu(&gpu, logits, 2), gb = to_gpu(&gpu, bias, 0), gi = to_gpu(&gpu, id, 1),
           gw = to_gpu(&gpu, w, 1);
    for (int norm = 0; norm < 2; norm++) {
        ref.ops->moe_route(ref.dev, id, w, logits, bias, norm, 2.5f);
        gpu.ops->moe_route(gpu.dev, gi, gw, g, gb, norm, 2.5f);
        Tensor got = from_gpu(&gpu, gi), got_w = from_gpu(&gpu, gw);
        same(id, got);
        for (int r = 0; r < N; r++)
            near(tensor_row(w, r), tensor_row(got_w, r), 1e-6);
        free(got.at), free(got_w.at);
    }
    gpu_free(&gpu, &g, 2), gpu_free(&gpu, &gb, 0), gpu_free(&gpu, &gi, 1), gpu_free(&gpu, &gw, 1);
    free(logits.at), free(bias.at), free(id.at), free(w.at);
    side_close(&ref);
    side_close(&gpu);
}

/* ---- KV rows ---- */

/* Pages of any number of rows hash as on the host. */
static void hash_case(const Side *gpu, const KvLayout *l, const uint8_t *host) {
    enum { N = 66 };
    static const int index_slot[] = {0, 1, -1};
    int32_t page[N], n_rows[N];
    uint64_t hash[N];
    for (int i = 0; i < N; i++) {
        page[i] = (i * 5) % (PAGES + 1);
        n_rows[i] = i < 65 ? i : 64;
    }
    gpu->ops->kv_hash(gpu->dev, index_slot, page, n_rows, N, hash);
    for (int i = 0; i < N; i++)
        assert_true(hash[i] == kv_hash_page(l, index_slot, host, page[i], n_rows[i]));
}

/* Bytes to the pool, within it, and back, from a thread that is not the rank's. */
static void *copy_around(void *arg) {
    const Side *gpu = arg;
    uint8_t from[512], to[512] = {0}, *pool;
    Err err;
    for (int i = 0; i < 512; i++)
        from[i] = (uint8_t)(i * 7);
    gpu->ops->pool_enter(gpu->dev);
    assert_int_equal(gpu->ops->pool_new(gpu->dev, 2048, (void **)&pool, &err), 0);
    gpu->ops->pool_copy(gpu->dev, pool + 3, from, 512);
    gpu->ops->pool_copy(gpu->dev, pool + 1024, pool + 3, 512);
    gpu->ops->pool_copy(gpu->dev, to, pool + 1024, 512);
    gpu->ops->pool_free(gpu->dev, pool);
    return memcmp(from, to, 512) ? "differs" : NULL;
}

static void test_pool_copy(void **state) {
    (void)state;
    Side gpu = cuda_side(4, 64);
    pthread_t t;
    void *what;
    assert_int_equal(pthread_create(&t, NULL, copy_around, &gpu), 0);
    pthread_join(t, &what);
    assert_null(what);
    side_close(&gpu);
}

/* The whole pool afterwards, byte for byte: what was written and what was not. */
static void kv_case(Dtype dtype) {
    enum { N = 70, SLOTS = 3 };
    KvLayout l = {.dtype = dtype,
                  .n_slots = SLOTS,
                  .n_index = 2,
                  .kv_lora = 256,
                  .rope = 16,
                  .index_dim = 32,
                  .n_pages = PAGES + 1};
    Side gpu = cuda_side(MAX_ROWS, CONTEXT), ref = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    size_t bytes = kv_pool_bytes(&l);
    uint8_t *host = xmalloc(bytes), *got = xmalloc(bytes);
    memset(host, 0xff, bytes);
    void *pool = pool_to_gpu(&gpu, host, bytes);
    Tensor kv = noise_tensor(N, 272), key = noise_tensor(N, 32);
    int32_t tok[N] = {0}, pos[N];
    for (int i = 0; i < N; i++) {
        pos[i] = i < 68 ? i + 30 : i == 68 ? 640 : 1023;
        for (int c = 0; c < 272; c++)
            host_row(kv, i)[c] *= i % 7 == 0 ? 5e-5f : i % 7 == 1 ? 300.0f : 1.0f;
        for (int c = 0; c < 32; c++)
            host_row(key, i)[c] *= i % 5 == 0 ? 1e-7f : i % 5 == 1 ? 448.0f : 1.0f;
    }
    memset(host_row(kv, 3), 0, 272 * sizeof(float));
    host_row(kv, 4)[5] = -0.0f, host_row(kv, 5)[9] = 1e30f, host_row(key, 6)[0] = 448.0f;
    Tensor gkv = to_gpu(&gpu, kv, 2), gkey = to_gpu(&gpu, key, 1);
    batch(&ref, tok, pos, N);
    batch(&gpu, tok, pos, N);
    ref.ops->kv_bind(ref.dev, &l, host);
    gpu.ops->kv_bind(gpu.dev, &l, pool);
    ref.ops->kv_write(ref.dev, 1, kv, 1, key);
    gpu.ops->kv_write(gpu.dev, 1, gkv, 1, gkey);
    ref.ops->kv_write(ref.dev, 2, kv, -1, key);
    gpu.ops->kv_write(gpu.dev, 2, gkv, -1, gkey);
    Tensor all = {pool, DT_F32, (int)(bytes / 64), 16, 16, false};
    memcpy(got, host, bytes);
    gpu.ops->download(gpu.dev, &all, got);
    assert_memory_equal(host, got, bytes);
    hash_case(&gpu, &l, host);
    gpu_free(&gpu, &gkv, 2), gpu_free(&gpu, &gkey, 1);
    gpu.ops->pool_free(gpu.dev, pool);
    free(kv.at), free(key.at), free(host), free(got);
    side_close(&ref);
    side_close(&gpu);
}

static void test_kv_rows(void **state) {
    (void)state;
    kv_case(DT_F32);
    kv_case(DT_BF16);
    kv_case(DT_F8E4M3);
}

/* ---- ranks ---- */

enum { MAX_RANKS = 4, SUM_ROWS = 3, SUM_COLS = 100, ROUNDS = 200 };

typedef struct Member {
    const Ops *ops;
    Dev *dev;
    int rank, n_ranks;
    float sum[SUM_ROWS * SUM_COLS], shared[8];
    pthread_t thread;
} Member;

static void fill_part(int rank, int round, float *x) {
    for (int i = 0; i < SUM_ROWS * SUM_COLS; i++)
        x[i] = (float)(rank + 1) * 0.1f + (float)i + (float)round;
}

static void *member_main(void *arg) {
    Member *m = arg;
    Tensor x, all, part;
    Err err;
    float host[SUM_ROWS * SUM_COLS], own[8];
    if (m->ops->tensor_new(m->dev, DT_F32, SUM_ROWS, SUM_COLS, &x, &err) ||
        m->ops->tensor_new(m->dev, DT_F32, 2, 4 / m->n_ranks, &part, &err) ||
        m->ops->tensor_shared(m->dev, DT_F32, 2, 4, &all, &err))
        return (void *)1;
    for (int round = 0; round < ROUNDS; round++) {
        fill_part(m->rank, round, host);
        for (int i = 0; i < 2 * part.cols; i++)
            own[i] = (float)(round + m->rank);
        m->ops->upload(m->dev, &x, host);
        m->ops->upload(m->dev, &part, own);
        m->ops->all_reduce(m->dev, x);
        m->ops->gather_cols(m->dev, all, part);
    }
    m->ops->download(m->dev, &x, m->sum);
    m->ops->download(m->dev, &all, m->shared);
    m->ops->tensor_free(m->dev, &x);
    m->ops->tensor_free(m->dev, &part);
    m->ops->tensor_free(m->dev, &all);
    return NULL;
}

static void ranks_case(int n) {
    Member m[MAX_RANKS] = {0};
    Dev *dev[MAX_RANKS];
    Err err = {0};
    DevConf c = {.n_ranks = n, .max_rows = 4, .max_seqs = 1, .max_context = 64, .index_topk = 4};
    if (ops_cuda(&err)->open(&c, dev, &err))
        fail_msg("%s", err.text);
    for (int r = 0; r < n; r++) {
        m[r].ops = ops_cuda(NULL), m[r].dev = dev[r], m[r].rank = r, m[r].n_ranks = n;
        assert_int_equal(pthread_create(&m[r].thread, NULL, member_main, &m[r]), 0);
    }
    for (int r = 0; r < n; r++) {
        void *failed;
        pthread_join(m[r].thread, &failed);
        assert_null(failed);
    }
    float want[SUM_ROWS * SUM_COLS], part[SUM_ROWS * SUM_COLS];
    fill_part(0, ROUNDS - 1, want);
    for (int r = 1; r < n; r++) {
        fill_part(r, ROUNDS - 1, part);
        for (int i = 0; i < SUM_ROWS * SUM_COLS; i++)
            want[i] += part[i]; /* in rank order: the same bits */
    }
    for (int r = 0; r < n; r++) {
        assert_memory_equal(want, m[r].sum, sizeof want);
        for (int i = 0; i < 8; i++)
            assert_true(m[r].shared[i] == (float)(ROUNDS - 1 + i % 4 / (4 / n)));
    }
    ops_cuda(NULL)->close(dev, n);
}

static void test_ranks(void **state) {
    (void)state;
    Side gpu = cuda_side(1, 64); /* skips where there is no GPU */
    side_close(&gpu);
    for (int n = 1; n <= MAX_RANKS; n *= 2)
        ranks_case(n);
}

/* What cannot be had is refused, with numbers. */
static void test_too_much_memory(void **state) {
    (void)state;
    Side gpu = cuda_side(1, 64);
    Err err = {0};
    void *pool;
    assert_int_equal(gpu.ops->pool_new(gpu.dev, (uint64_t)1 << 46, &pool, &err), E_NOMEM);
    assert_non_null(strstr(err.text, "needs 65536.000 GiB"));
    assert_int_equal(gpu.ops->pool_new(gpu.dev, 4096, &pool, &err), 0); /* and nothing broke */
    gpu.ops->pool_free(gpu.dev, pool);
    side_close(&gpu);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_slices),
        cmocka_unit_test(test_a_large_matrix),
        cmocka_unit_test(test_rows_do_not_see_each_other),
        cmocka_unit_test(test_products_of_unlike_sizes),
        cmocka_unit_test(test_absorb_and_expand),
        cmocka_unit_test(test_embed_and_gather),
        cmocka_unit_test(test_rows_of_numbers),
        cmocka_unit_test(test_rope_at_a_million),
        cmocka_unit_test(test_routing),
        cmocka_unit_test(test_kv_rows),
        cmocka_unit_test(test_pool_copy),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_too_much_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
