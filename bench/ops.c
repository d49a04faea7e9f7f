/* bench_ops [BACKEND [THREADS]]: what single operations of a host backend reach, beside what memory
 * gives in the same run.
 *
 * BACKEND: avx512, avx2, ref or best (default). THREADS: of the one rank (default 1). Each figure
 * is the median of many calls. Matrices are dealt out from a set that is larger than the L2 cache,
 * as in a step, where every weight is used once. GB/s counts stored bytes that an operation must
 * read; the last column is their share of the copy bandwidth. */
#include "base/clock.h"
#include "kernels/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_ROWS = 512,
    TOPK = 2048,
    MAX_CONTEXT = 131072,
    CALLS = 400,
    BUDGET_US = 400000,
    SET_BYTES = 32 << 20,
};

typedef struct Bench {
    const Ops *ops;
    Dev *dev;
    double copy_gb; /* GB/s read by memcpy */
} Bench;

static uint32_t noise_state = 1;

static uint32_t noise_bits(void) {
    noise_state = noise_state * 1664525u + 1013904223u;
    return noise_state >> 8;
}

static void must(int rc, const Err *err) {
    if (rc == 0)
        return;
    fprintf(stderr, "bench_ops: %s\n", err->text);
    exit(1);
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Median microseconds of fn(arg, call), after two calls that warm up. The clock counts whole
 * microseconds, so short calls are timed in batches. */
static double median_us(void (*fn)(void *arg, int call), void *arg) {
    int64_t us[CALLS], begin = clock_now_us();
    int n = 0, call = 2;
    fn(arg, 0);
    fn(arg, 1);
    int batch = clock_now_us() - begin < 2000 ? 16 : 1;
    begin = clock_now_us();
    for (; n < CALLS && (n < 3 || clock_now_us() - begin < BUDGET_US); n++) {
        int64_t t = clock_now_us();
        for (int i = 0; i < batch; i++)
            fn(arg, call++);
        us[n] = clock_now_us() - t;
    }
    qsort(us, (size_t)n, sizeof *us, by_value);
    return (double)us[n / 2] / batch;
}

static void row(const Bench *b, const char *name, double us, double flop, double bytes) {
    double gb = bytes / us * 1e-3;
    printf("| %-50s | %10.1f | %8.1f | %7.2f | %5.2f |\n", name, us, flop / us * 1e-3, gb,
           gb / b->copy_gb);
    fflush(stdout);
}

/* ---- memory ---- */

typedef struct Copy {
    char *to, *from;
    size_t n;
} Copy;

static void copy_call(void *arg, int call) {
    Copy *c = arg;
    c->from[call % 4096] = (char)call;
    memcpy(c->to, c->from, c->n);
}

static double copy_bandwidth(void) {
    Copy c = {xaligned(SET_BYTES), xaligned(SET_BYTES), SET_BYTES};
    double us = median_us(copy_call, &c);
    free(c.to);
    free(c.from);
    return (double)SET_BYTES / us * 1e-3;
}

/* ---- products ---- */

typedef struct Linear {
    const Bench *b;
    Mat **mat;
    int n_mats;
    Tensor x, y;
} Linear;

static void linear_call(void *arg, int call) {
    Linear *l = arg;
    l->b->ops->linear(l->b->dev, l->y, l->x, l->mat[call % l->n_mats]);
}

static Tensor noise_tensor(const Bench *b, int rows, int cols) {
    Tensor t;
    Err err;
    must(b->ops->tensor_new(b->dev, DT_F32, rows, cols, &t, &err), &err);
    for (int i = 0; i < rows * cols; i++)
        ((float *)t.at)[i] = (float)noise_bits() / 8388608.0f - 1.0f;
    return t;
}

/* Bytes that are neither NaN nor tiny in any format; scales of 1. */
static MatView noise_matrix(Dtype dtype, int rows, int cols, uint8_t *data, void *scale) {
    size_t row_bytes = dtype_row_bytes(dtype, cols);
    for (size_t i = 0; i < row_bytes * (size_t)rows; i++)
        data[i] = (uint8_t)((noise_bits() & 0x87) | 0x38);
    return (MatView){.dtype = dtype,
                     .rows = rows,
                     .cols = cols,
                     .data = data,
                     .row_bytes = row_bytes,
                     .scale = scale,
                     .scale_cols = dtype == DT_NVFP4 ? cols / NVFP4_GROUP : (cols + 127) / 128,
                     .scale2 = 1.0f};
}

/* Scales for the largest matrix: 0x38 is 1 in e4m3, and as fp32 about 4e-5. */
static void *scales(int rows, int cols) {
    size_t bytes = (size_t)rows * (size_t)(cols / NVFP4_GROUP + 4);
    void *s = xmalloc(bytes);
    memset(s, 0x38, bytes);
    return s;
}

static void bench_linear(const Bench *b, Dtype dtype, int rows, int cols) {
    static const int tokens[] = {1, 8, MAX_ROWS};
    double bytes = (double)dtype_row_bytes(dtype, cols) * rows;
    int n_mats = (int)(SET_BYTES / bytes) + 1;
    uint8_t *data = xmalloc((size_t)bytes * (size_t)n_mats);
    void *scale = scales(rows, cols);
    Mat **mat = xcalloc((size_t)n_mats, sizeof *mat);
    Tensor x = noise_tensor(b, MAX_ROWS, cols), y = noise_tensor(b, MAX_ROWS, rows);
    Err err;
    for (int i = 0; i < n_mats; i++) {
        MatView v = noise_matrix(dtype, rows, cols, data + (size_t)bytes * (size_t)i, scale);
        must(b->ops->mat_load(b->dev, &v, &mat[i], &err), &err);
    }
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        Linear l = {b, mat, n_mats, tensor_head(x, tokens[i]), tensor_head(y, tokens[i])};
        char name[128];
        snprintf(name, sizeof name, "linear %s [%d, %d], %d tokens", dtype_name(dtype), rows, cols,
                 tokens[i]);
        row(b, name, median_us(linear_call, &l), 2.0 * rows * cols * tokens[i], bytes);
    }
    for (int i = 0; i < n_mats; i++)
        b->ops->mat_free(b->dev, mat[i]);
    b->ops->tensor_free(b->dev, &x);
    b->ops->tensor_free(b->dev, &y);
    free(mat);
    free(scale);
    free(data);
}

