/* The forward pass on the tiny model: the same tokens whatever the ranks, chunks, batch companions
 * and placement of experts; rollback; and proof that the tolerances would catch the usual mistakes.
 * Reference results: tests/model_check. */
#include "kernels/host.h"
#include "tests/support/oracle.h"
#include "tests/support/rig.h"

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#define MODEL  "tests/models/tiny-glm52/fp8"
#define ORACLE "tests/models/tiny-glm52/oracle/fp8"
enum { N_OUT = 12, MAX_OUT = 16 };

static Oracle *oracle;

static const json_t *prompt_named(const char *name) {
    for (int i = 0; i < oracle_n_prompts(oracle); i++)
        if (!strcmp(oracle_name(oracle_prompt(oracle, i)), name))
            return oracle_prompt(oracle, i);
    fail_msg("no prompt %s", name);
    return NULL;
}

static void must_open(Rig *r, RigConf conf) {
    Err err = {0};
    conf.dir = conf.dir ? conf.dir : MODEL;
    conf.max_context = 1024;
    if (rig_open(r, &conf, &err))
        fail_msg("%s", err.text);
}

/* Greedy continuation of ids[n] into out[N_OUT]; the logits of the first choice into logits when
 * not NULL. */
static void continue_greedy(Rig *r, const int32_t *ids, int n, int chunk, int32_t *out,
                            float *logits) {
    int vocab = engine_shape(r->engine)->vocab;
    RigSeq seq = rig_seq_new(r, n + MAX_OUT);
    Err err = {0};
    assert_int_equal(rig_append(r, &seq, ids, n, chunk, 1, NULL, &err), 0);
    if (logits)
        memcpy(logits, engine_logits(r->engine, 0), (size_t)vocab * sizeof *logits);
    for (int i = 0; i < N_OUT; i++) {
        out[i] = rig_argmax(engine_logits(r->engine, 0), vocab);
        assert_int_equal(rig_append(r, &seq, &out[i], 1, 1, 1, NULL, &err), 0);
    }
    rig_seq_free(r, &seq, n + MAX_OUT);
}

static void expect_reference(Rig *r, const char *name, int chunk) {
    int n, no;
    const json_t *p = prompt_named(name);
    int32_t *ids = oracle_ints(p, "ids", &n), *want = oracle_ints(p, "output_ids", &no), got[N_OUT];
    continue_greedy(r, ids, n, chunk, got, NULL);
    for (int i = 0; i < N_OUT; i++)
        assert_int_equal(got[i], want[i]);
    free(ids);
    free(want);
}

static void test_same_tokens_for_ranks_and_chunks(void **state) {
    (void)state;
    static const int tps[] = {1, 2, 4}, chunks[] = {1, 7, 64, 512};
    for (size_t t = 0; t < 3; t++) {
        Rig r;
        must_open(&r, (RigConf){.tp = tps[t]});
        for (size_t c = 0; c < 4; c++)
            expect_reference(&r, "tool_call", chunks[c]);
        expect_reference(&r, "needle_1k", 512);
        expect_reference(&r, "facts_zh", 64);
        rig_close(&r);
    }
}

static void test_ranks_agree_with_one(void **state) {
    (void)state;
    int n;
    int32_t *ids = oracle_ints(prompt_named("needle_1k"), "ids", &n), out[N_OUT];
    float *one = xcalloc(4096, sizeof *one), *four = xcalloc(4096, sizeof *four);
    Rig r;
    must_open(&r, (RigConf){.tp = 1});
    continue_greedy(&r, ids, n, 512, out, one);
    rig_close(&r);
    must_open(&r, (RigConf){.tp = 4});
    continue_greedy(&r, ids, n, 512, out, four);
    rig_close(&r);
    for (int i = 0; i < 4096; i++)
        assert_true(fabsf(one[i] - four[i]) < 1e-3f);
    free(one);
    free(four);
    free(ids);
}

