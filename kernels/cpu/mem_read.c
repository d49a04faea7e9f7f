/* See mem_read.h. The pool's caller calls. */
#include "kernels/cpu/mem_read.h"

#include "base/clock.h"

#include <stdatomic.h>

typedef struct Read {
    const uint8_t *const *piece;
    size_t bytes;
    _Atomic uint64_t mixed;
} Read;

static void read_piece(void *arg, int i, int thread) {
    Read *d = arg;
    uint64_t mixed[8] = {0};
    (void)thread;
    if (!d->piece[i])
        return;
    const uint64_t *at = (const uint64_t *)(const void *)d->piece[i];
    for (size_t w = 0; w < d->bytes / 8; w += 8)
        for (size_t k = 0; k < 8; k++)
            mixed[k] ^= at[w + k];
    for (size_t k = 0; k < 8; k++)
        atomic_fetch_xor(&d->mixed, mixed[k]); /* so that nothing is left out */
}

double mem_read(HostPool *pool, const uint8_t *const *piece, int n, size_t bytes) {
    Read d = {.piece = piece, .bytes = bytes};
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += piece[i] ? (double)bytes : 0;
    int64_t begin = clock_now_us();
    pool_run(pool, n, read_piece, &d);
    int64_t us = clock_now_us() - begin;
    return us > 0 ? sum / 1e3 / (double)us : 0;
}
