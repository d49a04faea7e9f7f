/* Placement changes speed, not answers: every strategy and changes between steps against all
 * experts resident; the same set gives the same bits however it came about; one expert has the same
 * bits here and in expertd. */
#include "expertd/store.h"
#include "kernels/host.h"
#include "model/place.h"
#include "tests/support/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define MODEL "tests/models/tiny-glm52/fp8"
enum { N_PROMPT = 40, N_OUT = 10, MAX_ROWS = 64 };

static Weights *weights;
static Store *store; /* every expert, in the checkpoint's format */
static const Shape *shape;

/* ---- expertd, in this process ---- */

static float *sum; /* [MAX_ROWS, hidden] */
static int n_sum, n_asked;

static int post(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                const float *weight, Err *err) {
    (void)arg, (void)err;
    for (int i = 0; i < n * k; i++)
        n_asked += id[i] >= 0;
    store_compute(store, layer, n, k, x, id, weight, sum, NULL, NULL);
    n_sum = n;
    return 0;
}

static int wait_sum(void *arg, float *y, Err *err) {
    (void)arg, (void)err;
    for (int i = 0; i < n_sum * shape->hidden; i++)
        y[i] += sum[i];
    return 0;
}

static const ExpertPort PORT = {NULL, post, wait_sum};

/* ---- running ---- */

typedef struct Answer {
    int32_t token[N_OUT];
    float *logits; /* [N_OUT, vocab] */
} Answer;

static void must_open(Rig *r, RigConf c) {
    Err err = {0};
    c.dir = MODEL;
    c.max_context = 256;
    c.max_rows = MAX_ROWS;
    c.port = c.resident ? &PORT : NULL;
    if (rig_open(r, &c, &err))
        fail_msg("%s", err.text);
}

/* Greedy answer to a fixed prompt; between(i) comes before step i. */
static Answer answer(Rig *r, void (*between)(Rig *r, int i)) {
    size_t vocab = (size_t)shape->vocab;
    Answer a = {.logits = xmalloc(N_OUT * vocab * sizeof(float))};
    int32_t prompt[N_PROMPT];
    Err err = {0};
    for (int i = 0; i < N_PROMPT; i++)
        prompt[i] = 100 + i * 37 % 900;
    RigSeq seq = rig_seq_new(r, N_PROMPT + N_OUT);
    for (int i = 0; i < N_OUT; i++) {
        if (between)
            between(r, i);
        int rc = i == 0 ? rig_append(r, &seq, prompt, N_PROMPT, 16, 1, NULL, &err)
                        : rig_append(r, &seq, &a.token[i - 1], 1, 1, 1, NULL, &err);
        assert_int_equal(rc, 0);
        memcpy(a.logits + (size_t)i * vocab, engine_logits(r->engine, 0), vocab * sizeof(float));
        a.token[i] = rig_argmax(a.logits + (size_t)i * vocab, (int)vocab);
    }
    rig_seq_free(r, &seq, N_PROMPT + N_OUT);
    return a;
}

/* The order of fp32 sums is all that may differ. */
static void expect_close(const Answer *a, const Answer *want) {
    assert_memory_equal(a->token, want->token, sizeof a->token);
    for (int i = 0; i < N_OUT * shape->vocab; i++)
        assert_true(fabsf(a->logits[i] - want->logits[i]) < 1e-3f);
}

static void expect_same_bits(const Answer *a, const Answer *want) {
    assert_memory_equal(a->logits, want->logits,
                        (size_t)N_OUT * (size_t)shape->vocab * sizeof(float));
}

static Answer all_resident(int tp, RouteCount *counts) {
    Rig r;
    must_open(&r, (RigConf){.tp = tp, .counts = counts});
    Answer a = answer(&r, NULL);
    rig_close(&r);
    return a;
}

static bool *decide(PlaceStrategy strategy, const char *n, const uint64_t *counts) {
    bool *resident = NULL;
    Err err = {0};
    PlaceConf c = {.strategy = strategy, .resident = n, .counts = counts};
    assert_int_equal(place_decide(&c, shape, &resident, &err), 0);
    return resident;
}

