/* See route_count.h. One writer, so a count is a relaxed load and store and never a locked
 * addition. */
#include "model/route_count.h"

#include <jansson.h>

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef _Atomic uint64_t Count;

struct RouteCount {
    Shape shape;
    Count tokens, pairs, remote;
    Count *count; /* [n_layers + n_mtp, n_experts] */
};

static void add(Count *c, uint64_t n) {
    uint64_t old = atomic_load_explicit(c, memory_order_relaxed);
    atomic_store_explicit(c, old + n, memory_order_relaxed);
}

static uint64_t get(const Count *c) {
    return atomic_load_explicit(c, memory_order_relaxed);
}

static int n_layers(const Shape *s) {
    return s->n_layers + s->n_mtp;
}

RouteCount *route_count_new(const Shape *s) {
    RouteCount *c = xcalloc(1, sizeof *c);
    c->shape = *s;
    c->count = xcalloc((size_t)n_layers(s) * (size_t)s->n_experts, sizeof *c->count);
    return c;
}

void route_count_free(RouteCount *c) {
    if (!c)
        return;
    free(c->count);
    free(c);
}

void route_count_add(RouteCount *c, int layer, const int32_t *id, int n) {
    Count *row = c->count + (size_t)layer * (size_t)c->shape.n_experts;
    for (int i = 0; i < n; i++)
        if (id[i] >= 0)
            add(&row[id[i]], 1);
}

void route_count_tokens(RouteCount *c, int n) {
    add(&c->tokens, (uint64_t)n);
}

void route_count_pairs(RouteCount *c, int n, int n_remote) {
    add(&c->pairs, (uint64_t)n);
    add(&c->remote, (uint64_t)n_remote);
}

uint64_t route_count_get(const RouteCount *c, int layer, int expert) {
    return get(&c->count[layer * c->shape.n_experts + expert]);
}

uint64_t route_count_n_tokens(const RouteCount *c) {
    return get(&c->tokens);
}

uint64_t route_count_n_pairs(const RouteCount *c) {
    return get(&c->pairs);
}

uint64_t route_count_n_remote(const RouteCount *c) {
    return get(&c->remote);
}

uint64_t *route_count_copy(const RouteCount *c) {
    size_t n = (size_t)n_layers(&c->shape) * (size_t)c->shape.n_experts;
    uint64_t *out = xcalloc(n, sizeof *out);
    for (size_t i = 0; i < n; i++)
        out[i] = get(&c->count[i]);
    return out;
}

/* ---- the file ---- */

static json_t *to_json(const RouteCount *c, uint64_t model_id) {
    const Shape *s = &c->shape;
    char id[17];
    json_t *layers = json_object();
    snprintf(id, sizeof id, "%016" PRIx64, model_id);
    for (int l = 0; l < n_layers(s); l++) {
        char key[16];
        json_t *row = s->layer_dense[l] ? NULL : json_array();
        if (!row)
            continue;
        for (int e = 0; e < s->n_experts; e++)
            json_array_append_new(row, json_integer((json_int_t)route_count_get(c, l, e)));
        snprintf(key, sizeof key, "%d", l);
        json_object_set_new(layers, key, row);
    }
    return json_pack("{s:s, s:I, s:o}", "model_id", id, "tokens",
                     (json_int_t)route_count_n_tokens(c), "layers", layers);
}

int route_count_save(const RouteCount *c, const char *path, uint64_t model_id, Err *err) {
    char *part = xasprintf("%s.part", path);
    json_t *root = to_json(c, model_id);
    int rc = 0;
    if (json_dump_file(root, part, JSON_COMPACT))
        rc = err_set(err, E_IO, "%s: cannot be written: %s", part, strerror(errno));
    else if (rename(part, path))
        rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    json_decref(root);
    free(part);
    return rc;
}

static int read_layer(RouteCount *c, const char *path, int layer, const json_t *row, Err *err) {
    int n = c->shape.n_experts;
    if (!json_is_array(row) || json_array_size(row) != (size_t)n)
        return err_set(err, E_MISMATCH, "%s: layers.%d: expected a list of %d counts", path, layer,
                       n);
    for (int e = 0; e < n; e++) {
        const json_t *v = json_array_get(row, (size_t)e);
        if (!json_is_integer(v) || json_integer_value(v) < 0)
            return err_set(err, E_FORMAT, "%s: layers.%d[%d]: expected a count", path, layer, e);
        add(&c->count[layer * n + e], (uint64_t)json_integer_value(v));
    }
    return 0;
}

static int read_counts(RouteCount *c, const char *path, const json_t *root, uint64_t model_id,
                       Err *err) {
    const Shape *s = &c->shape;
    const char *id = json_string_value(json_object_get(root, "model_id"));
    const json_t *tokens = json_object_get(root, "tokens"),
                 *layers = json_object_get(root, "layers");
    char want[17];
    snprintf(want, sizeof want, "%016" PRIx64, model_id);
    if (!id || strcmp(id, want))
        return err_set(err, E_MISMATCH, "%s: model_id: counts of model %.32s, this is %s", path,
                       id ? id : "(none)", want);
    if (!json_is_integer(tokens) || json_integer_value(tokens) < 0)
        return err_set(err, E_FORMAT, "%s: tokens: expected a number", path);
    int rc = 0, n = 0;
    for (int l = 0; l < n_layers(s) && rc == 0; l++) {
        char key[16];
        snprintf(key, sizeof key, "%d", l);
        if (s->layer_dense[l])
            continue;
        rc = read_layer(c, path, l, json_object_get(layers, key), err);
        n++;
    }
    if (rc == 0 && json_object_size(layers) != (size_t)n)
        rc = err_set(err, E_MISMATCH, "%s: layers: expected the %d MoE layers and no others", path,
                     n);
    if (rc == 0)
        add(&c->tokens, (uint64_t)json_integer_value(tokens));
    return rc;
}

int route_count_load(RouteCount **out, const char *path, const Shape *s, uint64_t model_id,
                     Err *err) {
    json_error_t at;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return err_set(err, errno == ENOENT ? E_NOTFOUND : E_IO, "%s: %s", path, strerror(errno));
    json_t *root = json_loadf(f, JSON_REJECT_DUPLICATES, &at);
    fclose(f);
    if (!root)
        return err_set(err, E_FORMAT, "%s:%d: %s", path, at.line, at.text);
    RouteCount *c = route_count_new(s);
    int rc = read_counts(c, path, root, model_id, err);
    json_decref(root);
    if (rc) {
        route_count_free(c);
        return rc;
    }
    *out = c;
    return 0;
}
