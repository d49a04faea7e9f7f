/* The fast host backends against the reference, operation by operation, and against each other bit
 * for bit. */
#include "tests/unit/kernels/ops_side.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 96, TOPK = 100, CONTEXT = 1024 };

static void test_rows_are_dequantised_exactly(void **state) {
    (void)state;
    const Kern *kern[2] = {ops_cpu("avx2") ? kern_avx2() : NULL,
                           ops_cpu("avx512") ? kern_avx512() : NULL};
    for (int k = 0; k < 2; k++)
        for (int d = 0; d < 4 && kern[k]; d++) {
            Stored s = stored(DTYPES[d], 140, 304);
            MatView part = mat_rows(&s.view, 100, 40), slice = mat_cols(&part, 112, 144);
            float want[304], got[304];
            for (int r = 0; r < slice.rows; r++) {
                mat_row_f32(&slice, r, want);
                kern[k]->row(&slice, r, got);
                assert_memory_equal(want, got, 144 * sizeof *got);
            }
            stored_done(&s);
        }
}

static void test_every_fp8_code(void **state) {
    (void)state;
    uint8_t code[256];
    float want[256], got[256];
    MatView m = {.dtype = DT_F8E4M3, .rows = 1, .cols = 256, .data = code, .row_bytes = 256};
    for (int i = 0; i < 256; i++)
        code[i] = (uint8_t)i;
    mat_row_f32(&m, 0, want);
    const Kern *kern[2] = {ops_cpu("avx2") ? kern_avx2() : NULL,
                           ops_cpu("avx512") ? kern_avx512() : NULL};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 256 && kern[k]; i++) {
            kern[k]->row(&m, 0, got);
            assert_true((isnan(want[i]) && isnan(got[i])) ||
                        (want[i] == got[i] && signbit(want[i]) == signbit(got[i])));
        }
}

static void test_linear(void **state) {
    (void)state;
    static const int shape[][3] = {{1, 16, 16},   {2, 33, 250},   {7, 130, 304},
                                   {65, 67, 208}, {96, 20, 1000}, {3, 1, 7}};
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int d = 0; d < 4; d++) {
            int rows = shape[i][0], out = shape[i][1], k = shape[i][2];
            if (DTYPES[d] == DT_NVFP4 && k % 16)
                continue;
            Stored w = stored(DTYPES[d], out, k);
            Tensor x = noise_tensor(rows, k), y[4];
            for (int b = 0; b < n; b++) {
                Mat *m;
                y[b] = tensor(rows, out);
                assert_int_equal(s[b].ops->mat_load(s[b].dev, &w.view, &m, NULL), 0);
                s[b].ops->linear(s[b].dev, y[b], x, m);
                s[b].ops->mat_free(s[b].dev, m);
                near(y[0], y[b], 1e-5);
            }
            for (int b = 2; b < n; b++)
                same(y[1], y[b]);
            for (int b = 0; b < n; b++)
                free(y[b].at);
            free(x.at);
            stored_done(&w);
        }
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* A row's result has the same bits alone and among others. */
static void test_rows_do_not_see_each_other(void **state) {
    (void)state;
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT);
    Stored w = stored(DT_F8E4M3, 70, 300);
    Tensor x = noise_tensor(65, 300);
    for (int b = 1; b < n; b++) {
        Mat *m;
        Tensor all = tensor(65, 70), one = tensor(1, 70);
        assert_int_equal(s[b].ops->mat_load(s[b].dev, &w.view, &m, NULL), 0);
        s[b].ops->linear(s[b].dev, all, x, m);
        for (int r = 0; r < 65; r += 9) {
            s[b].ops->linear(s[b].dev, one, tensor_row(x, r), m);
            same(tensor_row(all, r), one);
        }
        s[b].ops->mat_free(s[b].dev, m);
        free(all.at), free(one.at);
    }
    free(x.at);
    stored_done(&w);
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

