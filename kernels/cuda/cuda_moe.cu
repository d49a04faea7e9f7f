/* Routed experts: places of a step sorted by expert, then two passes over the packed matrices (gate
 * and up with the activation, down) that read each wanted expert once per chunk of tokens, then the
 * sum over a token's experts in their order.
 *
 * Both passes multiply with mma.m16n8k16: 16 weight rows by 8 columns, which are 4 tokens in two
 * halves of bf16. A warp streams stages of two row tiles into registers, one ahead, and turns them
 * into bf16 exactly: e2m1 times its group's scale and e4m3 have few enough bits; fp32 is kept as
 * two bf16. Block and matrix scales go to the sums. Error: fp32 sums and 2^-17 of each product.
 *
 * The work is cut into jobs (expert, group of row tiles, chunk of tokens), dealt to a persistent
 * grid. The warps of a block share a job: some along its columns, whose sums meet in shared memory
 * in fixed order, the rest on further row tiles. A token's result depends neither on the batch nor
 * on the chunks.
 *
 * Bytes: each wanted expert's matrices once: 21.2 MB (NVFP4), 37.7 MB (e4m3) at 6144 x 2048.
 */
#include "kernels/cuda/cuda_moe_work.h"
#include "kernels/cuda/cuda_moe_decode.cuh"

enum {
    WARPS = 8,
    THREADS = WARPS * 32,
    GROUP = 4,       /* tokens of a product */
    SMALL_CHUNK = 8, /* tokens of a job */
    LARGE_CHUNK = 32,
    LONG_JOBS_FROM = 128, /* tiles of a matrix */
    LARGE_FROM = 8,       /* places per held expert from which large chunks pay */
};

/* ---- a pass over the matrices ---- */

/* A stage of two tiles: where it stands and its scales; NULL for no stage. */
template <Dtype F> struct Source {
    const uint8_t *from;  /* of the first tile; the second stands a row of stages behind it */
    uint2 scale[2];       /* NVFP4: codes of rows g and g + 8, for each quarter */
    float block_scale[2]; /* e4m3 */
};

/* Its bytes. As a block of them is used up, the next stage's are asked for in its place. */
struct Raw {
    uint4 v[2][MOE_QUARTERS];
};

struct Pass {
    MoeMat mat;
    const uint16_t *x; /* [.., 2, x_cols] */
    int x_cols;
    int split_bits; /* 2 to this many warps along the columns */
    int row_pairs;  /* warps side by side, each on two tiles: with those along the columns WARPS */
    uint32_t part_of_k; /* 2^32 / k, rounded up: divides a place by k */
    bool x_of_places;   /* x has a row for each place, else for each token */
    bool down;
};

/* A job as one warp sees it. */
template <int GROUPS> struct Job {
    int expert, pair;      /* pair of tiles, maybe beyond the last */
    int n;                 /* tokens */
    int32_t place[GROUPS]; /* this lane's places of the step (token * k + i), -1: none */
};

/* What finding a job takes, of one expert. */
struct alignas(16) Share {
    int first_job, count, first, place;
    float scale[2]; /* of the matrices that even and odd tiles belong to */
};

template <int CHUNK> struct Smem {
    float sum[2][WARPS][2][CHUNK][MOE_TILE]; /* jobs take turns with the halves */
    int32_t place[2][CHUNK];
    int32_t warp_jobs[WARPS];
    Share share[1]; /* [n_experts + 1]: the last one has the number of jobs */
};

/* Jobs of each expert, summed up. */
template <int CHUNK>
static __device__ void count_jobs(const CudaMoe &m, const MoeWork &w, const Pass &p,
                                  Smem<CHUNK> *s) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, n = m.e.n_experts,
        each = (n + THREADS - 1) / THREADS, e0 = (int)threadIdx.x * each, jobs = 0,
        wide = (p.mat.tiles / 2 + p.row_pairs - 1) / p.row_pairs;
    for (int e = e0; e < min(e0 + each, n); e++)
        jobs += (w.count[e] + CHUNK - 1) / CHUNK * wide;
    int sum = jobs;
    for (int d = 1; d < 32; d *= 2) {
        int x = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? x : 0;
    }
    if (lane == 31)
        s->warp_jobs[warp] = sum;
    __syncthreads();
    int at = sum - jobs;
    for (int i = 0; i < warp; i++)
        at += s->warp_jobs[i];
    for (int e = e0; e < min(e0 + each, n); e++) {
        Share *to = &s->share[e];
        to->first_job = at;
        to->count = w.count[e];
        to->first = w.first[e];
        to->place = m.e.place[e];
        for (int i = 0; i < 2; i++)
            to->scale[i] = m.e.dtype == DT_NVFP4 && to->count > 0
                               ? 1024.0f * p.mat.scale2[2 * to->place + i]
                               : 1.0f;
        at += (w.count[e] + CHUNK - 1) / CHUNK * wide;
    }
    if (e0 < n && e0 + each >= n)
        s->share[n].first_job = at;
    __syncthreads();
}

