/* What choosing positions, attending to them and running experts cost on a GPU, at GLM-5.2's
 * shapes: each operation in a captured graph of several instances on data of their own, so that the
 * L2 is cold for what a step reads once; medians, beside the time that reading the bytes takes at
 * least.
 *
 *     bench_gpu_sparse [index|attention|experts|all] */
#include "kernels/cuda/cuda_moe.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace {

enum {
    REPEATS = 31,
    PAGE = KV_PAGE_TOKENS,
    TOPK = 2048,
    HIDDEN = 6144,
    INNER = 2048,
    EXPERTS = 256,
    ACTIVE = 8
};

struct Gpu {
    cudaStream_t stream;
    int n_sm;
    double copy, read; /* bytes per second */
};

__device__ uint32_t mix(uint64_t i) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (uint32_t)(x >> 32);
}

__global__ void fill_words(uint32_t *p, size_t n, uint32_t keep, uint32_t set) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = (mix(i) & keep) | set;
}

__global__ void fill_numbers(float *p, size_t n, float size) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = size * ((float)(mix(i) & 0xffff) / 32768.0f - 1.0f);
}

/* A pool of e4m3: numbers near 1 with scales of 2^-8; rotated parts near 1. */
__global__ void fill_latent(uint8_t *p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        int c = (int)(i % 656);
        uint8_t b = (uint8_t)mix(i);
        p[i] = c < 512   ? (b & 0x87) | 0x38
               : c < 528 ? (c % 4 == 3   ? 0x3b
                            : c % 4 == 2 ? 0x80
                                         : 0)
               : c % 2   ? (b & 0x80) | 0x3f
                         : b;
    }
}

__global__ void fill_keys(uint8_t *p, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        int c = (int)(i % 8448);
        p[i] = c < 8192     ? ((uint8_t)mix(i) & 0x87) | 0x38
               : c % 4 == 3 ? 0x3b
               : c % 4 == 2 ? 0x80
                            : 0;
    }
}

__global__ void read_all(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t x = 0;
    size_t step = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
        x ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^
             d.z ^ d.w;
    }
    if (x == 0x12345678)
        *out = x;
}

template <class T> T *take(size_t n) {
    void *p;
    cuda_must(cudaMalloc(&p, n * sizeof(T)), "cudaMalloc");
    cuda_must(cudaMemset(p, 0, n * sizeof(T)), "cudaMemset");
    return static_cast<T *>(p);
}

