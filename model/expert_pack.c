/* See expert_pack.h. Threads take units of experts from a counter and write each to its place; the
 * header, with the hashes of all, comes last. */
#include "model/expert_pack.h"

#include "model/expert_file_int.h"

#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_THREADS = 1024 };

typedef struct Job {
    const ExpertPackConf *conf;
    int layer, n_experts, units, fd;
    size_t data_at;
    uint64_t *hash; /* [n_experts, units] */
    IqLoss *loss;   /* [n_experts, units] */
    _Atomic int next, done;
    _Atomic int rc; /* of the first failure */
    Err err;        /* by who set rc */
} Job;

static void fail(Job *j, const Err *err) {
    int none = 0;
    if (atomic_compare_exchange_strong(&j->rc, &none, err->code))
        j->err = *err;
}

/* ---- one unit ---- */

static int view_of(const Job *j, int expert, IqMatrix m, MatView *v, Err *err) {
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    const IqGeom *g = &j->conf->geom;
    char name[160];
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s", j->layer, expert, part[m]);
    return weights_matrix(j->conf->weights, name, m == IQ_DOWN ? g->hidden : g->inner,
                          m == IQ_DOWN ? g->inner : g->hidden, v, err);
}

static void rows_f32(const MatView *v, float *out) {
    for (int r = 0; r < v->rows; r++)
        mat_row_f32(v, r, out + (size_t)r * (size_t)v->cols);
}

/* The checkpoint's pages have been read for good once the last unit of an expert is done; they are
 * not to fill memory. They come back from the file if another thread still wants some. */
static void forget(const MatView *v) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)v->data,
              end = begin + (size_t)v->rows * v->row_bytes;
    begin = (begin + page - 1) / page * page;
    end = end / page * page;
    if (end > begin)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
}

static int write_all(int fd, const void *from, size_t n, size_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t put = pwrite(fd, (const char *)from + done, n - done, (off_t)(at + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0)
            return errno;
        done += (size_t)put;
    }
    return 0;
}

static int pack_unit(Job *j, int index, float *w, uint8_t *unit, Err *err) {
    const IqGeom *g = &j->conf->geom;
    int expert = index / j->units, u = index % j->units, rc = 0;
    size_t n = (size_t)g->group * (size_t)g->hidden, bytes = iq_unit_bytes(g);
    MatView whole[3];
    for (int m = IQ_GATE; m <= IQ_DOWN && rc == 0; m++) {
        rc = view_of(j, expert, (IqMatrix)m, &whole[m], err);
        if (rc == 0) {
            MatView part = m == IQ_DOWN ? mat_cols(&whole[m], u * g->group, g->group)
                                        : mat_rows(&whole[m], u * g->group, g->group);
            rows_f32(&part, w + (size_t)m * n);
        }
    }
    if (rc == 0)
        rc = iq_pack_unit(g, w, w + n, w + 2 * n, unit, &j->loss[index], err);
    if (rc)
        return err_wrap(err, "layer %d, expert %d, unit %d", j->layer, expert, u);
    j->hash[index] = XXH3_64bits(unit, bytes);
    rc = write_all(j->fd, unit, bytes, j->data_at + (size_t)index * bytes);
    if (rc)
        return err_set(err, E_IO, "cannot write layer %d: %s", j->layer, strerror(rc));
    for (int m = IQ_GATE; m <= IQ_DOWN && u == j->units - 1; m++)
        forget(&whole[m]);
    return 0;
}

static void *pack_thread(void *arg) {
    Job *j = arg;
    const IqGeom *g = &j->conf->geom;
    float *w = xmalloc(3 * (size_t)g->group * (size_t)g->hidden * sizeof *w);
    uint8_t *unit = xmalloc(iq_unit_bytes(g));
    int total = j->n_experts * j->units;
    for (int i; (i = atomic_fetch_add(&j->next, 1)) < total && !j->rc;) {
        Err err = {0};
        if (pack_unit(j, i, w, unit, &err))
            fail(j, &err);
        atomic_fetch_add(&j->done, 1);
    }
    free(unit);
    free(w);
    return NULL;
}

/* ---- one layer ---- */

static void pack_all(Job *j) {
    pthread_t id[MAX_THREADS];
    int n = 0, total = j->n_experts * j->units;
    while (n < j->conf->threads && n < MAX_THREADS &&
           pthread_create(&id[n], NULL, pack_thread, j) == 0)
        n++;
    if (n == 0) {
        Err err = {0};
        err_set(&err, E_IO, "cannot start a thread");
        fail(j, &err);
    }
    while (j->done < total && !j->rc) {
        usleep(20000);
        if (j->conf->progress && !j->conf->progress(j->conf->arg, j->layer, j->done, total)) {
            Err err = {0};
            err_set(&err, E_CANCELED, "stopped in layer %d", j->layer);
            fail(j, &err);
        }
    }
    for (int i = 0; i < n; i++)
        pthread_join(id[i], NULL);
}

