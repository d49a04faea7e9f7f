/* What the two kinds of stores share. */
#pragma once

#include "expertd/store.h"

/* held[n_layers + n_mtp, n_experts], the caller's: what the callers' devices do not hold. E_INVAL
 * when nothing is left. */
int store_decide_held(const char *device, const Shape *s, bool **held, Err *err);
