/* The k largest of many scores, exactly: a radix select over all 32 bits, then an ordered copy of
 * the positions above the edge and of the first ones on it.
 *
 * Grid: `parts` blocks per row. The parts of a row count digits over their own span, add up in
 * global memory and meet four times; many rows take one part each. Blocks draw tickets, so that a
 * row's parts run before those of later rows and a wait always ends: at most a quarter as many
 * blocks as there are multiprocessors wait for each other, which leaves room for further ranks on
 * the same GPU. The result does not depend on the number of parts.
 *
 * Bytes: each score four times, from the L2 as a rule. */
#include "kernels/cuda/cuda_mma.cuh"

#include <math.h>

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    FIRST_BITS = 12, /* digits of 12, 10 and 10 bits */
    NEXT_BITS = 10,
    FIRST_BINS = 1 << FIRST_BITS,
    NEXT_BINS = 1 << NEXT_BITS,
    PART_SCORES = 4096,  /* a part has at least this many */
    KEPT_SCORES = 12288, /* of a span in shared memory */
};

/* What the parts of one row share; the counts are zero between launches. */
struct Shared {
    unsigned bins[FIRST_BINS + 2 * NEXT_BINS];
    uint2 taken[TOPK_MAX_PARTS]; /* scores of a part above the edge, on the edge */
    unsigned arrived, left;
};

struct Work {
    unsigned ticket;
    Shared row[TOPK_SHARED_ROWS];
};

/* One block's view of its row. */
struct Part {
    const float *span; /* its scores: in shared memory when they fit */
    int begin, n;      /* position of the first, how many */
    int part, parts;
    Shared *shared;    /* NULL for a part alone */
    unsigned *own;     /* shared memory [FIRST_BINS]: digits in the span */
    unsigned *scratch; /* shared memory [WARPS + 4] */
    unsigned meetings;
};

/* In words: digits, scratch, scores. */
enum { SCRATCH_WORDS = 2 * WARPS, SMEM_WORDS = FIRST_BINS + SCRATCH_WORDS };

/* fp32 bits in an order that unsigned comparison follows; -0 and 0 are one value. */
static __device__ __forceinline__ uint32_t sortable(float f) {
    uint32_t u = __float_as_uint(f + 0.0f);
    return u ^ ((uint32_t)((int32_t)u >> 31) | 0x80000000u);
}

static __device__ void meet(Part *p) {
    __syncthreads();
    if (p->parts > 1) {
        p->meetings++;
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(&p->shared->arrived, 1u);
            wait_until_at_least(&p->shared->arrived, p->meetings * (unsigned)p->parts);
            __threadfence();
        }
        __syncthreads();
    }
}

/* Sum over the block of one number per thread in the threads before this one; the total too. */
static __device__ unsigned sum_before(unsigned v, unsigned *scratch, unsigned *total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned sum = v;
    for (int d = 1; d < 32; d *= 2) {
        unsigned x = __shfl_up_sync(~0u, sum, d);
        sum += lane >= d ? x : 0;
    }
    if (lane == 31)
        scratch[warp] = sum;
    __syncthreads();
    unsigned before = 0, all = 0;
    for (int i = 0; i < WARPS; i++) {
        before += i < warp ? scratch[i] : 0;
        all += scratch[i];
    }
    __syncthreads();
    *total = all;
    return before + sum - v;
}

/* Counts the digit at `shift` of the span's scores that share the edge's higher digits. Spans may
 * be read to a multiple of 4. */
static __device__ void count_digits(const Part *p, uint32_t edge, int shift, int bits) {
    uint32_t mask = (1u << bits) - 1;
    int above = shift + bits;
    for (int i = threadIdx.x; i <= (int)mask; i += THREADS)
        p->own[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int i = 4 * (int)threadIdx.x; i < p->n; i += 4 * THREADS) {
        float4 x = *reinterpret_cast<const float4 *>(p->span + i);
        const float v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t u = sortable(v[j]);
            if (i + j < p->n && (above == 32 || (u >> (above & 31)) == (edge >> (above & 31))))
                atomicAdd(&p->own[(u >> shift) & mask], 1u);
        }
    }
    __syncthreads();
}

