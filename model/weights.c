/* A checkpoint directory: maps its files, collects their tensors, finds them by name. Opened on one
 * thread, then read-only. */
#include "model/weights.h"

#include "model/weights_id.h"

#include <jansson.h>
#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SAMPLE_BYTES = 4096 };

#define INDEX "model.safetensors.index.json"

typedef struct File {
    char *name;
    uint8_t *map;
    size_t bytes;
} File;

typedef struct Entry {
    WeightsTensor t; /* t.name is heap */
    int file;
} Entry;

struct Weights {
    Shape shape;
    File *file;
    int n_files;
    Entry *entry; /* sorted by name once open */
    int n_entries, cap_entries;
    uint64_t fingerprint, id;
};

/* ---- files ---- */

static int keep(void *ctx, const WeightsTensor *t, Err *err) {
    Weights *w = ctx;
    (void)err;
    if (w->n_entries == w->cap_entries) {
        w->cap_entries = w->cap_entries ? 2 * w->cap_entries : 1024;
        w->entry = xrealloc(w->entry, (size_t)w->cap_entries * sizeof *w->entry);
    }
    Entry *e = &w->entry[w->n_entries++];
    *e = (Entry){*t, w->n_files - 1};
    e->t.name = xstrdup(t->name);
    return 0;
}

static int map_file(File *f, const char *path, Err *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, E_IO, "cannot open %s: %s", path, strerror(errno));
    int rc = fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)
                 ? err_set(err, E_IO, "%s is not a file", path)
                 : 0;
    if (rc == 0 && st.st_size < 8)
        rc = err_set(err, E_FORMAT, "%s: %lld bytes: too short for a safetensors header", path,
                     (long long)st.st_size);
    if (rc == 0) {
        f->bytes = (size_t)st.st_size;
        f->map = mmap(NULL, f->bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (f->map == MAP_FAILED) {
            f->map = NULL;
            rc = err_set(err, E_IO, "cannot map %s: %s", path, strerror(errno));
        }
    }
    close(fd);
    return rc;
}

static int add_file(Weights *w, const char *dir, const char *name, Err *err) {
    char path[PATH_MAX];
    if (!*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
        return err_set(err, E_FORMAT, INDEX ": file \"%.100s\": expected a plain name", name);
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return err_set(err, E_LIMIT, INDEX ": file \"%.100s...\": name too long", name);
    w->file = xrealloc(w->file, (size_t)(w->n_files + 1) * sizeof *w->file);
    File *f = &w->file[w->n_files++];
    *f = (File){.name = xstrdup(name)};
    int rc = map_file(f, path, err);
    if (rc)
        return rc;
    rc = weights_parse(f->map, f->bytes, keep, w, err);
    return rc ? err_wrap(err, "%s", path) : 0;
}

static int find_file(const Weights *w, const char *name) {
    for (int i = 0; i < w->n_files; i++)
        if (!strcmp(w->file[i].name, name))
            return i;
    return -1;
}

/* ---- names ---- */

static int by_name(const void *a, const void *b) {
    return strcmp(((const Entry *)a)->t.name, ((const Entry *)b)->t.name);
}

static int sort_names(Weights *w, Err *err) {
    if (w->n_entries > 1)
        qsort(w->entry, (size_t)w->n_entries, sizeof *w->entry, by_name);
    for (int i = 1; i < w->n_entries; i++)
        if (!strcmp(w->entry[i - 1].t.name, w->entry[i].t.name))
            return err_set(err, E_FORMAT, "%s stands in both %s and %s", w->entry[i].t.name,
                           w->file[w->entry[i - 1].file].name, w->file[w->entry[i].file].name);
    return 0;
}

static const Entry *find_entry(const Weights *w, const char *name) {
    Entry key = {.t.name = name};
    return w->n_entries ? bsearch(&key, w->entry, (size_t)w->n_entries, sizeof *w->entry, by_name)
                        : NULL;
}

/* Opens every file that the index names, each once. Neighbours in the index mostly share a file. */
static int open_shards(Weights *w, const char *dir, json_t *map, Err *err) {
    const char *name, *last = NULL;
    json_t *file;
    json_object_foreach(map, name, file) {
        const char *f = json_string_value(file);
        if (!f)
            return err_set(err, E_FORMAT, INDEX ": %.100s: expected a file name", name);
        if (last && !strcmp(f, last))
            continue;
        int rc = find_file(w, f) < 0 ? add_file(w, dir, f, err) : 0;
        if (rc)
            return rc;
        last = f;
    }
    return 0;
}

/* Every tensor of the index stands where the index says, and the files hold no others. */
static int check_index(const Weights *w, json_t *map, Err *err) {
    const char *name;
    json_t *file;
    json_object_foreach(map, name, file) {
        const Entry *e = find_entry(w, name);
        if (!e || strcmp(w->file[e->file].name, json_string_value(file)))
            return err_set(err, E_MISMATCH, INDEX ": %.200s is not in %.100s", name,
                           json_string_value(file));
    }
    for (int i = 0; i < w->n_entries; i++)
        if (!json_object_get(map, w->entry[i].t.name))
            return err_set(err, E_MISMATCH, "%s: %s is not in the index",
                           w->file[w->entry[i].file].name, w->entry[i].t.name);
    return 0;
}

static int open_indexed(Weights *w, const char *dir, const char *path, Err *err) {
    json_error_t je;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return je.line > 0 ? err_set(err, E_FORMAT, "%s: line %d: %s", path, je.line, je.text)
                           : err_set(err, E_IO, "%s: %s", path, je.text);
    json_t *map = json_object_get(root, "weight_map");
    int rc = json_is_object(map)
                 ? open_shards(w, dir, map, err)
                 : err_set(err, E_FORMAT, "%s: weight_map: expected an object", path);
    if (rc == 0)
        rc = sort_names(w, err);
    if (rc == 0)
        rc = check_index(w, map, err);
    json_decref(root);
    return rc;
}

static int open_files(Weights *w, const char *dir, Err *err) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/" INDEX, dir);
    if (access(path, F_OK) == 0)
        return open_indexed(w, dir, path, err);
    int rc = add_file(w, dir, "model.safetensors", err);
    return rc ? rc : sort_names(w, err);
}

