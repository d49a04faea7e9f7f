/* Memory of a rank's device: allocation, workspace, staging, tensors, matrices, the pool, the
 * current batch. Runs on the rank's thread. */
#include "kernels/cuda/cuda.h"
#include "kernels/kv_hash.h"

#include <stdlib.h>
#include <string.h>

enum { HASH_PAGES = 4096 }; /* at a time */

static double gib(size_t bytes) {
    return (double)bytes / (double)(1 << 30);
}

int cuda_alloc(Dev *d, size_t bytes, const char *what, void **out, Err *err) {
    size_t available = 0, total = 0;
    void *at = NULL;
    cuda_enter(d);
    cudaError_t rc = cudaMalloc(&at, bytes);
    if (rc == cudaSuccess) {
        *out = at;
        return 0;
    }
    if (rc != cudaErrorMemoryAllocation)
        cuda_must(rc, what);
    (void)cudaGetLastError(); /* running out of memory is not sticky */
    cuda_must(cudaMemGetInfo(&available, &total), "asking for free memory");
    return err_set(err, E_NOMEM, "GPU %d: %s needs %.3f GiB, %.3f of %.3f GiB are free", d->device,
                   what, gib(bytes), gib(available), gib(total));
}

void cuda_free(Dev *d, void *at) {
    if (!at)
        return;
    cuda_enter(d);
    cuda_must(cudaFree(at), "giving memory back");
}

void *cuda_work(Dev *d, CudaUse use, size_t bytes) {
    CudaBuf *b = &d->work[use];
    Err err = {0};
    if (bytes <= b->bytes)
        return b->at;
    cuda_finish(d);
    cuda_free(d, b->at);
    *b = (CudaBuf){0};
    if (cuda_alloc(d, bytes, "workspace", &b->at, &err))
        cuda_die("%s", err.text);
    b->bytes = bytes;
    cuda_must(cudaMemsetAsync(b->at, 0, bytes, d->stream), "clearing workspace");
    return b->at;
}

/* ---- staging ---- */

/* The next pinned buffer, free to write. */
static CudaPinned *stage_next(Dev *d) {
    CudaPinned *p = &d->stage[d->n_staged++ & 1];
    cuda_wait_event(p->free);
    return p;
}

static void copy_rows(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes,
                      int rows) {
    if (to_pitch == bytes && from_pitch == bytes) {
        memcpy(to, from, bytes * (size_t)rows);
        return;
    }
    for (int r = 0; r < rows; r++)
        memcpy((char *)to + (size_t)r * to_pitch, (const char *)from + (size_t)r * from_pitch,
               bytes);
}

const uint8_t *cuda_stage(Dev *d, const void *host, size_t pitch, size_t row_bytes, int rows) {
    size_t bytes = row_bytes * (size_t)rows;
    CHECK(bytes <= CUDA_STAGE_BYTES);
    cuda_enter(d);
    uint8_t *to = d->stage_dev[d->n_staged & 1];
    CudaPinned *p = stage_next(d);
    copy_rows(p->at, row_bytes, host, pitch, row_bytes, rows);
    cuda_must(cudaMemcpyAsync(to, p->at, bytes, cudaMemcpyHostToDevice, d->stream), "staging");
    cuda_must(cudaEventRecord(p->free, d->stream), "staging");
    return to;
}

void cuda_put(Dev *d, void *to, const void *from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += CUDA_STAGE_BYTES) {
        size_t n = bytes - at < CUDA_STAGE_BYTES ? bytes - at : CUDA_STAGE_BYTES;
        const uint8_t *p = cuda_stage(d, (const char *)from + at, n, n, 1);
        cuda_must(cudaMemcpyAsync((char *)to + at, p, n, cudaMemcpyDeviceToDevice, d->stream),
                  "copying");
    }
}

/* ---- tensors ---- */

int cuda_tensor_new(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err) {
    void *at;
    if (rows < 1 || cols < 1 || (dtype != DT_F32 && dtype != DT_I32))
        return err_set(err, E_INVAL, "tensor [%d, %d] of %s", rows, cols, dtype_name(dtype));
    int rc = cuda_alloc(d, (size_t)rows * (size_t)cols * 4, "a tensor", &at, err);
    if (rc == 0)
        *out = (Tensor){at, dtype, rows, cols, cols, false};
    return rc;
}

