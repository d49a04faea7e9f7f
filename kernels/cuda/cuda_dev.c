/* Life of the ranks' devices: what the machine must offer, opening and closing, errors, waiting.
 * Opening and closing run on one thread; everything else on its rank's. */
#include "kernels/cuda/cuda.h"

#include "base/clock.h"
#include "base/log.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    WAIT_MS = 60000, /* no step takes a minute: the device hangs */
    SPINS = 4096,    /* polls before a waiting thread gives its core away */
    MIN_MAJOR = 9,   /* compute capability */
};

void cuda_die(const char *fmt, ...) {
    char text[500];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    LOG_ERR("%s", text);
    fflush(stderr);
    _exit(CUDA_EXIT);
}

void cuda_must(cudaError_t rc, const char *what) {
    if (rc != cudaSuccess)
        cuda_die("the GPU failed: %s: %s (%s)", what, cudaGetErrorString(rc), cudaGetErrorName(rc));
}

void cuda_enter(const Dev *d) {
    static _Thread_local int current = -1;
    if (current == d->device)
        return;
    cuda_must(cudaSetDevice(d->device), "choosing the GPU");
    current = d->device;
}

/* ---- waiting ---- */

/* Polls, so that a broken device shows at once and a hanging one in time. */
void cuda_wait_event(cudaEvent_t event) {
    int64_t until = 0;
    for (int i = 0;; i++) {
        cudaError_t rc = cudaEventQuery(event);
        if (rc == cudaSuccess)
            return;
        if (rc != cudaErrorNotReady)
            cuda_must(rc, "waiting");
        if (i < SPINS) {
            __builtin_ia32_pause();
            continue;
        }
        int64_t now = clock_now_ms();
        until = until ? until : now + WAIT_MS;
        if (now > until)
            cuda_die("the GPU has not finished its work within %d s", WAIT_MS / 1000);
        sched_yield();
    }
}

void cuda_finish(Dev *d) {
    cuda_enter(d);
    cuda_must(cudaEventRecord(d->done, d->stream), "marking work");
    cuda_wait_event(d->done);
}

void cuda_mark(Dev *d, int number) {
    cuda_enter(d);
    cuda_must(cudaEventRecord(d->mark[number], d->stream), "marking work");
}

void cuda_reach(Dev *d, int number) {
    cuda_enter(d);
    cuda_wait_event(d->mark[number]);
}

/* ---- what the machine must offer ---- */

static int check_driver(int *n_devices, Err *err) {
    int driver = 0, needed = CUDART_VERSION / 1000;
    cudaError_t rc = cudaDriverGetVersion(&driver);
    if (rc != cudaSuccess || driver == 0)
        return err_set(err, E_UNSUPPORTED, "cuda: this machine has no NVIDIA driver");
    if (driver / 1000 < needed)
        return err_set(err, E_UNSUPPORTED,
                       "cuda: the NVIDIA driver offers CUDA %d.%d, this build needs %d.0 or later",
                       driver / 1000, driver % 1000 / 10, needed);
    rc = cudaGetDeviceCount(n_devices);
    if (rc != cudaSuccess || *n_devices < 1)
        return err_set(err, E_UNSUPPORTED, "cuda: no GPU can be used: %s",
                       rc == cudaSuccess ? "the machine has none" : cudaGetErrorString(rc));
    return 0;
}

static int check_device(const Dev *d, Err *err) {
    struct cudaDeviceProp p;
    cuda_enter(d);
    cudaError_t rc = cudaGetDeviceProperties(&p, d->device);
    if (rc != cudaSuccess)
        return err_set(err, E_IO, "cuda: GPU %d: %s", d->device, cudaGetErrorString(rc));
    if (p.major < MIN_MAJOR)
        return err_set(err, E_UNSUPPORTED,
                       "cuda: GPU %d (%s) has compute capability %d.%d, %d.0 is needed", d->device,
                       p.name, p.major, p.minor, MIN_MAJOR);
    rc = cuda_base_probe();
    if (rc != cudaSuccess)
        return err_set(err, E_UNSUPPORTED,
                       "cuda: this build has no kernels for GPU %d (%s, compute capability %d.%d): "
                       "%s",
                       d->device, p.name, p.major, p.minor, cudaGetErrorString(rc));
    return 0;
}

/* ---- opening ---- */

