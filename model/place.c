/* See place.h. */
#include "model/place.h"

#include <stdlib.h>
#include <string.h>

static int first_n(const char *spec, int n_experts) {
    char *end;
    if (!strcmp(spec, "all"))
        return n_experts;
    if (!strcmp(spec, "none"))
        return 0;
    long n = strtol(spec, &end, 10);
    return *spec && !*end && n >= 0 && n <= n_experts ? (int)n : -1;
}

int place_parse(const char *spec, const Shape *s, bool **resident, Err *err) {
    int n = first_n(spec, s->n_experts), layers = s->n_layers + s->n_mtp;
    if (n < 0)
        return err_set(err, E_INVAL,
                       "experts on the device: expected all, none or 0 to %d, got \"%s\"",
                       s->n_experts, spec);
    bool *r = xcalloc((size_t)layers * (size_t)s->n_experts, sizeof *r);
    for (int l = 0; l < layers; l++)
        for (int e = 0; e < s->n_experts; e++)
            r[l * s->n_experts + e] = s->layer_dense[l] || e < n;
    *resident = r;
    return 0;
}

int place_n_remote(const Shape *s, const bool *resident) {
    int n = 0;
    for (int i = 0; i < (s->n_layers + s->n_mtp) * s->n_experts; i++)
        n += !resident[i];
    return n;
}