/* The last of n experts whose first job is not beyond this one: the warp tries 32 at a time. */
static __device__ __forceinline__ int find_expert(const Share *share, int n, int job) {
    int low = 0, lane = (int)threadIdx.x % 32;
    for (int span = n; span > 1;) {
        int step = (span + 31) / 32, at = (lane + 1) * step;
        bool not_beyond = at < span && share[low + at].first_job <= job;
        int skip = __popc(__ballot_sync(~0u, not_beyond)) * step;
        low += skip;
        span = min(step, span - skip);
    }
    return low;
}

template <int CHUNK>
static __device__ __forceinline__ void find_job(const CudaMoe &m, const MoeWork &w, const Pass &p,
                                                const Smem<CHUNK> *s, int job,
                                                Job<CHUNK / GROUP> *j) {
    j->expert = find_expert(s->share, m.e.n_experts, job);
    const Share &e = s->share[j->expert];
    int i = job - e.first_job, from = 0, g = (int)threadIdx.x % 32 / 4;
    if (e.count > CHUNK) {
        int chunks = (e.count + CHUNK - 1) / CHUNK;
        from = i % chunks * CHUNK;
        i /= chunks;
    }
    j->pair = i * p.row_pairs + ((int)threadIdx.x / 32 >> p.split_bits);
    j->n = min(e.count - from, CHUNK);
#pragma unroll
    for (int t = 0; t < CHUNK / GROUP; t++) {
        int at = GROUP * t + g % GROUP;
        j->place[t] = at < j->n ? w.pair[e.first + from + at] : -1;
    }
}

template <Dtype F>
constexpr int STAGE_BYTES = MOE_QUARTERS *MOE_QUARTER_BYTES + (F == DT_NVFP4 ? MOE_SCALE_BYTES : 0);

/* Bytes of all stages of a tile. */
template <Dtype F> static __device__ __forceinline__ size_t row_of_stages(const Pass &p) {
    return (size_t)p.mat.stages * STAGE_BYTES<F>;
}

template <Dtype F>
static __device__ __forceinline__ void find_stage(Source<F> *r, const Pass &p, int place, int pair,
                                                  int stage) {
    int lane = (int)threadIdx.x % 32;
    bool real = 2 * pair < p.mat.tiles;
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        size_t at =
            ((size_t)place * p.mat.tiles + (size_t)(2 * pair + tile)) * p.mat.stages + stage;
        if (tile == 0)
            r->from = real ? p.mat.data + at * STAGE_BYTES<F> + 16 * lane : NULL;
        if constexpr (F == DT_NVFP4)
            r->scale[tile] = real ? load8_once(p.mat.data + at * STAGE_BYTES<F> +
                                               MOE_QUARTERS * MOE_QUARTER_BYTES + 8 * lane)
                                  : make_uint2(0, 0);
        if constexpr (F == DT_F8E4M3)
            r->block_scale[tile] = real ? p.mat.block_scale[at] : 0.0f;
    }
}

/* Asks for quarters [q0, q1) of a tile. */
template <Dtype F>
static __device__ __forceinline__ void load_quarters(Raw *r, const Source<F> &from, size_t row,
                                                     int tile, int q0, int q1) {
    if (!from.from)
        return;
#pragma unroll
    for (int q = q0; q < q1; q++)
        r->v[tile][q] = load16_once(from.from + tile * row + q * MOE_QUARTER_BYTES);
}

template <Dtype F>
static __device__ __forceinline__ void load_both(Raw *r, const Source<F> &from, size_t row) {
    load_quarters<F>(r, from, row, 0, 0, MOE_QUARTERS);
    load_quarters<F>(r, from, row, 1, 0, MOE_QUARTERS);
}