void cuda_tensor_free(Dev *d, Tensor *t) {
    cuda_finish(d);
    cuda_free(d, t->at);
    *t = (Tensor){0};
}

/* Rows of t that pass through a staging buffer at a time. */
static int rows_per_copy(const Tensor *t) {
    size_t row = (size_t)t->cols * 4;
    CHECK(row <= CUDA_STAGE_BYTES);
    return (int)(CUDA_STAGE_BYTES / row);
}

void cuda_upload(Dev *d, Tensor *t, const void *host) {
    size_t row = (size_t)t->cols * 4, pitch = (size_t)t->ld * 4;
    int most = rows_per_copy(t);
    cuda_enter(d);
    for (int r = 0; r < t->rows; r += most) {
        int n = t->rows - r < most ? t->rows - r : most;
        CudaPinned *p = stage_next(d);
        memcpy(p->at, (const char *)host + (size_t)r * row, (size_t)n * row);
        cuda_must(cudaMemcpy2DAsync((char *)t->at + (size_t)r * pitch, pitch, p->at, row, row,
                                    (size_t)n, cudaMemcpyHostToDevice, d->stream),
                  "upload");
        cuda_must(cudaEventRecord(p->free, d->stream), "upload");
    }
}

void cuda_download(Dev *d, const Tensor *t, void *host) {
    size_t row = (size_t)t->cols * 4, pitch = (size_t)t->ld * 4;
    int most = rows_per_copy(t);
    cuda_enter(d);
    for (int r = 0; r < t->rows; r += most) {
        int n = t->rows - r < most ? t->rows - r : most;
        CudaPinned *p = stage_next(d);
        cuda_must(cudaMemcpy2DAsync(p->at, row, (const char *)t->at + (size_t)r * pitch, pitch, row,
                                    (size_t)n, cudaMemcpyDeviceToHost, d->stream),
                  "download");
        cuda_finish(d);
        memcpy((char *)host + (size_t)r * row, p->at, (size_t)n * row);
    }
}

/* ---- matrices ---- */

static int check_view(const MatView *v, Err *err) {
    if (!v->data || v->rows < 1 || v->cols < 1)
        return err_set(err, E_INVAL, "matrix without data");
    if (v->dtype == DT_I32)
        return err_set(err, E_UNSUPPORTED, "a matrix of integers");
    if (v->dtype == DT_NVFP4 && (v->cols % NVFP4_GROUP || v->col0 % NVFP4_GROUP || !v->scale))
        return err_set(err, E_INVAL, "nvfp4: columns [%d, %d) are not whole groups of %d", v->col0,
                       v->col0 + v->cols, NVFP4_GROUP);
    if (dtype_row_bytes(v->dtype, v->cols) > CUDA_STAGE_BYTES / MAT_TILE)
        return err_set(err, E_LIMIT, "a matrix of %d columns", v->cols);
    return 0;
}

static CudaMat shape_of(const MatView *v) {
    CudaMat m = {.dtype = v->dtype, .rows = v->rows, .cols = v->cols, .scale2 = v->scale2};
    if (v->dtype == DT_F8E4M3 && v->scale) {
        m.row_pad = v->row0 % MAT_TILE;
        m.col_pad = v->col0 % MAT_BLOCK;
    }
    m.tiles = (m.row_pad + m.rows + 2 * MAT_TILE - 1) / (2 * MAT_TILE) * 2;
    m.blocks = (m.col_pad + m.cols + MAT_BLOCK - 1) / MAT_BLOCK;
    return m;
}

/* One scale for each tile and block; blocks of 128 rows hold whole tiles. */
static void put_scales(Dev *d, const CudaMat *m, const MatView *v) {
    size_t n = (size_t)m->tiles * (size_t)m->blocks;
    float *s = xmalloc(n * sizeof *s);
    int row0 = v->row0 - m->row_pad, col0 = v->col0 - m->col_pad;
    for (int t = 0; t < m->tiles; t++)
        for (int b = 0; b < m->blocks; b++) {
            bool used = t * MAT_TILE < m->row_pad + m->rows;
            size_t at = (size_t)((row0 + t * MAT_TILE) / F8_BLOCK) * (size_t)v->scale_cols +
                        (size_t)(col0 / F8_BLOCK + b);
            s[(size_t)t * (size_t)m->blocks + (size_t)b] = !used ? 0.0f
                                                           : v->scale
                                                               ? ((const float *)v->scale)[at]
                                                               : 1.0f;
        }
    cuda_put(d, m->scale, s, n * sizeof *s);
    free(s);
}

