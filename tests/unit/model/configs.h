/* The configs of the published models, and changes to them. A step that fails fails the test. */
#pragma once

#include "model/shape.h"

#include <jansson.h>

/* Without what only names the release, with ' for ". */
extern const char CONFIG_GLM5[], CONFIG_GLM51[], CONFIG_GLM52[];

/* Parses JSON with ' for ". The caller owns the result. */
json_t *config_parse(const char *text);
/* Sets "field" or "object/field" to a value with ' for "; NULL takes it out. */
void config_set(json_t *root, const char *path, const char *value);
/* Sets a list of n names. */
void config_set_names(json_t *root, const char *name, int n, const char *(*value)(int));
/* shape_parse of it. */
int config_shape(Shape *s, const json_t *root, Err *err);

/* indexer_types and mlp_layer_types of GLM-5.2, layer_types of its NVFP4 release. */
extern const int CONFIG_GLM52_FULL[21];
const char *config_glm52_indexer(int layer);
const char *config_glm52_mlp(int layer);
const char *config_glm52_layer(int layer);