/* The lane's half of its token of a group, from a stage's first column on; NULL for no token. */
static __device__ __forceinline__ const uint16_t *token_row(const Pass &p, int32_t place,
                                                            size_t col) {
    size_t row = p.x_of_places ? (size_t)place : (size_t)__umulhi((uint32_t)place, p.part_of_k);
    size_t half = threadIdx.x % 32 / 4 / GROUP;
    return place < 0 ? NULL : p.x + (row * 2 + half) * (size_t)p.x_cols + col;
}

/* Adds a stage of two tiles times N groups of tokens; the next stage takes its place. Two products
 * that do not wait for each other stand side by side: of both tiles, or of two groups of tokens.
 * Tokens are asked for before the weights they meet are decoded. */
template <Dtype F, int N, int GROUPS>
static __device__ __forceinline__ void multiply(Raw *r, const Source<F> &now, const Source<F> &next,
                                                const Pass &p, const int32_t place[GROUPS],
                                                int stage, float acc[2][GROUPS][4]) {
    constexpr int COLS = F == DT_F32 ? 32 : 16 * BLOCKS<F> * STEPS<F>,
                  EACH = MOE_QUARTERS / BLOCKS<F>;
    constexpr int TILES = N == 2 ? 1 : 2, SIDE = N == 2 ? 2 : 1;
    int c = (int)threadIdx.x % 4;
    size_t col = (size_t)stage * COLS;
#pragma unroll
    for (int block = 0; block < BLOCKS<F>; block++) {
        uint32_t a[TILES][STEPS<F>][TERMS<F>][4], b[2][STEPS<F>][2];
#pragma unroll
        for (int k = 0; k < SIDE; k++)
            load_tokens<F>(token_row(p, place[k], col), block, c, b[k]);
#pragma unroll
        for (int first = 0; first < 2; first += TILES) {
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                decode<F>(r->v[first + i], now.scale[first + i], block, a[i]);
                load_quarters<F>(r, next, row_of_stages<F>(p), first + i, block * EACH,
                                 block * EACH + EACH);
            }
#pragma unroll
            for (int t = 0; t < N; t += SIDE) {
                if (N > 2 && t + 1 < N)
                    load_tokens<F>(token_row(p, place[t + 1 < N ? t + 1 : t], col), block, c,
                                   b[(t + 1) % 2]);
                float d[2][4] = {};
#pragma unroll
                for (int i = 0; i < 2 * STEPS<F> * TERMS<F>; i++) {
                    int x = i % 2, term = i / 2 % TERMS<F>, step = i / 2 / TERMS<F>,
                        tile = x % TILES, k = x % SIDE;
                    mma_bf16(F == DT_F8E4M3 ? d[x] : acc[first + tile][t + k], a[tile][step][term],
                             b[(t + k) % 2][step][0], b[(t + k) % 2][step][1]);
                }
                if constexpr (F == DT_F8E4M3)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float *to = &acc[first + i / 4 % TILES][t + i / 4 % SIDE][i % 4];
                        *to = fmaf(d[i / 4][i % 4], now.block_scale[first + i / 4 % TILES], *to);
                    }
            }
        }
    }
}

/* The warp's sums of a job to shared memory: high and low halves of a token are two columns apart
 * in lanes. Columns of no token are not looked at. */
template <int CHUNK>
static __device__ __forceinline__ void
share_sums(Smem<CHUNK> *s, int turn, const Job<CHUNK / GROUP> &j, float acc[2][CHUNK / GROUP][4]) {
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, g = lane / 4, c = lane % 4;
#pragma unroll
    for (int t = 0; t < CHUNK / GROUP; t++) {
        if (warp == 0 && c == 0 && g < GROUP)
            s->place[turn][GROUP * t + g] = j.place[t];
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float v = acc[tile][t][i] + __shfl_xor_sync(~0u, acc[tile][t][i], 2);
                if (c < 2)
                    s->sum[turn][warp][tile][GROUP * t + 2 * c + i % 2][g + i / 2 * 8] = v;
                acc[tile][t][i] = 0;
            }
    }
}

/* Sum over the warps along the columns of what they have for one number. */
template <int CHUNK>
static __device__ __forceinline__ float whole_sum(const Smem<CHUNK> *s, int turn, int warp,
                                                  int split, int tile, int token, int row) {
    float v = 0;
    for (int i = 0; i < split; i++)
        v += s->sum[turn][warp + i][tile][token][row];
    return v;
}

