/* How often the router chose each expert of each layer.
 *
 * Counts are added by one thread at a time, the one that runs rank 0's steps; any thread may read
 * them meanwhile. They may be kept in a JSON file: model_id, tokens, and a list of counts for each
 * MoE layer. */
#pragma once

#include "base/err.h"
#include "model/shape.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct RouteCount RouteCount;

/* All counts 0. */
RouteCount *route_count_new(const Shape *s);
/* NULL is a no-op. */
void route_count_free(RouteCount *c);

/* The choices id[n] of a layer (-1: none). */
void route_count_add(RouteCount *c, int layer, const int32_t *id, int n);
/* The tokens of a step; and of one layer the pairs of token and chosen expert, n_remote of them
 * with an expert that is not resident. */
void route_count_tokens(RouteCount *c, int n);
void route_count_pairs(RouteCount *c, int n, int n_remote);

uint64_t route_count_get(const RouteCount *c, int layer, int expert);
uint64_t route_count_n_tokens(const RouteCount *c);
uint64_t route_count_n_pairs(const RouteCount *c);
uint64_t route_count_n_remote(const RouteCount *c);
/* A copy [n_layers + n_mtp, n_experts], the caller's to free. */
uint64_t *route_count_copy(const RouteCount *c);

/* Writes the file beside its place and renames it, so that readers see it whole. E_IO. */
int route_count_save(const RouteCount *c, const char *path, uint64_t model_id, Err *err);
/* Reads a file of the same model. E_NOTFOUND when there is none, E_FORMAT or E_MISMATCH with the
 * field otherwise. */
int route_count_load(RouteCount **out, const char *path, const Shape *s, uint64_t model_id,
                     Err *err);
