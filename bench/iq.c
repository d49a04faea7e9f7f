/* Integer-quantised experts at GLM-5.2's layer shape, against what the machine's memory and tiles
 * can do, measured in the same run.
 *
 *   bench_iq [--layers 8] [--bits 4] [--group 128] [--shards 1] [--threads MAX] [--least MAX / 2]
 * [--rounds 40]
 *
 * Weights are random codes with random scales: speed does not depend on them. Every call takes
 * random experts of the next layer, so that nothing is in a cache. One thread per physical core. */
#include "base/clock.h"
#include "base/topo.h"
#include "kernels/cpu/iq_kern.h"
#include "kernels/cpu/iq_run.h"
#include "kernels/cpu/pool.h"

#include <immintrin.h>

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { HIDDEN = 6144, INNER = 2048, EXPERTS = 256, K = 8, MOE_LAYERS = 75, MAX_ROWS = 4096 };

static Topo *topo;
static int n_layers = 8, rounds = 40, max_threads, least_threads;
static IqIsa best_isa;
static IqGeom geom = {HIDDEN, INNER, 4, 128, IQ_SCALE_F16};
static int n_units;
static size_t slice_bytes; /* of one expert */
static uint8_t *memory;    /* [n_layers, EXPERTS, slice_bytes] */

static void pin(void *arg, int thread) {
    (void)arg;
    Err err = {0};
    if (topo_pin_core(topo, -1, thread, &err))
        fprintf(stderr, "%s\n", err.text);
}

static uint64_t rng = 88172645463325252ull;

static uint64_t next_u64(void) {
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return rng;
}

/* ---- memory ---- */

/* Random codes; every 16-bit word with its exponent bounded, so that any of them is a finite scale.
 */
static void fill_chunk(void *arg, int chunk, int thread) {
    (void)arg;
    (void)thread;
    uint64_t *at = (uint64_t *)(memory + (size_t)chunk * slice_bytes), s = (uint64_t)chunk + 1;
    for (size_t i = 0; i < slice_bytes / 8; i++) {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        at[i] = s & 0xbbffbbffbbffbbffull;
    }
}

static void *huge(size_t bytes) {
    char *p =
        mmap(NULL, bytes + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    p += -(uintptr_t)p & ((2 << 20) - 1);
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* What the system gave, of what was asked for. */
static void print_huge(void) {
    char line[256];
    long kb = 0;
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "AnonHugePages: %ld", &kb) == 1)
            break;
    if (f)
        fclose(f);
    printf("in huge pages: %.1f GB\n", (double)kb / 1e6);
}

static HostPool *pool_of(int threads) {
    HostPool *p;
    PoolConf conf = {.n_threads = threads, .spin_us = 2000, .on_thread = pin};
    CHECK(pool_new(&p, &conf, NULL) == 0);
    return p;
}

/* ---- what the memory can do ---- */

typedef struct Read {
    size_t chunk;
    int first; /* chunk */
    _Atomic long long sum;
} Read;

__attribute__((target("avx512f"))) static void read_chunk(void *arg, int chunk, int thread) {
    (void)thread;
    Read *r = arg;
    const uint8_t *at = memory + (size_t)(r->first + chunk) * r->chunk;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < r->chunk; i += 256) {
        a = _mm512_or_si512(a, _mm512_load_si512(at + i));
        b = _mm512_or_si512(b, _mm512_load_si512(at + i + 64));
        c = _mm512_or_si512(c, _mm512_load_si512(at + i + 128));
        d = _mm512_or_si512(d, _mm512_load_si512(at + i + 192));
    }
    r->sum +=
        _mm512_reduce_add_epi64(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
}

/* GB/s of reading 4 GB in runs of 1 MB; a different part each time. */
static double read_speed(HostPool *p) {
    static int turn;
    Read r = {.chunk = 1 << 20};
    int chunks = (int)((size_t)n_layers * EXPERTS * slice_bytes / r.chunk), n = 4096;
    n = n < chunks ? n : chunks;
    r.first = chunks - n > 0 ? (int)((size_t)turn++ * 1733 % (size_t)(chunks - n)) : 0;
    int64_t begin = clock_now_us();
    pool_run(p, n, read_chunk, &r);
    return (double)n * (double)r.chunk / 1e3 / (double)(clock_now_us() - begin);
}

/* ---- what the tiles can do ---- */

enum { GEMM_REPEAT = 200, GEMM_K = 2048 };

