/* See pool.h. `turn` is written by the rank's thread to start a job; workers take chunks from
 * `next` and report through `left`. Whoever changes a word that others wait for wakes them only if
 * someone sleeps: `sleepers` is raised before the word is looked at for the last time. */
#include "kernels/cpu/pool.h"

#include "base/clock.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROUNDS_PER_LOOK = 32 }; /* spins between two looks at the clock */

typedef struct Worker {
    HostPool *pool;
    int index;
    pthread_t thread;
} Worker;

struct HostPool {
    PoolConf conf;
    int n_threads, n_started;
    Worker *worker; /* [n_threads - 1] */
    PoolFn fn;      /* of the job; written before `turn` */
    void *arg;
    int n_chunks;
    bool stop;
    _Atomic uint32_t turn; /* futex word of the workers */
    _Atomic int next;      /* first chunk that nobody has taken */
    _Atomic uint32_t left; /* workers still in the job; futex word of the rank's thread */
    _Atomic int sleepers;  /* threads in or about to enter futex_wait, on either word */
};

static void wake(HostPool *p, _Atomic uint32_t *word, int n) {
    if (atomic_load(&p->sleepers) > 0)
        syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Until *word differs from value. */
static void wait_change(HostPool *p, _Atomic uint32_t *word, uint32_t value) {
    int64_t end = clock_now_us() + p->conf.spin_us;
    do {
        for (int i = 0; i < ROUNDS_PER_LOOK; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value)
                return;
            __builtin_ia32_pause();
        }
    } while (clock_now_us() < end);
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(word) == value)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
    atomic_fetch_sub(&p->sleepers, 1);
}

static void take_chunks(HostPool *p, int thread) {
    for (int c; (c = atomic_fetch_add_explicit(&p->next, 1, memory_order_relaxed)) < p->n_chunks;)
        p->fn(p->arg, c, thread);
}

static void *worker_main(void *arg) {
    Worker *w = arg;
    HostPool *p = w->pool;
    if (p->conf.on_thread)
        p->conf.on_thread(p->conf.arg, w->index);
    for (uint32_t seen = 0;;) {
        wait_change(p, &p->turn, seen);
        seen++;
        if (p->stop)
            return NULL;
        take_chunks(p, w->index);
        if (atomic_fetch_sub(&p->left, 1) == 1)
            wake(p, &p->left, 1);
    }
}

static void start(HostPool *p) {
    atomic_store_explicit(&p->left, (uint32_t)p->n_started, memory_order_relaxed);
    atomic_fetch_add(&p->turn, 1);
    wake(p, &p->turn, p->n_started);
}

int pool_new(HostPool **out, const PoolConf *conf, Err *err) {
    HostPool *p = xcalloc(1, sizeof *p);
    int n_threads = conf->n_threads;
    p->conf = *conf;
    p->n_threads = n_threads;
    p->worker = xcalloc((size_t)n_threads, sizeof *p->worker);
    for (int i = 1; i < n_threads; i++) {
        Worker *w = &p->worker[i - 1];
        *w = (Worker){.pool = p, .index = i};
        int rc = pthread_create(&w->thread, NULL, worker_main, w);
        if (rc) {
            pool_free(p);
            return err_set(err, E_IO, "cannot start compute thread %d: %s", i, strerror(rc));
        }
        p->n_started++;
    }
    *out = p;
    return 0;
}

void pool_free(HostPool *p) {
    if (!p)
        return;
    p->stop = true;
    start(p);
    for (int i = 0; i < p->n_started; i++)
        pthread_join(p->worker[i].thread, NULL);
    free(p->worker);
    free(p);
}

int pool_size(const HostPool *p) {
    return p->n_threads;
}

void pool_run(HostPool *p, int n_chunks, PoolFn fn, void *arg) {
    if (p->n_threads == 1 || n_chunks <= 1) {
        for (int c = 0; c < n_chunks; c++)
            fn(arg, c, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n_chunks = n_chunks;
    atomic_store_explicit(&p->next, 0, memory_order_relaxed);
    start(p);
    take_chunks(p, 0);
    for (uint32_t left; (left = atomic_load_explicit(&p->left, memory_order_acquire)) != 0;)
        wait_change(p, &p->left, left);
}
