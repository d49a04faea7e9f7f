/* See store_files.h. Compute threads are pinned to the physical cores of the node, one each; thread
 * 0 is the worker, which store_pin_caller pins. */
#include "expertd/store_files.h"

#include "base/topo.h"
#include "expertd/store_int.h"
#include "model/expert_file.h"

#include <xxhash.h>

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    READERS = 16,
    SPIN_US = 2000,     /* small calls follow each other within a step */
    SPIN_LARGE_US = 50, /* while small calls run inside of a large one they need its cores */
    READ_SLICES = 1024,
    /* Of the workspace: rows of a tile, bytes between rows, of a thread, of buffers rounded up. */
    PAD_ROWS = 16,
    PAD_BYTES = 64,
    THREAD_BYTES = 64 << 10,
    BUFFERS_BYTES = 16 << 20,
};

struct StoreFiles {
    const StoreConf *conf; /* the caller's */
    FilesHead head;
    int head_of;                        /* the layer whose file said so */
    ExpertFile *file[SHAPE_MAX_LAYERS]; /* only while loading */
    Topo *topo;
    NodeMem memory;
    uint64_t bytes;
    const uint8_t **expert; /* [n_layers, n_experts] slice, NULL: not held */
    int read_at;            /* where the next reading begins, an index into expert */
    IqRun *small, *large;   /* calls of at most STORE_SMALL_ROWS rows, and others */
};

static int n_units(const StoreFiles *f) {
    return iq_units(&f->head.geom) / f->conf->n_shards;
}

static size_t slice_bytes(const StoreFiles *f) {
    return (size_t)n_units(f) * iq_unit_bytes(&f->head.geom);
}

/* ---- what the files say ---- */

static int check_same(const StoreFiles *f, const ExpertHead *one, int layer, Err *err) {
    const FilesHead *h = &f->head;
    const char *what = one->model_id != h->model_id                        ? "model"
                       : memcmp(&one->geom, &h->geom, sizeof h->geom) != 0 ? "geometry"
                       : one->n_experts != h->n_experts                    ? "number of experts"
                       : one->n_layers != h->n_layers                      ? "number of layers"
                       : one->first_layer != h->first_layer                ? "first layer"
                                                                           : NULL;
    if (what)
        return err_set(err, E_MISMATCH, "layer %d is of another %s than layer %d", layer, what,
                       f->head_of);
    if (one->layer != layer)
        return err_set(err, E_MISMATCH, "the file of layer %d holds layer %d", layer, one->layer);
    return 0;
}

static int open_layer(StoreFiles *f, int layer, Err *err) {
    char path[4096];
    expert_file_path(path, sizeof path, f->conf->files, layer);
    int rc = expert_file_open(&f->file[layer], path, err);
    if (rc)
        return rc;
    const ExpertHead *one = expert_file_head(f->file[layer]);
    if (f->head.n_layers == 0) {
        f->head_of = layer;
        f->head = (FilesHead){one->geom,
                              one->n_experts,
                              one->n_active,
                              one->n_layers,
                              one->first_layer,
                              one->model_id,
                              0};
    }
    rc = check_same(f, one, layer, err);
    return rc ? err_wrap(err, "%s", path) : 0;
}

/* What the shards of a deployment must have in common. */
static uint64_t hash_files(const StoreFiles *f) {
    uint64_t hash[SHAPE_MAX_LAYERS] = {0};
    for (int l = 0; l < f->head.n_layers; l++)
        hash[l] = f->file[l] ? expert_file_head(f->file[l])->hash : 0;
    return XXH3_64bits(hash, sizeof hash);
}

/* The first file that is found says which layers have experts; none of them may be missing. */
static int open_all(StoreFiles *f, Err *err) {
    int layer = 0, rc = E_NOTFOUND;
    for (; layer < SHAPE_MAX_LAYERS && rc == E_NOTFOUND; layer++)
        rc = open_layer(f, layer, err);
    if (rc == E_NOTFOUND)
        return err_set(err, E_NOTFOUND, "%s: no expert files", f->conf->files);
    if (rc == 0 && f->head.n_layers > SHAPE_MAX_LAYERS)
        rc = err_set(err, E_UNSUPPORTED, "%s: %d layers, at most %d are supported", f->conf->files,
                     f->head.n_layers, SHAPE_MAX_LAYERS);
    for (layer = f->head.first_layer; rc == 0 && layer < f->head.n_layers; layer++)
        if (!f->file[layer])
            rc = open_layer(f, layer, err);
    if (rc == 0)
        f->head.hash = hash_files(f);
    return rc;
}