/* Rows pass through staging in chunks of whole tiles. */
static void put_rows(Dev *d, const CudaMat *m, const MatView *v) {
    size_t row_bytes = dtype_row_bytes(v->dtype, v->cols);
    int most = (int)(CUDA_STAGE_BYTES / row_bytes) / MAT_TILE * MAT_TILE;
    for (int r = 0; r < m->rows;) {
        int n = most - (m->row_pad + r) % MAT_TILE;
        n = n < m->rows - r ? n : m->rows - r;
        CudaMatPack p = {.to = *m, .row_bytes = row_bytes, .row = r, .n = n};
        p.raw = cuda_stage(d, v->data + (size_t)r * v->row_bytes, v->row_bytes, row_bytes, n);
        if (v->dtype == DT_NVFP4) {
            const uint8_t *scale = (const uint8_t *)v->scale +
                                   (size_t)(v->row0 + r) * (size_t)v->scale_cols +
                                   v->col0 / NVFP4_GROUP;
            p.group_scale =
                cuda_stage(d, scale, (size_t)v->scale_cols, (size_t)(v->cols / NVFP4_GROUP), n);
        }
        cuda_mat_pack(&p, d->stream);
        r += n;
    }
}

int cuda_mat_load(Dev *d, const MatView *v, Mat **out, Err *err) {
    int rc = check_view(v, err);
    if (rc)
        return rc;
    CudaMat m = shape_of(v);
    void *at;
    size_t places = (size_t)m.tiles * (size_t)m.blocks;
    rc = cuda_alloc(d, places * (size_t)mat_block_bytes(m.dtype), "a matrix", &at, err);
    if (rc)
        return rc;
    m.data = at;
    if (m.dtype == DT_F8E4M3) {
        rc = cuda_alloc(d, places * sizeof(float), "scales", &at, err);
        if (rc) {
            cuda_free(d, m.data);
            return rc;
        }
        m.scale = at;
        put_scales(d, &m, v);
    }
    put_rows(d, &m, v);
    cuda_finish(d); /* kernels may fetch weights before they wait for the kernel before them */
    *out = xmalloc(sizeof **out);
    (*out)->m = m;
    return 0;
}

void cuda_mat_free(Dev *d, Mat *m) {
    if (!m)
        return;
    cuda_finish(d);
    cuda_free(d, m->m.data);
    cuda_free(d, m->m.scale);
    free(m);
}

/* ---- the pool ---- */

int cuda_pool_new(Dev *d, uint64_t bytes, void **out, Err *err) {
    int rc = cuda_alloc(d, bytes, "the KV pool", out, err);
    if (rc)
        return rc;
    cuda_must(cudaMemsetAsync(*out, 0, bytes, d->stream), "clearing the pool");
    cuda_finish(d);
    return 0;
}

void cuda_pool_free(Dev *d, void *pool) {
    if (!pool)
        return;
    cuda_finish(d);
    cuda_free(d, pool);
}

void cuda_kv_bind(Dev *d, const KvLayout *layout, void *pool) {
    struct cudaPointerAttributes a;
    cuda_enter(d);
    cuda_must(cudaPointerGetAttributes(&a, pool), "looking at the pool");
    if (a.type != cudaMemoryTypeDevice)
        cuda_die("the KV pool is not in GPU memory");
    d->kv = *layout;
    d->pool = pool;
}

void cuda_pool_enter(const Dev *d) {
    cuda_enter(d);
}

/* Within the pool the copy alone may return before it is done. */
void cuda_pool_copy(const Dev *d, void *to, const void *from, uint64_t bytes) {
    cuda_enter(d);
    cuda_must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copying the pool");
    cuda_must(cudaStreamSynchronize(cudaStreamLegacy), "copying the pool");
}