template <class T> T *take_copy(const std::vector<T> &v) {
    T *p = take<T>(v.size());
    cuda_must(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
    return p;
}

float *take_numbers(size_t n, float size) {
    float *p = take<float>(n);
    fill_numbers<<<1024, 256>>>(p, n, size);
    return p;
}

struct Times {
    double median, p95; /* seconds per instance */
};

/* Runs a graph of `n` instances. */
Times measure(const Gpu &g, int n, const std::function<void(int)> &instance) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t a, b;
    std::vector<double> t;
    cuda_must(cudaDeviceSynchronize(), "filling");
    cuda_must(cudaStreamBeginCapture(g.stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < n; i++)
        instance(i);
    cuda_must(cudaStreamEndCapture(g.stream, &graph), "capture");
    cuda_must(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cuda_must(cudaEventCreate(&a), "event");
    cuda_must(cudaEventCreate(&b), "event");
    for (int i = 0; i < REPEATS + 3; i++) {
        float ms;
        cuda_must(cudaEventRecord(a, g.stream), "event");
        cuda_must(cudaGraphLaunch(exec, g.stream), "graph");
        cuda_must(cudaEventRecord(b, g.stream), "event");
        cuda_must(cudaStreamSynchronize(g.stream), "graph");
        cuda_must(cudaEventElapsedTime(&ms, a, b), "event");
        if (i >= 3)
            t.push_back(ms * 1e-3 / n);
    }
    std::sort(t.begin(), t.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    return {t[t.size() / 2], t[t.size() * 95 / 100]};
}

/* One line of the table; targets in us, 0 for none. */
void line(const Gpu &g, const char *name, Times t, double bytes, double flop, double target_us) {
    double floor_us = bytes / g.read * 1e6, us = t.median * 1e6;
    char target[32] = "", rate[32] = "";
    if (target_us > 0)
        snprintf(target, sizeof target, "%.0f%s", target_us, us <= target_us ? "" : " (missed)");
    if (flop > 0)
        snprintf(rate, sizeof rate, "%.0f", flop / t.median / 1e12);
    printf("| %s | %.1f | %.1f | %.1f | %.0f %% | %s | %s |\n", name, us, t.p95 * 1e6, floor_us,
           100 * floor_us / us, rate, target);
    fflush(stdout);
}

Gpu open_gpu() {
    Gpu g = {};
    cudaDeviceProp p;
    cuda_must(cudaSetDevice(0), "GPU 0");
    cuda_must(cudaGetDeviceProperties(&p, 0), "GPU 0");
    cuda_must(cudaStreamCreateWithFlags(&g.stream, cudaStreamNonBlocking), "stream");
    g.n_sm = p.multiProcessorCount;
    size_t n = (size_t)2 << 30;
    uint8_t *from = take<uint8_t>(n), *to = take<uint8_t>(n);
    g.copy =
        2.0 * (double)n /
        measure(g, 1, [&](int) {
            cuda_must(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, g.stream), "copy");
        }).median;
    g.read = (double)n / measure(g, 1, [&](int) {
                             read_all<<<g.n_sm * 8, 512, 0, g.stream>>>((const uint4 *)from, n / 16,
                                                                        (uint32_t *)to);
                         }).median;
    cudaFree(from);
    cudaFree(to);
    printf("%s, %d multiprocessors; copy %.0f GB/s, read %.0f GB/s\n\n", p.name, g.n_sm,
           g.copy * 1e-9, g.read * 1e-9);
    printf("| operation | us | p95 | floor us | of floor | TFLOP/s | target us "
           "|\n|---|---|---|---|---|---|---|\n");
    return g;
}

/* Rows of one sequence each, at the end of `context` positions; pages in scattered order. */
CudaRows make_rows(int rows, int context) {
    int per = context / PAGE, pages = rows * per;
    std::vector<int32_t> pos((size_t)rows, context - 1), seq((size_t)rows), table((size_t)pages);
    for (int i = 0; i < rows; i++)
        seq[(size_t)i] = i;
    for (int i = 0; i < pages; i++)
        table[(size_t)i] = (int32_t)((int64_t)i * 7919 % pages);
    return {take_copy(pos), take_copy(seq), take_copy(table), per, rows};
}

/* ---- index selection ---- */

void bench_index(const Gpu &g, int rows, int context, double score_us, double topk_us) {
    int copies = std::max(2, (int)((512ll << 20) / ((int64_t)rows * context * 132)));
    size_t page_bytes = 8448, slot = (size_t)rows * context / PAGE * page_bytes;
    uint8_t *pool = take<uint8_t>(slot * copies);
    fill_keys<<<2048, 256>>>(pool, slot * copies);
    CudaIndex x = {};
    x.rows = make_rows(rows, context);
    x.q = take_numbers((size_t)rows * 32 * 128, 1);
    x.w = take_numbers((size_t)rows * 32, 1);
    x.q_ld = 32 * 128, x.w_ld = 32, x.heads = 32, x.dim = 128, x.k = TOPK;
    x.pitch = (size_t)context;
    x.score = take<float>((size_t)rows * x.pitch);
    x.n_sm = g.n_sm;
    CudaTopk t = {};
    t.score = x.score, t.pitch = x.pitch, t.pos = x.rows.pos;
    t.list = take<int32_t>((size_t)rows * TOPK);
    t.list_ld = TOPK, t.rows = rows, t.k = TOPK, t.max_len = context, t.n_sm = g.n_sm;
    t.work = take<uint8_t>(cuda_topk_work_bytes());
    auto score = [&](int i) {
        x.keys = {pool + (size_t)i % copies * slot, page_bytes, DT_F8E4M3};
        cuda_index_scores(&x, g.stream);
    };
    char name[96];
    double keys = (double)rows * context * 132, flop = (double)rows * context * 32 * 128 * 2;
    snprintf(name, sizeof name, "index scores, %d x %dk", rows, context >> 10);
    line(g, name, measure(g, copies, score), keys, flop, score_us);
    snprintf(name, sizeof name, "top-2048, %d x %dk", rows, context >> 10);
    line(g, name, measure(g, 16, [&](int) { cuda_topk(&t, g.stream); }), (double)rows * context * 4,
         0, topk_us);
    for (void *p :
         {(void *)pool, (void *)x.q, (void *)x.w, (void *)x.score, (void *)t.list, t.work})
        cudaFree(p);
}

/* Prompt rows: neighbours of one sequence. */
void bench_index_prompt(const Gpu &g, int rows, int context) {
    size_t page_bytes = 8448;
    uint8_t *pool = take<uint8_t>((size_t)context / PAGE * page_bytes);
    fill_keys<<<2048, 256>>>(pool, (size_t)context / PAGE * page_bytes);
    CudaIndex x = {};
    x.rows = make_rows(1, context);
    std::vector<int32_t> pos((size_t)rows), seq((size_t)rows, 0);
    for (int i = 0; i < rows; i++)
        pos[(size_t)i] = context - rows + i;
    x.rows.pos = take_copy(pos), x.rows.seq = take_copy(seq), x.rows.rows = rows;
    x.q = take_numbers((size_t)rows * 32 * 128, 1);
    x.w = take_numbers((size_t)rows * 32, 1);
    x.q_ld = 32 * 128, x.w_ld = 32, x.heads = 32, x.dim = 128, x.k = TOPK;
    x.pitch = (size_t)context;
    x.score = take<float>((size_t)rows * x.pitch);
    x.n_sm = g.n_sm;
    x.keys = {pool, page_bytes, DT_F8E4M3};
    CudaTopk t = {};
    t.score = x.score, t.pitch = x.pitch, t.pos = x.rows.pos;
    t.list = take<int32_t>((size_t)rows * TOPK);
    t.list_ld = TOPK, t.rows = rows, t.k = TOPK, t.max_len = context, t.n_sm = g.n_sm;
    t.work = take<uint8_t>(cuda_topk_work_bytes());
    char name[96];
    snprintf(name, sizeof name, "index scores, prompt of %d at %dk", rows, context >> 10);
    line(g, name, measure(g, 1, [&](int) { cuda_index_scores(&x, g.stream); }), 132.0 * context,
         (double)rows * context * 32 * 128 * 2, 0);
    snprintf(name, sizeof name, "top-2048, prompt of %d at %dk", rows, context >> 10);
    line(g, name, measure(g, 1, [&](int) { cuda_topk(&t, g.stream); }), 4.0 * rows * context, 0, 0);
    for (void *p :
         {(void *)pool, (void *)x.q, (void *)x.w, (void *)x.score, (void *)t.list, t.work})
        cudaFree(p);
}

/* ---- attention ---- */

void bench_attention(const Gpu &g, int rows, int heads, int context, double target_us) {
    int64_t tokens = (int64_t)rows * context;
    int copies = std::max(2, (int)((1ll << 30) / (tokens * 656)));
    size_t page_bytes = 656 * PAGE, slot = (size_t)(tokens / PAGE) * page_bytes;
    uint8_t *pool = take<uint8_t>(slot * copies);
    fill_latent<<<2048, 256>>>(pool, slot * copies);
    std::vector<int32_t> list((size_t)rows * TOPK);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < TOPK; i++) /* ascending, about evenly spread */
            list[(size_t)(r * TOPK + i)] =
                (int32_t)((int64_t)i * context / TOPK + rand() % (context / TOPK));
    CudaAttn a = {};
    a.rows = make_rows(rows, context);
    a.q = take_numbers((size_t)rows * heads * 576, 1);
    a.list = take_copy(list);
    a.out = take<float>((size_t)rows * heads * 512);
    a.q_ld = heads * 576, a.list_ld = TOPK, a.out_ld = heads * 512;
    a.heads = heads, a.lora = 512, a.rope = 64, a.k = TOPK, a.scale = 0.0625f, a.n_sm = g.n_sm;
    a.work = take<float>(cuda_attn_work_floats(heads, 512, TOPK, g.n_sm));
    char name[96];
    snprintf(name, sizeof name, "sparse attention, %d x %d heads", rows, heads);
    Times t = measure(g, std::max(copies, 4), [&](int i) {
        a.kv = {pool + (size_t)i % copies * slot, page_bytes, DT_F8E4M3};
        cuda_attn(&a, g.stream);
    });
    line(g, name, t, (double)rows * TOPK * 656, 2.0 * rows * heads * TOPK * (576 + 512), target_us);
    for (void *p : {(void *)pool, (void *)a.q, (void *)a.list, (void *)a.out, (void *)a.work})
        cudaFree(p);
}

/* ---- experts ---- */

MoeMat random_mat(Dtype dtype, int tiles, int cols) {
    MoeMat m = {};
    m.tiles = tiles;
    m.stages = cols / moe_stage_cols(dtype);
    size_t bytes = EXPERTS * moe_mat_bytes(&m, dtype), blocks = (size_t)EXPERTS * tiles * m.stages;
    m.data = take<uint8_t>(bytes);

    uint32_t keep = dtype == DT_NVFP4 ? 0x7f7f7f7fu : dtype == DT_BF16 ? 0x80ff80ffu : ~0u;
    fill_words<<<4096, 256>>>((uint32_t *)m.data, bytes / 4, keep,
                              dtype == DT_BF16 ? 0x3c003c00u : 0);
    m.block_scale = take_numbers(blocks, 1e-3f);
    m.scale2 = take_numbers(2 * EXPERTS, 1e-2f);
    return m;
}

/* Different experts of distinct tokens, at random. */
std::vector<int32_t> random_routing(int rows) {
    std::vector<int32_t> id;
    for (int r = 0; r < rows; r++) {
        std::vector<int32_t> mine;
        while (mine.size() < ACTIVE) {
            int32_t e = rand() % EXPERTS;
            if (std::find(mine.begin(), mine.end(), e) == mine.end())
                mine.push_back(e);
        }
        std::sort(mine.begin(), mine.end());
        id.insert(id.end(), mine.begin(), mine.end());
    }
    return id;
}

struct MoeBench {
    MoeExperts e;
    const char *name;
};

void bench_experts(const Gpu &g, const MoeBench &b, int rows, bool nobody, double target_us) {
    enum { INSTANCES = 8 };
    CudaMoe m = {};
    std::vector<int32_t *> id;
    double wanted = 0;
    for (int i = 0; i < INSTANCES; i++) {
        std::vector<int32_t> v = random_routing(rows), used = v;
        std::sort(used.begin(), used.end());
        wanted +=
            nobody ? 0 : (double)(std::unique(used.begin(), used.end()) - used.begin()) / INSTANCES;
        if (nobody)
            std::fill(v.begin(), v.end(), -1);
        id.push_back(take_copy(v));
    }
    m.e = b.e;
    m.x = take_numbers((size_t)rows * HIDDEN, 1);
    m.weight = take_numbers((size_t)rows * ACTIVE, 1);
    m.y = take<float>((size_t)rows * HIDDEN);
    m.x_ld = m.y_ld = HIDDEN, m.weight_ld = m.id_ld = ACTIVE;
    m.rows = rows, m.k = ACTIVE, m.n_sm = g.n_sm;
    m.work = take<uint8_t>(cuda_moe_work_bytes(&m.e, rows, ACTIVE));
    Times t = measure(g, INSTANCES, [&](int i) {
        m.id = id[(size_t)i];
        cuda_moe(&m, g.stream);
    });
    double bytes = wanted * (double)(moe_mat_bytes(&b.e.gate_up, b.e.dtype) +
                                     moe_mat_bytes(&b.e.down, b.e.dtype));
    char name[96];
    snprintf(name, sizeof name, "%s experts, inner %d, batch %d%s", b.name, b.e.inner, rows,
             nobody ? ", none held" : "");
    line(g, name, t, bytes, nobody ? 0 : 6.0 * rows * ACTIVE * HIDDEN * b.e.inner, target_us);
    for (int32_t *p : id)
        cudaFree(p);
    for (void *p : {(void *)m.x, (void *)m.weight, (void *)m.y, m.work})
        cudaFree(p);
}

/* A layer's routed experts, each with `inner` rows of gate and up. */
void bench_layer(const Gpu &g, Dtype dtype, const char *name, int inner,
                 const double target_us[3]) {
    std::vector<int32_t> place(EXPERTS);
    for (int i = 0; i < EXPERTS; i++)
        place[(size_t)i] = i;
    int32_t *places = take_copy(place);
    MoeBench b = {{dtype, EXPERTS, EXPERTS, HIDDEN, inner, places,
                   random_mat(dtype, 2 * inner / MOE_TILE, HIDDEN),
                   random_mat(dtype, HIDDEN / MOE_TILE, inner)},
                  name};
    bench_experts(g, b, 1, true, 0);
    bench_experts(g, b, 1, false, target_us[0]);
    bench_experts(g, b, 8, false, target_us[1]);
    bench_experts(g, b, 64, false, target_us[2]);
    bench_experts(g, b, 1024, false, 0);
    for (MoeMat *m : {&b.e.gate_up, &b.e.down})
        for (void *p : {(void *)m->data, (void *)m->block_scale, (void *)m->scale2})
            cudaFree(p);
    cudaFree(places);
}

} // namespace

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "all";
    bool all = !strcmp(what, "all");
    if (argc > 2 ||
        (!all && strcmp(what, "index") && strcmp(what, "attention") && strcmp(what, "experts"))) {
        fprintf(stderr, "usage: bench_gpu_sparse [index|attention|experts|all]\n");
        return 2;
    }
    static const double nvfp4[3] = {62, 405, 1570}, fp8[3] = {100, 720, 2790}, none[3] = {0, 0, 0};
    Gpu g = open_gpu();
    if (all || !strcmp(what, "index")) {
        bench_index(g, 1, 32 << 10, 0, 0);
        bench_index(g, 1, 128 << 10, 8, 20);
        bench_index(g, 1, 1 << 20, 0, 0);
        bench_index(g, 8, 32 << 10, 0, 0);
        bench_index(g, 64, 32 << 10, 0, 0);
        bench_index_prompt(g, 1024, 32 << 10);
    }
    if (all || !strcmp(what, "attention")) {
        bench_attention(g, 1, 16, 128 << 10, 17);
        bench_attention(g, 8, 16, 32 << 10, 17);
        bench_attention(g, 64, 16, 8 << 10, 0);
        bench_attention(g, 1, 64, 128 << 10, 0);
        bench_attention(g, 128, 64, 4 << 10, 2.0 * 128 * 64 * TOPK * (576 + 512) / 330e12 * 1e6);
        bench_attention(g, 1, 8, 128 << 10, 0);
    }
    if (all || !strcmp(what, "experts")) {
        bench_layer(g, DT_NVFP4, "nvfp4", INNER, nvfp4);
        bench_layer(g, DT_NVFP4, "nvfp4", INNER / 4, none);
        bench_layer(g, DT_F8E4M3, "fp8", INNER, fp8);
        bench_layer(g, DT_F8E4M3, "fp8", INNER / 8, none);
        bench_layer(g, DT_BF16, "bf16", INNER / 4, none);
    }
    return 0;
}