/* Adds up in the order of the units, so that the sum does not depend on threads. */
static double total_loss(const Job *j, ExpertPackResult *out) {
    IqLoss all = {0};
    out->worst = -1;
    for (int e = 0; e < j->n_experts; e++) {
        IqLoss one = {0};
        for (int u = 0; u < j->units; u++) {
            one.square += j->loss[e * j->units + u].square;
            one.error_square += j->loss[e * j->units + u].error_square;
        }
        double relative = one.square > 0 ? sqrt(one.error_square / one.square) : 0;
        if (relative > out->worst) {
            out->worst = relative;
            out->worst_expert = e;
        }
        all.square += one.square;
        all.error_square += one.error_square;
    }
    return all.square > 0 ? sqrt(all.error_square / all.square) : 0;
}

static ExpertHead head_of(const ExpertPackConf *c, int layer) {
    const Shape *s = weights_shape(c->weights);
    ExpertHead h = {.geom = c->geom,
                    .layer = layer,
                    .n_experts = s->n_experts,
                    .n_active = s->n_active,
                    .n_layers = s->n_layers + s->n_mtp,
                    .model_id = weights_id(c->weights),
                    .source = weights_fingerprint(c->weights)};
    while (h.first_layer < layer && s->layer_dense[h.first_layer])
        h.first_layer++;
    snprintf(h.method, sizeof h.method, "%s", c->geom.bits == 4 ? "rtn-search" : "rtn");
    return h;
}

/* Whether a file that stands there is what would be written. */
static int look_at_present(const char *path, const ExpertHead *want, bool *kept, double *loss,
                           Err *err) {
    ExpertFile *f;
    Err why = {0};
    *kept = false;
    int rc = expert_file_open(&f, path, &why);
    if (rc == E_UNSUPPORTED)
        return err_set(err, rc, "%s", why.text); /* not ours to write over */
    if (rc)
        return 0; /* none, or a damaged one that is written anew */
    const ExpertHead *h = expert_file_head(f);
    if (h->model_id != want->model_id)
        rc = err_set(err, E_MISMATCH, "%s: packed from another model (%016llx, this is %016llx)",
                     path, (unsigned long long)h->model_id, (unsigned long long)want->model_id);
    else if (h->source != want->source)
        rc = err_set(err, E_MISMATCH, "%s: packed from another checkpoint of this model", path);
    else if (memcmp(&h->geom, &want->geom, sizeof h->geom) || h->layer != want->layer ||
             h->n_experts != want->n_experts || strcmp(h->method, want->method)) {
        char name[32];
        expert_file_format(name, sizeof name, &h->geom);
        rc = err_set(err, E_MISMATCH, "%s: holds layer %d as %s (%s): give another directory", path,
                     h->layer, name, h->method);
    } else {
        *kept = true;
        *loss = h->loss;
    }
    expert_file_close(f);
    return rc;
}

int expert_pack_check(const ExpertPackConf *conf, Err *err) {
    const Shape *s = weights_shape(conf->weights);
    int rc = 0;
    for (int l = 0; l < s->n_layers + s->n_mtp && rc == 0; l++) {
        ExpertHead head = head_of(conf, l);
        char path[4096];
        bool kept;
        double loss;
        expert_file_path(path, sizeof path, conf->dir, l);
        if (!s->layer_dense[l])
            rc = look_at_present(path, &head, &kept, &loss, err);
    }
    return rc;
}

/* The new name is to outlive a loss of power too. */
static int sync_dir(const char *dir) {
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = 0;
    if (fd < 0 || fsync(fd))
        rc = errno;
    if (fd >= 0)
        close(fd);
    return rc;
}

static int finish(Job *j, ExpertHead *head, const char *from, const char *to, Err *err) {
    uint8_t *header = xmalloc(j->data_at);
    expert_header_write(head, j->hash, header);
    int rc = write_all(j->fd, header, j->data_at, 0);
    free(header);
    if (rc == 0 && (fsync(j->fd) || rename(from, to)))
        rc = errno;
    if (rc == 0)
        rc = sync_dir(j->conf->dir);
    return rc ? err_set(err, E_IO, "%s: %s", to, strerror(rc)) : 0;
}

int expert_pack_layer(const ExpertPackConf *conf, int layer, ExpertPackResult *out, Err *err) {
    ExpertHead head = head_of(conf, layer);
    ExpertPackResult result = {0};
    char path[4096], part[4096 + 8];
    expert_file_path(path, sizeof path, conf->dir, layer);
    snprintf(part, sizeof part, "%s.part", path);
    int rc = look_at_present(path, &head, &result.kept, &result.loss, err);
    if (rc)
        return rc;
    Job j = {.conf = conf,
             .layer = layer,
             .n_experts = head.n_experts,
             .units = iq_units(&conf->geom),
             .data_at = expert_header_bytes(&head)};
    size_t units = (size_t)j.n_experts * (size_t)j.units;
    result.bytes = j.data_at + units * iq_unit_bytes(&conf->geom);
    if (result.kept) {
        *out = result;
        return 0;
    }
    j.fd = open(part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (j.fd < 0)
        return err_set(err, E_IO, "%s: %s", part, strerror(errno));
    j.hash = xcalloc(units, sizeof *j.hash);
    j.loss = xcalloc(units, sizeof *j.loss);
    pack_all(&j);
    rc = j.rc;
    if (rc && err)
        *err = j.err;
    head.loss = result.loss = total_loss(&j, &result);
    if (rc == 0)
        rc = finish(&j, &head, part, path, err);
    if (rc)
        unlink(part);
    close(j.fd);
    free(j.hash);
    free(j.loss);
    if (rc == 0)
        *out = result;
    return rc;
}
