/* Rank group, barrier, memory and collectives of the host backends. Each function runs on the
 * calling rank's thread. */
#include "kernels/host.h"

#include "kernels/kv_hash.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

void host_barrier(Dev *d) {
    HostGroup *g = d->group;
    if (g->n_ranks == 1)
        return;
    uint32_t round = atomic_load_explicit(&g->round, memory_order_acquire);
    if (atomic_fetch_add_explicit(&g->arrived, 1, memory_order_acq_rel) + 1 ==
        (uint32_t)g->n_ranks) {
        atomic_store_explicit(&g->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&g->round, round + 1, memory_order_release);
        futex_wake_all(&g->round);
        return;
    }
    for (int i = 0; i < g->spin; i++) {
        if (atomic_load_explicit(&g->round, memory_order_acquire) != round)
            return;
        __builtin_ia32_pause();
    }
    while (atomic_load_explicit(&g->round, memory_order_acquire) == round)
        futex_wait(&g->round, round);
}

/* ---- life ---- */

static Dev *dev_new(const Ops *ops, const DevConf *conf, HostGroup *g, int rank) {
    Dev *d = xcalloc(1, sizeof *d);
    size_t pages = (size_t)(conf->max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    d->ops = ops;
    d->conf = *conf;
    d->group = g;
    d->rank = rank;
    d->token = xcalloc((size_t)conf->max_rows, sizeof(int32_t));
    d->pos = xcalloc((size_t)conf->max_rows, sizeof(int32_t));
    d->seq = xcalloc((size_t)conf->max_rows, sizeof(int32_t));
    d->page_table = xcalloc((size_t)conf->max_seqs * pages, sizeof(int32_t));
    d->batch.page_stride = (int)pages;
    return d;
}

int host_open(const Ops *ops, const DevConf *conf, Dev **dev, Err *err) {
    if (conf->n_ranks < 1 || conf->n_ranks > 64 || conf->max_rows < 1 || conf->max_seqs < 1 ||
        conf->max_context < 1)
        return err_set(err, E_INVAL,
                       "device: ranks 1..64, rows, sequences and context must be positive");
    HostGroup *g = xcalloc(1, sizeof *g);
    g->n_ranks = g->n_open = conf->n_ranks;
    g->spin = sysconf(_SC_NPROCESSORS_ONLN) > conf->n_ranks ? 4000 : 0;
    for (int r = 0; r < conf->n_ranks; r++)
        dev[r] = dev_new(ops, conf, g, r);
    return 0;
}

static void host_close(Dev **dev, int n_ranks) {
    for (int r = 0; r < n_ranks; r++) {
        Dev *d = dev[r];
        if (!d)
            continue;
        if (--d->group->n_open == 0) {
            free(d->group->stage[0]);
            free(d->group->stage[1]);
            free(d->group);
        }
        free(d->token);
        free(d->pos);
        free(d->seq);
        free(d->page_table);
        free(d->scratch);
        free(d);
        dev[r] = NULL;
    }
}

/* ---- memory ---- */

static int host_mat_load(Dev *d, const MatView *view, Mat **out, Err *err) {
    (void)d;
    if (!view->data || view->rows < 1 || view->cols < 1)
        return err_set(err, E_INVAL, "matrix without data");
    Mat *m = xcalloc(1, sizeof *m);
    m->view = *view;
    *out = m;
    return 0;
}

static void host_mat_free(Dev *d, Mat *m) {
    (void)d;
    free(m);
}

static MatView *copy_views(const MatView *v, int n) {
    MatView *c = xcalloc((size_t)n, sizeof *c);
    memcpy(c, v, (size_t)n * sizeof *c);
    return c;
}

static int host_experts_load(Dev *d, const ExpertsView *view, Experts **out, Err *err) {
    (void)d;
    (void)err;
    Experts *e = xcalloc(1, sizeof *e);
    e->n_experts = view->n_experts;
    e->gate = copy_views(view->gate, view->n_experts);
    e->up = copy_views(view->up, view->n_experts);
    e->down = copy_views(view->down, view->n_experts);
    *out = e;
    return 0;
}

static void host_experts_free(Dev *d, Experts *e) {
    (void)d;
    if (!e)
        return;
    free(e->gate);
    free(e->up);
    free(e->down);
    free(e);
}

static int host_tensor_new(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err) {
    (void)d;
    if (rows < 1 || cols < 1 || (dtype != DT_F32 && dtype != DT_I32))
        return err_set(err, E_INVAL, "tensor [%d, %d] of %s", rows, cols, dtype_name(dtype));
    *out = (Tensor){xaligned((size_t)rows * (size_t)cols * 4), dtype, rows, cols, cols, false};
    return 0;
}

/* Rank 0 owns the memory: the others borrow it and never free it before rank 0 does, since a group
 * closes as a whole. */
static int host_tensor_shared(Dev *d, Dtype dtype, int rows, int cols, Tensor *out, Err *err) {
    int rc = 0;
    if (d->rank == 0)
        rc = host_tensor_new(d, dtype, rows, cols, &d->group->shared, err);
    host_barrier(d);
    if (d->rank != 0 && !d->group->shared.at)
        rc = err_set(err, E_INVAL, "shared tensor [%d, %d]", rows, cols);
    Tensor t = d->group->shared;
    t.borrowed = d->rank != 0;
    host_barrier(d);
    if (d->rank == 0)
        d->group->shared = (Tensor){0};
    host_barrier(d);
    if (rc == 0)
        *out = t;
    return rc;
}

static void host_tensor_free(Dev *d, Tensor *t) {
    (void)d;
    if (!t->borrowed)
        free(t->at);
    *t = (Tensor){0};
}

static void host_upload(Dev *d, Tensor *t, const void *host) {
    (void)d;
    for (int r = 0; r < t->rows; r++)
        memcpy(host_row(*t, r), (const char *)host + (size_t)r * (size_t)t->cols * 4,
               (size_t)t->cols * 4);
}

static void host_download(Dev *d, const Tensor *t, void *host) {
    (void)d;
    for (int r = 0; r < t->rows; r++)
        memcpy((char *)host + (size_t)r * (size_t)t->cols * 4, host_row(*t, r),
               (size_t)t->cols * 4);
}

static void host_clear(Dev *d, Tensor x) {
    (void)d;
    for (int r = 0; r < x.rows; r++)
        memset(host_row(x, r), 0, (size_t)x.cols * 4);
}

static int host_pool_new(Dev *d, uint64_t bytes, void **out, Err *err) {
    (void)d;
    (void)err;
    *out = xaligned(bytes);
    return 0;
}

static void host_pool_enter(const Dev *d) {
    (void)d;
}

static void host_pool_copy(const Dev *d, void *to, const void *from, uint64_t bytes) {
    (void)d;
    memmove(to, from, bytes);
}

/* Calls have done their work when they return. */
static void host_reach(Dev *d, int number) {
    (void)d, (void)number;
}

static void host_kv_hash(Dev *d, const int *index_slot, const int32_t *page, const int32_t *n_rows,
                         int n, uint64_t *hash) {
    for (int i = 0; i < n; i++)
        hash[i] = kv_hash_page(&d->kv, index_slot, d->kv_pool, page[i], n_rows[i]);
}

static void host_pool_free(Dev *d, void *pool) {
    (void)d;
    free(pool);
}

static void host_kv_bind(Dev *d, const KvLayout *layout, void *pool) {
    d->kv = *layout;
    d->kv_pool = pool;
}

static void host_batch_set(Dev *d, const OpsBatch *b) {
    CHECK(b->n_tok >= 1 && b->n_tok <= d->conf.max_rows);
    CHECK(b->n_seq >= 1 && b->n_seq <= d->conf.max_seqs);
    int stride = d->batch.page_stride;
    d->rope.n_tok = 0;
    int used = b->page_stride < stride ? b->page_stride : stride;
    memcpy(d->token, b->token, (size_t)b->n_tok * sizeof(int32_t));
    memcpy(d->pos, b->pos, (size_t)b->n_tok * sizeof(int32_t));
    memcpy(d->seq, b->seq, (size_t)b->n_tok * sizeof(int32_t));
    for (int s = 0; s < b->n_seq; s++)
        memcpy(d->page_table + (size_t)s * (size_t)stride,
               b->page_table + (size_t)s * (size_t)b->page_stride, (size_t)used * sizeof(int32_t));
    d->batch = (OpsBatch){b->n_tok, b->n_seq, d->token, d->pos, d->seq, d->page_table, stride};
}

/* ---- collectives ---- */

/* One rank stores, the barrier publishes: the pool is one memory for all ranks of a host. */
static void host_kv_write(Dev *d, int slot, Tensor kv, int index_slot, Tensor key) {
    for (int t = 0; t < d->batch.n_tok && d->rank == 0; t++) {
        int pos = d->pos[t];
        int64_t page = host_page(d, d->seq[t], pos);
        host_kv_put_latent(d, slot, page, pos % KV_PAGE_TOKENS, host_row(kv, t));
        if (index_slot >= 0)
            host_kv_put_key(d, index_slot, page, pos % KV_PAGE_TOKENS, host_row(key, t));
    }
    host_barrier(d);
}

/* Grows both stages; every rank calls it with the same size, so that all take the same branch. */
static void stage_reserve(Dev *d, size_t numbers) {
    HostGroup *g = d->group;
    if (numbers <= g->stage_cap)
        return;
    host_barrier(d);
    if (d->rank == 0) {
        for (int i = 0; i < 2; i++) {
            free(g->stage[i]);
            g->stage[i] = xaligned((size_t)g->n_ranks * numbers * sizeof(float));
        }
        g->stage_cap = numbers;
    }
    host_barrier(d);
}

/* Each rank publishes its part, then adds up all parts in rank order. The stages alternate: a rank
 * can overwrite a stage only after the barrier of the call in between, when nobody reads it any
 * more. */
static void host_all_reduce(Dev *d, Tensor x) {
    HostGroup *g = d->group;
    if (g->n_ranks == 1)
        return;
    size_t cols = (size_t)x.cols, numbers = (size_t)x.rows * cols;
    stage_reserve(d, numbers);
    float *stage = g->stage[d->n_reduced++ & 1];
    float *mine = stage + (size_t)d->rank * g->stage_cap;
    for (int r = 0; r < x.rows; r++)
        memcpy(mine + (size_t)r * cols, host_row(x, r), cols * sizeof(float));
    host_barrier(d);
    for (int r = 0; r < x.rows; r++) {
        float *out = host_row(x, r);
        memcpy(out, stage + (size_t)r * cols, cols * sizeof(float));
        for (int k = 1; k < g->n_ranks; k++) {
            const float *part = stage + (size_t)k * g->stage_cap + (size_t)r * cols;
            for (size_t c = 0; c < cols; c++)
                out[c] += part[c];
        }
    }
}

static void host_gather_cols(Dev *d, Tensor out, Tensor part) {
    for (int r = 0; r < part.rows; r++)
        memcpy(host_row(out, r) + (size_t)d->rank * (size_t)part.cols, host_row(part, r),
               (size_t)part.cols * sizeof(float));
    host_barrier(d);
}

void host_ops_fill(Ops *ops) {
    ops->close = host_close;
    ops->mat_load = host_mat_load;
    ops->mat_free = host_mat_free;
    ops->experts_load = host_experts_load;
    ops->experts_free = host_experts_free;
    ops->tensor_new = host_tensor_new;
    ops->tensor_shared = host_tensor_shared;
    ops->tensor_free = host_tensor_free;
    ops->upload = host_upload;
    ops->download = host_download;
    ops->clear = host_clear;
    ops->pool_new = host_pool_new;
    ops->pool_free = host_pool_free;
    ops->pool_enter = host_pool_enter;
    ops->pool_copy = host_pool_copy;
    ops->mark = ops->reach = host_reach;
    ops->kv_hash = host_kv_hash;
    ops->kv_bind = host_kv_bind;
    ops->batch_set = host_batch_set;
    ops->kv_write = host_kv_write;
    ops->all_reduce = host_all_reduce;
    ops->gather_cols = host_gather_cols;
}
