/* See oracle.h. */
#include "tests/support/oracle.h"

#include "model/weights.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ORACLE_MAX_TENSORS = 512 };

struct Oracle {
    json_t *json;
    void *map;
    size_t bytes;
    WeightsTensor tensor[ORACLE_MAX_TENSORS];
    int n_tensors;
};

static int keep(void *ctx, const WeightsTensor *t, Err *err) {
    Oracle *o = ctx;
    if (o->n_tensors == ORACLE_MAX_TENSORS)
        return err_set(err, E_LIMIT, "more than %d tensors", ORACLE_MAX_TENSORS);
    o->tensor[o->n_tensors] = *t;
    o->tensor[o->n_tensors++].name = xstrdup(t->name);
    return 0;
}

static int map_tensors(Oracle *o, const char *path, Err *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        return err_set(err, E_IO, "cannot open %s: %m", path);
    o->bytes = (size_t)st.st_size;
    o->map = mmap(NULL, o->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (o->map == MAP_FAILED)
        return err_set(err, E_IO, "cannot map %s: %m", path);
    return weights_parse(o->map, o->bytes, keep, o, err);
}

int oracle_open(Oracle **out, const char *prefix, Err *err) {
    Oracle *o = xcalloc(1, sizeof *o);
    char path[1024];
    json_error_t je;
    snprintf(path, sizeof path, "%s.json", prefix);
    o->json = json_load_file(path, 0, &je);
    int rc = o->json ? 0 : err_set(err, E_FORMAT, "%s: %s", path, je.text);
    snprintf(path, sizeof path, "%s.safetensors", prefix);
    if (rc == 0)
        rc = map_tensors(o, path, err);
    if (rc) {
        oracle_close(o);
        return rc;
    }
    *out = o;
    return 0;
}

void oracle_close(Oracle *o) {
    if (!o)
        return;
    for (int i = 0; i < o->n_tensors; i++)
        free((char *)o->tensor[i].name);
    if (o->map && o->map != MAP_FAILED)
        munmap(o->map, o->bytes);
    json_decref(o->json);
    free(o);
}

int oracle_n_prompts(const Oracle *o) {
    return (int)json_array_size(json_object_get(o->json, "prompts"));
}

const json_t *oracle_prompt(const Oracle *o, int i) {
    return json_array_get(json_object_get(o->json, "prompts"), (size_t)i);
}

const char *oracle_name(const json_t *prompt) {
    return json_string_value(json_object_get(prompt, "name"));
}

int32_t *oracle_ints(const json_t *prompt, const char *key, int *n) {
    const json_t *a = json_object_get(prompt, key);
    *n = (int)json_array_size(a);
    int32_t *v = xcalloc((size_t)*n + 1, sizeof *v);
    for (int i = 0; i < *n; i++)
        v[i] = (int32_t)json_integer_value(json_array_get(a, (size_t)i));
    return v;
}

double *oracle_reals(const json_t *prompt, const char *key, int *n) {
    const json_t *a = json_object_get(prompt, key);
    *n = (int)json_array_size(a);
    double *v = xcalloc((size_t)*n + 1, sizeof *v);
    for (int i = 0; i < *n; i++)
        v[i] = json_number_value(json_array_get(a, (size_t)i));
    return v;
}

static const void *find(const Oracle *o, const char *prompt, const char *key, const char *dtype,
                        int64_t dim[3]) {
    char name[256];
    snprintf(name, sizeof name, "%s.%s", prompt, key);
    for (int i = 0; i < o->n_tensors; i++) {
        const WeightsTensor *t = &o->tensor[i];
        if (strcmp(t->name, name) || strcmp(t->dtype, dtype) || t->n_dims > 3)
            continue;
        dim[0] = dim[1] = dim[2] = 1;
        for (int d = 0; d < t->n_dims; d++)
            dim[3 - t->n_dims + d] = t->dim[d];
        return t->data;
    }
    return NULL;
}

const float *oracle_f32(const Oracle *o, const char *prompt, const char *key, int64_t dim[3]) {
    return find(o, prompt, key, "F32", dim);
}

const int32_t *oracle_i32(const Oracle *o, const char *prompt, const char *key, int64_t dim[3]) {
    return find(o, prompt, key, "I32", dim);
}
