/* Which model a checkpoint is, whatever its weight format. Internal to weights: once, at opening.
 */
#pragma once

#include "model/weights.h"

/* What weights_id gives from then on; reads the tensors that weights.h names. Never 0. */
uint64_t weights_id_hash(const Weights *w);
