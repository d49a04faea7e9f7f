/* Experts of the CUDA backend: packing at start, and the operation. Called on the rank's thread. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cuda_moe.h"

#include <string.h>

enum { WAVE_ROWS = 1024 }; /* tokens of one launch: bounds the workspace */

/* Where the matrices of a kind come from: up is NULL for down. */
typedef struct Source {
    const MatView *first,
        *second; /* [n_experts] each; the second's tiles stand between the first's */
} Source;

struct Experts {
    MoeExperts e;
    void *data, *scales, *place; /* device memory */
};

/* ---- checks ---- */

static int unlike(Err *err, int expert, const MatView *v, int rows, int cols, Dtype dtype) {
    return err_set(
        err, E_UNSUPPORTED,
        "expert %d: a matrix [%d, %d] of %s, expected [%d, %d] of %s like the layer's others",
        expert, v->rows, v->cols, dtype_name(v->dtype), rows, cols, dtype_name(dtype));
}

/* A stage of columns and a tile of rows must not straddle blocks of scales. */
static int check_slice(const MatView *v, int expert, Err *err) {
    bool columns = v->col0 % F8_BLOCK == 0 || v->col0 % F8_BLOCK + v->cols <= F8_BLOCK;
    if (v->dtype == DT_F8E4M3 && (v->row0 % MOE_TILE || !columns))
        return err_set(
            err, E_UNSUPPORTED,
            "expert %d: a slice at row %d, column %d of %d columns: expected rows from a "
            "multiple of %d, columns that divide or fill blocks of %d",
            expert, v->row0, v->col0, v->cols, MOE_TILE, F8_BLOCK);
    if (v->dtype == DT_NVFP4 && (v->col0 % NVFP4_GROUP || v->cols % NVFP4_GROUP))
        return err_set(err, E_UNSUPPORTED, "expert %d: columns [%d, %d) cut a group of %d", expert,
                       v->col0, v->col0 + v->cols, NVFP4_GROUP);
    return 0;
}

/* Shape and format of the experts that are held; n_held 0 when there are none. */
static int read_shape(const ExpertsView *view, MoeExperts *e, Err *err) {
    int rc = 0;
    *e = (MoeExperts){.n_experts = view->n_experts};
    for (int i = 0; i < view->n_experts && rc == 0; i++) {
        const MatView *g = &view->gate[i], *u = &view->up[i], *d = &view->down[i];
        if (!g->data)
            continue;
        if (e->n_held++ == 0) {
            e->dtype = g->dtype;
            e->inner = g->rows;
            e->hidden = g->cols;
        }
        const MatView *part[3] = {g, u, d};
        for (int p = 0; p < 3 && rc == 0; p++) {
            int rows = p == 2 ? e->hidden : e->inner, cols = p == 2 ? e->inner : e->hidden;
            if (part[p]->rows != rows || part[p]->cols != cols || part[p]->dtype != e->dtype)
                return unlike(err, i, part[p], rows, cols, e->dtype);
            rc = check_slice(part[p], i, err);
        }
    }
    if (e->n_held && e->dtype == DT_I32)
        return err_set(err, E_UNSUPPORTED, "experts of integers");
    return rc;
}

/* ---- packing ---- */

/* One expert's matrix into tiles first, first + step, .., as many rows at a time as staging takes.
 */
static void pack(Dev *d, const MatView *v, const MoeMat *to, int place, int first, int step) {
    size_t row_bytes = dtype_row_bytes(v->dtype, v->cols);
    int tiles = to->tiles / step, each = (int)(CUDA_STAGE_BYTES / row_bytes / MOE_TILE);
    for (int tile = 0; tile < tiles; tile += each) {
        int row = tile * MOE_TILE,
            rows = v->rows - row < each * MOE_TILE ? v->rows - row : each * MOE_TILE;
        MoePack p = {.row_bytes = row_bytes,
                     .rows = rows > 0 ? rows : 0,
                     .cols = v->cols,
                     .to = *to,
                     .expert = place,
                     .first = first + tile * step,
                     .step = step,
                     .tiles = tiles - tile < each ? tiles - tile : each,
                     .dtype = v->dtype};
        if (p.rows > 0)
            p.raw =
                cuda_stage(d, v->data + (size_t)row * v->row_bytes, v->row_bytes, row_bytes, rows);
        if (p.rows > 0 && v->dtype == DT_NVFP4) {
            p.scale_cols = v->cols / NVFP4_GROUP;
            p.scale = cuda_stage(d,
                                 (const uint8_t *)v->scale +
                                     (size_t)(v->row0 + row) * (size_t)v->scale_cols +
                                     v->col0 / NVFP4_GROUP,
                                 (size_t)v->scale_cols, (size_t)p.scale_cols, rows);
        }
        cuda_moe_pack(&p, d->stream);
    }
}

/* Scales of a matrix by tile and stage into out[tiles, stages]; padding has 0. */
static void block_scales(const MatView *v, const MoeMat *to, int first, int step, float *out) {
    const float *scale = v->scale;
    for (int t = 0; t * MOE_TILE < v->rows; t++)
        for (int s = 0; s < to->stages; s++) {
            size_t row = (size_t)((v->row0 + t * MOE_TILE) / F8_BLOCK),
                   col = (size_t)((v->col0 + s * F8_BLOCK) / F8_BLOCK);
            out[(size_t)(first + t * step) * (size_t)to->stages + (size_t)s] =
                scale ? scale[row * (size_t)v->scale_cols + col] : 1.0f;
        }
}

