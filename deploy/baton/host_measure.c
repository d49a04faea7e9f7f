/* Measured numbers of the host: one node after another, each by threads of its own; then the GPUs.
 */
#include "deploy/baton/host_int.h"

#include "base/clock.h"
#include "base/topo.h"
#include "expertd/node_mem.h"
#include "kernels/cpu/mem_read.h"
#include "kernels/link_speed.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    PIECE = 1 << 20,
    CACHES = 4,        /* so many times the last-level cache is read, */
    LEAST = 256 << 20, /* but at least this */
    READ_US = 300000,
};

typedef struct NodeRead {
    const Topo *topo;
    int node, threads;
    size_t bytes;
    double gb_per_s;
    int rc;
    Err err;
} NodeRead;

static void on_thread(void *arg, int thread) {
    const NodeRead *r = arg;
    (void)topo_pin_core(r->topo, r->node, thread, NULL);
}

static void touch(void *arg, int piece, int thread) {
    NodeMem *m = arg;
    (void)thread;
    memset((char *)m->at + (size_t)piece * PIECE, piece + 1, PIECE);
}

static void read_pieces(NodeRead *r, HostPool *pool, NodeMem *m) {
    int n = (int)(m->bytes / PIECE);
    const uint8_t **piece = xcalloc((size_t)n, sizeof *piece);
    for (int i = 0; i < n; i++)
        piece[i] = (const uint8_t *)m->at + (size_t)i * PIECE;
    pool_run(pool, n, touch, m);
    int64_t begin = clock_now_us();
    do {
        double v = mem_read(pool, piece, n, PIECE);
        r->gb_per_s = v > r->gb_per_s ? v : r->gb_per_s;
    } while (clock_now_us() - begin < READ_US);
    free(piece);
}

/* A thread of its own, since it stays bound. */
static void *read_node(void *arg) {
    NodeRead *r = arg;
    NodeMem m;
    HostPool *pool;
    PoolConf conf = {.n_threads = r->threads, .spin_us = 50, .on_thread = on_thread, .arg = r};
    r->rc = topo_bind_node(r->topo, r->node, &r->err);
    if (r->rc == 0)
        r->rc = node_mem_new(&m, r->bytes, r->node, &r->err);
    if (r->rc)
        return NULL;
    r->rc = pool_new(&pool, &conf, &r->err);
    if (r->rc == 0) {
        on_thread(r, 0);
        read_pieces(r, pool, &m);
        pool_free(pool);
    }
    node_mem_free(&m);
    return NULL;
}

static int measure_node(Facts *f, const Topo *topo, int node, Err *err) {
    char what[256];
    uint64_t left = node_mem_available("", node, what, sizeof what),
             want = CACHES * topo_cache_bytes(topo, node);
    NodeRead r = {.topo = topo,
                  .node = node,
                  .threads = topo_n_cores(topo, node),
                  .bytes = want > LEAST ? want : LEAST};
    pthread_t thread;
    if (r.bytes > left / 2)
        return err_set(err, E_NOMEM, "measuring node %d takes %zu MB, %s has %llu MB left", node,
                       r.bytes >> 20, what, (unsigned long long)(left >> 20));
    int rc = pthread_create(&thread, NULL, read_node, &r);
    if (rc)
        return err_set(err, E_IO, "cannot start a thread: %s", strerror(rc));
    pthread_join(thread, NULL);
    if (r.rc)
        return err_set(err, r.rc, "measuring node %d: %s", node, r.err.text);
    f->node[node].gb_per_s = r.gb_per_s;
    return 0;
}

static int measure_gpus(Facts *f, Err *err) {
    for (int i = 0; i < f->n_gpus; i++) {
        FactsGpu *g = &f->gpu[i];
        int rc = g->present ? link_speed(i, &g->h2d_gb_per_s, &g->d2h_gb_per_s, err) : 0;
        if (rc == E_UNSUPPORTED) {
            fprintf(stderr, "baton doctor: GPUs are not measured: %s\n", err->text);
            *err = (Err){0};
            return 0;
        }
        if (rc)
            return rc;
    }
    return 0;
}

int host_measure(Facts *f, Err *err) {
    Topo *topo;
    int list[FACTS_NODES], n = facts_usable_nodes(f, list), rc = topo_open(&topo, err);
    if (rc)
        return rc;
    for (int i = 0; i < n && rc == 0; i++)
        rc = measure_node(f, topo, list[i], err);
    topo_close(topo);
    return rc ? rc : measure_gpus(f, err);
}
