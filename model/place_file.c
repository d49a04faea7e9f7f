/* The placement file: lines "LAYER: 0-15, 40, 77". Pure but for reading it; any thread. */
#include "model/place.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_LIMIT = 1 << 22 }; /* bytes */

typedef struct Reader {
    const char *name, *at;
    int line;
    const Shape *shape;
    bool *resident;
    bool seen[SHAPE_MAX_LAYERS];
    Err *err;
} Reader;

static void skip_blanks(Reader *r) {
    while (*r->at == ' ' || *r->at == '\t' || *r->at == '\r')
        r->at++;
    if (*r->at == '#')
        r->at += strcspn(r->at, "\n");
}

/* A number of [0, limit). */
static int number(Reader *r, const char *what, int limit) {
    char *end;
    skip_blanks(r);
    if (!isdigit((unsigned char)*r->at))
        return err_set(r->err, E_INVAL, "%s:%d: expected %s, got \"%.*s\"", r->name, r->line, what,
                       (int)strcspn(r->at, " \t\r\n"), r->at);
    long n = strtol(r->at, &end, 10);
    if (n >= limit)
        return err_set(r->err, E_INVAL, "%s:%d: %s %ld: expected 0 to %d", r->name, r->line, what,
                       n, limit - 1);
    r->at = end;
    skip_blanks(r);
    return (int)n;
}

static int range(Reader *r, int layer) {
    int n = r->shape->n_experts, first = number(r, "expert", n), last = first;
    if (first < 0)
        return first;
    if (*r->at == '-') {
        r->at++;
        last = number(r, "expert", n);
    }
    if (last < 0)
        return last;
    if (last < first)
        return err_set(r->err, E_INVAL, "%s:%d: experts %d-%d: expected the smaller one first",
                       r->name, r->line, first, last);
    for (int e = first; e <= last; e++)
        r->resident[layer * n + e] = true;
    return 0;
}

/* One line, without its newline. */
static int entry(Reader *r) {
    const Shape *s = r->shape;
    int layer = number(r, "layer", s->n_layers + s->n_mtp), rc = 0;
    if (layer < 0)
        return layer;
    if (s->layer_dense[layer])
        return err_set(r->err, E_INVAL, "%s:%d: layer %d is dense and has no experts", r->name,
                       r->line, layer);
    if (r->seen[layer])
        return err_set(r->err, E_INVAL, "%s:%d: layer %d a second time", r->name, r->line, layer);
    if (*r->at != ':')
        return err_set(r->err, E_INVAL, "%s:%d: expected \":\" after layer %d", r->name, r->line,
                       layer);
    r->seen[layer] = true;
    r->at++;
    skip_blanks(r);
    for (bool more = *r->at && *r->at != '\n'; more && rc == 0;) {
        rc = range(r, layer);
        more = *r->at == ',';
        r->at += more;
    }
    if (rc == 0 && *r->at && *r->at != '\n')
        rc = err_set(r->err, E_INVAL, "%s:%d: layer %d: expected \",\" between experts", r->name,
                     r->line, layer);
    return rc;
}

int place_parse_file(const char *name, const char *text, const Shape *s, bool **resident,
                     Err *err) {
    int n = (s->n_layers + s->n_mtp) * s->n_experts, rc = 0;
    Reader r = {.name = name, .at = text, .line = 1, .shape = s, .err = err};
    r.resident = xcalloc((size_t)n, sizeof(bool));
    for (int i = 0; i < n; i++)
        r.resident[i] = s->layer_dense[i / s->n_experts];
    while (rc == 0) {
        skip_blanks(&r);
        if (!*r.at)
            break;
        if (*r.at != '\n')
            rc = entry(&r);
        if (rc == 0 && *r.at == '\n') {
            r.at++;
            r.line++;
        }
    }
    if (rc) {
        free(r.resident);
        return rc;
    }
    *resident = r.resident;
    return 0;
}

int place_read_file(const char *path, const Shape *s, bool **resident, Err *err) {
    FILE *f = fopen(path, "rbe");
    if (!f)
        return err_set(err, E_IO, "%s: %s", path, strerror(errno));
    char *text = xmalloc(FILE_LIMIT + 1);
    size_t n = fread(text, 1, FILE_LIMIT + 1, f);
    int rc = ferror(f) ? err_set(err, E_IO, "%s: cannot be read", path) : 0;
    if (rc == 0 && n > FILE_LIMIT)
        rc = err_set(err, E_LIMIT, "%s: more than %d bytes", path, FILE_LIMIT);
    if (rc == 0) {
        text[n] = '\0';
        rc = place_parse_file(path, text, s, resident, err);
    }
    free(text);
    fclose(f);
    return rc;
}
