/* One safetensors file: 8 bytes of header length, a JSON header, then the data. Everything is taken
 * as hostile. Pure; any thread. */
#include "model/weights.h"

#include <jansson.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_MAX_BYTES = 256 << 20, NAME_MAX_BYTES = 512 };

typedef struct Kind {
    const char *name;
    int bytes;
} Kind;

static const Kind KINDS[] = {{"F64", 8},     {"F32", 4},  {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1},
                             {"F8_E5M2", 1}, {"I64", 8},  {"I32", 4}, {"I16", 2},  {"I8", 1},
                             {"U8", 1},      {"BOOL", 1}, {"U16", 2}, {"U32", 4},  {"U64", 8}};

static const Kind *find_kind(const char *name) {
    for (size_t i = 0; name && i < sizeof KINDS / sizeof *KINDS; i++)
        if (!strcmp(KINDS[i].name, name))
            return &KINDS[i];
    return NULL;
}

/* A JSON integer within [0, max]; -1 otherwise. */
static int64_t whole(const json_t *v, int64_t max) {
    int64_t n = json_is_integer(v) ? json_integer_value(v) : -1;
    return n > max ? -1 : n;
}

/* The bytes that dtype and shape need, at most max_bytes. */
static int read_dims(const json_t *shape, const Kind *kind, int64_t max_bytes, WeightsTensor *t,
                     int64_t *bytes, Err *err) {
    size_t n = json_array_size(shape);
    if (!json_is_array(shape) || n > 4)
        return err_set(err, E_FORMAT, "%s: shape: expected a list of at most 4 numbers", t->name);
    int64_t product = kind->bytes;
    t->n_dims = (int)n;
    for (size_t i = 0; i < n; i++) {
        t->dim[i] = whole(json_array_get(shape, i), max_bytes);
        if (t->dim[i] < 0 || (t->dim[i] > 0 && product > max_bytes / t->dim[i]))
            return err_set(err, E_FORMAT, "%s: shape: more than the file holds, or not a number",
                           t->name);
        product *= t->dim[i];
    }
    *bytes = product;
    return 0;
}

/* Fills t from its header entry; data_bytes is the size of the data part at `data`. */
static int read_tensor(const json_t *entry, const uint8_t *data, size_t data_offset,
                       int64_t data_bytes, WeightsTensor *t, Err *err) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    const Kind *kind = find_kind(json_string_value(json_object_get(entry, "dtype")));
    int64_t bytes = 0;
    if (strlen(t->name) > NAME_MAX_BYTES)
        return err_set(err, E_LIMIT, "%.100s...: name longer than %d bytes", t->name,
                       NAME_MAX_BYTES);
    if (!kind)
        return err_set(err, E_FORMAT,
                       "%s: dtype: expected BF16, F32, F8_E4M3, U8 or another known name", t->name);
    t->dtype = kind->name;
    int rc = read_dims(json_object_get(entry, "shape"), kind, data_bytes, t, &bytes, err);
    if (rc)
        return rc;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return err_set(err, E_FORMAT, "%s: data_offsets: expected two numbers", t->name);
    int64_t begin = whole(json_array_get(offsets, 0), data_bytes),
            end = whole(json_array_get(offsets, 1), data_bytes);
    if (begin < 0 || end < 0)
        return err_set(err, E_FORMAT, "%s: data_offsets: outside the file's %lld data bytes",
                       t->name, (long long)data_bytes);
    if (end < begin)
        return err_set(err, E_FORMAT, "%s: data_offsets: end %lld before begin %lld", t->name,
                       (long long)end, (long long)begin);
    if (end - begin != bytes)
        return err_set(err, E_FORMAT,
                       "%s: data_offsets span %lld bytes, but shape and dtype need %lld", t->name,
                       (long long)(end - begin), (long long)bytes);
    if ((data_offset + (uint64_t)begin) % (uint64_t)kind->bytes)
        return err_set(err, E_FORMAT, "%s: data_offsets: begin not aligned to %d bytes", t->name,
                       kind->bytes);
    t->data = data + begin;
    t->bytes = (size_t)bytes;
    return 0;
}

static int by_data(const void *a, const void *b) {
    const WeightsTensor *x = a, *y = b;
    return x->data < y->data ? -1 : x->data > y->data;
}

/* Leaves the tensors in the order of their data. Empty ones overlap with nothing. */
static int check_overlap(WeightsTensor *t, int n, Err *err) {
    const WeightsTensor *last = NULL;
    qsort(t, (size_t)n, sizeof *t, by_data);
    for (int i = 0; i < n; i++) {
        if (t[i].bytes == 0)
            continue;
        if (last && last->data + last->bytes > t[i].data)
            return err_set(err, E_FORMAT, "%s: data_offsets: overlaps with %s", t[i].name,
                           last->name);
        last = &t[i];
    }
    return 0;
}

static int read_all(json_t *root, const uint8_t *data, size_t data_offset, int64_t data_bytes,
                    WeightsTensor *t, int *n, Err *err) {
    const char *name;
    json_t *entry;
    json_object_foreach(root, name, entry) {
        if (!strcmp(name, "__metadata__"))
            continue;
        t[*n] = (WeightsTensor){.name = name};
        int rc = json_is_object(entry)
                     ? read_tensor(entry, data, data_offset, data_bytes, &t[*n], err)
                     : err_set(err, E_FORMAT, "%.100s: expected an object", name);
        if (rc)
            return rc;
        ++*n;
    }
    return check_overlap(t, *n, err);
}

int weights_parse(const uint8_t *base, size_t file_bytes,
                  int (*each)(void *ctx, const WeightsTensor *t, Err *err), void *ctx, Err *err) {
    uint64_t header;
    json_error_t je;
    if (file_bytes < 8)
        return err_set(err, E_FORMAT, "%zu bytes: too short for a safetensors header", file_bytes);
    memcpy(&header, base, 8);
    if (header > HEADER_MAX_BYTES || header > file_bytes - 8)
        return err_set(err, E_FORMAT,
                       "header length %llu: more than the file's %zu bytes or the limit of %d",
                       (unsigned long long)header, file_bytes, HEADER_MAX_BYTES);
    json_t *root = json_loadb((const char *)base + 8, (size_t)header, JSON_REJECT_DUPLICATES, &je);
    if (!json_is_object(root)) {
        json_decref(root);
        return err_set(err, E_FORMAT, "header: %s", root ? "expected an object" : je.text);
    }
    int n = 0;
    WeightsTensor *t = xcalloc(json_object_size(root) + 1, sizeof *t);
    int rc = read_all(root, base + 8 + header, 8 + (size_t)header,
                      (int64_t)(file_bytes - 8 - header), t, &n, err);
    for (int i = 0; i < n && rc == 0; i++)
        rc = each(ctx, &t[i], err);
    free(t);
    json_decref(root);
    return rc;
}