static int check_shards(const StoreFiles *f, Err *err) {
    int units = iq_units(&f->head.geom);
    if (units % f->conf->n_shards == 0)
        return 0;
    return err_set(err, E_UNSUPPORTED,
                   "%d shards: an expert of %d inner channels in groups of %d has %d units, which "
                   "do not divide into %d",
                   f->conf->n_shards, f->head.geom.inner, f->head.geom.group, units,
                   f->conf->n_shards);
}

static int decide_held(StoreFiles *f, bool **held, Err *err) {
    Shape s = {.n_layers = f->head.n_layers, .n_experts = f->head.n_experts};
    for (int l = 0; l < f->head.first_layer; l++)
        s.layer_dense[l] = true;
    int rc = store_decide_held(f->conf->device, &s, held, err);
    for (int i = 0; i < s.n_layers * s.n_experts && rc == 0; i++)
        f->bytes += (*held)[i] ? slice_bytes(f) : 0;
    return rc;
}

/* ---- loading ---- */

/* No less than what calls need beside the weights: rows of activations of both runs as codes,
 * scales, sums and numbers, a padded row for each place of a call (iq_run.h), and what a call
 * brings and takes home. */
uint64_t store_files_work_bytes(const StoreFiles *f) {
    const IqGeom *g = &f->head.geom;
    uint64_t hidden = (uint64_t)g->hidden, inner = (uint64_t)(n_units(f) * g->group),
             most = (uint64_t)f->conf->max_rows, k = SHAPE_MAX_TOPK_EXPERTS,
             small = most < STORE_SMALL_ROWS ? most : STORE_SMALL_ROWS,
             padded = 2 * small * k > most + PAD_ROWS ? 2 * small * k : most + PAD_ROWS,
             row = hidden + 5 * inner + 2 * PAD_BYTES + (hidden + inner) / (uint64_t)g->group * 8,
             run = padded * row + (uint64_t)f->conf->threads * THREAD_BYTES + BUFFERS_BYTES;
    return 2 * run + most * (hidden + k) * 2 * sizeof(float);
}

/* Before anything is read. Reserved pages have been taken and count no more. */
static int admit(const StoreFiles *f, Err *err) {
    char what[256];
    uint64_t left = node_mem_available("", f->conf->node, what, sizeof what),
             work = store_files_work_bytes(f), need = work + (f->memory.reserved ? 0 : f->bytes);
    double gib = 1u << 30;
    if (need <= left)
        return 0;
    return err_set(err, E_NOMEM,
                   "the slice has %.1f GiB (%d experts of %.2f MiB)%s and calls of %d rows need "
                   "%.1f GiB, %s has %.1f GiB left",
                   (double)f->bytes / gib, (int)(f->bytes / slice_bytes(f)),
                   (double)slice_bytes(f) / (1 << 20),
                   f->memory.reserved ? ", which is there in reserved pages," : "",
                   f->conf->max_rows, (double)work / gib, what, (double)left / gib);
}

typedef struct Load {
    StoreFiles *f;
    _Atomic int next; /* index into expert */
    _Atomic int rc;   /* of the first failure */
    Err err;          /* by who set rc */
} Load;

/* Reads slices straight into their place; the reading thread is the first to touch it. */
static void *load_thread(void *arg) {
    Load *l = arg;
    StoreFiles *f = l->f;
    int n = f->head.n_layers * f->head.n_experts, units = n_units(f), none = 0;
    for (int i; (i = atomic_fetch_add(&l->next, 1)) < n && !l->rc;) {
        Err err = {0};
        if (!f->expert[i])
            continue;
        int rc = expert_file_read(f->file[i / f->head.n_experts], i % f->head.n_experts,
                                  f->conf->shard * units, units, (void *)f->expert[i], &err);
        if (rc && atomic_compare_exchange_strong(&l->rc, &none, rc))
            l->err = err;
    }
    return NULL;
}