/* This thread's digits of the row, the largest first: from what all parts have counted. */
template <int EACH>
static __device__ void read_bins(Part *p, unsigned *shared_bins, int first, unsigned v[EACH]) {
    if (p->parts > 1) {
        for (int i = threadIdx.x; i < EACH * THREADS; i += THREADS)
            if (p->own[i])
                atomicAdd(&shared_bins[i], p->own[i]);
        meet(p);
    }
    for (int i = 0; i < EACH; i += 2) {
        uint2 two = p->parts > 1 ? __ldcg(reinterpret_cast<const uint2 *>(shared_bins + first + i))
                                 : *reinterpret_cast<const uint2 *>(p->own + first + i);
        v[EACH - 1 - i] = two.x;
        v[EACH - 2 - i] = two.y;
    }
}

/* The digit that holds the *rank-th largest of the row; *rank becomes its rank among the scores
 * with that digit, *above grows by the span's scores with larger digits. */
template <int BITS>
static __device__ uint32_t find_digit(Part *p, unsigned *shared_bins, unsigned *rank,
                                      unsigned *above) {
    constexpr int EACH = (1 << BITS) / THREADS;
    int first = (1 << BITS) - EACH * ((int)threadIdx.x + 1); /* the smallest of this thread's */
    unsigned v[EACH], n = 0, total, mine = 0, *found = p->scratch + WARPS;
    read_bins<EACH>(p, shared_bins, first, v);
    for (int i = 0; i < EACH; i++)
        n += v[i];
    unsigned before = sum_before(n, p->scratch, &total);
    if (before < *rank && *rank <= before + n)
        for (int i = 0; i < EACH; i++) {
            if (before < *rank && *rank <= before + v[i]) {
                found[0] = (unsigned)(first + EACH - 1 - i);
                found[1] = *rank - before;
            }
            before += v[i];
        }
    __syncthreads();
    uint32_t digit = found[0];
    *rank = found[1];
    for (int i = threadIdx.x; i < EACH * THREADS; i += THREADS)
        mine += (uint32_t)i > digit ? p->own[i] : 0;
    sum_before(mine, p->scratch, &total);
    *above += total;
    return digit;
}

/* Copies the span's positions above the edge, and the first `quota` of those on it, to list. Each
 * warp has a stretch of the span. */
static __device__ void write_list(const Part *p, uint32_t edge, unsigned quota, int32_t *list) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32,
        each = ((p->n + WARPS - 1) / WARPS + 31) / 32 * 32, begin = warp * each,
        end = min(begin + each, p->n);
    unsigned *above = p->own, *on = p->own + WARPS, n_above = 0, n_on = 0;
#pragma unroll 4
    for (int i = begin + lane; i - lane < end; i += 32) {
        uint32_t u = i < end ? sortable(p->span[i]) : 0;
        n_above += (unsigned)__popc(__ballot_sync(~0u, i < end && u > edge));
        n_on += (unsigned)__popc(__ballot_sync(~0u, i < end && u == edge));
    }
    if (lane == 0) {
        above[warp] = n_above;
        on[warp] = n_on;
    }
    __syncthreads();
    unsigned at = 0, seen = 0; /* where this warp writes; how many on the edge came before */
    for (int i = 0; i < warp; i++) {
        at += above[i];
        seen += on[i];
    }
    at += min(seen, quota);
#pragma unroll 4
    for (int i = begin + lane; i - lane < end; i += 32) {
        uint32_t u = i < end ? sortable(p->span[i]) : 0;
        bool equal = i < end && u == edge;
        unsigned equals = __ballot_sync(~0u, equal), below = (1u << lane) - 1;
        bool take = (i < end && u > edge) || (equal && seen + __popc(equals & below) < quota);
        unsigned takes = __ballot_sync(~0u, take);
        if (take)
            list[at + __popc(takes & below)] = p->begin + i;
        at += (unsigned)__popc(takes);
        seen += (unsigned)__popc(equals);
    }
}

/* Where this part's positions begin in the list, and how many on the edge it may take. */
static __device__ unsigned place(Part *p, unsigned above, unsigned on, unsigned *quota) {
    if (p->parts == 1)
        return 0;
    if (threadIdx.x == 0)
        p->shared->taken[p->part] = make_uint2(above, on);
    meet(p);
    unsigned at = 0, seen = 0;
    for (int i = 0; i < p->part; i++) {
        uint2 t = __ldcg(&p->shared->taken[i]);
        at += t.x;
        seen += t.y;
    }
    unsigned taken = min(seen, *quota);
    *quota -= taken;
    return at + taken;
}