/* One step with a prefill chunk of `a`, two verification rows of `b` and one token of `c` gives
 * each the bits that it gets alone. */
static void test_companions_change_no_bit(void **state) {
    (void)state;
    int na, nb, nc, vocab;
    int32_t *a = oracle_ints(prompt_named("tool_call"), "ids", &na),
            *b = oracle_ints(prompt_named("facts"), "ids", &nb);
    int32_t *c = oracle_ints(prompt_named("json"), "ids", &nc);
    Err err = {0};
    Rig r;
    must_open(&r, (RigConf){.tp = 2, .max_seqs = 6});
    vocab = engine_shape(r.engine)->vocab;
    RigSeq sa = rig_seq_new(&r, na), sb = rig_seq_new(&r, nb), sc = rig_seq_new(&r, nc);
    RigSeq alone[3] = {rig_seq_new(&r, na), rig_seq_new(&r, nb), rig_seq_new(&r, nc)};
    float *want = xcalloc(4 * (size_t)vocab, sizeof *want);

    assert_int_equal(rig_append(&r, &alone[0], a, na, 512, 1, NULL, &err), 0);
    memcpy(want, engine_logits(r.engine, 0), (size_t)vocab * sizeof *want);
    assert_int_equal(rig_append(&r, &alone[1], b, nb, 512, 2, NULL, &err), 0);
    memcpy(want + vocab, engine_logits(r.engine, 0), 2 * (size_t)vocab * sizeof *want);
    assert_int_equal(rig_append(&r, &alone[2], c, nc, 512, 1, NULL, &err), 0);
    memcpy(want + 3 * vocab, engine_logits(r.engine, 0), (size_t)vocab * sizeof *want);

    assert_int_equal(rig_append(&r, &sa, a, 100, 512, 0, NULL, &err), 0);
    assert_int_equal(rig_append(&r, &sb, b, nb - 2, 512, 0, NULL, &err), 0);
    assert_int_equal(rig_append(&r, &sc, c, nc - 1, 512, 0, NULL, &err), 0);
    int rest = na - 100, n = rest + 3;
    int32_t *tok = xcalloc((size_t)n * 3, sizeof *tok), *pos = tok + n, *seq = pos + n;
    int32_t *table = xcalloc(3 * (size_t)r.max_pages, sizeof *table);
    for (int i = 0; i < n; i++) {
        seq[i] = i < rest ? 0 : i < rest + 2 ? 1 : 2;
        pos[i] = i < rest ? 100 + i : i < rest + 2 ? nb - 2 + i - rest : nc - 1;
        tok[i] = i < rest ? a[100 + i] : i < rest + 2 ? b[nb - 2 + i - rest] : c[nc - 1];
    }
    const RigSeq *seqs[3] = {&sa, &sb, &sc};
    for (int s = 0; s < 3; s++)
        memcpy(table + s * r.max_pages, seqs[s]->page, (size_t)r.max_pages * sizeof *table);
    OpsBatch batch = {n, 3, tok, pos, seq, table, r.max_pages};
    EngineRow rows[4] = {{.row = rest - 1}, {.row = rest}, {.row = rest + 1}, {.row = rest + 2}};
    assert_int_equal(engine_step(r.engine, &batch, rows, 4, NULL, &err), 0);
    for (int i = 0; i < 4; i++)
        assert_memory_equal(engine_logits(r.engine, i), want + i * vocab,
                            (size_t)vocab * sizeof *want);

    rig_seq_free(&r, &sa, na), rig_seq_free(&r, &sb, nb), rig_seq_free(&r, &sc, nc);
    rig_seq_free(&r, &alone[0], na), rig_seq_free(&r, &alone[1], nb),
        rig_seq_free(&r, &alone[2], nc);
    rig_close(&r);
    free(want), free(tok), free(table), free(a), free(b), free(c);
}