static int load_all(StoreFiles *f, const bool *held, Err *err) {
    int n = f->head.n_layers * f->head.n_experts, started = 0;
    const uint8_t *at = f->memory.at;
    f->expert = xcalloc((size_t)n, sizeof *f->expert);
    for (int i = 0; i < n; i++)
        if (held[i]) {
            f->expert[i] = at;
            at += slice_bytes(f);
        }
    Load l = {.f = f};
    pthread_t id[READERS];
    while (started < READERS - 1 && started < f->conf->threads - 1 &&
           pthread_create(&id[started], NULL, load_thread, &l) == 0)
        started++;
    load_thread(&l);
    for (int i = 0; i < started; i++)
        pthread_join(id[i], NULL);
    if (l.rc && err)
        *err = l.err;
    return l.rc;
}

static void close_files(StoreFiles *f) {
    for (int i = 0; i < SHAPE_MAX_LAYERS; i++) {
        expert_file_close(f->file[i]);
        f->file[i] = NULL;
    }
}

/* ---- threads ---- */

typedef struct PinTrial {
    const StoreFiles *f;
    int rc;
    Err err;
} PinTrial;

static void *try_pins(void *arg) {
    PinTrial *t = arg;
    for (int i = 0; i < t->f->conf->threads && t->rc == 0; i++)
        t->rc = topo_pin_core(t->f->topo, t->f->conf->node, i, &t->err);
    return NULL;
}

/* Whether the system lets threads be pinned, tried by one that ends. */
static int check_pins(const StoreFiles *f, Err *err) {
    PinTrial t = {.f = f};
    pthread_t id;
    int why = pthread_create(&id, NULL, try_pins, &t);
    if (why)
        return err_set(err, E_IO, "cannot start a thread: %s", strerror(why));
    pthread_join(id, NULL);
    if (t.rc && err)
        *err = t.err;
    return t.rc;
}

/* A thread that is not pinned would run somewhere else than where its memory is. */
static void on_thread(void *arg, int thread) {
    const StoreFiles *f = arg;
    CHECK(topo_pin_core(f->topo, f->conf->node, thread, NULL) == 0); /* check_pins could */
}

static int open_runs(StoreFiles *f, Err *err) {
    IqRunConf c = {.geom = f->head.geom,
                   .n_units = n_units(f),
                   .n_experts = f->head.n_experts,
                   .max_rows = f->conf->max_rows,
                   .max_k = SHAPE_MAX_TOPK_EXPERTS,
                   .threads = f->conf->threads,
                   .spin_us = SPIN_US,
                   .on_thread = f->conf->pin ? on_thread : NULL,
                   .arg = f};
    if (c.max_rows > STORE_SMALL_ROWS)
        c.max_rows = STORE_SMALL_ROWS;
    int rc = f->conf->pin ? check_pins(f, err) : 0;
    if (rc == 0)
        rc = iq_run_open(&f->small, &c, err);
    c.max_rows = f->conf->max_rows;
    c.spin_us = SPIN_LARGE_US;
    if (rc == 0 && c.max_rows > STORE_SMALL_ROWS)
        rc = iq_run_open(&f->large, &c, err);
    return rc;
}

/* ---- life ---- */

int store_files_open(StoreFiles **out, const StoreConf *conf, bool **held, Err *err) {
    StoreFiles *f = xcalloc(1, sizeof *f);
    bool *mine = NULL;
    f->conf = conf;
    int rc = topo_open(&f->topo, err);
    if (rc == 0)
        rc = open_all(f, err);
    if (rc == 0)
        rc = check_shards(f, err);
    if (rc == 0)
        rc = decide_held(f, &mine, err);
    if (rc == 0)
        rc = node_mem_new(&f->memory, f->bytes, conf->node, err);
    if (rc == 0)
        rc = admit(f, err);
    if (rc == 0)
        rc = load_all(f, mine, err);
    if (rc == 0 && conf->lock)
        rc = node_mem_lock(&f->memory, err);
    if (rc == 0)
        rc = open_runs(f, err);
    close_files(f);
    if (rc) {
        free(mine);
        store_files_close(f);
        return rc;
    }
    *held = mine;
    *out = f;
    return 0;
}

