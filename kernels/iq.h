/* Integer-quantised experts: the layout that expert files hold and that host kernels compute on, as
 * is. Facts and pure functions; any thread.
 *
 * An expert is cut along its inner dimension into units of `group` channels, each a run of bytes of
 * its own: a shard owns a range of units, so that any number of shards that divides the units reads
 * the same file, and a slice is one contiguous range of it. Unit u holds rows [u * group, (u + 1) *
 * group) of gate and up, and the same columns of down:
 *
 *   for p in 0 .. group / 16 - 1: gate panel p, up panel p    [16 rows, hidden] each
 *   down: the blocks of panels 0 .. hidden / 16 - 1, then their scales, padded to 64 bytes
 *
 * A block is [16 rows, group columns] of codes with one scale per row. A panel of gate or up is its
 * hidden / group blocks, then their scales [hidden / group, 16], padded to 64 bytes. A scale is
 * IEEE half or bfloat16; weight = code * scale.
 *
 * A block is cut along its columns into sub-blocks of 64. A line of 64 bytes holds four consecutive
 * columns of 16 rows, byte 4 * row + i for column i: the order of dot-product instructions and
 * tiles. Codes are stored unsigned: code + 8 or code + 128.
 *   4 bits: 8 lines; the low nibbles of line j are columns 4j .. 4j + 3, the high ones 32 + those.
 *   8 bits: 16 lines; line j is columns 4j .. 4j + 3. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { IQ_ROWS = 16, IQ_SUB = 64, IQ_MAX_GROUP = 128 };

typedef enum IqScale { IQ_SCALE_F16, IQ_SCALE_BF16 } IqScale;

typedef struct IqGeom {
    int hidden, inner; /* of the whole expert */
    int bits;          /* 4: codes -8 .. 7; 8: codes -127 .. 127 */
    int group;         /* 64 or 128 columns share a scale */
    IqScale scale;
} IqGeom;

/* E_UNSUPPORTED names the dimension that groups or panels do not divide, E_INVAL an unknown number
 * of bits, group or scale. */
int iq_check(const IqGeom *g, Err *err);

static inline int iq_units(const IqGeom *g) {
    return g->inner / g->group;
}
static inline size_t iq_block_bytes(const IqGeom *g) {
    return (size_t)IQ_ROWS * (size_t)g->group * (size_t)g->bits / 8;
}
/* One panel of gate or up. */
static inline size_t iq_panel_bytes(const IqGeom *g) {
    size_t blocks = (size_t)(g->hidden / g->group);
    return (blocks * (iq_block_bytes(g) + IQ_ROWS * 2) + 63) / 64 * 64;
}
/* From a unit's begin to its down blocks, and from those to their scales. */
static inline size_t iq_down_at(const IqGeom *g) {
    return (size_t)(g->group / IQ_ROWS) * 2 * iq_panel_bytes(g);
}
static inline size_t iq_down_scales_at(const IqGeom *g) {
    return (size_t)(g->hidden / IQ_ROWS) * iq_block_bytes(g);
}
/* A multiple of 64. */
static inline size_t iq_unit_bytes(const IqGeom *g) {
    return (iq_down_at(g) + iq_down_scales_at(g) + (size_t)g->hidden * 2 + 63) / 64 * 64;
}

/* What quantisation lost, summed over weights. */
typedef struct IqLoss {
    double square;       /* of the weights */
    double error_square; /* of stored minus given */
} IqLoss;

/* Quantises one unit. gate, up [group, hidden], down [hidden, group], all fp32 and densely packed;
 * out[iq_unit_bytes] needs no alignment. The same input gives the same bytes on every machine.
 *
 * 8 bits: scale = largest magnitude / 127. 4 bits: of several scales around the one at which the
 * largest magnitude meets its end of the range, the one with the least squared error, the first
 * among equals. Scales are rounded to their stored format before codes are chosen; codes round half
 * to even. *loss grows by this unit's. E_INVAL for weights that are not finite or need a scale that
 * the format does not have; names matrix, row and column within the unit. */
int iq_pack_unit(const IqGeom *g, const float *gate, const float *up, const float *down,
                 uint8_t *out, IqLoss *loss, Err *err);

typedef enum IqMatrix { IQ_GATE, IQ_UP, IQ_DOWN } IqMatrix;

/* The stored weight of one unit at (row, col) of gate or up [group, hidden] or of down [hidden,
 * group]. For tests and reports; slow. */
float iq_weight(const IqGeom *g, const uint8_t *unit, IqMatrix m, int row, int col);