static void test_absorb_and_expand(void **state) {
    (void)state;
    enum { H = 3, NOPE = 24, ROPE = 8, V = 20, LORA = 256, N = 5 };
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT);
    Stored w = stored(DT_F8E4M3, H * (NOPE + V), LORA);
    Tensor q = noise_tensor(N, H * (NOPE + ROPE)), ql[4], x = noise_tensor(N, H * LORA), o[4];
    for (int b = 0; b < n; b++) {
        Mat *m;
        ql[b] = tensor(N, H * (LORA + ROPE));
        o[b] = tensor(N, H * V);
        assert_int_equal(s[b].ops->mat_load(s[b].dev, &w.view, &m, NULL), 0);
        s[b].ops->mla_absorb(s[b].dev, ql[b], q, m, H, NOPE, V);
        s[b].ops->mla_expand(s[b].dev, o[b], x, m, H, NOPE, V);
        s[b].ops->mat_free(s[b].dev, m);
        near(ql[0], ql[b], 1e-5);
        near(o[0], o[b], 1e-5);
        if (b > 1) {
            same(ql[1], ql[b]);
            same(o[1], o[b]);
        }
    }
    for (int b = 0; b < n; b++) {
        free(ql[b].at), free(o[b].at);
        side_close(&s[b]);
    }
    free(q.at), free(x.at);
    stored_done(&w);
}

/* ---- attention over a pool with NaN in every row that must not be read ---- */

enum { HEADS = 5, KV_LORA = 128, KV_ROPE = 16, DIM = 32, INDEX_HEADS = 6 };

typedef struct Pool {
    KvLayout layout;
    void *bytes;
    int32_t tok[MAX_ROWS], pos[MAX_ROWS], seq[MAX_ROWS], table[2 * (CONTEXT / 64)];
} Pool;

static Pool pool_new_for(Dtype dtype) {
    Pool p = {.layout = {.dtype = dtype,
                         .n_slots = 2,
                         .n_index = 2,
                         .kv_lora = KV_LORA,
                         .rope = KV_ROPE,
                         .index_dim = DIM,
                         .n_pages = 40}};
    p.bytes = xmalloc(kv_pool_bytes(&p.layout));
    memset(p.bytes, 0xff, kv_pool_bytes(&p.layout));
    for (int i = 0; i < CONTEXT / 64; i++) {
        p.table[i] = 39 - i;           /* sequence 0 */
        p.table[CONTEXT / 64 + i] = i; /* sequence 1 */
    }
    return p;
}

/* Positions [0, n0) of sequence 0 and [0, n1) of sequence 1, in steps. */
static void fill(Side *s, Pool *p, int n0, int n1) {
    s->ops->kv_bind(s->dev, &p->layout, p->bytes);
    for (int at = 0; at < n0 + n1;) {
        int n = n0 + n1 - at < MAX_ROWS ? n0 + n1 - at : MAX_ROWS;
        for (int i = 0; i < n; i++) {
            p->seq[i] = at + i >= n0;
            p->pos[i] = p->seq[i] ? at + i - n0 : at + i;
        }
        Tensor kv = noise_tensor(n, KV_LORA + KV_ROPE), key = noise_tensor(n, DIM);
        s->ops->batch_set(s->dev,
                          &(OpsBatch){n, 2, p->tok, p->pos, p->seq, p->table, CONTEXT / 64});
        s->ops->kv_write(s->dev, 1, kv, 1, key);
        free(kv.at), free(key.at);
        at += n;
    }
}