/* All experts' matrices of one kind. */
static void pack_kind(Dev *d, const Experts *e, const int32_t *place, Source from,
                      const MoeMat *to) {
    size_t blocks = (size_t)to->tiles * (size_t)to->stages, held = (size_t)e->e.n_held;
    int step = from.second ? 2 : 1;
    float *scale = xcalloc(held * blocks, sizeof *scale),
          *scale2 = xcalloc(held * 2, sizeof *scale2);
    for (int i = 0; i < e->e.n_experts; i++) {
        if (place[i] < 0)
            continue;
        const MatView *v[2] = {&from.first[i], from.second ? &from.second[i] : &from.first[i]};
        for (int k = 0; k < 2; k++) {
            scale2[2 * place[i] + k] = v[k]->scale2;
            if (k == step)
                continue; /* down is one matrix: both of its kinds of tiles are packed */
            pack(d, v[k], to, place[i], k, step);
            if (e->e.dtype == DT_F8E4M3)
                block_scales(v[k], to, k, step, scale + (size_t)place[i] * blocks);
        }
    }
    if (e->e.dtype == DT_F8E4M3)
        cuda_put(d, to->block_scale, scale, held * blocks * sizeof *scale);
    if (e->e.dtype == DT_NVFP4)
        cuda_put(d, to->scale2, scale2, held * 2 * sizeof *scale2);
    free(scale);
    free(scale2);
}

static MoeMat mat_shape(const MoeExperts *e, int tiles, int cols) {
    int stage = moe_stage_cols(e->dtype);
    return (MoeMat){.tiles = (tiles + 1) / 2 * 2, .stages = (cols + stage - 1) / stage};
}

static size_t scale_count(const MoeExperts *e, const MoeMat *m) {
    size_t blocks = e->dtype == DT_F8E4M3 ? (size_t)m->tiles * (size_t)m->stages : 2;
    return (size_t)e->n_held * blocks;
}

/* Takes the memory of all matrices and says where each begins. */
static int take_memory(Dev *d, Experts *e, Err *err) {
    MoeExperts *x = &e->e;
    x->gate_up = mat_shape(x, 2 * ((x->inner + MOE_TILE - 1) / MOE_TILE), x->hidden);
    x->down = mat_shape(x, (x->hidden + MOE_TILE - 1) / MOE_TILE, x->inner);
    size_t held = (size_t)x->n_held, first = held * moe_mat_bytes(&x->gate_up, x->dtype),
           second = held * moe_mat_bytes(&x->down, x->dtype), s1 = scale_count(x, &x->gate_up),
           s2 = scale_count(x, &x->down);
    int rc = cuda_alloc(d, first + second, "experts", &e->data, err);
    if (rc == 0)
        rc = cuda_alloc(d, (s1 + s2) * sizeof(float), "scales of experts", &e->scales, err);
    if (rc == 0)
        rc = cuda_alloc(d, (size_t)x->n_experts * sizeof(int32_t), "places of experts", &e->place,
                        err);
    if (rc)
        return rc;
    x->gate_up.data = e->data;
    x->down.data = (uint8_t *)e->data + first;
    x->place = e->place;
    float *scales = e->scales;
    if (x->dtype == DT_F8E4M3) {
        x->gate_up.block_scale = scales;
        x->down.block_scale = scales + s1;
    } else {
        x->gate_up.scale2 = scales;
        x->down.scale2 = scales + s1;
    }
    return 0;
}

static void pack_all(Dev *d, const ExpertsView *view, Experts *e) {
    int32_t *place = xcalloc((size_t)view->n_experts, sizeof *place);
    for (int i = 0, n = 0; i < view->n_experts; i++)
        place[i] = view->gate[i].data ? n++ : -1;
    cuda_put(d, e->place, place, (size_t)view->n_experts * sizeof *place);
    pack_kind(d, e, place, (Source){view->gate, view->up}, &e->e.gate_up);
    pack_kind(d, e, place, (Source){view->down, NULL}, &e->e.down);
    free(place);
}

int cuda_experts_load(Dev *d, const ExpertsView *view, Experts **out, Err *err) {
    cuda_enter(d);
    Experts *e = xcalloc(1, sizeof *e);
    int rc = read_shape(view, &e->e, err);
    if (rc == 0 && e->e.n_held > 0) {
        rc = take_memory(d, e, err);
        if (rc == 0)
            pack_all(d, view, e);
    }
    if (rc) {
        cuda_experts_free(d, e);
        return rc;
    }
    *out = e;
    return 0;
}

void cuda_experts_free(Dev *d, Experts *e) {
    if (!e)
        return;
    cuda_enter(d);
    cuda_free(d, e->data);
    cuda_free(d, e->scales);
    cuda_free(d, e->place);
    free(e);
}

/* ---- the operation ---- */

void cuda_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e) {
    cuda_enter(d);
    if (e->e.n_held == 0)
        return;
    CudaMoe m = {.e = e->e,
                 .x_ld = x.ld,
                 .weight_ld = weight.ld,
                 .id_ld = id.ld,
                 .y_ld = y.ld,
                 .k = id.cols,
                 .n_sm = d->n_sm};
    int most = x.rows < WAVE_ROWS ? x.rows : WAVE_ROWS;
    m.work = cuda_work(d, CUDA_WORK_MOE, cuda_moe_work_bytes(&m.e, most, m.k));
    for (int t = 0; t < x.rows; t += WAVE_ROWS) {
        m.rows = x.rows - t < WAVE_ROWS ? x.rows - t : WAVE_ROWS;
        m.x = tensor_row(x, t).at;
        m.id = tensor_row(id, t).at;
        m.weight = tensor_row(weight, t).at;
        m.y = tensor_row(y, t).at;
        cuda_moe(&m, d->stream);
    }
}
