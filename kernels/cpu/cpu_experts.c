/* Routed experts of the fast host backend. Each expert that some token wants is read once: first
 * gate and up of all of them, then down. A token adds up its experts in the order of their ids, so
 * that its result does not depend on the other tokens. */
#include "kernels/cpu/cpu.h"

#include <math.h>

enum { CHUNK_ROWS = 16 };

typedef struct Job {
    Dev *d;
    const Experts *e;
    Tensor y;
    int hidden, inner, n_used, inner_chunks;
    int *used;    /* [n_used] experts with tokens, ascending */
    int *first;   /* [n_experts + 1] where an expert's tokens begin in `token` */
    int *token;   /* [total] */
    float *share; /* [total] weight of the expert for the token */
    float *x;     /* [total, hidden] gathered inputs */
    float *act;   /* [total, inner] */
    int total;
} Job;

/* Sorts the (token, place) pairs by expert; tokens of an expert stay ascending. */
static void group(Job *j, Tensor x, Tensor id, Tensor weight) {
    int n_experts = j->e->n_experts;
    for (int t = 0; t < x.rows; t++)
        for (int i = 0; i < id.cols; i++) {
            int32_t e = host_row_i32(id, t)[i];
            if (e >= 0 && j->e->gate[e].data)
                j->first[e + 1]++;
        }
    for (int e = 0; e < n_experts; e++) {
        if (j->first[e + 1])
            j->used[j->n_used++] = e;
        j->first[e + 1] += j->first[e];
    }
    j->total = j->first[n_experts];
    int *at = xmalloc((size_t)n_experts * sizeof *at);
    memcpy(at, j->first, (size_t)n_experts * sizeof *at);
    for (int t = 0; t < x.rows; t++)
        for (int i = 0; i < id.cols; i++) {
            int32_t e = host_row_i32(id, t)[i];
            if (e < 0 || !j->e->gate[e].data)
                continue;
            j->token[at[e]] = t;
            j->share[at[e]++] = host_row(weight, t)[i];
        }
    free(at);
}

static void gather(Job *j, Tensor x) {
    for (int k = 0; k < j->total; k++)
        memcpy(j->x + (size_t)k * (size_t)j->hidden, host_row(x, j->token[k]),
               (size_t)j->hidden * sizeof(float));
}

/* Rows [r0, r1) of one expert's gate and up, multiplied and activated into act. */
static void gate_up_chunk(void *arg, int chunk, int thread) {
    const Job *j = arg;
    const Kern *kern = j->d->kern;
    int e = j->used[chunk / j->inner_chunks], r0 = chunk % j->inner_chunks * CHUNK_ROWS;
    int r1 = r0 + CHUNK_ROWS < j->inner ? r0 + CHUNK_ROWS : j->inner, first = j->first[e],
        n = j->first[e + 1] - first;
    size_t hidden = (size_t)j->hidden, pad = (hidden + 15) & ~(size_t)15;
    float *buf = cpu_scratch(j->d, thread), *up = buf + KERN_TILE * pad;
    for (int r = r0; r < r1; r += KERN_TILE) {
        const float *row[KERN_TILE];
        int m = r1 - r < KERN_TILE ? r1 - r : KERN_TILE;
        float *act = j->act + (size_t)first * (size_t)j->inner + r;
        for (int i = 0; i < m; i++) {
            kern->row(&j->e->gate[e], r + i, buf + (size_t)i * pad);
            row[i] = buf + (size_t)i * pad;
        }
        kern->dots(row, m, j->x + (size_t)first * hidden, hidden, n, j->hidden, act,
                   (size_t)j->inner);
        for (int i = 0; i < m; i++)
            kern->row(&j->e->up[e], r + i, buf + (size_t)i * pad);
        kern->dots(row, m, j->x + (size_t)first * hidden, hidden, n, j->hidden, up, KERN_TILE);
        for (int t = 0; t < n; t++)
            for (int i = 0; i < m; i++) {
                float *a = &act[(size_t)t * (size_t)j->inner + (size_t)i];
                *a = *a / (1.0f + expf(-*a)) * up[t * KERN_TILE + i];
            }
    }
}

/* Output rows [r0, r1) of all experts, ascending. */
static void down_chunk(void *arg, int chunk, int thread) {
    const Job *j = arg;
    const Kern *kern = j->d->kern;
    int r0 = chunk * CHUNK_ROWS, r1 = r0 + CHUNK_ROWS < j->hidden ? r0 + CHUNK_ROWS : j->hidden;
    size_t pad = ((size_t)j->inner + 15) & ~(size_t)15;
    float *buf = cpu_scratch(j->d, thread), *part = buf + KERN_TILE * pad;
    for (int u = 0; u < j->n_used; u++) {
        int e = j->used[u], first = j->first[e], n = j->first[e + 1] - first;
        for (int r = r0; r < r1; r += KERN_TILE) {
            const float *row[KERN_TILE];
            int m = r1 - r < KERN_TILE ? r1 - r : KERN_TILE;
            for (int i = 0; i < m; i++) {
                kern->row(&j->e->down[e], r + i, buf + (size_t)i * pad);
                row[i] = buf + (size_t)i * pad;
            }
            kern->dots(row, m, j->act + (size_t)first * (size_t)j->inner, (size_t)j->inner, n,
                       j->inner, part, KERN_TILE);
            for (int t = 0; t < n; t++)
                for (int i = 0; i < m; i++)
                    host_row(j->y, j->token[first + t])[r + i] +=
                        j->share[first + t] * part[t * KERN_TILE + i];
        }
    }
}

static int inner_size(const Experts *e) {
    for (int i = 0; i < e->n_experts; i++)
        if (e->gate[i].data)
            return e->gate[i].rows;
    return 0;
}

void cpu_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e) {
    int hidden = x.cols, inner = inner_size(e), n_places = x.rows * id.cols;
    if (inner == 0)
        return;
    size_t places = (size_t)n_places, h = (size_t)hidden, in = (size_t)inner,
           wide = h > in ? h : in;
    float *mem = xmalloc(places * (1 + h + in) * sizeof *mem);
    int *ints = xcalloc(2 * (size_t)e->n_experts + 1 + places, sizeof *ints);
    Job j = {.d = d,
             .e = e,
             .y = y,
             .hidden = hidden,
             .inner = inner,
             .inner_chunks = (inner + CHUNK_ROWS - 1) / CHUNK_ROWS};
    j.share = mem;
    j.x = mem + places;
    j.act = j.x + places * h;
    j.used = ints;
    j.first = ints + e->n_experts;
    j.token = j.first + e->n_experts + 1;
    group(&j, x, id, weight);
    gather(&j, x);
    cpu_scratch_reserve(d, KERN_TILE * (((wide + 15) & ~(size_t)15) + (size_t)x.rows));
    pool_run(d->pool, j.n_used * j.inner_chunks, gate_up_chunk, &j);
    pool_run(d->pool, (hidden + CHUNK_ROWS - 1) / CHUNK_ROWS, down_chunk, &j);
    free(ints);
    free(mem);
}