static void attention_case(Dtype dtype) {
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT), rows = 0;
    Pool p = pool_new_for(dtype);
    fill(&s[0], &p, 700, 65);
    static const int at[] = {0, 1, 63, 64, 99, 100, 101, 500, 699};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++, rows++)
        p.pos[rows] = at[i], p.seq[rows] = 0;
    p.pos[rows] = 64, p.seq[rows++] = 1;
    Tensor iq = noise_tensor(rows, INDEX_HEADS * DIM), iw = noise_tensor(rows, INDEX_HEADS),
           q = noise_tensor(rows, HEADS * (KV_LORA + KV_ROPE));
    Tensor list[4], out[4];
    for (int b = 0; b < n; b++) {
        s[b].ops->kv_bind(s[b].dev, &p.layout, p.bytes);
        s[b].ops->batch_set(s[b].dev,
                            &(OpsBatch){rows, 2, p.tok, p.pos, p.seq, p.table, CONTEXT / 64});
        list[b] = tensor(rows, TOPK);
        out[b] = tensor(rows, HEADS * KV_LORA);
        s[b].ops->index_select(s[b].dev, list[b], iq, iw, INDEX_HEADS, 1);
        same(list[0], list[b]); /* random scores have no near ties */
    }
    for (int b = 0; b < n; b++) {
        host_row_i32(list[b], 2)[5] = -1; /* holes */
        for (int i = 0; i < TOPK; i++)
            host_row_i32(list[b], 3)[i] = -1; /* nothing to attend to */
        s[b].ops->mla_attend(s[b].dev, out[b], q, list[b], HEADS, 1, 0.2f);
        near(out[0], out[b], 1e-5);
        for (int c = 0; c < HEADS * KV_LORA; c++)
            assert_true(host_row(out[b], 3)[c] == 0);
        if (b > 1)
            same(out[1], out[b]);
    }
    for (int b = 0; b < n; b++) {
        free(list[b].at), free(out[b].at);
        side_close(&s[b]);
    }
    free(iq.at), free(iw.at), free(q.at), free(p.bytes);
}

static void test_attention_f32(void **state) {
    (void)state;
    attention_case(DT_F32);
}

static void test_attention_bf16(void **state) {
    (void)state;
    attention_case(DT_BF16);
}

static void test_attention_fp8(void **state) {
    (void)state;
    attention_case(DT_F8E4M3);
}

static int by_score_then_pos(const void *a, const void *b, void *score) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    float sx = ((const float *)score)[x], sy = ((const float *)score)[y];
    return sx != sy ? (sx > sy ? -1 : 1) : x < y ? -1 : 1;
}

static int by_pos(const void *a, const void *b) {
    return *(const int32_t *)a < *(const int32_t *)b ? -1 : 1;
}

/* Exact, lowest position first among equals: clustered scores, zeros of both signs, infinities,
 * many ties. */
static void test_top_k_is_exact(void **state) {
    (void)state;
    enum { N = 5000 };
    static float score[N];
    static int32_t want[N], got[N];
    uint32_t *work = xmalloc(cpu_top_k_work(N) * sizeof *work);
    for (int kind = 0; kind < 6; kind++)
        for (int k = 1; k < N; k = k * 3 + 1) {
            for (int i = 0; i < N; i++) {
                score[i] = kind == 0   ? noise()
                           : kind == 1 ? 1.0f + noise() * 1e-6f
                           : kind == 2 ? (float)(i % 3)
                           : kind == 3 ? 0.0f
                                       : noise() * 1e30f;
                if (kind == 3 && i % 2)
                    score[i] = -0.0f;
                if (kind == 5 && i % 7 == 0)
                    score[i] = i % 2 ? INFINITY : -INFINITY;
                want[i] = i;
            }
            qsort_r(want, N, sizeof *want, by_score_then_pos, score);
            qsort(want, (size_t)k, sizeof *want, by_pos);
            cpu_top_k(score, N, k, work, got);
            assert_memory_equal(want, got, (size_t)k * sizeof *want);
        }
    free(work);
}

/* ---- experts and routing ---- */