/* Finishes a job: activations as two halves of bf16, or the products of down. */
template <int CHUNK>
static __device__ __forceinline__ void finish(const CudaMoe &m, const MoeWork &w, const Pass &p,
                                              const Smem<CHUNK> *s, int turn,
                                              const Job<CHUNK / GROUP> &j) {
    int split = 1 << p.split_bits,
        first =
            j.pair - ((int)threadIdx.x / 32 >> p.split_bits); /* the block's first pair of tiles */
    const Share &e = s->share[j.expert];
    for (int i = (int)threadIdx.x; i < j.n * p.row_pairs * MOE_TILE; i += THREADS) {
        int row = i % MOE_TILE, side = i / MOE_TILE & (p.row_pairs - 1),
            t = i / MOE_TILE * split / WARPS, pair = first + side;
        if (2 * pair >= p.mat.tiles)
            continue;
        float v0 = e.scale[0] * whole_sum<CHUNK>(s, turn, side * split, split, 0, t, row),
              v1 = e.scale[1] * whole_sum<CHUNK>(s, turn, side * split, split, 1, t, row);
        size_t to = (size_t)s->place[turn][t];
        if (p.down) {
            float *out = w.part + to * (size_t)w.part_cols + 2 * pair * MOE_TILE + row;
            out[0] = v0;
            out[MOE_TILE] = v1;
        } else {
            uint32_t hi, lo;
            split_bf16(v0 / (1.0f + expf(-v0)) * v1, 0, &hi, &lo);
            uint16_t *out = w.act + to * 2 * (size_t)w.act_cols + pair * MOE_TILE + row;
            out[0] = (uint16_t)hi;
            out[w.act_cols] = (uint16_t)lo;
        }
    }
}

template <Dtype F, int CHUNK>
static __device__ __forceinline__ void
multiply_some(Raw *r, const Source<F> &now, const Source<F> &next, const Pass &p,
              const Job<CHUNK / GROUP> &j, int stage, float acc[2][CHUNK / GROUP][4]) {
    constexpr int ALL = CHUNK / GROUP;
    if (!now.from)
        load_both<F>(r, next, row_of_stages<F>(p));
    else if (j.n <= GROUP)
        multiply<F, 1, ALL>(r, now, next, p, j.place, stage, acc);
    else if (j.n <= ALL / 2 * GROUP)
        multiply<F, ALL / 2, ALL>(r, now, next, p, j.place, stage, acc);
    else
        multiply<F, ALL, ALL>(r, now, next, p, j.place, stage, acc);
}

/* What the pass before has written is waited for only once the first weights are on their way; the
 * sorted pairs are there, since the pass before has waited for them. */
template <Dtype F, int CHUNK>
static __global__ void __launch_bounds__(THREADS, CHUNK == SMALL_CHUNK ? 2 : 1)
    pass_kernel(CudaMoe m, MoeWork w, Pass p) {
    Smem<CHUNK> *s = dynamic_smem<Smem<CHUNK>>();
    if (!p.down)
        grid_wait();
    grid_release();
    count_jobs<CHUNK>(m, w, p, s);
    int jobs = s->share[m.e.n_experts].first_job, job = (int)blockIdx.x, turn = 0,
        step = 1 << p.split_bits, begin = (int)threadIdx.x / 32 % step, stage = begin;
    Job<CHUNK / GROUP> now, next;
    Source<F> source, ahead;
    Raw raw;
    float acc[2][CHUNK / GROUP][4] = {};
    if (job < jobs) {
        find_job<CHUNK>(m, w, p, s, job, &now);
        find_stage<F>(&source, p, s->share[now.expert].place, now.pair, stage);
        load_both<F>(&raw, source, row_of_stages<F>(p));
    }
    if (p.down)
        grid_wait();
    while (job < jobs) {
        int next_stage = stage + step, next_job = job;
        next = now;
        if (next_stage >= p.mat.stages) {
            next_stage = begin;
            next_job += (int)gridDim.x;
            if (next_job < jobs)
                find_job<CHUNK>(m, w, p, s, next_job, &next);
        }
        ahead.from = NULL;
        if (next_job < jobs)
            find_stage<F>(&ahead, p, s->share[next.expert].place, next.pair, next_stage);
        multiply_some<F, CHUNK>(&raw, source, ahead, p, now, stage, acc);
        if (next_job != job) {
            share_sums<CHUNK>(s, turn, now, acc);
            __syncthreads();
            finish<CHUNK>(m, w, p, s, turn, now);
            turn ^= 1;
        }
        source = ahead;
        now = next;
        job = next_job;
        stage = next_stage;
    }
}

