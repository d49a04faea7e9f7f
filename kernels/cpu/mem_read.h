/* The speed of memory: what any computation on it can reach at most. */
#pragma once

#include "kernels/cpu/pool.h"

#include <stddef.h>
#include <stdint.h>

/* GB/s at which the threads of the pool read n pieces of `bytes` (a multiple of 64), doing nothing
 * else. NULL pieces are passed over. */
double mem_read(HostPool *pool, const uint8_t *const *piece, int n, size_t bytes);