/* A plain int8 product: 2 x 2 tiles of sums, operands in L1 and L2, no scales. */
__attribute__((target("amx-tile,amx-int8"))) static void gemm_chunk(void *arg, int chunk,
                                                                    int thread) {
    (void)chunk;
    uint8_t *a = (uint8_t *)arg + (size_t)thread * 4 * 16 * GEMM_K, *b = a + 2 * 16 * GEMM_K;
    static const _Alignas(64)
        uint8_t conf[64] = {1, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,  0,  0,  0,  0,  0,  64, 0, 64,
                            0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,  64, 0,  0,  0,  0,  0,  0, 0,
                            0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  16, 16, 16, 16, 16, 16, 16, 16};
    int32_t out[16][16];
    _tile_loadconfig(conf);
    for (int r = 0; r < GEMM_REPEAT; r++) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < GEMM_K / 64; k++) {
            _tile_loadd(4, a + (size_t)k * 1024, 64);
            _tile_loadd(6, b + (size_t)k * 1024, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(5, a + (size_t)(16 * GEMM_K) + (size_t)k * 1024, 64);
            _tile_dpbssd(1, 5, 6);
            _tile_loadd(7, b + (size_t)(16 * GEMM_K) + (size_t)k * 1024, 64);
            _tile_dpbssd(2, 4, 7);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, out, 64);
        _tile_stored(1, out, 64);
        _tile_stored(2, out, 64);
        _tile_stored(3, out, 64);
    }
    _tile_release();
}

/* TOPS of all threads of the pool. */
static double tile_speed(HostPool *p, int threads) {
    static uint8_t *operands;
    if (!operands) {
        operands = huge((size_t)max_threads * 4 * 16 * GEMM_K);
        memset(operands, 1, (size_t)max_threads * 4 * 16 * GEMM_K);
    }
    int chunks = threads * 8;
    int64_t begin = clock_now_us();
    pool_run(p, chunks, gemm_chunk, operands);
    double ops = 2.0 * 32 * 32 * GEMM_K * GEMM_REPEAT * chunks;
    return ops / 1e6 / (double)(clock_now_us() - begin);
}

/* ---- calls ---- */

typedef struct Call {
    float *x, *y, *weight;
    int32_t *id;
} Call;

static Call call_new(void) {
    Call c = {huge(sizeof(float) * MAX_ROWS * HIDDEN), huge(sizeof(float) * MAX_ROWS * HIDDEN),
              xcalloc(MAX_ROWS * K, sizeof(float)), xcalloc(MAX_ROWS * K, sizeof(int32_t))};
    for (int i = 0; i < MAX_ROWS * HIDDEN; i++)
        c.x[i] = (float)(int)(next_u64() % 2001) / 1000 - 1;
    return c;
}

static void route(Call *c, int n) {
    for (int t = 0; t < n; t++)
        for (int i = 0; i < K; i++) {
            int e = 0;
            for (bool again = true; again;) {
                e = (int)(next_u64() % EXPERTS);
                again = false;
                for (int j = 0; j < i; j++)
                    again |= c->id[t * K + j] == e;
            }
            c->id[t * K + i] = e;
            c->weight[t * K + i] = 0.125f;
        }
}

typedef struct Result {
    double us, gb_per_s, tops, experts;
} Result;

