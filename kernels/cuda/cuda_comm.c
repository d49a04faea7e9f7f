/* Ranks as threads of one process: a barrier of the threads, events between their streams, stages
 * that the others read directly, over peer access when GPUs differ. Each function runs on its
 * rank's thread.
 *
 * A rank publishes by copying into its stage, recording an event and meeting the others; then its
 * stream waits for their events. Stages and events alternate between calls: one is written again
 * only after the meeting in between, before which everyone has enqueued its reads of it. */
#include "kernels/cuda/cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { MEET_S = 60 }; /* ranks walk in step: one that is this late has failed */

/* What one rank shows to the others. */
typedef struct Member {
    CudaBuf stage[2];
    cudaEvent_t event[2];
    unsigned n_met, n_published; /* calls so far: pick the event and the stage */
} Member;

struct CudaGroup {
    int n_ranks;
    int n_open;           /* Devs left; the last one to close frees the group */
    pthread_mutex_t lock; /* guards the next two */
    pthread_cond_t all_here;
    unsigned arrived, round;
    Member member[CUDA_MAX_RANKS]; /* written by its rank, read by others after a barrier */
};

/* ---- life ---- */

static int reach_peers(Dev **dev, int n_ranks, Err *err) {
    for (int i = 0; i < n_ranks; i++)
        for (int j = 0; j < n_ranks; j++) {
            int can = 0, a = dev[i]->device, b = dev[j]->device;
            if (a == b)
                continue;
            cuda_enter(dev[i]);
            cudaError_t rc = cudaDeviceCanAccessPeer(&can, a, b);
            if (rc != cudaSuccess || !can)
                return err_set(err, E_UNSUPPORTED, "cuda: GPU %d cannot reach the memory of GPU %d",
                               a, b);
            rc = cudaDeviceEnablePeerAccess(b, 0);
            if (rc == cudaErrorPeerAccessAlreadyEnabled)
                (void)cudaGetLastError();
            else if (rc != cudaSuccess)
                return err_set(err, E_IO, "cuda: GPU %d cannot reach the memory of GPU %d: %s", a,
                               b, cudaGetErrorString(rc));
        }
    return 0;
}

int cuda_group_open(Dev **dev, int n_ranks, Err *err) {
    int rc = reach_peers(dev, n_ranks, err);
    if (rc)
        return rc;
    CudaGroup *g = xcalloc(1, sizeof *g);
    g->n_ranks = g->n_open = n_ranks;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&g->all_here, &attr);
    pthread_condattr_destroy(&attr);
    for (int r = 0; r < n_ranks; r++) {
        dev[r]->group = g;
        cuda_enter(dev[r]);
        for (int i = 0; i < 2; i++)
            cuda_must(cudaEventCreateWithFlags(&g->member[r].event[i], cudaEventDisableTiming),
                      "creating an event");
    }
    return 0;
}

void cuda_group_close(Dev *d) {
    CudaGroup *g = d->group;
    if (!g)
        return;
    Member *m = &g->member[d->rank];
    for (int i = 0; i < 2; i++) {
        cudaEventDestroy(m->event[i]);
        cuda_free(d, m->stage[i].at);
    }
    if (--g->n_open > 0)
        return;
    pthread_cond_destroy(&g->all_here);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* ---- meeting ---- */

/* All ranks' threads meet; device work goes on. */
static void barrier(Dev *d) {
    CudaGroup *g = d->group;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += MEET_S;
    pthread_mutex_lock(&g->lock);
    unsigned round = g->round;
    if (++g->arrived == (unsigned)g->n_ranks) {
        g->arrived = 0;
        g->round++;
        pthread_cond_broadcast(&g->all_here);
    }
    while (g->round == round)
        if (pthread_cond_timedwait(&g->all_here, &g->lock, &until) == ETIMEDOUT &&
            g->round == round)
            cuda_die("rank %d waited %d s for the other ranks", d->rank, MEET_S);
    pthread_mutex_unlock(&g->lock);
}

void cuda_group_meet(Dev *d) {
    CudaGroup *g = d->group;
    if (g->n_ranks == 1)
        return;
    Member *me = &g->member[d->rank];
    unsigned turn = me->n_met++ & 1;
    cuda_must(cudaEventRecord(me->event[turn], d->stream), "meeting");
    barrier(d);
    for (int r = 0; r < g->n_ranks; r++)
        if (r != d->rank)
            cuda_must(cudaStreamWaitEvent(d->stream, g->member[r].event[turn], 0), "meeting");
}

/* Grows both stages; every rank calls it with the same size, so that all take the same branch. */
static void reserve(Dev *d, size_t bytes) {
    Member *me = &d->group->member[d->rank];
    Err err = {0};
    if (bytes <= me->stage[0].bytes)
        return;
    cuda_finish(d);
    barrier(d); /* nobody reads the old ones any more */
    for (int i = 0; i < 2; i++) {
        cuda_free(d, me->stage[i].at);
        if (cuda_alloc(d, bytes, "the exchange between ranks", &me->stage[i].at, &err))
            cuda_die("%s", err.text);
        me->stage[i].bytes = bytes;
    }
}

/* Shows x to all ranks; afterwards kernels on this rank's stream may read everyone's. */
static CudaParts publish(Dev *d, Tensor x) {
    CudaGroup *g = d->group;
    CudaParts parts = {.n = g->n_ranks};
    size_t row = (size_t)x.cols * sizeof(float);
    reserve(d, row * (size_t)x.rows);
    Member *me = &g->member[d->rank];
    unsigned turn = me->n_published++ & 1;
    cuda_must(cudaMemcpy2DAsync(me->stage[turn].at, row, x.at, (size_t)x.ld * sizeof(float), row,
                                (size_t)x.rows, cudaMemcpyDeviceToDevice, d->stream),
              "showing a part");
    cuda_group_meet(d);
    for (int r = 0; r < g->n_ranks; r++)
        parts.part[r] = g->member[r].stage[turn].at;
    return parts;
}

/* ---- collectives ---- */

/* One rank stores into the pool, which all of them read. */
void cuda_kv_write(Dev *d, int slot, Tensor kv, int index_slot, Tensor key) {
    cuda_enter(d);
    if (d->rank == 0) {
        cuda_store_latent(&d->rows, cuda_latent_pages(d, slot), cuda_view(kv), d->kv.kv_lora,
                          d->stream);
        if (index_slot >= 0)
            cuda_store_keys(&d->rows, cuda_key_pages(d, index_slot), cuda_view(key), d->stream);
    }
    cuda_group_meet(d);
}

void cuda_all_reduce(Dev *d, Tensor x) {
    cuda_enter(d);
    if (cuda_n_ranks(d) > 1)
        cuda_sum_parts(cuda_view(x), publish(d, x), d->stream);
}

void cuda_gather_cols(Dev *d, Tensor out, Tensor part) {
    cuda_enter(d);
    if (cuda_n_ranks(d) == 1)
        cuda_must(cudaMemcpy2DAsync(out.at, (size_t)out.ld * sizeof(float), part.at,
                                    (size_t)part.ld * sizeof(float),
                                    (size_t)part.cols * sizeof(float), (size_t)part.rows,
                                    cudaMemcpyDeviceToDevice, d->stream),
                  "gathering");
    else
        cuda_join_parts(cuda_view(tensor_head(out, part.rows)), part.cols, publish(d, part),
                        d->stream);
}
