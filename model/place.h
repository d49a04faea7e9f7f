/* Which routed experts the device holds; the others are computed by expertd. Pure; any thread.
 * Placement changes speed, never results. */
#pragma once

#include "base/err.h"
#include "model/shape.h"

#include <stdbool.h>

/* Reads spec "all", "none" or a number N (the first N experts of every layer) into a new array
 * resident[n_layers + n_mtp][n_experts] that the caller frees; dense layers count as resident.
 * E_INVAL says what was expected. */
int place_parse(const char *spec, const Shape *s, bool **resident, Err *err);

/* Experts that are not resident, over all layers. */
int place_n_remote(const Shape *s, const bool *resident);