/* Leaves the row's shared part as it was found; the last block to leave clears the counters. */
static __device__ void leave(const Part *p) {
    if (p->parts == 1)
        return;
    for (int i = p->part * THREADS + (int)threadIdx.x; i < FIRST_BINS + 2 * NEXT_BINS;
         i += p->parts * THREADS)
        p->shared->bins[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&p->shared->left, 1u) == (unsigned)p->parts - 1)
        p->shared->arrived = p->shared->left = 0;
}

static __device__ void select(Part *p, int k, int32_t *list) {
    unsigned rank = (unsigned)k, above = 0, *bins = p->shared ? p->shared->bins : NULL;
    uint32_t edge = 0;
    count_digits(p, edge, 32 - FIRST_BITS, FIRST_BITS);
    edge = find_digit<FIRST_BITS>(p, bins, &rank, &above) << (32 - FIRST_BITS);
    count_digits(p, edge, NEXT_BITS, NEXT_BITS);
    edge |= find_digit<NEXT_BITS>(p, bins + FIRST_BINS, &rank, &above) << NEXT_BITS;
    count_digits(p, edge, 0, NEXT_BITS);
    edge |= find_digit<NEXT_BITS>(p, bins + FIRST_BINS + NEXT_BINS, &rank, &above);
    unsigned on = p->own[edge & (NEXT_BINS - 1)];
    unsigned at = place(p, above, on, &rank);
    __syncthreads();
    write_list(p, edge, rank, list + at);
    leave(p);
}

/* Brings the span to shared memory. */
static __device__ void keep_span(Part *p, float *to) {
#pragma unroll 4
    for (int i = 4 * (int)threadIdx.x; i < p->n; i += 4 * THREADS)
        *reinterpret_cast<float4 *>(to + i) = *reinterpret_cast<const float4 *>(p->span + i);
    p->span = to;
}

static __global__ void __launch_bounds__(THREADS) topk_kernel(CudaTopk t, int parts) {
    grid_wait();
    unsigned *smem = dynamic_smem<unsigned>();
    Work *work = static_cast<Work *>(t.work);
    int row = (int)blockIdx.x, part = 0;
    if (parts > 1) {
        unsigned *ticket = smem;
        if (threadIdx.x == 0) {
            *ticket = atomicAdd(&work->ticket, 1u);
            if (*ticket == gridDim.x - 1)
                work->ticket = 0;
        }
        __syncthreads();
        row = (int)*ticket / parts;
        part = (int)*ticket % parts;
        __syncthreads();
    }
    int n = t.pos[row] + 1, used = min(parts, (n + PART_SCORES - 1) / PART_SCORES);
    int32_t *list = t.list + (size_t)row * (size_t)t.list_ld;
    if (n <= t.k) {
        for (int i = threadIdx.x; i < t.k && part == 0; i += THREADS)
            list[i] = i < n ? i : -1;
        return;
    }
    if (part >= used)
        return;
    int each = ((n + used - 1) / used + 3) & ~3;
    Part p = {};
    p.begin = min(part * each, n);
    p.n = min(each, n - p.begin);
    p.span = t.score + (size_t)row * t.pitch + p.begin;
    p.part = part;
    p.parts = used;
    p.shared = used > 1 ? &work->row[row] : NULL;
    p.own = smem;
    p.scratch = smem + FIRST_BINS;
    if (p.n <= KEPT_SCORES)
        keep_span(&p, reinterpret_cast<float *>(smem + SMEM_WORDS));
    select(&p, t.k, list);
}

size_t cuda_topk_work_bytes(void) {
    return sizeof(Work);
}

void cuda_topk(const CudaTopk *t, cudaStream_t stream) {
    int parts = (t->max_len + PART_SCORES - 1) / PART_SCORES, room = 2 * t->n_sm / t->rows;
    parts = parts < room ? parts : room;
    parts = parts < t->n_sm / 4 ? parts : t->n_sm / 4;
    parts = parts < TOPK_MAX_PARTS ? parts : TOPK_MAX_PARTS;
    if (parts < 2 || t->rows > TOPK_SHARED_ROWS)
        parts = 1;
    launch(topk_kernel, dim3((unsigned)(t->rows * parts)), THREADS,
           (SMEM_WORDS + KEPT_SCORES) * sizeof(unsigned), stream, true, *t, parts);
}