static void test_experts(void **state) {
    (void)state;
    enum { E = 6, HID = 80, INNER = 48, K = 3 };
    static const int counts[] = {1, 2, 65, 65};
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT);
    for (int d = 1; d < 4; d++) {
        Stored part[3][E];
        MatView v[3][E] = {0};
        for (int e = 0; e < E; e++)
            for (int p = 0; p < 3; p++) {
                part[p][e] = stored(DTYPES[d], p == 2 ? HID : INNER, p == 2 ? INNER : HID);
                v[p][e] = part[p][e].view;
            }
        v[0][4].data = v[1][4].data = v[2][4].data = NULL; /* not held */
        for (int c = 0; c < 4; c++) {
            int rows = counts[c];
            bool one = c == 3; /* every place of every token names the same expert */
            Tensor x = noise_tensor(rows, HID), id = tensor(rows, K), w = noise_tensor(rows, K),
                   base = noise_tensor(rows, HID), y[4];
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < K; i++)
                    host_row_i32(id, r)[i] = one ? 2 : i == 1 && r % 5 == 4 ? -1 : i * 2 + r % 2;
            for (int b = 0; b < n; b++) {
                Experts *e;
                ExpertsView view = {E, v[0], v[1], v[2]};
                y[b] = tensor(rows, HID);
                for (int r = 0; r < rows; r++)
                    memcpy(host_row(y[b], r), host_row(base, r), HID * sizeof(float));
                assert_int_equal(s[b].ops->experts_load(s[b].dev, &view, &e, NULL), 0);
                s[b].ops->experts(s[b].dev, y[b], x, id, w, e);
                s[b].ops->experts_free(s[b].dev, e);
                near(y[0], y[b], 1e-5);
                if (b > 1)
                    same(y[1], y[b]);
            }
            for (int b = 0; b < n; b++)
                free(y[b].at);
            free(x.at), free(id.at), free(w.at), free(base.at);
        }
        for (int e = 0; e < E; e++)
            for (int p = 0; p < 3; p++)
                stored_done(&part[p][e]);
    }
    for (int b = 0; b < n; b++)
        side_close(&s[b]);
}

/* Logits near -30 and +10 with a bias about 11: finite weights that sum to the scale, ties to the
 * lower id, never -1. */
static void test_routing_of_extreme_logits(void **state) {
    (void)state;
    enum { E = 32, K = 4 };
    Side s = side_open(ops_ref(), 1, MAX_ROWS, CONTEXT);
    Tensor logits = tensor(3, E), bias = tensor(1, E), id = tensor(3, K), w = tensor(3, K);
    for (int e = 0; e < E; e++) {
        host_row(logits, 0)[e] = -30.0f - (float)(e % 2);
        host_row(logits, 1)[e] = e == 7 ? 10.0f : -200.0f;
        host_row(logits, 2)[e] = noise();
        host_row(bias, 0)[e] = 11.2f;
    }
    s.ops->moe_route(s.dev, id, w, logits, bias, true, 2.5f);
    for (int t = 0; t < 3; t++) {
        float sum = 0;
        for (int i = 0; i < K; i++) {
            int32_t e = host_row_i32(id, t)[i];
            assert_true(e >= 0 && e < E && (i == 0 || e > host_row_i32(id, t)[i - 1]));
            assert_true(isfinite(host_row(w, t)[i]) && host_row(w, t)[i] >= 0);
            sum += host_row(w, t)[i];
        }
        assert_true(fabsf(sum - 2.5f) < 1e-4f);
    }
    for (int i = 0; i < K; i++)
        assert_int_equal(host_row_i32(id, 0)[i], i); /* equal in fp32 once the bias is added */
    free(logits.at), free(bias.at), free(id.at), free(w.at);
    side_close(&s);
}

/* ---- norms and rotation ---- */

static void test_norms_rope_and_silu(void **state) {
    (void)state;
    enum { N = 7, C = 77, HD = 48 };
    Side s[4];
    int n = sides(s, MAX_ROWS, CONTEXT);
    int32_t tok[N] = {0}, pos[N] = {0, 1, 5, 63, 64, 1000, 1023}, seq[N] = {0},
            page[CONTEXT / 64] = {0};
    Tensor x = noise_tensor(N, C), w = noise_tensor(1, C), q = noise_tensor(N, 2 * HD),
           g = noise_tensor(N, C), out[4][3];
    host_row(g, 0)[0] = -120.0f, host_row(g, 0)[1] = 120.0f;
    for (int b = 0; b < n; b++) {
        const Ops *op = s[b].ops;
        op->batch_set(s[b].dev, &(OpsBatch){N, 1, tok, pos, seq, page, CONTEXT / 64});
        for (int i = 0; i < 3; i++)
            out[b][i] = tensor(N, i == 1 ? 2 * HD : C);
        op->rms_norm(s[b].dev, out[b][0], x, w, 1e-5f);
        for (int r = 0; r < N; r++)
            memcpy(host_row(out[b][1], r), host_row(q, r), 2 * HD * sizeof(float));
        op->rope(s[b].dev, out[b][1], 2, HD, 8, 32, 8e6f);
        op->silu_mul(s[b].dev, out[b][2], g, x);
        for (int i = 0; i < 3; i++) {
            near(out[0][i], out[b][i], 1e-5);
            if (b > 1)
                same(out[1][i], out[b][i]);
        }
        for (int r = 0; r < N; r++) /* what is not rotated stays */
            assert_memory_equal(host_row(out[b][1], r), host_row(q, r), 8 * sizeof(float));
    }
    for (int b = 0; b < n; b++) {
        for (int i = 0; i < 3; i++)
            free(out[b][i].at);
        side_close(&s[b]);
    }
    free(x.at), free(w.at), free(q.at), free(g.at);
}

