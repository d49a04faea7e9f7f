/* AMX tile operations as the kernel uses them, so that a model in plain C can stand in for the
 * instructions where a processor has none. Tile numbers are literals.
 *
 * With IQ_TILE_MODEL defined the includer provides tile_config, tile_release, tile_zero, tile_load,
 * tile_store, tile_dot and tile_fence as functions before it includes the kernel. */
#pragma once

#ifndef IQ_TILE_MODEL

#include <immintrin.h>

#define tile_config(conf)        _tile_loadconfig(conf)
#define tile_release()           _tile_release()
#define tile_zero(c)             _tile_zero(c)
#define tile_load(t, at, pitch)  _tile_loadd(t, at, pitch)
#define tile_store(t, at, pitch) _tile_stored(t, at, pitch)
/* c[m][n] += sum over 4 bytes i of a[m][4 k + i] * b[k][4 n + i], all signed */
#define tile_dot(c, a, b) _tile_dpbssd(c, a, b)
/* The compiler does not see that tiles are loaded from and stored to memory. */
#define tile_fence() __asm__ volatile("" ::: "memory")

#endif