/* ---- attention ---- */

typedef struct Attention {
    const Bench *b;
    Tensor q, out, topk, iq, iw;
    int heads, index_heads;
} Attention;

static void attend_call(void *arg, int call) {
    Attention *a = arg;
    (void)call;
    a->b->ops->mla_attend(a->b->dev, a->out, a->q, a->topk, a->heads, 0, 0.0625f);
}

static void index_call(void *arg, int call) {
    Attention *a = arg;
    (void)call;
    a->b->ops->index_select(a->b->dev, a->topk, a->iq, a->iw, a->index_heads, 0);
}

/* The last n positions of one sequence of `context` tokens as a batch. */
static void set_batch(const Bench *b, int n, int context) {
    int n_pages = context / KV_PAGE_TOKENS;
    int32_t *table = xcalloc((size_t)n_pages, sizeof *table), tok[MAX_ROWS] = {0}, pos[MAX_ROWS],
            seq[MAX_ROWS] = {0};
    for (int p = 0; p < n_pages; p++)
        table[p] = (p * 7) % n_pages; /* scattered */
    for (int i = 0; i < n; i++)
        pos[i] = context - n + i;
    b->ops->batch_set(b->dev, &(OpsBatch){n, 1, tok, pos, seq, table, n_pages});
    free(table);
}

static void *noise_pool(const KvLayout *l) {
    size_t bytes = kv_pool_bytes(l);
    uint8_t *p = xmalloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        p[i] = (uint8_t)((noise_bits() & 0x87) | 0x38);
    return p;
}

