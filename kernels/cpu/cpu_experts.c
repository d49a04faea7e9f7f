/* Routed experts of the fast host backend. Each expert that some token wants is read once: first
 * gate and up of all of them, then down. A token adds up its experts in the order of their ids, so
 * that its result does not depend on the other tokens. */
#include "kernels/cpu/cpu.h"

typedef struct Job {
    Dev *d;
    const Experts *e;
    Tensor y;
    int hidden, inner, n_used, inner_chunks;
    int *used;    /* [n_used] experts with tokens, ascending */
    int *first;   /* [n_experts + 1] where an expert's tokens begin in `token` */
    int *at;      /* [n_experts] where the next of an expert's tokens goes */
    int *token;   /* [total] */
    float *share; /* [total] weight of the expert for the token */
    float *x;     /* [total, hidden] gathered inputs */
    float *act;   /* [total, inner] */
    int total;
    int most; /* places of the expert that has the most: a token may name an expert more than once
               */
} Job;

/* Sorts the (token, place) pairs by expert; tokens of an expert stay ascending. */
static void group(Job *j, Tensor id, Tensor weight) {
    int n_experts = j->e->n_experts;
    for (int t = 0; t < id.rows; t++)
        for (int i = 0; i < id.cols; i++) {
            int32_t e = host_row_i32(id, t)[i];
            if (e >= 0 && j->e->gate[e].data)
                j->first[e + 1]++;
        }
    for (int e = 0; e < n_experts; e++) {
        if (j->first[e + 1])
            j->used[j->n_used++] = e;
        if (j->first[e + 1] > j->most)
            j->most = j->first[e + 1];
        j->first[e + 1] += j->first[e];
        j->at[e] = j->first[e];
    }
    j->total = j->first[n_experts];
    for (int t = 0; t < id.rows; t++)
        for (int i = 0; i < id.cols; i++) {
            int32_t e = host_row_i32(id, t)[i];
            if (e < 0 || !j->e->gate[e].data)
                continue;
            j->token[j->at[e]] = t;
            j->share[j->at[e]++] = host_row(weight, t)[i];
        }
}

static void gather(Job *j, Tensor x) {
    for (int k = 0; k < j->total; k++)
        memcpy(j->x + (size_t)k * (size_t)j->hidden, host_row(x, j->token[k]),
               (size_t)j->hidden * sizeof(float));
}

/* A chunk of rows of one expert's gate and up, multiplied and activated into act. */
static void gate_up_chunk(void *arg, int chunk, int thread) {
    const Job *j = arg;
    const Kern *kern = j->d->kern;
    int e = j->used[chunk / j->inner_chunks], r0 = chunk % j->inner_chunks * CPU_CHUNK_ROWS,
        r1 = cpu_min(r0 + CPU_CHUNK_ROWS, j->inner), first = j->first[e],
        n = j->first[e + 1] - first;
    size_t hidden = (size_t)j->hidden, inner = (size_t)j->inner;
    float *rows = cpu_scratch(j->d, thread), *up = rows + CPU_CHUNK_ROWS * cpu_row_pitch(j->hidden),
          *act = j->act + (size_t)first * inner + r0;
    const float *x = j->x + (size_t)first * hidden;
    cpu_rows_dot(kern, &j->e->gate[e], r0, r1, x, hidden, n, act, inner, rows);
    cpu_rows_dot(kern, &j->e->up[e], r0, r1, x, hidden, n, up, CPU_CHUNK_ROWS, rows);
    for (int t = 0; t < n; t++, act += inner)
        kern->silu_mul(act, act, up + t * CPU_CHUNK_ROWS, r1 - r0);
}

/* A chunk of output rows of all experts, ascending. */
static void down_chunk(void *arg, int chunk, int thread) {
    const Job *j = arg;
    int r0 = chunk * CPU_CHUNK_ROWS, r1 = cpu_min(r0 + CPU_CHUNK_ROWS, j->hidden);
    float *rows = cpu_scratch(j->d, thread),
          *part = rows + CPU_CHUNK_ROWS * cpu_row_pitch(j->inner);
    for (int u = 0; u < j->n_used; u++) {
        int e = j->used[u], first = j->first[e], n = j->first[e + 1] - first;
        cpu_rows_dot(j->d->kern, &j->e->down[e], r0, r1, j->act + (size_t)first * (size_t)j->inner,
                     (size_t)j->inner, n, part, CPU_CHUNK_ROWS, rows);
        for (int t = 0; t < n; t++) {
            float *y = host_row(j->y, j->token[first + t]) + r0, share = j->share[first + t];
            for (int i = 0; i < r1 - r0; i++)
                y[i] += share * part[t * CPU_CHUNK_ROWS + i];
        }
    }
}

static int inner_size(const Experts *e) {
    for (int i = 0; i < e->n_experts; i++)
        if (e->gate[i].data)
            return e->gate[i].rows;
    return 0;
}

/* Lays the arrays of a job into the rank's working memory; the integers behind the numbers. */
static void job_place(Job *j, size_t places) {
    size_t h = (size_t)j->hidden, in = (size_t)j->inner, n = (size_t)j->e->n_experts,
           floats = places * (1 + h + in), ints = 3 * n + 1 + places;
    j->x = cpu_work(j->d, floats + ints);
    j->act = j->x + places * h;
    j->share = j->act + places * in;
    j->used = (int *)(j->share + places);
    j->first = j->used + n;
    j->at = j->first + n + 1;
    j->token = j->at + n;
    memset(j->first, 0, (n + 1) * sizeof *j->first);
}

void cpu_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e) {
    Job j = {.d = d, .e = e, .y = y, .hidden = x.cols, .inner = inner_size(e)};
    if (j.inner == 0)
        return;
    int wide = j.hidden > j.inner ? j.hidden : j.inner;
    j.inner_chunks = (j.inner + CPU_CHUNK_ROWS - 1) / CPU_CHUNK_ROWS;
    job_place(&j, (size_t)x.rows * (size_t)id.cols);
    group(&j, id, weight);
    gather(&j, x);
    cpu_scratch_reserve(d, CPU_CHUNK_ROWS * (cpu_row_pitch(wide) + (size_t)j.most));
    pool_run(d->pool, j.n_used * j.inner_chunks, gate_up_chunk, &j);
    pool_run(d->pool, (j.hidden + CPU_CHUNK_ROWS - 1) / CPU_CHUNK_ROWS, down_chunk, &j);
}
