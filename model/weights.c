/* A checkpoint directory: maps its files, collects their tensors, finds them by name. Opened on one
 * thread, then read-only. */
#include "model/weights.h"

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
    uint64_t fingerprint;
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
    if (strchr(name, '/') || !strcmp(name, "..") ||
        snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return err_set(err, E_FORMAT,
                       "model.safetensors.index.json: file name \"%.100s\": expected a plain name",
                       name);
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

/* Opens every file that the index names. Files are few, so a linear search per tensor stays cheap
 * next to reading their headers. */
static int open_shards(Weights *w, const char *dir, const json_t *map, Err *err) {
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)map, name, file) {
        if (!json_is_string(file))
            return err_set(err, E_FORMAT,
                           "model.safetensors.index.json: %.100s: expected a file name", name);
        if (find_file(w, json_string_value(file)) < 0) {
            int rc = add_file(w, dir, json_string_value(file), err);
            if (rc)
                return rc;
        }
    }
    return 0;
}

/* Every tensor of the index stands where the index says, and the files hold no others. */
static int check_index(const Weights *w, const json_t *map, Err *err) {
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)map, name, file) {
        const Entry *e = find_entry(w, name);
        if (!e || strcmp(w->file[e->file].name, json_string_value(file)))
            return err_set(err, E_MISMATCH, "model.safetensors.index.json: %.100s is not in %s",
                           name, json_string_value(file));
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
        return err_set(err, E_FORMAT, "%s: line %d: %s", path, je.line, je.text);
    const json_t *map = json_object_get(root, "weight_map");
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
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    if (access(path, F_OK) == 0)
        return open_indexed(w, dir, path, err);
    int rc = add_file(w, dir, "model.safetensors", err);
    return rc ? rc : sort_names(w, err);
}

/* ---- fingerprint ---- */

static void hash_tensor(XXH3_state_t *h, const WeightsTensor *t) {
    size_t n = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
    XXH3_64bits_update(h, t->name, strlen(t->name) + 1);
    XXH3_64bits_update(h, t->dtype, strlen(t->dtype) + 1);
    XXH3_64bits_update(h, t->dim, sizeof t->dim);
    XXH3_64bits_update(h, t->data, n);
    XXH3_64bits_update(h, t->data + t->bytes - n, n);
}

static uint64_t hash_all(const Weights *w) {
    XXH3_state_t *h = XXH3_createState();
    CHECK(h);
    XXH3_64bits_reset(h);
    XXH3_64bits_update(h, &w->shape,
                       sizeof w->shape); /* zeroed before it was filled: padding is equal */
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

const WeightsTensor *weights_find(const Weights *w, const char *name) {
    const Entry *e = find_entry(w, name);
    return e ? &e->t : NULL;
}

/* ---- matrices ---- */

static const WeightsTensor *find_suffixed(const Weights *w, const char *name, const char *suffix) {
    char full[600];
    if (snprintf(full, sizeof full, "%s%s", name, suffix) >= (int)sizeof full)
        return NULL;
    return weights_find(w, full);
}

static bool is(const WeightsTensor *t, const char *dtype, int n_dims, int64_t d0, int64_t d1) {
    return t && !strcmp(t->dtype, dtype) && t->n_dims == n_dims &&
           (n_dims < 1 || t->dim[0] == d0) && (n_dims < 2 || t->dim[1] == d1);
}

static int wrong(const char *name, const WeightsTensor *t, const char *dtype, int64_t rows,
                 int64_t cols, Err *err) {
    if (!t)
        return err_set(err, E_NOTFOUND, "%s: not in the checkpoint, expected %s [%lld, %lld]", name,
                       dtype, (long long)rows, (long long)cols);
    return err_set(
        err, E_MISMATCH, "%s: expected %s [%lld, %lld], found %s with %d dimensions [%lld, %lld]",
        name, dtype, (long long)rows, (long long)cols, t->dtype, t->n_dims,
        (long long)(t->n_dims > 0 ? t->dim[0] : 1), (long long)(t->n_dims > 1 ? t->dim[1] : 1));
}

static int with_f8_scale(const Weights *w, const char *name, MatView *v, Err *err) {
    int64_t sr = (v->rows + F8_BLOCK - 1) / F8_BLOCK, sc = (v->cols + F8_BLOCK - 1) / F8_BLOCK;
    const WeightsTensor *s = find_suffixed(w, name, ".weight_scale_inv");
    if (!is(s, "F32", 2, sr, sc))
        return wrong(name, s, "weight_scale_inv F32", sr, sc, err);
    v->scale = s->data;
    v->scale_cols = (int)sc;
    return 0;
}

static int with_nvfp4_scale(const Weights *w, const char *name, MatView *v, Err *err) {
    const WeightsTensor *s = find_suffixed(w, name, ".weight_scale"),
                        *s2 = find_suffixed(w, name, ".weight_scale_2");
    if (v->cols % NVFP4_GROUP)
        return err_set(err, E_UNSUPPORTED, "%s: %d columns do not fill groups of %d", name, v->cols,
                       NVFP4_GROUP);
    if (!is(s, "F8_E4M3", 2, v->rows, v->cols / NVFP4_GROUP))
        return wrong(name, s, "weight_scale F8_E4M3", v->rows, v->cols / NVFP4_GROUP, err);
    if (!is(s2, "F32", 0, 0, 0) && !is(s2, "F32", 1, 1, 0))
        return wrong(name, s2, "weight_scale_2 F32", 1, 1, err);
    v->scale = s->data;
    v->scale_cols = v->cols / NVFP4_GROUP;
    memcpy(&v->scale2, s2->data, 4);
    return 0;
}

int weights_matrix(const Weights *w, const char *name, int rows, int cols, MatView *out, Err *err) {
    const WeightsTensor *t = find_suffixed(w, name, ".weight");
    MatView v = {.rows = rows, .cols = cols};
    bool packed = is(t, "U8", 2, rows, cols / 2) && cols % 2 == 0;
    if (!packed && !is(t, "BF16", 2, rows, cols) && !is(t, "F32", 2, rows, cols) &&
        !is(t, "F8_E4M3", 2, rows, cols))
        return wrong(name, t, "weight BF16, F32, F8_E4M3 or packed U8", rows, cols, err);
    v.dtype = packed                      ? DT_NVFP4
              : !strcmp(t->dtype, "BF16") ? DT_BF16
              : !strcmp(t->dtype, "F32")  ? DT_F32
                                          : DT_F8E4M3;
    v.data = t->data;
    v.row_bytes = dtype_row_bytes(v.dtype, cols);
    int rc = v.dtype == DT_F8E4M3  ? with_f8_scale(w, name, &v, err)
             : v.dtype == DT_NVFP4 ? with_nvfp4_scale(w, name, &v, err)
                                   : 0;
    if (rc == 0)
        *out = v;
    return rc;
}

int weights_vector(const Weights *w, const char *name, int n, float *out, Err *err) {
    const WeightsTensor *t = weights_find(w, name);
    if (is(t, "F32", 1, n, 0)) {
        memcpy(out, t->data, (size_t)n * sizeof *out);
        return 0;
    }
    if (!is(t, "BF16", 1, n, 0))
        return wrong(name, t, "BF16 or F32", n, 1, err);
    for (int i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, t->data + 2 * i, 2);
        out[i] = bf16_to_f32(v);
    }
    return 0;
}
