/* Reference results: NAME.json and NAME.safetensors as the oracle folder holds them. Read-only
 * after opening; one thread. */
#pragma once

#include "base/err.h"

#include <jansson.h>

#include <stdint.h>

typedef struct Oracle Oracle;

/* prefix: path without ".json" and ".safetensors" */
int oracle_open(Oracle **out, const char *prefix, Err *err);
void oracle_close(Oracle *o);

int oracle_n_prompts(const Oracle *o);
const json_t *oracle_prompt(const Oracle *o, int i);
const char *oracle_name(const json_t *prompt);
/* The array `key` of a prompt as integers; heap. */
int32_t *oracle_ints(const json_t *prompt, const char *key, int *n);
double *oracle_reals(const json_t *prompt, const char *key, int *n);

/* Tensor PROMPT.KEY; NULL when the oracle has none. dim gets its shape, padded with 1 in front. */
const float *oracle_f32(const Oracle *o, const char *prompt, const char *key, int64_t dim[3]);
const int32_t *oracle_i32(const Oracle *o, const char *prompt, const char *key, int64_t dim[3]);