/* ---- fingerprint ---- */

/* Field by field: padding and the layout of the struct do not count. */
static void hash_shape(XXH3_state_t *h, const Shape *s) {
    const int32_t n[] = {
        s->n_layers,       s->n_mtp,       s->hidden,      s->vocab,     s->max_positions,
        s->n_heads,        s->q_lora,      s->kv_lora,     s->nope,      s->rope,
        s->v_dim,          s->dense_inner, s->moe_inner,   s->n_experts, s->n_active,
        s->n_shared,       s->norm_topk,   s->index_heads, s->index_dim, s->index_topk,
        s->n_index_layers, s->n_eos,
    };
    const float x[] = {s->eps, s->rope_theta, s->routed_scale};
    XXH3_64bits_update(h, n, sizeof n);
    XXH3_64bits_update(h, x, sizeof x);
    XXH3_64bits_update(h, s->eos, (size_t)s->n_eos * sizeof *s->eos);
    for (int i = 0; i < s->n_layers + s->n_mtp; i++) {
        const uint8_t layer[] = {s->layer_dense[i], s->layer_has_index[i]};
        XXH3_64bits_update(h, layer, sizeof layer);
    }
}

/* The bytes of one end of a tensor that the fingerprint reads. */
static size_t sample_bytes(const WeightsTensor *t) {
    return t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
}

/* Asks the system to read all samples ahead, so that storage works on many at a time. */
static void fetch_samples(const Weights *w) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < w->n_entries; i++) {
        const WeightsTensor *t = &w->entry[i].t;
        size_t n = sample_bytes(t);
        const uint8_t *at[] = {t->data, t->data + t->bytes - n};
        for (int k = 0; k < (t->bytes > SAMPLE_BYTES ? 2 : 1) && n > 0; k++) {
            size_t past = (uintptr_t)at[k] % page;
            madvise((void *)(at[k] - past), n + past, MADV_WILLNEED);
        }
    }
}

static void hash_tensor(XXH3_state_t *h, const WeightsTensor *t) {
    size_t n = sample_bytes(t);
    XXH3_64bits_update(h, t->name, strlen(t->name) + 1);
    XXH3_64bits_update(h, t->dtype, strlen(t->dtype) + 1);
    XXH3_64bits_update(h, &t->n_dims, sizeof t->n_dims);
    XXH3_64bits_update(h, t->dim, (size_t)t->n_dims * sizeof *t->dim);
    XXH3_64bits_update(h, t->data, n);
    XXH3_64bits_update(h, t->data + t->bytes - n, n);
}

/* Never 0. */
static uint64_t hash_all(const Weights *w) {
    XXH3_state_t *h = XXH3_createState();
    CHECK(h);
    XXH3_64bits_reset(h);
    hash_shape(h, &w->shape);
    fetch_samples(w);
    for (int i = 0; i < w->n_entries; i++)
        hash_tensor(h, &w->entry[i].t);
    uint64_t sum = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return sum ? sum : 1;
}

/* ---- life ---- */

int weights_open(Weights **out, const char *dir, Err *err) {
    char path[PATH_MAX];
    Weights *w = xcalloc(1, sizeof *w);
    if (strlen(dir) > PATH_MAX - 64) {
        free(w);
        return err_set(err, E_LIMIT, "model directory: path too long");
    }
    snprintf(path, sizeof path, "%s/config.json", dir);
    int rc = shape_load(&w->shape, path, err);
    if (rc == 0)
        rc = open_files(w, dir, err);
    if (rc) {
        weights_close(w);
        return rc;
    }
    w->fingerprint = hash_all(w);
    w->id = weights_id_hash(w);
    *out = w;
    return 0;
}

void weights_close(Weights *w) {
    if (!w)
        return;
    for (int i = 0; i < w->n_entries; i++)
        free((char *)w->entry[i].t.name);
    for (int i = 0; i < w->n_files; i++) {
        if (w->file[i].map)
            munmap(w->file[i].map, w->file[i].bytes);
        free(w->file[i].name);
    }
    free(w->entry);
    free(w->file);
    free(w);
}

const Shape *weights_shape(const Weights *w) {
    return &w->shape;
}

uint64_t weights_fingerprint(const Weights *w) {
    return w->fingerprint;
}

uint64_t weights_id(const Weights *w) {
    return w->id;
}

const WeightsTensor *weights_find(const Weights *w, const char *name) {
    const Entry *e = find_entry(w, name);
    return e ? &e->t : NULL;
}
