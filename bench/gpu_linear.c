/* What linear layers and the small operations of a step cost on a GPU, at GLM-5.2's shapes: each in
 * a captured graph over several matrices, together larger than the L2, so that weights come from
 * memory; medians, beside the time that reading the stored bytes takes at the read bandwidth of the
 * same run.
 *
 *     bench_gpu_linear */
#include "bench/gpu_read.h"
#include "kernels/cuda/cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    REPEATS = 31,
    WARM_UP = 3,
    MAX_ROWS = 4096,
    SET_BYTES = 400 << 20, /* of matrices that take turns: eight times the L2 */
    MAX_SET = 64,
    COPY_BYTES = 1 << 30,
};

typedef struct Bench {
    const Ops *ops;
    Dev *dev;
    double copy, read; /* bytes per second */
    uint8_t *noise;    /* host bytes, no NaN in any format */
    Tensor x, y;
} Bench;

static void must(int rc, const Err *err) {
    if (rc == 0)
        return;
    fprintf(stderr, "bench_gpu_linear: %s\n", err->text);
    exit(1);
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one of the n calls fn(arg, i) of a graph. */
static double graph_time(Bench *b, int n, void (*fn)(void *arg, int i), void *arg) {
    cudaStream_t s = b->dev->stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    float ms[REPEATS];
    fn(arg, 0); /* workspace is taken before the capture */
    cuda_finish(b->dev);
    cuda_must(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; i++)
        fn(arg, i);
    cuda_must(cudaStreamEndCapture(s, &graph), "capture");
    cuda_must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cuda_must(cudaEventCreate(&from), "event");
    cuda_must(cudaEventCreate(&to), "event");
    for (int i = -WARM_UP; i < REPEATS; i++) {
        cuda_must(cudaEventRecord(from, s), "event");
        cuda_must(cudaGraphLaunch(exec, s), "launch");
        cuda_must(cudaEventRecord(to, s), "event");
        cuda_finish(b->dev);
        cuda_must(cudaEventElapsedTime(&ms[i < 0 ? 0 : i], from, to), "event");
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    qsort(ms, REPEATS, sizeof *ms, by_value);
    return (double)ms[REPEATS / 2] * 1e-3 / n;
}

/* ---- linear layers ---- */

typedef struct Linear {
    Bench *b;
    Mat *mat[MAX_SET];
    int n, rows;
} Linear;

static void linear_call(void *arg, int i) {
    Linear *l = arg;
    Bench *b = l->b;
    const CudaMat *m = &l->mat[i % l->n]->m;
    Tensor x = b->x, y = b->y;
    x.rows = y.rows = l->rows;
    x.cols = x.ld = m->cols;
    y.cols = y.ld = m->rows;
    b->ops->linear(b->dev, y, x, l->mat[i % l->n]);
}

typedef struct Shape {
    const char *name;
    Dtype dtype;
    int rows, cols;
} Shape;

static MatView noise_mat(const Bench *b, const Shape *s, float *scale) {
    MatView v = {.dtype = s->dtype,
                 .rows = s->rows,
                 .cols = s->cols,
                 .data = b->noise,
                 .row_bytes = dtype_row_bytes(s->dtype, s->cols),
                 .scale2 = 1.0f};
    if (s->dtype == DT_F8E4M3) {
        v.scale_cols = (s->cols + F8_BLOCK - 1) / F8_BLOCK;
        size_t n = (size_t)((s->rows + F8_BLOCK - 1) / F8_BLOCK) * (size_t)v.scale_cols;
        for (size_t i = 0; i < n; i++)
            scale[i] = 0.01f;
        v.scale = scale;
    }
    return v;
}

static double target_of(const Shape *s, int rows, double bytes) {
    if (rows == 8 && s->rows == 6144 && s->cols == 16384)
        return 32e-6;
    return rows == 1 && bytes > 30e6 ? -0.8 : 0; /* below 0: share of the bandwidth */
}

static void linear_rows(Linear *l, const Shape *s, int rows) {
    Bench *b = l->b;
    double bytes = (double)dtype_row_bytes(s->dtype, s->cols) * s->rows, floor = bytes / b->read,
           flop = 2.0 * s->rows * s->cols * rows, target = target_of(s, rows, bytes);
    l->rows = rows;
    double t = graph_time(b, l->n < 8 ? 8 : l->n, linear_call, l);
    double limit = target < 0 ? floor / -target : target;
    printf("| %s %s [%d, %d] | %d | %.1f | %.1f | %.0f %% | %.0f | ", s->name, dtype_name(s->dtype),
           s->rows, s->cols, rows, t * 1e6, floor * 1e6, 100 * floor / t, flop / t * 1e-12);
    if (limit > 0)
        printf("%.1f%s ", limit * 1e6, t > limit ? " (missed)" : "");
    printf("|\n");
    fflush(stdout);
}

static void linear_shape(Bench *b, const Shape *s) {
    static const int rows[] = {1, 2, 4, 8, 16, 32, 64, 512, 4096};
    size_t bytes = dtype_row_bytes(s->dtype, s->cols) * (size_t)s->rows;
    float *scale = xmalloc(((size_t)s->rows / F8_BLOCK + 1) * ((size_t)s->cols / F8_BLOCK + 1) *
                           sizeof *scale);
    MatView v = noise_mat(b, s, scale);
    Linear l = {.b = b};
    Err err;
    for (size_t have = 0; have < SET_BYTES && l.n < MAX_SET; have += bytes)
        must(b->ops->mat_load(b->dev, &v, &l.mat[l.n++], &err), &err);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        linear_rows(&l, s, rows[i]);
    for (int i = 0; i < l.n; i++)
        b->ops->mat_free(b->dev, l.mat[i]);
    free(scale);
}

/* ---- small operations: one layer's worth at one token ---- */

enum { HIDDEN = 6144, HEADS = 16, NOPE = 192, ROPE = 64, V = 256, LORA = 512, EXPERTS = 256 };

typedef struct Small {
    Bench *b;
    int op, rows;
    Tensor w, id, weight;
    Mat *kv_b;
} Small;

static Tensor shape(Tensor t, int rows, int cols) {
    t.rows = rows;
    t.cols = t.ld = cols;
    return t;
}

static void small_call(void *arg, int i) {
    Small *s = arg;
    Bench *b = s->b;
    int n = s->rows;
    Tensor x = shape(b->x, n, HIDDEN), y = shape(b->y, n, HIDDEN);
    (void)i;
    if (s->op == 0)
        b->ops->rms_norm(b->dev, y, x, s->w, 1e-5f);
    else if (s->op == 1)
        b->ops->add(b->dev, y, x);
    else if (s->op == 2)
        b->ops->silu_mul(b->dev, y, x, x);
    else if (s->op == 3)
        b->ops->moe_route(b->dev, shape(s->id, n, 8), shape(s->weight, n, 8),
                          shape(b->x, n, EXPERTS), shape(s->w, 1, EXPERTS), true, 2.5f);
    else if (s->op == 4)
        b->ops->mla_absorb(b->dev, shape(b->y, n, HEADS * (LORA + ROPE)),
                           shape(b->x, n, HEADS * (NOPE + ROPE)), s->kv_b, HEADS, NOPE, V);
    else
        b->ops->mla_expand(b->dev, shape(b->y, n, HEADS * V), shape(b->x, n, HEADS * LORA), s->kv_b,
                           HEADS, NOPE, V);
}

static void small_ops(Bench *b) {
    static const char *const name[] = {"rms_norm", "add",        "silu_mul",
                                       "route",    "mla_absorb", "mla_expand"};
    static const int rows[] = {1, 8, 512};
    Small s = {.b = b};
    Shape kv = {"kv_b", DT_BF16, HEADS * (NOPE + V), LORA};
    MatView v = noise_mat(b, &kv, NULL);
    Err err;
    must(b->ops->tensor_new(b->dev, DT_F32, 1, HIDDEN, &s.w, &err), &err);
    must(b->ops->tensor_new(b->dev, DT_I32, MAX_ROWS, 8, &s.id, &err), &err);
    must(b->ops->tensor_new(b->dev, DT_F32, MAX_ROWS, 8, &s.weight, &err), &err);
    must(b->ops->mat_load(b->dev, &v, &s.kv_b, &err), &err);
    b->ops->clear(b->dev, s.w);
    printf("\n| operation, warm L2 | tokens | us |\n|---|---|---|\n");
    for (s.op = 0; s.op < 6; s.op++)
        for (int i = 0; i < 3; i++) {
            s.rows = rows[i];
            printf("| %s | %d | %.1f |\n", name[s.op], s.rows,
                   graph_time(b, 16, small_call, &s) * 1e6);
        }
    b->ops->mat_free(b->dev, s.kv_b);
}

/* ---- memory ---- */

typedef struct Copy {
    Bench *b;
    char *from, *to;
} Copy;

static void copy_call(void *arg, int i) {
    Copy *c = arg;
    (void)i;
    cuda_must(
        cudaMemcpyAsync(c->to, c->from, COPY_BYTES, cudaMemcpyDeviceToDevice, c->b->dev->stream),
        "copy");
}

static void read_call(void *arg, int i) {
    Copy *c = arg;
    (void)i;
    gpu_read(c->from, COPY_BYTES, c->to, c->b->dev->stream);
}

static void measure_memory(Bench *b) {
    void *from, *to;
    Err err;
    must(b->ops->pool_new(b->dev, COPY_BYTES, &from, &err), &err);
    must(b->ops->pool_new(b->dev, COPY_BYTES, &to, &err), &err);
    Copy c = {b, from, to};
    b->copy = 2.0 * COPY_BYTES / graph_time(b, 4, copy_call, &c);
    b->read = COPY_BYTES / graph_time(b, 4, read_call, &c);
    b->ops->pool_free(b->dev, from);
    b->ops->pool_free(b->dev, to);
}

static void open_bench(Bench *b) {
    Err err = {0};
    DevConf c = {
        .n_ranks = 1, .max_rows = MAX_ROWS, .max_seqs = 1, .max_context = 64, .index_topk = 64};
    size_t bytes = 2ull * 32768 * 6144;
    b->ops = ops_cuda(&err);
    must(b->ops ? 0 : E_UNSUPPORTED, &err);
    must(b->ops->open(&c, &b->dev, &err), &err);
    must(b->ops->tensor_new(b->dev, DT_F32, MAX_ROWS, 32768, &b->x, &err), &err);
    must(b->ops->tensor_new(b->dev, DT_F32, MAX_ROWS, 32768, &b->y, &err), &err);
    b->noise = xmalloc(bytes);
    uint32_t seed = 1;
    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        b->noise[i] = (uint8_t)(seed >> 24) & 0xbf;
    }
    for (int r = 0; r < MAX_ROWS; r++) { /* bytes below 0x40 make small numbers of fp32 too */
        Tensor row = tensor_row(b->x, r);
        b->ops->upload(b->dev, &row, b->noise + (size_t)r * 64);
    }
}

int main(void) {
    static const Shape shapes[] = {
        {"q_b", DT_F8E4M3, 16384, 2048},        {"q_b of 4 ranks", DT_F8E4M3, 4096, 2048},
        {"o_proj", DT_F8E4M3, 6144, 16384},     {"o_proj of 4 ranks", DT_F8E4M3, 6144, 4096},
        {"q_a", DT_F8E4M3, 2048, 6144},         {"kv_a", DT_F8E4M3, 576, 6144},
        {"shared gate", DT_F8E4M3, 2048, 6144}, {"dense gate", DT_F8E4M3, 12288, 6144},
        {"dense down", DT_F8E4M3, 6144, 12288}, {"o_proj", DT_BF16, 6144, 16384},
        {"router", DT_BF16, 256, 6144},         {"lm_head of 8 ranks", DT_BF16, 19360, 6144},
    };
    struct cudaDeviceProp p;
    Bench b = {0};
    open_bench(&b);
    cuda_must(cudaGetDeviceProperties(&p, b.dev->device), "properties");
    measure_memory(&b);
    printf("%s, %d multiprocessors; copy %.0f GB/s, read %.0f GB/s\n\n", p.name, b.dev->n_sm,
           b.copy * 1e-9, b.read * 1e-9);
    printf("| layer | tokens | us | floor us | of floor | TFLOP/s | target us |\n"
           "|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        linear_shape(&b, &shapes[i]);
    small_ops(&b);
    free(b.noise);
    b.ops->close(&b.dev, 1);
    return 0;
}
