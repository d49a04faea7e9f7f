/* See runtime.h. */
#include "model/runtime.h"

#include "model/place.h"
#include "model/tok.h"

#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_PAGES = 1 << 24 }; /* as many as the option takes */

static const struct {
    const char *name;
    Dtype dtype;
} KV_DTYPES[] = {{"f32", DT_F32}, {"bf16", DT_BF16}, {"fp8", DT_F8E4M3}}; /* in order of choices */

/* ---- what is in the directory ---- */

static int hash_file(const char *path, uint64_t *out, Err *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, E_IO, "%s: %s", path, strerror(errno));
    int rc = 0;
    void *map = MAP_FAILED;
    if (fstat(fd, &st) || st.st_size < 1)
        rc = err_set(err, E_IO, "%s: empty or unreadable", path);
    else if ((map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0)) == MAP_FAILED)
        rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    close(fd);
    if (rc)
        return rc;
    *out = XXH3_64bits(map, (size_t)st.st_size);
    munmap(map, (size_t)st.st_size);
    return 0;
}

static int load_tokenizer(Runtime *r, const char *dir, Err *err) {
    char *path = xasprintf("%s/tokenizer.json", dir);
    Tok *tok = NULL;
    int rc = hash_file(path, &r->tokenizer_hash, err);
    if (rc == 0 && (rc = tok_open(&tok, path, err)) == 0) {
        r->n_tokens = tok_size(tok);
        if (r->n_tokens > r->shape->vocab)
            rc = err_set(err, E_MISMATCH,
                         "%s has %d tokens, config.json beside it has vocab_size %d", path,
                         r->n_tokens, r->shape->vocab);
    }
    tok_close(tok);
    free(path);
    return rc;
}

static int decide_context(Runtime *r, const EngineOpts *o, Err *err) {
    int most = r->shape->max_positions;
    r->max_context = o->max_context > 0 && o->max_context < most ? (int)o->max_context : most;
    if (o->max_context <= most)
        return 0;
    return err_set(err, E_INVAL, "[engine] max_context is %lld, the model has %d positions",
                   (long long)o->max_context, most);
}

/* ---- experts ---- */

static bool given(const char *option) {
    return option && *option;
}

static int decide_place(Runtime *r, const EngineOpts *o, Err *err) {
    RouteCount *recorded = NULL;
    PlaceConf c = {
        .strategy = (PlaceStrategy)o->strategy, .resident = o->resident, .file = o->placement};
    int rc = 0;
    if (c.strategy == PLACE_FREQUENCY && given(o->counts))
        rc = route_count_load(&recorded, o->counts, r->shape, r->model_id, err);
    uint64_t *counts = recorded ? route_count_copy(recorded) : NULL;
    c.counts = counts;
    if (rc == 0)
        rc = place_decide(&c, r->shape, &r->resident, err);
    free(counts);
    route_count_free(recorded);
    return rc ? err_wrap(err, "[experts]") : 0;
}

/* Experts that never leave: with an update, only those of layers that have all of them. */
static bool *decide_kept(const Runtime *r, bool update) {
    size_t n = (size_t)r->shape->n_experts;
    int layers = r->shape->n_layers + r->shape->n_mtp;
    bool *kept = xcalloc((size_t)layers * n, sizeof *kept);
    for (int l = 0; l < layers; l++) {
        const bool *now = r->resident + (size_t)l * n;
        if (!update || !memchr(now, false, n * sizeof *now))
            memcpy(kept + (size_t)l * n, now, n * sizeof *now);
    }
    return kept;
}

/* A record goes on from what its file has; that of another model is refused, and one that another
 * service writes, since each would write over what the other has counted. */
static int open_record(Runtime *r, const char *path, Err *err) {
    int rc = file_lock_take(&r->record_lock, path, err);
    if (rc == 0)
        rc = route_count_load(&r->counts, path, r->shape, r->model_id, err);
    if (rc == E_NOTFOUND) {
        r->counts = route_count_new(r->shape);
        rc = route_count_save(r->counts, path, r->model_id, err);
    }
    return rc ? err_wrap(err, "[experts] record") : 0;
}

int runtime_load(Runtime *out, const EngineOpts *o, Err *err) {
    Runtime r = {.kv_dtype = KV_DTYPES[o->kv_dtype].name};
    int rc = weights_open(&r.weights, o->dir, err);
    if (rc == 0) {
        r.shape = weights_shape(r.weights);
        r.fingerprint = weights_fingerprint(r.weights);
        r.model_id = weights_id(r.weights);
        rc = load_tokenizer(&r, o->dir, err);
    }
    if (rc == 0)
        rc = decide_context(&r, o, err);
    if (rc == 0)
        rc = decide_place(&r, o, err);
    if (rc == 0 && given(o->record))
        rc = open_record(&r, o->record, err);
    else if (rc == 0)
        r.counts = route_count_new(r.shape);
    if (rc) {
        runtime_close(&r);
        return rc;
    }
    r.kept = decide_kept(&r, o->update_ms > 0);
    r.n_remote = place_n_remote(r.shape, r.resident);
    *out = r;
    return 0;
}

/* ---- the engine ---- */

static int decide_pool(Runtime *r, const EngineOpts *o, Err *err) {
    r->layout = engine_kv_layout(r->engine);
    int64_t page = (int64_t)kv_page_total_bytes(&r->layout), need = kv_pages_of(r->max_context);
    r->layout.n_pages = o->pages > 0 ? o->pages : o->pool_bytes / page;
    if (r->layout.n_pages > MAX_PAGES)
        r->layout.n_pages = MAX_PAGES;
    if (r->layout.n_pages >= need)
        return 0;
    return err_set(err, E_INVAL,
                   "the KV pool has %lld pages (%lld bytes each), but one request of max_context "
                   "%d takes %lld: raise [engine] %s to at least %lld or lower max_context",
                   (long long)r->layout.n_pages, (long long)page, r->max_context, (long long)need,
                   o->pages > 0 ? "pages" : "pool_bytes",
                   (long long)(o->pages > 0 ? need : need * page));
}

int runtime_start(Runtime *r, const EngineOpts *o, int max_rows, int max_seqs,
                  const ExpertPort *port, Err *err) {
    EngineConf conf = {
        .backend = o->backend,
        .tp = (int)o->tp,
        .threads = (int)o->threads,
        .max_rows = max_rows,
        .max_seqs = max_seqs,
        .max_logits = max_seqs,
        .max_context = r->max_context,
        .kv_dtype = KV_DTYPES[o->kv_dtype].dtype,
        .resident = r->resident,
        .port = port,
        .counts = r->counts,
        .count_all = given(o->record),
    };
    int rc = engine_open(&r->engine, r->weights, &conf, err);
    if (rc == 0)
        rc = decide_pool(r, o, err);
    if (rc == 0)
        rc = engine_selftest(r->engine, err);
    return rc;
}

void runtime_close(Runtime *r) {
    if (r->pool)
        engine_pool_free(r->engine, r->pool);
    engine_close(r->engine);
    free(r->resident);
    free(r->kept);
    route_count_free(r->counts);
    file_lock_free(r->record_lock);
    weights_close(r->weights);
    *r = (Runtime){0};
}