void store_files_close(StoreFiles *f) {
    if (!f)
        return;
    close_files(f);
    iq_run_close(f->small);
    iq_run_close(f->large);
    node_mem_free(&f->memory);
    free(f->expert);
    topo_close(f->topo);
    free(f);
}

const FilesHead *store_files_head(const StoreFiles *f) {
    return &f->head;
}

uint64_t store_files_bytes(const StoreFiles *f) {
    return f->bytes;
}

const NodeMem *store_files_memory(const StoreFiles *f) {
    return &f->memory;
}

uint64_t store_files_cache(const StoreFiles *f) {
    return topo_cache_bytes(f->topo, f->conf->node);
}

IqIsa store_files_isa(const StoreFiles *f) {
    return iq_run_isa(f->small);
}

/* ---- self-test ---- */

enum { TEST_ROWS = 8 }; /* enough for tiles */

static double largest_difference(const float *a, const float *b, int n) {
    double most = 0, top = 0;
    for (int i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        most = d > most || isnan(d) ? d : most;
        top = fabs((double)b[i]) > top ? fabs((double)b[i]) : top;
    }
    return top > 0 ? most / top : most;
}

int store_files_selftest(StoreFiles *f, Err *err) {
    const FilesHead *h = &f->head;
    int hidden = h->geom.hidden, first = 0;
    IqRunConf c = {.geom = h->geom,
                   .n_units = n_units(f),
                   .n_experts = h->n_experts,
                   .max_rows = TEST_ROWS,
                   .max_k = 1,
                   .threads = f->conf->threads,
                   .best = IQ_SCALAR};
    IqRun *plain;
    int rc = iq_run_open(&plain, &c, err);
    if (rc)
        return rc;
    while (!f->expert[first])
        first++;
    size_t n = (size_t)TEST_ROWS * (size_t)hidden;
    float *x = xcalloc(n * 3, sizeof *x), weight[TEST_ROWS];
    int32_t id[TEST_ROWS];
    for (size_t i = 0; i < n; i++)
        x[i] = sinf((float)i * 0.7f);
    for (int i = 0; i < TEST_ROWS; i++) {
        id[i] = first % h->n_experts;
        weight[i] = 1;
    }
    const uint8_t *const *layer = f->expert + first / h->n_experts * h->n_experts;
    int rows = f->conf->max_rows < TEST_ROWS ? f->conf->max_rows : TEST_ROWS;
    iq_run(plain, layer, rows, 1, x, id, weight, x + n, NULL, NULL);
    iq_run(f->small, layer, rows, 1, x, id, weight, x + 2 * n, NULL, NULL);
    double diff = largest_difference(x + 2 * n, x + n, rows * hidden);
    iq_run_close(plain);
    free(x);
    if (diff <= 0.01)
        return 0;
    return err_set(err, E_MISMATCH,
                   "the %s kernel differs from plain C by %.3g of the largest number: refusing to "
                   "serve",
                   iq_isa_name(store_files_isa(f)), diff);
}

double store_files_read(StoreFiles *f) {
    int n = f->head.n_layers * f->head.n_experts, begin = f->read_at,
        end = begin + READ_SLICES < n ? begin + READ_SLICES : n;
    f->read_at = end < n ? end : 0;
    return iq_run_read(f->small, f->expert + begin, end - begin);
}

StoreWork store_files_compute(StoreFiles *f, int layer, int n, int k, const float *x,
                              const int32_t *id, const float *weight, float *y,
                              void (*between)(void *arg), void *arg) {
    IqRun *run = n <= STORE_SMALL_ROWS ? f->small : f->large;
    IqWork w = iq_run(run, f->expert + (size_t)layer * (size_t)f->head.n_experts, n, k, x, id,
                      weight, y, between, arg);
    return (StoreWork){w.n_experts, w.bytes};
}
