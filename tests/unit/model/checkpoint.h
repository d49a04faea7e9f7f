/* Checkpoint directories that a test makes up, below /tmp. A step that fails fails the test. */
#pragma once

#include "model/weights.h"

typedef struct Checkpoint {
    char dir[32];
} Checkpoint;

/* weights_open that must work. */
Weights *checkpoint_open(const char *dir);

/* Makes an empty directory. */
void checkpoint_new(Checkpoint *c);
/* Removes it with the files in it. */
void checkpoint_free(Checkpoint *c);

/* Path of a file in it, in a buffer that the next call but three writes again. */
const char *checkpoint_path(const Checkpoint *c, const char *name);

void checkpoint_bytes(const Checkpoint *c, const char *name, const void *bytes, size_t n);
/* The same with ' for ". */
void checkpoint_json(const Checkpoint *c, const char *name, const char *text);
/* A tensor of zeros, of `size` bytes an element and shape [], [a] or [a, b]. */
#define CHECKPOINT_ZEROS(name, dtype, size, n_dims, a, b)                                          \
    {                                                                                              \
        name, dtype, n_dims, {a, b}, NULL,                                                         \
            (size_t)(size) * ((n_dims) > 0 ? (a) : 1) * ((n_dims) > 1 ? (b) : 1)                   \
    }

/* Writes a safetensors file of n tensors; their data NULL: zeros. */
void checkpoint_tensors(const Checkpoint *c, const char *name, const WeightsTensor *t, int n);
/* A symbolic link to a file of the source tree. */
void checkpoint_link(const Checkpoint *c, const char *name, const char *to);