/* Five drafted tokens are refused: the sequence continues as if they had never been there. */
static void test_rollback(void **state) {
    (void)state;
    int n, no;
    const json_t *p = prompt_named("tool_call");
    int32_t *ids = oracle_ints(p, "ids", &n), *want = oracle_ints(p, "output_ids", &no),
            wrong[5] = {5, 6, 7, 8, 9}, out[N_OUT];
    Err err = {0};
    Rig r;
    must_open(&r, (RigConf){.tp = 2});
    float *clean = xcalloc(4096, sizeof *clean);
    RigSeq a = rig_seq_new(&r, n + MAX_OUT), b = rig_seq_new(&r, n + MAX_OUT);
    assert_int_equal(rig_append(&r, &a, ids, n, 512, 0, NULL, &err), 0);
    assert_int_equal(rig_append(&r, &a, want, 3, 8, 1, NULL, &err), 0);
    memcpy(clean, engine_logits(r.engine, 0), 4096 * sizeof *clean);

    assert_int_equal(rig_append(&r, &b, ids, n, 512, 0, NULL, &err), 0);
    assert_int_equal(rig_append(&r, &b, wrong, 5, 8, 5, NULL, &err), 0);
    b.n -= 5;
    assert_int_equal(rig_append(&r, &b, want, 3, 8, 1, NULL, &err), 0);
    assert_memory_equal(engine_logits(r.engine, 0), clean, 4096 * sizeof *clean);
    rig_seq_free(&r, &a, n + MAX_OUT), rig_seq_free(&r, &b, n + MAX_OUT);
    continue_greedy(&r, ids, n, 64, out, NULL);
    assert_memory_equal(out, want, N_OUT * sizeof *out);
    rig_close(&r);
    free(clean), free(ids), free(want);
}

/* ---- remote experts ---- */

/* A stand-in for expertd: computes the remote part with a second device of its own. */
typedef struct Remote {
    const Ops *ops;
    Dev *dev;
    Experts *layer[SHAPE_MAX_LAYERS];
    int hidden, n, k, asked, at_layer;
    const float *x, *weight;
    const int32_t *id;
    bool broken;
} Remote;

static int remote_post(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                       const float *weight, Err *err) {
    Remote *m = arg;
    if (m->broken)
        return err_set(err, E_PEER, "expertd 0 is gone");
    m->at_layer = layer, m->n = n, m->k = k, m->x = x, m->id = id, m->weight = weight;
    m->asked++;
    return 0;
}

static int remote_wait(void *arg, float *y, Err *err) {
    Remote *m = arg;
    (void)err;
    Tensor ty = {y, DT_F32, m->n, m->hidden, m->hidden, true},
           tx = {(void *)m->x, DT_F32, m->n, m->hidden, m->hidden, true};
    Tensor ti = {(void *)m->id, DT_I32, m->n, m->k, m->k, true},
           tw = {(void *)m->weight, DT_F32, m->n, m->k, m->k, true};
    m->ops->experts(m->dev, ty, tx, ti, tw, m->layer[m->at_layer]);
    return 0;
}

static void remote_open(Remote *m, const Weights *w) {
    const Shape *s = weights_shape(w);
    DevConf dc = {.n_ranks = 1,
                  .threads = 1,
                  .max_rows = 512,
                  .max_seqs = 1,
                  .max_context = 1,
                  .index_topk = 1};
    Err err = {0};
    *m = (Remote){.ops = ops_cpu(NULL), .hidden = s->hidden};
    assert_int_equal(m->ops->open(&dc, &m->dev, &err), 0);
    for (int l = 0; l < s->n_layers; l++) {
        MatView v[3][64];
        for (int e = 0; e < s->n_experts && !s->layer_dense[l]; e++)
            for (int p = 0; p < 3; p++) {
                char name[128];
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj", l, e,
                         p == 0   ? "gate"
                         : p == 1 ? "up"
                                  : "down");
                assert_int_equal(weights_matrix(w, name, p == 2 ? s->hidden : s->moe_inner,
                                                p == 2 ? s->moe_inner : s->hidden, &v[p][e], &err),
                                 0);
            }
        ExpertsView view = {s->n_experts, v[0], v[1], v[2]};
        if (!s->layer_dense[l])
            assert_int_equal(m->ops->experts_load(m->dev, &view, &m->layer[l], &err), 0);
    }
}

