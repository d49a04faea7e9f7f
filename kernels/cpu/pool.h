/* Worker threads of one rank: run a function over chunks, then sleep.
 *
 * The rank's thread takes part as thread 0. Workers spin for a moment after a job, since the next
 * operation follows at once within a step, then sleep on a futex: an idle service uses no CPU. */
#pragma once

#include "base/err.h"

typedef struct HostPool HostPool;

/* chunk runs from 0 to n - 1, begun in this order, so that one may wait for an earlier one; thread
 * from 0 to the pool's size - 1. */
typedef void (*PoolFn)(void *arg, int chunk, int thread);

typedef struct PoolConf {
    int n_threads; /* counts the caller; 1 gives a pool without workers */
    int spin_us;   /* how long a thread spins before it sleeps */
    /* Called by each worker before its first job, to pin it. NULL: nothing. */
    void (*on_thread)(void *arg, int thread);
    void *arg;
} PoolConf;

int pool_new(HostPool **out, const PoolConf *conf, Err *err);
void pool_free(HostPool *p);
int pool_size(const HostPool *p);

/* Calls fn for every chunk and returns when all are done. Only the rank's thread calls it. */
void pool_run(HostPool *p, int n_chunks, PoolFn fn, void *arg);