static void bench_attention(const Bench *b, Dtype dtype, int heads, int index_heads, int topk,
                            int n, int context) {
    KvLayout l = {dtype, 1, 1, 512, 64, 128, context / KV_PAGE_TOKENS};
    void *pool = noise_pool(&l);
    Attention a = {.b = b, .heads = heads, .index_heads = index_heads};
    char name[128], shape[64];
    Err err;
    a.q = noise_tensor(b, n, heads * (512 + 64));
    a.out = noise_tensor(b, n, heads * 512);
    a.iq = noise_tensor(b, n, index_heads * 128);
    a.iw = noise_tensor(b, n, index_heads);
    must(b->ops->tensor_new(b->dev, DT_I32, n, topk, &a.topk, &err), &err);
    b->ops->kv_bind(b->dev, &l, pool);
    set_batch(b, n, context);
    snprintf(shape, sizeof shape, "%s, %d tokens at %d", dtype_name(dtype), n, context);

    snprintf(name, sizeof name, "index %d heads, %s", index_heads, shape);
    double keys = (double)context * kv_index_page_bytes(&l) / KV_PAGE_TOKENS;
    row(b, name, median_us(index_call, &a), 2.0 * n * index_heads * 128 * (context - n / 2.0),
        keys);
    snprintf(name, sizeof name, "attend %d heads top %d, %s", heads, topk, shape);
    row(b, name, median_us(attend_call, &a), 2.0 * n * heads * topk * (512 + 64 + 512),
        (double)n * topk * kv_latent_row_bytes(&l));

    b->ops->tensor_free(b->dev, &a.q);
    b->ops->tensor_free(b->dev, &a.out);
    b->ops->tensor_free(b->dev, &a.iq);
    b->ops->tensor_free(b->dev, &a.iw);
    b->ops->tensor_free(b->dev, &a.topk);
    free(pool);
}

static void open_backend(Bench *b, const char *name, int threads) {
    DevConf c = {.n_ranks = 1,
                 .threads = threads,
                 .max_rows = MAX_ROWS,
                 .max_seqs = 1,
                 .max_context = MAX_CONTEXT,
                 .index_topk = TOPK};
    Err err;
    if (!strcmp(name, "ref"))
        b->ops = ops_ref();
    else
        b->ops = ops_cpu(strcmp(name, "best") ? name : NULL);
    if (!b->ops) {
        fprintf(stderr, "bench_ops: this processor does not run %s\n", name);
        exit(1);
    }
    must(b->ops->open(&c, &b->dev, &err), &err);
    b->copy_gb = copy_bandwidth();
    printf("%s, %d thread(s); copy %.1f GB/s\n\n", b->ops->name, threads, b->copy_gb);
    printf("| operation | us | GFLOP/s | GB/s | of copy |\n|---|---|---|---|---|\n");
}

int main(int argc, char **argv) {
    static const Dtype stored[] = {DT_F8E4M3, DT_BF16, DT_NVFP4};
    Bench b = {0};
    int threads = argc > 2 ? atoi(argv[2]) : 1;
    if (argc > 3 || threads < 1) {
        fprintf(stderr, "usage: bench_ops [avx512|avx2|ref|best [THREADS]]\n");
        return 2;
    }
    open_backend(&b, argc > 1 ? argv[1] : "best", threads);
    for (int i = 0; i < 3; i++) {
        bench_linear(&b, stored[i], 512, 256);   /* the tiny model's dense MLP */
        bench_linear(&b, stored[i], 2048, 6144); /* an expert of GLM-5.2 */
    }
    for (int i = 0; i < 2; i++) {
        bench_attention(&b, stored[i], 4, 4, 256, 1, 4096); /* the tiny model */
        bench_attention(&b, stored[i], 4, 4, 256, 64, 4096);
        bench_attention(&b, stored[i], 16, 32, TOPK, 1, 32768); /* one of four ranks */
        bench_attention(&b, stored[i], 16, 32, TOPK, 1, MAX_CONTEXT);
    }
    b.ops->close(&b.dev, 1);
    return 0;
}