static void test_every_strategy_gives_the_same_answer(void **state) {
    (void)state;
    static const char *const sizes[] = {"none", "1", "5", "15", "all"};
    RouteCount *counts = route_count_new(shape);
    Answer want = all_resident(2, counts);
    uint64_t *used = route_count_copy(counts);
    assert_int_equal(route_count_n_tokens(counts), N_PROMPT + N_OUT - 1);
    assert_int_equal(route_count_n_remote(counts), 0);
    for (int s = PLACE_UNIFORM; s <= PLACE_FRONT; s++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            bool *resident = decide(s, sizes[i], used);
            Rig r;
            must_open(&r, (RigConf){.tp = 2, .resident = resident});
            Answer got = answer(&r, NULL);
            expect_close(&got, &want);
            free(got.logits);
            rig_close(&r);
            free(resident);
        }
    free(want.logits);
    free(used);
    route_count_free(counts);
}

/* ---- changes between steps ---- */

static const bool *target; /* [layers, n_experts] */

static void place_all(Rig *r, const bool *resident) {
    Err err = {0};
    for (int l = 0; l < shape->n_layers; l++)
        if (!shape->layer_dense[l] &&
            engine_place(r->engine, l, resident + l * shape->n_experts, &err))
            fail_msg("%s", err.text);
}

static void go_to_target(Rig *r, int i) {
    if (i == 0)
        place_all(r, target);
}

/* Each step another five experts in a row, wrapping around; now and then all or none. */
static void rotate(Rig *r, int i) {
    int n = shape->n_experts, all = shape->n_layers * n;
    bool *set = xcalloc((size_t)all, sizeof *set);
    for (int j = 0; j < all; j++)
        set[j] = i == 4 || (i != 7 && (j % n + i * 3 + j / n) % n < 5);
    place_all(r, set);
    free(set);
}

static void test_the_same_set_gives_the_same_bits(void **state) {
    (void)state;
    bool *front = decide(PLACE_FRONT, "6", NULL), *uniform = decide(PLACE_UNIFORM, "5", NULL);
    Rig r;
    must_open(&r, (RigConf){.tp = 2, .resident = front});
    Answer want = answer(&r, NULL);
    rig_close(&r);
    must_open(&r, (RigConf){.tp = 2, .resident = uniform});
    target = front;
    Answer got = answer(&r, go_to_target);
    expect_same_bits(&got, &want);
    rig_close(&r);
    free(got.logits);
    free(want.logits);
    free(front);
    free(uniform);
}

static void test_changes_during_an_answer_change_no_token(void **state) {
    (void)state;
    bool *resident = decide(PLACE_UNIFORM, "5", NULL);
    for (int tp = 1; tp <= 2; tp++) {
        Answer want = all_resident(tp, NULL);
        Rig r;
        must_open(&r, (RigConf){.tp = tp, .resident = resident});
        n_asked = 0;
        Answer got = answer(&r, rotate);
        assert_true(n_asked > 0);
        expect_close(&got, &want);
        rig_close(&r);
        free(got.logits);
        free(want.logits);
    }
    free(resident);
}

/* ---- failures ---- */

static Ops limited;
static _Atomic int loads_left;

static int load_some(Dev *d, const ExpertsView *view, Experts **out, Err *err) {
    if (loads_left-- <= 0)
        return err_set(err, E_NOMEM, "the device is full");
    return ops_cpu(NULL)->experts_load(d, view, out, err);
}

/* One of the two ranks finds no memory: neither changes. */
static void half_fails(Rig *r, int i) {
    Err err = {0};
    int layer = shape->n_layers - 1;
    loads_left = 1;
    assert_int_equal(engine_place(r->engine, layer, target + layer * shape->n_experts, &err),
                     E_NOMEM);
    assert_string_equal(err.text, "the device is full");
    (void)i;
}