/* ---- launches ---- */

static size_t align_up(size_t n) {
    return (n + 255) & ~(size_t)255;
}

/* Lays out the work; returns its bytes. */
static size_t place_work(MoeWork *w, const MoeExperts *e, int rows, int k, uint8_t *at) {
    size_t pairs = (size_t)rows * (size_t)k, used = 0;
    w->x_cols = e->gate_up.stages * moe_stage_cols(e->dtype);
    w->act_cols = e->down.stages * moe_stage_cols(e->dtype);
    w->part_cols = e->down.tiles * MOE_TILE;
    w->count = (int32_t *)at;
    w->first = w->count + e->n_experts;
    used = align_up(2 * (size_t)e->n_experts * sizeof(int32_t));
    w->pair = (int32_t *)(at + used);
    used += align_up(pairs * sizeof(int32_t));
    w->x = (uint16_t *)(at + used);
    used += align_up((size_t)rows * 2 * (size_t)w->x_cols * sizeof(uint16_t));
    w->act = (uint16_t *)(at + used);
    used += align_up(pairs * 2 * (size_t)w->act_cols * sizeof(uint16_t));
    w->part = (float *)(at + used);
    return used + align_up(pairs * (size_t)w->part_cols * sizeof(float));
}

size_t cuda_moe_work_bytes(const MoeExperts *e, int rows, int k) {
    MoeWork w;
    return place_work(&w, e, rows, k, NULL);
}

/* Few warps along the columns make long jobs, many make enough jobs of a slice. */
static Pass pass_over(const MoeMat *mat, const uint16_t *x, int x_cols, int k, bool down) {
    Pass p = {};
    int most = mat->tiles >= LONG_JOBS_FROM ? WARPS / 2 : WARPS;
    p.mat = *mat;
    p.x = x;
    p.x_cols = x_cols;
    p.part_of_k = (uint32_t)(((1ull << 32) + (uint64_t)k - 1) / (uint64_t)k);
    p.x_of_places = down || k == 1;
    p.down = down;
    while (2 << p.split_bits <= most && 2 << p.split_bits <= mat->stages)
        p.split_bits++;
    p.row_pairs = WARPS >> p.split_bits;
    return p;
}

template <Dtype F, int CHUNK>
static void run_passes(const CudaMoe *m, const MoeWork &w, cudaStream_t stream) {
    size_t smem = sizeof(Smem<CHUNK>) + (size_t)m->e.n_experts * sizeof(Share);
    dim3 grid((unsigned)(m->n_sm * (CHUNK == SMALL_CHUNK ? 2 : 1)));
    launch(pass_kernel<F, CHUNK>, grid, THREADS, smem, stream, true, *m, w,
           pass_over(&m->e.gate_up, w.x, w.x_cols, m->k, false));
    launch(pass_kernel<F, CHUNK>, grid, THREADS, smem, stream, true, *m, w,
           pass_over(&m->e.down, w.act, w.act_cols, m->k, true));
}

template <Dtype F> static void run_format(const CudaMoe *m, const MoeWork &w, cudaStream_t stream) {
    if (m->rows * m->k >= LARGE_FROM * m->e.n_held)
        run_passes<F, LARGE_CHUNK>(m, w, stream);
    else
        run_passes<F, SMALL_CHUNK>(m, w, stream);
}

void cuda_moe(const CudaMoe *m, cudaStream_t stream) {
    MoeWork w;
    place_work(&w, &m->e, m->rows, m->k, (uint8_t *)m->work);
    moe_prepare(m, &w, stream);
    if (m->e.dtype == DT_NVFP4)
        run_format<DT_NVFP4>(m, w, stream);
    else if (m->e.dtype == DT_F8E4M3)
        run_format<DT_F8E4M3>(m, w, stream);
    else if (m->e.dtype == DT_BF16)
        run_format<DT_BF16>(m, w, stream);
    else
        run_format<DT_F32>(m, w, stream);
    moe_sum(m, &w, stream);
}