/* ---- ranks ---- */

typedef struct Member {
    const Ops *ops;
    Dev *dev;
    int rank, n_ranks;
    float sum[300], shared[8];
    pthread_t thread;
} Member;

static void *member_main(void *arg) {
    Member *m = arg;
    Tensor x, all, part;
    Err err;
    if (m->ops->tensor_new(m->dev, DT_F32, 3, 100, &x, &err) ||
        m->ops->tensor_new(m->dev, DT_F32, 2, 4 / m->n_ranks, &part, &err) ||
        m->ops->tensor_shared(m->dev, DT_F32, 2, 4, &all, &err))
        return (void *)1;
    for (int round = 0; round < 2000; round++) {
        for (int i = 0; i < 300; i++)
            ((float *)x.at)[i] = (float)(m->rank + 1) * 0.1f + (float)i + (float)round;
        m->ops->all_reduce(m->dev, x);
        for (int i = 0; i < 2 * part.cols; i++)
            ((float *)part.at)[i] = (float)(round + m->rank);
        m->ops->gather_cols(m->dev, all, part);
        memcpy(m->shared, all.at, sizeof m->shared);
        host_barrier(m->dev);
    }
    memcpy(m->sum, x.at, sizeof m->sum);
    m->ops->tensor_free(m->dev, &x);
    m->ops->tensor_free(m->dev, &part);
    m->ops->tensor_free(m->dev, &all);
    return NULL;
}

static void test_collectives(void **state) {
    (void)state;
    for (int n = 1; n <= 4; n *= 2) {
        Member m[4] = {0};
        Dev *dev[4];
        Err err = {0};
        DevConf c = {.n_ranks = n,
                     .threads = 1,
                     .max_rows = 4,
                     .max_seqs = 1,
                     .max_context = 64,
                     .index_topk = 4};
        assert_int_equal(ops_cpu(NULL)->open(&c, dev, &err), 0);
        for (int r = 0; r < n; r++) {
            m[r].ops = ops_cpu(NULL), m[r].dev = dev[r], m[r].rank = r, m[r].n_ranks = n;
            assert_int_equal(pthread_create(&m[r].thread, NULL, member_main, &m[r]), 0);
        }
        for (int r = 0; r < n; r++) {
            void *failed;
            pthread_join(m[r].thread, &failed);
            assert_null(failed);
        }
        for (int i = 0; i < 300; i++) {
            float want = 0.1f + (float)i + 1999.0f;
            for (int r = 1; r < n; r++)
                want += (float)(r + 1) * 0.1f + (float)i + 1999.0f;
            for (int r = 0; r < n; r++)
                assert_true(m[r].sum[i] == m[0].sum[i] && fabsf(m[r].sum[i] - want) < 1e-2f);
        }
        for (int r = 0; r < n; r++)
            for (int i = 0; i < 8; i++)
                assert_true(m[r].shared[i] == (float)(1999 + i % 4 / (4 / n)));
        ops_cpu(NULL)->close(dev, n);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_are_dequantised_exactly),
        cmocka_unit_test(test_every_fp8_code),
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_rows_do_not_see_each_other),
        cmocka_unit_test(test_absorb_and_expand),
        cmocka_unit_test(test_attention_f32),
        cmocka_unit_test(test_attention_bf16),
        cmocka_unit_test(test_attention_fp8),
        cmocka_unit_test(test_top_k_is_exact),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_routing_of_extreme_logits),
        cmocka_unit_test(test_norms_rope_and_silu),
        cmocka_unit_test(test_collectives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
