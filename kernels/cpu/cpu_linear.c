/* Matrix products of the fast host backend. Weight rows are dequantised four at a time into the
 * thread's scratch, then multiplied with all tokens: a row is read from memory once per step, and
 * the result of a token does not depend on the others. */
#include "kernels/cpu/cpu.h"

enum { CHUNK_ROWS = 16 };

typedef struct Product {
    Dev *d;
    const MatView *w; /* [rows, k] */
    const float *x;
    float *out;
    size_t ld_x, ld_out;
    int n;
} Product;

static size_t padded(int k) {
    return ((size_t)k + 15) & ~(size_t)15;
}

/* Rows [r0, r1) of w against all tokens. */
static void rows_dot(const Kern *kern, const MatView *w, int r0, int r1, const float *x,
                     size_t ld_x, int n, float *out, size_t ld_out, float *scratch) {
    for (int r = r0; r < r1; r += KERN_TILE) {
        const float *row[KERN_TILE];
        int m = r1 - r < KERN_TILE ? r1 - r : KERN_TILE;
        for (int i = 0; i < m; i++) {
            float *buf = scratch + (size_t)i * padded(w->cols);
            kern->row(w, r + i, buf);
            row[i] = buf;
        }
        kern->dots(row, m, x, ld_x, n, w->cols, out + r, ld_out);
    }
}

static void product_chunk(void *arg, int chunk, int thread) {
    const Product *p = arg;
    int r0 = chunk * CHUNK_ROWS, r1 = r0 + CHUNK_ROWS < p->w->rows ? r0 + CHUNK_ROWS : p->w->rows;
    rows_dot(p->d->kern, p->w, r0, r1, p->x, p->ld_x, p->n, p->out, p->ld_out,
             cpu_scratch(p->d, thread));
}

static void product(Dev *d, const MatView *w, const float *x, size_t ld_x, int n, float *out,
                    size_t ld_out) {
    Product p = {d, w, x, out, ld_x, ld_out, n};
    cpu_scratch_reserve(d, KERN_TILE * padded(w->cols));
    pool_run(d->pool, (w->rows + CHUNK_ROWS - 1) / CHUNK_ROWS, product_chunk, &p);
}

void cpu_linear(Dev *d, Tensor out, Tensor x, const Mat *w) {
    DCHECK(x.cols == w->view.cols && out.cols == w->view.rows && x.rows == out.rows);
    product(d, &w->view, host_row(x, 0), (size_t)x.ld, x.rows, host_row(out, 0), (size_t)out.ld);
}

void cpu_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v) {
    int lora = kv_b->view.cols;
    for (int h = 0; h < heads; h++) {
        MatView w = mat_rows(&kv_b->view, h * (nope + v) + nope, v);
        product(d, &w, host_row(x, 0) + h * lora, (size_t)x.ld, x.rows, host_row(out, 0) + h * v,
                (size_t)out.ld);
    }
}

/* ---- absorb: the stored rows are the summed dimension ---- */

enum { COL_BLOCK = 128, MAX_NOPE = 1024 };

typedef struct Absorb {
    Dev *d;
    const MatView *kv_b;
    Tensor out, q;
    int heads, nope, v, rope, n_blocks;
} Absorb;

/* One head and one block of latent columns, all tokens. */
static void absorb_chunk(void *arg, int chunk, int thread) {
    const Absorb *a = arg;
    int h = chunk / a->n_blocks, c0 = chunk % a->n_blocks * COL_BLOCK, lora = a->kv_b->cols;
    int width = lora - c0 < COL_BLOCK ? lora - c0 : COL_BLOCK;
    MatView rows = mat_rows(a->kv_b, h * (a->nope + a->v), a->nope), w = mat_cols(&rows, c0, width);
    const float *row[MAX_NOPE];
    float *scratch = cpu_scratch(a->d, thread);
    for (int i = 0; i < a->nope; i++) {
        float *buf = scratch + (size_t)i * COL_BLOCK;
        a->d->kern->row(&w, i, buf);
        row[i] = buf;
    }
    for (int t = 0; t < a->q.rows; t++) {
        float *out = host_row(a->out, t) + h * (lora + a->rope) + c0;
        memset(out, 0, (size_t)width * sizeof *out);
        a->d->kern->accumulate(out, host_row(a->q, t) + h * (a->nope + a->rope), row, a->nope,
                               width);
    }
}

void cpu_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v) {
    int lora = kv_b->view.cols, rope = out.cols / heads - lora;
    Absorb a = {d, &kv_b->view, out, q, heads, nope, v, rope, (lora + COL_BLOCK - 1) / COL_BLOCK};
    CHECK(nope <= MAX_NOPE);
    cpu_scratch_reserve(d, (size_t)nope * COL_BLOCK);
    pool_run(d->pool, heads * a.n_blocks, absorb_chunk, &a);
    for (int t = 0; t < q.rows; t++)
        for (int h = 0; h < heads; h++)
            memcpy(host_row(out, t) + h * (lora + rope) + lora,
                   host_row(q, t) + h * (nope + rope) + nope, (size_t)rope * sizeof(float));
}
