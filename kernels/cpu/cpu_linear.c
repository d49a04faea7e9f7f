/* Matrix products of the fast host backend. For one token stored rows are multiplied as they are
 * decoded. For more, a chunk of rows is dequantised into the thread's scratch and multiplied with
 * all tokens: a row is decoded once per step. Both give the same bits, so that the result of a
 * token does not depend on the others. */
#include "kernels/cpu/cpu.h"

enum { BLOCK_FLOATS = 64 * 1024 }; /* of inputs, kept in L2 while a chunk of rows passes */

void cpu_rows_dot(const Kern *kern, const MatView *w, int r0, int r1, const float *x, size_t ld_x,
                  int n, float *out, size_t ld_out, float *scratch) {
    const float *row[CPU_CHUNK_ROWS];
    size_t pitch = cpu_row_pitch(w->cols);
    int m = r1 - r0, block = BLOCK_FLOATS / w->cols / KERN_TILE * KERN_TILE;
    if (n == 1 && row_dots_can(w)) {
        for (int i = 0; i < m; i += KERN_TILE)
            kern->row_dots(w, r0 + i, cpu_min(m - i, KERN_TILE), x, out + i);
        return;
    }
    for (int i = 0; i < m; i++) {
        float *buf = scratch + (size_t)i * pitch;
        kern->row(w, r0 + i, buf);
        row[i] = buf;
    }
    block = block < KERN_TILE ? KERN_TILE : block;
    for (int t = 0; t < n; t += block)
        for (int i = 0; i < m; i += KERN_TILE)
            kern->dots(row + i, cpu_min(m - i, KERN_TILE), x + (size_t)t * ld_x, ld_x,
                       cpu_min(n - t, block), w->cols, out + (size_t)t * ld_out + i, ld_out);
}

/* `heads` products of the same shape: head h multiplies rows [h * w_step + w_at, + rows) of w with
 * columns [h * k, + k) of x into columns [h * rows, + rows) of out. */
typedef struct Product {
    Dev *d;
    const MatView *w; /* [.., k] */
    Tensor out, x;
    int w_step, w_at, rows;
    int chunks; /* per head */
} Product;

static void product_chunk(void *arg, int chunk, int thread) {
    const Product *p = arg;
    int h = chunk / p->chunks, r = chunk % p->chunks * CPU_CHUNK_ROWS,
        first = h * p->w_step + p->w_at;
    cpu_rows_dot(p->d->kern, p->w, first + r, first + cpu_min(r + CPU_CHUNK_ROWS, p->rows),
                 host_row(p->x, 0) + h * p->w->cols, (size_t)p->x.ld, p->x.rows,
                 host_row(p->out, 0) + h * p->rows + r, (size_t)p->out.ld,
                 cpu_scratch(p->d, thread));
}

static void product(Product *p, int heads) {
    p->chunks = (p->rows + CPU_CHUNK_ROWS - 1) / CPU_CHUNK_ROWS;
    cpu_scratch_reserve(p->d, CPU_CHUNK_ROWS * cpu_row_pitch(p->w->cols));
    pool_run(p->d->pool, heads * p->chunks, product_chunk, p);
}

void cpu_linear(Dev *d, Tensor out, Tensor x, const Mat *w) {
    DCHECK(x.cols == w->view.cols && out.cols == w->view.rows && x.rows == out.rows);
    product(&(Product){.d = d, .w = &w->view, .out = out, .x = x, .rows = w->view.rows}, 1);
}

void cpu_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope, int v) {
    product(&(Product){.d = d,
                       .w = &kv_b->view,
                       .out = out,
                       .x = x,
                       .w_step = nope + v,
                       .w_at = nope,
                       .rows = v},
            heads);
}

/* ---- absorb: the stored rows are the summed dimension ---- */

enum { COL_BLOCK = 128, ROW_BLOCK = 32 }; /* dequantised at a time: fits L1 */

typedef struct Absorb {
    Dev *d;
    const MatView *kv_b;
    Tensor out, q;
    int nope, v, rope, n_blocks;
} Absorb;

/* One head and one block of latent columns, all tokens. */
static void absorb_chunk(void *arg, int chunk, int thread) {
    const Absorb *a = arg;
    int h = chunk / a->n_blocks, c0 = chunk % a->n_blocks * COL_BLOCK, lora = a->kv_b->cols,
        width = cpu_min(lora - c0, COL_BLOCK), out_at = h * (lora + a->rope) + c0;
    MatView w = mat_cols(a->kv_b, c0, width);
    float *scratch = cpu_scratch(a->d, thread);
    const float *row[ROW_BLOCK];
    for (int t = 0; t < a->q.rows; t++)
        memset(host_row(a->out, t) + out_at, 0, (size_t)width * sizeof(float));
    for (int i = 0; i < a->nope; i += ROW_BLOCK) {
        int m = cpu_min(a->nope - i, ROW_BLOCK);
        for (int j = 0; j < m; j++) {
            float *buf = scratch + (size_t)j * COL_BLOCK;
            a->d->kern->row(&w, h * (a->nope + a->v) + i + j, buf);
            row[j] = buf;
        }
        for (int t = 0; t < a->q.rows; t += KERN_TILE) {
            float *acc[KERN_TILE];
            int n = cpu_min(a->q.rows - t, KERN_TILE);
            for (int k = 0; k < n; k++)
                acc[k] = host_row(a->out, t + k) + out_at;
            a->d->kern->accumulate(acc, n, host_row(a->q, t) + h * (a->nope + a->rope) + i,
                                   (size_t)a->q.ld, row, m, width);
        }
    }
}

void cpu_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope, int v) {
    int lora = kv_b->view.cols, rope = out.cols / heads - lora;
    Absorb a = {d, &kv_b->view, out, q, nope, v, rope, (lora + COL_BLOCK - 1) / COL_BLOCK};
    cpu_scratch_reserve(d, ROW_BLOCK * COL_BLOCK);
    pool_run(d->pool, heads * a.n_blocks, absorb_chunk, &a);
    for (int t = 0; t < q.rows; t++)
        for (int h = 0; h < heads; h++)
            memcpy(host_row(out, t) + h * (lora + rope) + lora,
                   host_row(q, t) + h * (nope + rope) + nope, (size_t)rope * sizeof(float));
}