static int by_value(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

/* Medians over calls of n tokens, each on the next layer. */
static Result calls(IqRun *run, Call *c, int n, int times) {
    const uint8_t *expert[EXPERTS];
    double *us = xcalloc((size_t)times, sizeof *us), bytes = 0, experts = 0;
    for (int i = 0; i < times; i++) {
        for (int e = 0; e < EXPERTS; e++)
            expert[e] = memory + ((size_t)(i % n_layers) * EXPERTS + (size_t)e) * slice_bytes;
        route(c, n);
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        IqWork w = iq_run(run, expert, n, K, c->x, c->id, c->weight, c->y, NULL, NULL);
        clock_gettime(CLOCK_MONOTONIC, &b);
        us[i] = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
        bytes += (double)w.bytes / times;
        experts += (double)w.n_experts / times;
    }
    qsort(us, (size_t)times, sizeof *us, by_value);
    double m = us[times / 2];
    free(us);
    return (Result){m, bytes / 1e3 / m, 2.0 * 3 * n * K * HIDDEN * n_units * geom.group / 1e6 / m,
                    experts};
}

static IqRun *run_of(int threads) {
    IqRunConf conf = {.geom = geom,
                      .n_units = n_units,
                      .n_experts = EXPERTS,
                      .max_rows = MAX_ROWS,
                      .max_k = K,
                      .threads = threads,
                      .best = best_isa,
                      .spin_us = 2000,
                      .on_thread = pin};
    IqRun *r;
    Err err = {0};
    if (iq_run_open(&r, &conf, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return r;
}

static double best_read;

static void few_tokens(Call *c, int threads) {
    HostPool *p = pool_of(threads);
    double read = 0;
    for (int i = 0; i < 5; i++) {
        double v = read_speed(p);
        read = v > read ? v : read;
    }
    pool_free(p);
    best_read = read > best_read ? read : best_read;
    IqRun *run = run_of(threads);
    static const int tokens[] = {1, 2, 4, 8, 16};
    for (int i = 0; i < 5; i++) {
        calls(run, c, tokens[i], 5);
        Result r = calls(run, c, tokens[i], rounds);
        printf("%2d threads %5d tokens %6.1f experts %9.1f us %7.1f GB/s  reading %6.1f GB/s, "
               "ratio %.3f, to the best reading %.3f",
               threads, tokens[i], r.experts, r.us, r.gb_per_s, read, r.gb_per_s / read,
               r.gb_per_s / best_read);
        if (tokens[i] == 1)
            printf("  %d layers: %.1f us, %.1f tok/s", MOE_LAYERS, MOE_LAYERS * r.us,
                   1e6 / (MOE_LAYERS * r.us));
        printf("\n");
        fflush(stdout);
    }
    iq_run_close(run);
}

static void many_tokens(Call *c, int threads) {
    double tops = 0;
    bool tiles = iq_isa_usable(IQ_AMX, NULL);
    HostPool *p = pool_of(threads);
    for (int i = 0; i < 5 && tiles; i++) {
        double v = tile_speed(p, threads);
        tops = v > tops ? v : tops;
    }
    pool_free(p);
    IqRun *run = run_of(threads);
    static const int tokens[] = {64, 128, 512, 4096};
    for (int i = 0; i < 4; i++) {
        calls(run, c, tokens[i], 2);
        Result r = calls(run, c, tokens[i], 7);
        double memory_us = r.us * r.gb_per_s / best_read, tile_us = r.us * r.tops / tops;
        printf("%2d threads %5d tokens %6.1f experts %9.1f us %7.2f TOPS %6.1f GB/s  plain tiles "
               "%.2f TOPS, ratio %.3f; time of memory alone %.1f us, of tiles alone %.1f us\n",
               threads, tokens[i], r.experts, r.us, r.tops, r.gb_per_s, tops, r.tops / tops,
               memory_us, tile_us);
        fflush(stdout);
    }
    iq_run_close(run);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"layers", 1, 0, 'l'}, {"bits", 1, 0, 'b'},    {"group", 1, 0, 'g'},
        {"shards", 1, 0, 's'}, {"threads", 1, 0, 't'}, {"rounds", 1, 0, 'r'},
        {"isa", 1, 0, 'i'},    {"least", 1, 0, 'm'},   {0}};
    int shards = 1;
    Err err = {0};
    CHECK(topo_open(&topo, &err) == 0);
    max_threads = topo_n_cores(topo, -1);
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        int v = optarg ? atoi(optarg) : 0;
        if (c == 'l' && v > 0)
            n_layers = v;
        else if (c == 'b')
            geom.bits = v;
        else if (c == 'g')
            geom.group = v;
        else if (c == 's' && v > 0)
            shards = v;
        else if (c == 't' && v > 0)
            max_threads = v;
        else if (c == 'm' && v > 0)
            least_threads = v;
        else if (c == 'r' && v > 0)
            rounds = v;
        else if (c == 'i' && v < IQ_N_ISA)
            best_isa = (IqIsa)v;
        else
            return 2;
    }
    if (iq_check(&geom, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 2;
    }
    const char *why = "";
    bool amx = iq_isa_usable(IQ_AMX, &why);
    n_units = iq_units(&geom) / shards;
    slice_bytes = (size_t)n_units * iq_unit_bytes(&geom);
    printf("int%d g%d, %d of %d units, %d cores, amx: %s%s\n", geom.bits, geom.group, n_units,
           iq_units(&geom), topo_n_cores(topo, -1), amx ? "yes" : "no, ", why);
    size_t total = (size_t)n_layers * EXPERTS * slice_bytes;
    memory = huge(total);
    pin(NULL, 0);
    HostPool *p = pool_of(max_threads);
    int64_t begin = clock_now_us();
    pool_run(p, n_layers * EXPERTS, fill_chunk, NULL);
    printf("%d layers, %.1f GB, filled in %.1f s\n", n_layers, (double)total / 1e9,
           (double)(clock_now_us() - begin) * 1e-6);
    print_huge();
    for (int i = 0; i < 5; i++)
        best_read = read_speed(p) > best_read ? read_speed(p) : best_read;
    pool_free(p);
    Call c = call_new();
    if (!least_threads)
        least_threads = (max_threads + 1) / 2;
    for (int t = max_threads; t >= least_threads; t--)
        few_tokens(&c, t);
    many_tokens(&c, max_threads);
    return 0;
}
