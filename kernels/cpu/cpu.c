/* The fast host backend: chooses an instruction set, opens devices with their thread pools, and the
 * operations that are too small to split. */
#include "kernels/cpu/cpu.h"

#include "base/topo.h"

#include <cpuid.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

void cpu_scratch_reserve(Dev *d, size_t floats) {
    if (floats <= d->scratch_len)
        return;
    free(d->scratch);
    d->scratch_len = (floats + 1023) & ~(size_t)1023;
    d->scratch = xaligned(d->scratch_len * (size_t)pool_size(d->pool) * sizeof(float));
}

float *cpu_work(Dev *d, size_t floats) {
    if (floats > d->work_len) {
        free(d->work);
        d->work_len = (floats + 1023) & ~(size_t)1023;
        d->work = xaligned(d->work_len * sizeof(float));
    }
    return d->work;
}

static void cpu_rms_norm(Dev *d, Tensor out, Tensor x, Tensor w, float eps) {
    const float *weight = host_row(w, 0);
    for (int t = 0; t < x.rows; t++) {
        const float *in = host_row(x, t);
        float *o = host_row(out, t),
              inv = 1.0f / sqrtf(d->kern->square_sum(in, x.cols) / (float)x.cols + eps);
        for (int i = 0; i < x.cols; i++)
            o[i] = in[i] * inv * weight[i];
    }
}

/* cos and sin of every token of the batch for pairs of `dim` numbers: computed once per batch and
 * shape, used by every layer. */
static const float *rope_table(Dev *d, int dim, float theta) {
    HostRope *r = &d->rope;
    if (r->n_tok == d->batch.n_tok && r->dim == dim && r->theta == theta)
        return r->cs;
    if (r->dim != dim) {
        free(r->cs);
        r->cs = xaligned((size_t)d->conf.max_rows * (size_t)dim * sizeof(float));
    }
    for (int t = 0; t < d->batch.n_tok; t++)
        for (int i = 0; i < dim / 2; i++) {
            double angle = d->pos[t] * pow((double)theta, -2.0 * i / dim);
            r->cs[(size_t)t * (size_t)dim + 2 * (size_t)i] = (float)cos(angle);
            r->cs[(size_t)t * (size_t)dim + 2 * (size_t)i + 1] = (float)sin(angle);
        }
    r->n_tok = d->batch.n_tok;
    r->dim = dim;
    r->theta = theta;
    return r->cs;
}

static void cpu_rope(Dev *d, Tensor x, int heads, int stride, int at, int dim, float theta) {
    const float *table = rope_table(d, dim, theta);
    for (int t = 0; t < x.rows; t++) {
        const float *cs = table + (size_t)t * (size_t)dim;
        for (int h = 0; h < heads; h++) {
            float *p = host_row(x, t) + h * stride + at;
            for (int i = 0; i < dim; i += 2) {
                float a = p[i], b = p[i + 1];
                p[i] = a * cs[i] - b * cs[i + 1];
                p[i + 1] = b * cs[i] + a * cs[i + 1];
            }
        }
    }
}

static void cpu_silu_mul(Dev *d, Tensor out, Tensor gate, Tensor up) {
    for (int t = 0; t < gate.rows; t++)
        d->kern->silu_mul(host_row(out, t), host_row(gate, t), host_row(up, t), gate.cols);
}

/* ---- tables ---- */

enum { SPIN_US = 100 }; /* operations of one step follow each other faster */

/* Physical cores that this process may use, shared among the ranks. */
static int default_threads(int n_ranks) {
    Topo *topo;
    if (topo_open(&topo, NULL))
        return 1;
    int n = topo_n_cores(topo, -1) / n_ranks;
    topo_close(topo);
    return n > 1 ? n : 1;
}

static int open_with(const Ops *ops, const Kern *kern, const DevConf *conf, Dev **dev, Err *err) {
    int rc = host_open(ops, conf, dev, err);
    if (rc)
        return rc;
    PoolConf pool = {.n_threads =
                         conf->threads > 0 ? conf->threads : default_threads(conf->n_ranks),
                     .spin_us = SPIN_US};
    for (int r = 0; r < conf->n_ranks && rc == 0; r++) {
        dev[r]->kern = kern;
        rc = pool_new(&dev[r]->pool, &pool, err);
    }
    if (rc)
        ops->close(dev, conf->n_ranks);
    return rc;
}

static void cpu_close(Dev **dev, int n_ranks) {
    for (int r = 0; r < n_ranks; r++)
        if (dev[r]) {
            pool_free(dev[r]->pool);
            free(dev[r]->rope.cs);
            free(dev[r]->work);
        }
    ops_ref()->close(dev, n_ranks);
}

static Ops table_of(const char *name, int (*open)(const DevConf *, Dev **, Err *)) {
    Ops t = *ops_ref();
    t.name = name;
    t.open = open;
    t.close = cpu_close;
    t.linear = cpu_linear;
    t.rms_norm = cpu_rms_norm;
    t.rope = cpu_rope;
    t.silu_mul = cpu_silu_mul;
    t.mla_absorb = cpu_mla_absorb;
    t.mla_expand = cpu_mla_expand;
    t.kv_write = cpu_kv_write;
    t.index_select = cpu_index_select;
    t.mla_attend = cpu_mla_attend;
    t.experts = cpu_experts;
    return t;
}

static Ops table_avx2, table_avx512;

static int open_avx2(const DevConf *conf, Dev **dev, Err *err) {
    return open_with(&table_avx2, kern_avx2(), conf, dev, err);
}

static int open_avx512(const DevConf *conf, Dev **dev, Err *err) {
    return open_with(&table_avx512, kern_avx512(), conf, dev, err);
}

/* clang 14 has no name for it in __builtin_cpu_supports. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void) {
    table_avx2 = table_of("cpu-avx2", open_avx2);
    table_avx512 = table_of("cpu-avx512", open_avx512);
}

const Ops *ops_cpu(const char *force) {
    pthread_once(&tables_once, fill_tables);
    if (has_avx512() && (!force || !strcmp(force, "avx512")))
        return &table_avx512;
    if (has_avx2() && (!force || !strcmp(force, "avx2")))
        return &table_avx2;
    return NULL;
}