static void remote_close(Remote *m) {
    for (int l = 0; l < SHAPE_MAX_LAYERS; l++)
        m->ops->experts_free(m->dev, m->layer[l]);
    m->ops->close(&m->dev, 1);
}

static void run_with_resident(int first_n, bool broken) {
    Weights *w;
    Remote remote;
    Rig r;
    Err err = {0};
    bool resident[9 * 16];
    assert_int_equal(weights_open(&w, MODEL, &err), 0);
    remote_open(&remote, w);
    for (int i = 0; i < 9 * 16; i++)
        resident[i] = i < 16 || i % 16 < first_n;
    ExpertPort port = {&remote, remote_post, remote_wait};
    must_open(&r, (RigConf){.tp = 2, .resident = resident, .port = &port});
    if (broken) {
        int n;
        int32_t *ids = oracle_ints(prompt_named("facts"), "ids", &n);
        RigSeq seq = rig_seq_new(&r, n);
        remote.broken = true;
        assert_int_equal(rig_append(&r, &seq, ids, n, 512, 1, NULL, &err), E_PEER);
        assert_string_equal(err.text, "expertd 0 is gone");
        rig_seq_free(&r, &seq, n);
        free(ids);
        remote.broken = false;
    }
    expect_reference(&r, "facts", 512);
    expect_reference(&r, "tool_call", 64);
    assert_int_equal(remote.asked > 0, first_n < 16);
    rig_close(&r);
    remote_close(&remote);
    weights_close(w);
}

static void test_offloading_changes_no_token(void **state) {
    (void)state;
    run_with_resident(16, false);
    run_with_resident(5, false);
    run_with_resident(0, false);
}

static void test_broken_port_fails_the_step_only(void **state) {
    (void)state;
    run_with_resident(5, true);
}

/* ---- the tolerances catch the usual mistakes ---- */

static const Ops *right;

/* The latest K positions instead of the best. */
static void last_positions(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    right->index_select(d, topk, q, w, heads, index_slot);
    for (int t = d->rank; t < topk.rows; t += d->group->n_ranks)
        for (int i = 0; i < topk.cols && d->pos[t] >= topk.cols; i++)
            host_row_i32(topk, t)[i] = d->pos[t] - topk.cols + 1 + i;
    host_barrier(d);
}

/* relu(a) - relu(-a) = a: twice the heads, the second half turned around, scores without the ReLU
 * up to a common factor. */
static void no_relu(Dev *d, Tensor topk, Tensor q, Tensor w, int heads, int index_slot) {
    int dim = q.cols / heads;
    Tensor q2 = {xaligned((size_t)q.rows * (size_t)q.cols * 8),
                 DT_F32,
                 q.rows,
                 2 * q.cols,
                 2 * q.cols,
                 false};
    Tensor w2 = {xaligned((size_t)w.rows * (size_t)w.cols * 8),
                 DT_F32,
                 w.rows,
                 2 * w.cols,
                 2 * w.cols,
                 false};
    for (int t = 0; t < q.rows; t++) {
        for (int i = 0; i < heads * dim; i++) {
            host_row(q2, t)[i] = host_row(q, t)[i];
            host_row(q2, t)[heads * dim + i] = -host_row(q, t)[i];
        }
        for (int h = 0; h < heads; h++) {
            host_row(w2, t)[h] = host_row(w, t)[h];
            host_row(w2, t)[heads + h] = -host_row(w, t)[h];
        }
    }
    right->index_select(d, topk, q2, w2, 2 * heads, index_slot);
    free(q2.at);
    free(w2.at);
}

