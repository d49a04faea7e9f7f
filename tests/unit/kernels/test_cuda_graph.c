/* Operations of the CUDA backend in a captured graph: a replay after batch_set works on the new
 * positions and gives the bits that plain calls give. */
#include "kernels/cuda/cuda.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    ROWS = 3,
    CONTEXT = 1024,
    PAGES = CONTEXT / 64,
    TOPK = 64,
    HEADS = 4,
    LORA = 128,
    ROPE = 16,
    INDEX_HEADS = 3,
    DIM = 32,
    HIDDEN = HEADS * LORA,
    INNER = 48,
    EXPERTS = 5,
    K = 2,
};

/* One step: choice of positions, attention, experts of what attention gave. */
typedef struct Step {
    const Ops *ops;
    Dev *dev;
    void *pool;
    Tensor iq, iw, q, list, out, id, weight, y;
    Experts *experts;
    float *matrix[3];
} Step;

static uint32_t seed = 1;

static float noise(void) {
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed / 2147483648.0f;
}

static float *noises(size_t n) {
    float *p = xmalloc(n * sizeof *p);
    for (size_t i = 0; i < n; i++)
        p[i] = noise();
    return p;
}

static Tensor tensor(const Step *s, Dtype dtype, int rows, int cols, const void *numbers) {
    Tensor t;
    assert_int_equal(s->ops->tensor_new(s->dev, dtype, rows, cols, &t, NULL), 0);
    if (numbers)
        s->ops->upload(s->dev, &t, numbers);
    return t;
}

static Tensor noise_tensor(const Step *s, int rows, int cols) {
    float *p = noises((size_t)rows * (size_t)cols);
    Tensor t = tensor(s, DT_F32, rows, cols, p);
    free(p);
    return t;
}

static void load_experts(Step *s) {
    MatView view[3][EXPERTS];
    for (int p = 0; p < 3; p++) {
        int rows = p == 2 ? HIDDEN : INNER, cols = p == 2 ? INNER : HIDDEN;
        s->matrix[p] = noises((size_t)rows * (size_t)cols);
        for (int e = 0; e < EXPERTS; e++)
            view[p][e] = (MatView){.dtype = DT_F32,
                                   .rows = rows,
                                   .cols = cols,
                                   .data = (const uint8_t *)s->matrix[p],
                                   .row_bytes = (size_t)cols * sizeof(float)};
    }
    ExpertsView all = {EXPERTS, view[0], view[1], view[2]};
    assert_int_equal(s->ops->experts_load(s->dev, &all, &s->experts, NULL), 0);
}

static void bind_pool(Step *s) {
    KvLayout l = {DT_F32, 1, 1, LORA, ROPE, DIM, PAGES};
    size_t bytes = kv_pool_bytes(&l);
    float *p = noises(bytes / sizeof *p);
    assert_int_equal(s->ops->pool_new(s->dev, bytes, &s->pool, NULL), 0);
    Tensor all = {s->pool, DT_F32, 1, (int)(bytes / 4), (int)(bytes / 4), false};
    s->ops->upload(s->dev, &all, p);
    s->ops->kv_bind(s->dev, &l, s->pool);
    free(p);
}

static Step step_open(void) {
    static const int32_t id[ROWS * K] = {0, 3, 1, 3, 2, 4};
    Err err = {0};
    Step s = {.ops = ops_cuda(&err)};
    DevConf c = {
        .n_ranks = 1, .max_rows = ROWS, .max_seqs = 1, .max_context = CONTEXT, .index_topk = TOPK};
    if (!s.ops || s.ops->open(&c, &s.dev, &err)) {
        fprintf(stderr, "skipped: %s\n", err.text);
        skip();
    }
    s.iq = noise_tensor(&s, ROWS, INDEX_HEADS * DIM);
    s.iw = noise_tensor(&s, ROWS, INDEX_HEADS);
    s.q = noise_tensor(&s, ROWS, HEADS * (LORA + ROPE));
    s.list = tensor(&s, DT_I32, ROWS, TOPK, NULL);
    s.out = tensor(&s, DT_F32, ROWS, HIDDEN, NULL);
    s.id = tensor(&s, DT_I32, ROWS, K, id);
    s.weight = noise_tensor(&s, ROWS, K);
    s.y = tensor(&s, DT_F32, ROWS, HIDDEN, NULL);
    load_experts(&s);
    bind_pool(&s);
    return s;
}

static void step_close(Step *s) {
    Tensor *all[] = {&s->iq, &s->iw, &s->q, &s->list, &s->out, &s->id, &s->weight, &s->y};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        s->ops->tensor_free(s->dev, all[i]);
    for (int p = 0; p < 3; p++)
        free(s->matrix[p]);
    s->ops->experts_free(s->dev, s->experts);
    s->ops->pool_free(s->dev, s->pool);
    s->ops->close(&s->dev, 1);
}

static void set_positions(const Step *s, const int32_t pos[ROWS]) {
    static const int32_t zero[ROWS];
    int32_t table[PAGES];
    for (int i = 0; i < PAGES; i++)
        table[i] = PAGES - 1 - i;
    s->ops->batch_set(s->dev, &(OpsBatch){ROWS, 1, zero, pos, zero, table, PAGES});
}

static void enqueue(const Step *s) {
    s->ops->index_select(s->dev, s->list, s->iq, s->iw, INDEX_HEADS, 0);
    s->ops->mla_attend(s->dev, s->out, s->q, s->list, HEADS, 0, 0.1f);
    s->ops->clear(s->dev, s->y);
    s->ops->experts(s->dev, s->y, s->out, s->id, s->weight, s->experts);
}

static float *result(const Step *s) {
    float *y = xmalloc((size_t)ROWS * HIDDEN * sizeof *y);
    s->ops->download(s->dev, &s->y, y);
    return y;
}

static void test_a_replay_sees_the_new_batch(void **state) {
    (void)state;
    static const int32_t pos[3][ROWS] = {{1023, 70, 5}, {3, 64, 1000}, {500, 501, 502}};
    Step s = step_open();
    float *want[3];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int i = 0; i < 3; i++) {
        set_positions(&s, pos[i]);
        enqueue(&s);
        want[i] = result(&s);
    }
    cuda_must(cudaStreamBeginCapture(s.dev->stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue(&s);
    cuda_must(cudaStreamEndCapture(s.dev->stream, &graph), "capture");
    cuda_must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    for (int i = 0; i < 6; i++) {
        set_positions(&s, pos[i % 3]);
        cuda_must(cudaGraphLaunch(exec, s.dev->stream), "replay");
        float *got = result(&s);
        assert_memory_equal(want[i % 3], got, (size_t)ROWS * HIDDEN * sizeof *got);
        free(got);
    }
    assert_memory_not_equal(want[0], want[1], (size_t)ROWS * HIDDEN * sizeof(float));
    cuda_must(cudaGraphExecDestroy(exec), "graph");
    cuda_must(cudaGraphDestroy(graph), "graph");
    for (int i = 0; i < 3; i++)
        free(want[i]);
    step_close(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_replay_sees_the_new_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
