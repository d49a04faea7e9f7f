/* How fast this daemon's experts are, beside what its memory gives: measured once at the start, on
 * the thread that opens the store. */
#pragma once

#include "expertd/store.h"

typedef struct Speed {
    double memory_gb_per_s; /* the compute threads reading the slices, doing nothing else */
    double kernel_gb_per_s; /* calls of one token with random experts */
    double layer_us;        /* one such call */
    double token_bytes;     /* of this shard's experts that one token of the whole model reads */
    double expected_tok_per_s, measured_tok_per_s; /* of all layers, at one stream */
    bool in_cache; /* the slices fit in the processor's cache: memory is not what is measured */
} Speed;

/* Takes some 300 ms and leaves gauges behind. Only for stores of expert files. */
Speed speed_measure(Store *s);