/* Rotates pairs (i, i + dim / 2) of the indexer, as other model families do: the same rotation of
 * reordered numbers. */
static void half_split_rope(Dev *d, Tensor x, int heads, int stride, int at, int dim, float theta) {
    if (stride == d->kv.index_dim && at == 0) {
        float *tmp = xmalloc((size_t)dim * sizeof *tmp);
        for (int t = 0; t < x.rows; t++)
            for (int h = 0; h < heads; h++) {
                float *p = host_row(x, t) + h * stride;
                for (int i = 0; i < dim / 2; i++) {
                    tmp[2 * i] = p[i];
                    tmp[2 * i + 1] = p[i + dim / 2];
                }
                memcpy(p, tmp, (size_t)dim * sizeof *tmp);
            }
        free(tmp);
    }
    right->rope(d, x, heads, stride, at, dim, theta);
}

typedef struct Last {
    const Shape *shape;
    int32_t topk[4][256]; /* of the last token, by index slot */
} Last;

static void on_topk(void *arg, ForwardPoint point, int layer, const Tensor *t) {
    Last *l = arg;
    if (point == FORWARD_TOPK)
        memcpy(l->topk[l->shape->index_slot[layer]], host_row_i32(*t, t->rows - 1),
               256 * sizeof(int32_t));
}

/* Largest logit difference and smallest overlap with the reference's positions on needle_1k. */
static void measure(RigConf conf, double *diff, int *shared) {
    int n;
    int64_t dim[3];
    int32_t *ids = oracle_ints(prompt_named("needle_1k"), "ids", &n);
    const float *want = oracle_f32(oracle, "needle_1k", "logits", dim);
    const int32_t *ref = oracle_i32(oracle, "needle_1k", "topk_last", dim);
    Rig r;
    Err err = {0};
    conf.tp = 2;
    must_open(&r, conf);
    Last last = {.shape = engine_shape(r.engine)};
    ForwardProbe probe = {&last, on_topk};
    RigSeq seq = rig_seq_new(&r, n);
    bool whole = engine_shape(r.engine)->index_topk != 256;
    assert_int_equal(rig_append(&r, &seq, ids, n, 512, 1, whole ? NULL : &probe, &err), 0);
    *diff = 0;
    for (int i = 0; i < 4096; i++)
        *diff = fmax(*diff, fabs((double)want[i] - engine_logits(r.engine, 0)[i]));
    *shared = 256;
    for (int s = 0; s < 4 && !whole; s++) {
        int both = 0;
        for (int i = 0, j = 0; i < 256 && j < 256;) {
            both += last.topk[s][i] == ref[s * 256 + j];
            last.topk[s][i]<ref[s * 256 + j] ? i++ : last.topk[s][i]> ref[s * 256 + j] ? j++
                                                                                       : (i++, j++);
        }
        *shared = both < *shared ? both : *shared;
    }
    rig_seq_free(&r, &seq, n);
    rig_close(&r);
    free(ids);
}