static int pinned_new(CudaPinned *p, size_t bytes, Err *err) {
    cudaError_t rc = cudaHostAlloc(&p->at, bytes, cudaHostAllocPortable);
    if (rc == cudaSuccess)
        rc = cudaEventCreateWithFlags(&p->free, cudaEventDisableTiming);
    if (rc != cudaSuccess)
        return err_set(err, E_NOMEM, "cuda: %.1f MiB of pinned memory: %s",
                       (double)bytes / (1 << 20), cudaGetErrorString(rc));
    return 0;
}

static void pinned_free(CudaPinned *p) {
    if (p->free)
        cudaEventDestroy(p->free);
    if (p->at)
        cudaFreeHost(p->at);
    *p = (CudaPinned){0};
}

static int alloc_all(Dev *d, Err *err) {
    size_t n = (size_t)d->conf.max_rows, stride = (size_t)d->rows.page_stride,
           ints = 3 * n + (size_t)d->conf.max_seqs * stride;
    void *at;
    int rc = cuda_alloc(d, ints * sizeof(int32_t), "the batch", &at, err);
    if (rc)
        return rc;
    d->token = at;
    d->pos = d->token + n;
    d->seq = d->pos + n;
    d->page_table = d->seq + n;
    d->rows.pos = d->pos;
    d->rows.seq = d->seq;
    d->rows.page_table = d->page_table;
    for (int i = 0; i < CUDA_RING && rc == 0; i++)
        rc = pinned_new(&d->ring[i], ints * sizeof(int32_t), err);
    for (int i = 0; i < 2 && rc == 0; i++) {
        rc = pinned_new(&d->stage[i], CUDA_STAGE_BYTES, err);
        if (rc == 0)
            rc = cuda_alloc(d, CUDA_STAGE_BYTES, "staging", &at, err);
        if (rc == 0)
            d->stage_dev[i] = at;
    }
    return rc;
}

static int open_rank(Dev *d, const DevConf *conf, int rank, int n_devices, Err *err) {
    d->rank = rank;
    d->device = rank % n_devices;
    d->conf = *conf;
    d->rows.page_stride = (conf->max_context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    int rc = check_device(d, err);
    if (rc)
        return rc;
    cudaError_t e = cudaDeviceGetAttribute(&d->n_sm, cudaDevAttrMultiProcessorCount, d->device);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&d->done, cudaEventDisableTiming);
    for (int i = 0; i < 2 && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&d->mark[i], cudaEventDisableTiming);
    if (e != cudaSuccess)
        return err_set(err, E_IO, "cuda: GPU %d: %s", d->device, cudaGetErrorString(e));
    return alloc_all(d, err);
}

int cuda_open(const DevConf *conf, Dev **dev, Err *err) {
    int n_devices = 0;
    for (int r = 0; r < conf->n_ranks; r++)
        dev[r] = NULL;
    if (conf->n_ranks < 1 || conf->n_ranks > CUDA_MAX_RANKS || conf->max_rows < 1 ||
        conf->max_seqs < 1 || conf->max_context < 1)
        return err_set(err, E_INVAL,
                       "device: ranks 1..%d, rows, sequences and context must be positive",
                       CUDA_MAX_RANKS);
    int rc = check_driver(&n_devices, err);
    for (int r = 0; r < conf->n_ranks && rc == 0; r++) {
        dev[r] = xcalloc(1, sizeof **dev);
        rc = open_rank(dev[r], conf, r, n_devices, err);
    }
    if (rc == 0)
        rc = cuda_group_open(dev, conf->n_ranks, err);
    if (rc)
        cuda_close(dev, conf->n_ranks);
    return rc;
}

static void close_rank(Dev *d) {
    cuda_enter(d);
    cuda_group_close(d);
    for (int i = 0; i < CUDA_RING; i++)
        pinned_free(&d->ring[i]);
    for (int i = 0; i < 2; i++) {
        pinned_free(&d->stage[i]);
        cuda_free(d, d->stage_dev[i]);
    }
    for (int i = 0; i < CUDA_N_WORK; i++)
        cuda_free(d, d->work[i].at);
    cuda_free(d, d->token);
    for (int i = 0; i < 2; i++)
        if (d->mark[i])
            cudaEventDestroy(d->mark[i]);
    if (d->done)
        cudaEventDestroy(d->done);
    if (d->stream)
        cudaStreamDestroy(d->stream);
    free(d);
}

void cuda_close(Dev **dev, int n_ranks) {
    for (int r = 0; r < n_ranks; r++)
        if (dev[r] && dev[r]->done)
            cuda_finish(dev[r]);
    for (int r = 0; r < n_ranks; r++) {
        if (dev[r])
            close_rank(dev[r]);
        dev[r] = NULL;
    }
}
