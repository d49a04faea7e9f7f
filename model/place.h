/* Which routed experts the device holds; the others are computed by expertd. Pure but for reading a
 * placement file; any thread.
 *
 * A placement is an array resident[n_layers + n_mtp][n_experts] of the caller's to free; experts of
 * dense layers count as resident. Placement decides speed. It enters results only as the order in
 * which fp32 sums are added, and, where expertd holds integers, as their quantisation error. */
#pragma once

#include "base/err.h"
#include "model/shape.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum PlaceStrategy {
    PLACE_UNIFORM,   /* the first N experts of every layer */
    PLACE_FREQUENCY, /* those with the largest recorded counts, over all layers */
    PLACE_FRONT,     /* whole layers from the first MoE layer on */
    PLACE_FILE,      /* as a file says */
} PlaceStrategy;

/* In the order of PlaceStrategy. */
#define PLACE_STRATEGIES "uniform|frequency|front|file"

typedef struct PlaceConf {
    PlaceStrategy strategy;
    const char *resident;   /* "all", "none" or N, per layer; not for PLACE_FILE */
    const uint64_t *counts; /* [n_layers + n_mtp, n_experts]; PLACE_FREQUENCY needs them */
    const char *file;       /* PLACE_FILE: path */
} PlaceConf;

/* Decides a placement. With frequency and front, N times the number of MoE layers is the budget of
 * all of them together; an MTP layer has N experts of its own. Among equal counts the lowest
 * (layer, expert) comes first. E_INVAL says what was expected, of a file with its line. */
int place_decide(const PlaceConf *conf, const Shape *s, bool **resident, Err *err);

/* place_decide with PLACE_UNIFORM. */
int place_parse(const char *spec, const Shape *s, bool **resident, Err *err);

/* Reads lines "LAYER: 0-15, 40, 77" with comments from # on; layers without a line have no resident
 * experts. text need not end in a newline; name is used in errors. */
int place_parse_file(const char *name, const char *text, const Shape *s, bool **resident, Err *err);

/* The same from a file. */
int place_read_file(const char *path, const Shape *s, bool **resident, Err *err);

/* Experts that are not resident, over all layers. */
int place_n_remote(const Shape *s, const bool *resident);

/* Whether a daemon's bitmap of held experts (bit layer * n_experts + expert, lowest first, of len
 * bytes) has every expert that is not resident, in the decoder layers. E_MISMATCH: "NAME does not
 * hold expert 7 of layer 3, which is not resident here". */
int place_check_held(const Shape *s, const bool *resident, const uint8_t *held, size_t len,
                     const char *name, Err *err);

/* One layer's next set: exchanges the least used resident expert for the most used remote one as
 * long as that is worth it, so that the number of residents stays the same and a set that is as
 * good as another stays. heat[n_experts] is recent use; next[n_experts] is written. Returns how
 * many experts come (as many go). */
int place_next(int n_experts, const double *heat, const bool *resident, bool *next);

/* The part of heat that falls on experts outside of the set; 0 without any. */
double place_remote_share(int n_experts, const double *heat, const bool *resident);