/* A copy of the checkpoint whose config chooses so many positions that attention is dense. */
static void dense_checkpoint(char *dir) {
    static const char *const linked[] = {"model-00001-of-00002.safetensors",
                                         "model-00002-of-00002.safetensors",
                                         "model.safetensors.index.json"};
    char from[PATH_MAX], to[PATH_MAX], here[PATH_MAX];
    assert_non_null(mkdtemp(dir));
    assert_non_null(realpath(MODEL, here));
    for (size_t i = 0; i < 3; i++) {
        snprintf(from, sizeof from, "%.3000s/%s", here, linked[i]);
        snprintf(to, sizeof to, "%s/%s", dir, linked[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    json_t *config = json_load_file(MODEL "/config.json", 0, NULL);
    json_object_set_new(config, "index_topk", json_integer(1024));
    snprintf(to, sizeof to, "%s/config.json", dir);
    assert_int_equal(json_dump_file(config, to, 0), 0);
    json_decref(config);
}

static void remove_checkpoint(const char *dir) {
    char cmd[256];
    snprintf(cmd, sizeof cmd, "rm -r %s", dir);
    assert_int_equal(system(cmd), 0);
}

static void test_tolerances_catch_mistakes(void **state) {
    (void)state;
    double diff;
    int shared;
    Ops faulty;
    char dir[] = "/tmp/baton-dense-XXXXXX";
    right = ops_cpu(NULL);
    measure((RigConf){0}, &diff, &shared);
    print_message("right: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff <= 1e-3 && shared >= 255);

    dense_checkpoint(dir);
    measure((RigConf){.dir = dir}, &diff, &shared);
    remove_checkpoint(dir);
    print_message("dense attention: logits %.1e\n", diff);
    assert_true(diff > 0.1);

    faulty = *right;
    faulty.index_select = no_relu;
    measure((RigConf){.ops = &faulty}, &diff, &shared);
    print_message("no ReLU: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff > 0.1 && shared < 255);

    faulty = *right;
    faulty.rope = half_split_rope;
    measure((RigConf){.ops = &faulty}, &diff, &shared);
    print_message("half-split rope: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff > 0.1 && shared < 255);

    faulty = *right;
    faulty.index_select = last_positions;
    measure((RigConf){.ops = &faulty}, &diff, &shared);
    print_message("last positions: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff > 0.1 && shared < 255);
}

/* Stated tolerances of the compressed caches: largest logit difference on needle_1k, whose logits
 * have a standard deviation of about 4. */
static void test_kv_formats(void **state) {
    (void)state;
    double diff;
    int shared;
    measure((RigConf){.kv_dtype = DT_BF16}, &diff, &shared);
    print_message("bf16 KV: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff < 0.25 && shared >= 250);
    measure((RigConf){.kv_dtype = DT_F8E4M3}, &diff, &shared);
    print_message("fp8 KV: logits %.1e, shared positions %d\n", diff, shared);
    assert_true(diff < 1.5 && shared >= 230);
}

static void test_refusals(void **state) {
    (void)state;
    Rig r;
    Err err = {0};
    assert_int_equal(rig_open(&r, &(RigConf){.dir = MODEL, .tp = 3}, &err), E_UNSUPPORTED);
    assert_int_equal(rig_open(&r, &(RigConf){.dir = MODEL, .backend = "abacus"}, &err),
                     E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "abacus"));
    if (!ops_cuda(NULL)) {
        assert_int_equal(rig_open(&r, &(RigConf){.dir = MODEL, .backend = "cuda"}, &err),
                         E_UNSUPPORTED);
        assert_non_null(strstr(err.text, "cuda"));
    }
    assert_int_equal(rig_open(&r, &(RigConf){.dir = MODEL, .max_context = 9000}, &err), E_INVAL);
    assert_non_null(strstr(err.text, "8192"));
    bool none[9 * 16] = {0};
    assert_int_equal(rig_open(&r, &(RigConf){.dir = MODEL, .resident = none}, &err), E_INVAL);
    assert_non_null(strstr(err.text, "expertd"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_tokens_for_ranks_and_chunks),
        cmocka_unit_test(test_ranks_agree_with_one),
        cmocka_unit_test(test_companions_change_no_bit),
        cmocka_unit_test(test_rollback),
        cmocka_unit_test(test_offloading_changes_no_token),
        cmocka_unit_test(test_broken_port_fails_the_step_only),
        cmocka_unit_test(test_tolerances_catch_mistakes),
        cmocka_unit_test(test_kv_formats),
        cmocka_unit_test(test_refusals),
    };
    Err err = {0};
    if (oracle_open(&oracle, ORACLE, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    oracle_close(oracle);
    return rc;
}
