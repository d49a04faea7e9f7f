/* See files.h. */
#include "router/files.h"

#include <xxhash.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Appends the file's bytes. */
static int read_file(const char *path, Buf *out, Err *err) {
    char block[1 << 16];
    FILE *f = fopen(path, "rb");
    if (!f)
        return err_set(err, errno == ENOENT ? E_NOTFOUND : E_IO, "cannot open %s: %s", path,
                       strerror(errno));
    for (size_t n; (n = fread(block, 1, sizeof block, f)) > 0;)
        buf_put(out, block, n);
    int rc = ferror(f) ? err_set(err, E_IO, "cannot read %s", path) : 0;
    fclose(f);
    return rc;
}

static int read_tokenizer(Files *f, const char *dir, Err *err) {
    char *path = xasprintf("%s/tokenizer.json", dir);
    Buf text = {0};
    int rc = read_file(path, &text, err);
    if (rc == 0) {
        f->tokenizer_hash = XXH3_64bits(text.data ? text.data : "", text.len);
        rc = tok_parse(&f->tok, text.data ? text.data : "", text.len, err);
        if (rc)
            err_wrap(err, "%s", path);
    }
    if (rc == 0)
        f->think_end = tok_added_id(f->tok, "</think>");
    buf_done(&text);
    free(path);
    return rc;
}

static int add_eos(Files *f, const char *path, int64_t id, Err *err) {
    for (int i = 0; i < f->n_eos; i++)
        if (f->eos[i] == id)
            return 0;
    if (id < 0 || id >= tok_size(f->tok))
        return err_set(err, E_FORMAT, "%s: eos_token_id %lld is no token", path, (long long)id);
    if (f->n_eos == SHAPE_MAX_EOS)
        return err_set(err, E_LIMIT, "%s: more than %d end tokens", path, SHAPE_MAX_EOS);
    f->eos[f->n_eos++] = (int)id;
    return 0;
}

static int read_shape(Files *f, const char *dir, Err *err) {
    char *path = xasprintf("%s/config.json", dir);
    Shape shape;
    int rc = shape_load(&shape, path, err);
    if (rc == 0)
        f->max_positions = shape.max_positions;
    for (int i = 0; rc == 0 && i < shape.n_eos; i++)
        rc = add_eos(f, path, shape.eos[i], err);
    free(path);
    return rc;
}

static int read_real(const json_t *root, const char *path, const char *key, double min, double max,
                     float *out, Err *err) {
    const json_t *v = json_object_get(root, key);
    if (!v || json_is_null(v))
        return 0;
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= min && x <= max))
        return err_set(err, E_FORMAT, "%s: %s: expected a number from %g to %g", path, key, min,
                       max);
    *out = (float)x;
    return 0;
}

static int read_defaults(Files *f, const json_t *root, const char *path, Err *err) {
    int rc = read_real(root, path, "temperature", 0, 2, &f->temperature, err);
    if (rc == 0)
        rc = read_real(root, path, "top_p", 1e-6, 1, &f->top_p, err);
    const json_t *eos = json_object_get(root, "eos_token_id");
    if (rc == 0 && json_is_integer(eos))
        rc = add_eos(f, path, json_integer_value(eos), err);
    for (size_t i = 0; rc == 0 && i < json_array_size(eos); i++) {
        const json_t *id = json_array_get(eos, i);
        rc = json_is_integer(id)
                 ? add_eos(f, path, json_integer_value(id), err)
                 : err_set(err, E_FORMAT, "%s: eos_token_id: expected integers", path);
    }
    return rc;
}

static int read_generation(Files *f, const char *dir, Err *err) {
    char *path = xasprintf("%s/generation_config.json", dir);
    Buf text = {0};
    json_error_t at;
    int rc = read_file(path, &text, err);
    if (rc == 0) {
        json_t *root = json_loadb(text.data ? text.data : "", text.len, 0, &at);
        rc = json_is_object(root)
                 ? read_defaults(f, root, path, err)
                 : err_set(err, E_FORMAT, "%s: not a JSON object: %s", path, root ? "" : at.text);
        json_decref(root);
    } else if (rc == E_NOTFOUND) {
        rc = 0;
    }
    buf_done(&text);
    free(path);
    return rc;
}

int files_open(Files *out, const char *dir, Err *err) {
    Files f = {.temperature = 1, .top_p = 1};
    int rc = read_tokenizer(&f, dir, err);
    if (rc == 0)
        rc = read_shape(&f, dir, err);
    if (rc == 0)
        rc = read_generation(&f, dir, err);
    if (rc) {
        files_close(&f);
        return rc;
    }
    *out = f;
    return 0;
}

void files_close(Files *f) {
    tok_close(f->tok);
    f->tok = NULL;
}