static void test_a_change_that_fails_changes_nothing(void **state) {
    (void)state;
    bool *few = decide(PLACE_UNIFORM, "5", NULL), *none = decide(PLACE_UNIFORM, "none", NULL);
    Rig r;
    limited = *ops_cpu(NULL);
    limited.experts_load = load_some;
    loads_left = 1000;
    target = none;
    must_open(&r, (RigConf){.tp = 2, .resident = few, .ops = &limited});
    Answer want = answer(&r, NULL), got = answer(&r, half_fails);
    expect_same_bits(&got, &want);
    rig_close(&r);
    free(got.logits);
    free(want.logits);
    must_open(&r, (RigConf){.tp = 1});
    Err err = {0};
    assert_int_equal(engine_place(r.engine, shape->n_layers - 1, none + shape->n_experts, &err),
                     E_INVAL);
    rig_close(&r);
    free(few);
    free(none);
}

/* ---- one expert ---- */

static void test_one_expert_has_the_same_bits_here_and_there(void **state) {
    (void)state;
    int layer = shape->n_layers - 1, hidden = shape->hidden;
    const Ops *op = ops_cpu(NULL);
    DevConf dc = {.n_ranks = 1, .threads = 1, .max_rows = 1, .max_seqs = 1, .max_context = 64};
    Dev *dev = NULL;
    Err err = {0};
    dc.index_topk = shape->index_topk;
    assert_int_equal(op->open(&dc, &dev, &err), 0);
    MatView *v = xcalloc(3 * (size_t)shape->n_experts, sizeof *v);
    for (int i = 0; i < 3 * shape->n_experts; i++) {
        static const char *const part[] = {"gate", "up", "down"};
        int p = i / shape->n_experts, inner = shape->moe_inner;
        char *name = xasprintf("model.layers.%d.mlp.experts.%d.%s_proj", layer,
                               i % shape->n_experts, part[p]);
        assert_int_equal(weights_matrix(weights, name, p == 2 ? hidden : inner,
                                        p == 2 ? inner : hidden, &v[i], &err),
                         0);
        free(name);
    }
    ExpertsView view = {shape->n_experts, v, v + shape->n_experts, v + 2 * shape->n_experts};
    Experts *e;
    assert_int_equal(op->experts_load(dev, &view, &e, &err), 0);
    float *x = xcalloc((size_t)hidden, sizeof *x), *y = xcalloc((size_t)hidden, sizeof *y);
    for (int i = 0; i < hidden; i++)
        x[i] = sinf((float)i);
    for (int32_t id = 0; id < shape->n_experts; id++) {
        float share = 0.37f;
        memset(y, 0, (size_t)hidden * sizeof *y);
        op->experts(dev, (Tensor){y, DT_F32, 1, hidden, hidden, false},
                    (Tensor){x, DT_F32, 1, hidden, hidden, false},
                    (Tensor){&id, DT_I32, 1, 1, 1, false}, (Tensor){&share, DT_F32, 1, 1, 1, false},
                    e);
        store_compute(store, layer, 1, 1, x, &id, &share, sum, NULL, NULL);
        assert_memory_equal(sum, y, (size_t)hidden * sizeof *y);
        assert_true(y[0] != 0);
    }
    free(x);
    free(y);
    free(v);
    op->experts_free(dev, e);
    op->close(&dev, 1);
}

static int open_model(void **state) {
    (void)state;
    Err err = {0};
    StoreConf c = {.backend = "cpu",
                   .device = "none",
                   .n_shards = 1,
                   .threads = 1,
                   .node = -1,
                   .max_rows = MAX_ROWS};
    if (weights_open(&weights, MODEL, &err) || store_open(&store, weights, &c, &err))
        return -1;
    shape = weights_shape(weights);
    sum = xcalloc((size_t)MAX_ROWS * (size_t)shape->hidden, sizeof *sum);
    return 0;
}

static int close_model(void **state) {
    (void)state;
    free(sum);
    store_close(store);
    weights_close(weights);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_strategy_gives_the_same_answer),
        cmocka_unit_test(test_the_same_set_gives_the_same_bits),
        cmocka_unit_test(test_changes_during_an_answer_change_no_token),
        cmocka_unit_test(test_a_change_that_fails_changes_nothing),
        cmocka_unit_test(test_one_expert_has_the_same_bits_here_and_there),
    };
    return cmocka_run_group_tests(tests, open_model, close_model);
}