/* Sums of up to HASH_PAGES pages; see kv_hash.h. */
static void hash_some(Dev *d, const int *index_slot, const int32_t *page, const int32_t *n_rows,
                      int n, uint64_t *hash) {
    size_t slots = (size_t)d->kv.n_slots, pages = (size_t)n, ints = slots + 2 * pages;
    int32_t *all = xmalloc(ints * sizeof *all);
    memcpy(all, index_slot, slots * sizeof *all);
    memcpy(all + slots, page, pages * sizeof *all);
    memcpy(all + slots + pages, n_rows, pages * sizeof *all);
    const int32_t *on = (const int32_t *)cuda_stage(d, all, 0, ints * sizeof *all, 1);
    free(all);
    void *sum = cuda_work(d, CUDA_WORK_HASH, HASH_PAGES * sizeof *hash);
    Tensor sums = {.at = sum, .dtype = DT_I32, .rows = 1, .cols = 2 * n, .ld = 2 * n};
    CudaPageSums s = {.layout = d->kv,
                      .pool = d->pool,
                      .index_slot = on,
                      .page = on + slots,
                      .n_rows = on + slots + pages,
                      .n = n,
                      .sum = sum};
    cuda_must(cudaMemsetAsync(sum, 0, pages * sizeof *hash, d->stream), "hashing");
    cuda_page_sums(&s, d->stream);
    cuda_download(d, &sums, hash);
    for (int i = 0; i < n; i++)
        hash[i] = kv_hash_end(hash[i], n_rows[i]);
}

void cuda_kv_hash(Dev *d, const int *index_slot, const int32_t *page, const int32_t *n_rows, int n,
                  uint64_t *hash) {
    cuda_enter(d);
    for (int i = 0; i < n; i += HASH_PAGES) {
        int most = n - i < HASH_PAGES ? n - i : HASH_PAGES;
        hash_some(d, index_slot, page + i, n_rows + i, most, hash + i);
    }
}

CudaPages cuda_latent_pages(const Dev *d, int slot) {
    return (CudaPages){d->pool + kv_latent_page_offset(&d->kv, slot, 0),
                       kv_latent_page_bytes(&d->kv), d->kv.dtype};
}

CudaPages cuda_key_pages(const Dev *d, int index_slot) {
    return (CudaPages){d->pool + kv_index_page_offset(&d->kv, index_slot, 0),
                       kv_index_page_bytes(&d->kv), d->kv.dtype};
}

/* ---- the batch ---- */

void cuda_batch_set(Dev *d, const OpsBatch *b) {
    size_t n = (size_t)b->n_tok, max = (size_t)d->conf.max_rows,
           stride = (size_t)d->rows.page_stride;
    CHECK(b->n_tok >= 1 && b->n_tok <= d->conf.max_rows);
    CHECK(b->n_seq >= 1 && b->n_seq <= d->conf.max_seqs);
    cuda_enter(d);
    d->rows.rows = b->n_tok;
    d->n_seq = b->n_seq;
    d->max_pos = 0;
    d->rope_valid = false;
    for (int i = 0; i < b->n_tok; i++)
        d->max_pos = b->pos[i] > d->max_pos ? b->pos[i] : d->max_pos;
    CHECK(d->max_pos < d->conf.max_context);
    size_t pages = (size_t)d->max_pos / KV_PAGE_TOKENS + 1, width = pages * sizeof(int32_t);
    CHECK(pages <= (size_t)b->page_stride);

    CudaPinned *p = &d->ring[d->n_batches++ % CUDA_RING];
    cuda_wait_event(p->free);
    int32_t *host = p->at, *table = host + 3 * n;
    memcpy(host, b->token, n * sizeof *host);
    memcpy(host + n, b->pos, n * sizeof *host);
    memcpy(host + 2 * n, b->seq, n * sizeof *host);
    copy_rows(table, width, b->page_table, (size_t)b->page_stride * sizeof(int32_t), width,
              b->n_seq);
    cuda_must(cudaMemcpy2DAsync(d->token, max * sizeof *host, host, n * sizeof *host,
                                n * sizeof *host, 3, cudaMemcpyHostToDevice, d->stream),
              "the batch");
    cuda_must(cudaMemcpy2DAsync(d->page_table, stride * sizeof *host, table, width, width,
                                (size_t)b->n_seq, cudaMemcpyHostToDevice, d->stream),
              "the batch");
    cuda_must(cudaEventRecord(p->free, d->stream), "the batch");
}
