/* See expert_file.h. A file's header is read into memory once and believed only after its own hash
 * was right and its sizes agree with the file's. */
#include "model/expert_file.h"

#include "model/expert_file_int.h"

#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct ExpertFile {
    ExpertHead head;
    char *path;
    int fd;
    size_t data_at;
    uint8_t *header; /* [data_at] */
};

void expert_file_path(char *path, size_t n, const char *dir, int layer) {
    snprintf(path, n, "%s/layer-%03d.experts", dir, layer);
}

void expert_file_format(char *name, size_t n, const IqGeom *g) {
    snprintf(name, n, "int%d-g%d-%s", g->bits, g->group, g->scale == IQ_SCALE_F16 ? "f16" : "bf16");
}

/* ---- header ---- */

size_t expert_header_bytes(const ExpertHead *h) {
    size_t units = (size_t)iq_units(&h->geom) * (size_t)h->n_experts;
    return (sizeof(ExpertDisk) + units * sizeof(uint64_t) + 4095) / 4096 * 4096;
}

static uint64_t header_hash(const uint8_t *header, size_t n) {
    XXH3_state_t *h = XXH3_createState();
    CHECK(h);
    XXH3_64bits_reset(h);
    XXH3_64bits_update(h, header, offsetof(ExpertDisk, header_hash));
    XXH3_64bits_update(h, header + sizeof(ExpertDisk), n - sizeof(ExpertDisk));
    uint64_t sum = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return sum;
}

void expert_header_seal(uint8_t *header, size_t n) {
    uint64_t sum = header_hash(header, n);
    memcpy(header + offsetof(ExpertDisk, header_hash), &sum, sizeof sum);
}

void expert_header_write(const ExpertHead *h, const uint64_t *unit_hash, uint8_t *out) {
    size_t n = expert_header_bytes(h), units = (size_t)iq_units(&h->geom) * (size_t)h->n_experts;
    ExpertDisk d = {.magic = EXPERT_MAGIC,
                    .version = EXPERT_FILE_VERSION,
                    .header_bytes = (uint32_t)n,
                    .model_id = h->model_id,
                    .source = h->source,
                    .hidden = h->geom.hidden,
                    .inner = h->geom.inner,
                    .bits = h->geom.bits,
                    .group = h->geom.group,
                    .scale = (int32_t)h->geom.scale,
                    .layer = h->layer,
                    .n_experts = h->n_experts,
                    .n_active = h->n_active,
                    .n_layers = h->n_layers,
                    .first_layer = h->first_layer,
                    .loss = h->loss,
                    .data_bytes = units * iq_unit_bytes(&h->geom)};
    memcpy(d.method, h->method, sizeof d.method);
    memset(out, 0, n);
    memcpy(out, &d, sizeof d);
    memcpy(out + sizeof d, unit_hash, units * sizeof *unit_hash);
    expert_header_seal(out, n);
}

static int check_numbers(const ExpertDisk *d, Err *err) {
    const struct {
        const char *name;
        int32_t value, low, high;
    } field[] = {{"hidden", d->hidden, 1, 1 << 20},
                 {"inner", d->inner, 1, 1 << 20},
                 {"n_experts", d->n_experts, 1, 4096},
                 {"n_active", d->n_active, 1, d->n_experts},
                 {"n_layers", d->n_layers, 1, 1 << 12},
                 {"layer", d->layer, 0, d->n_layers > 0 ? d->n_layers - 1 : 0},
                 {"first_layer", d->first_layer, 0, d->layer > 0 ? d->layer : 0}};
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        if (field[i].value < field[i].low || field[i].value > field[i].high)
            return err_set(err, E_FORMAT, "%s is %d, expected %d to %d", field[i].name,
                           field[i].value, field[i].low, field[i].high);
    if (!memchr(d->method, 0, sizeof d->method))
        return err_set(err, E_FORMAT, "method is not a text");
    return 0;
}

int expert_header_parse(const uint8_t *bytes, size_t n, uint64_t file_bytes, ExpertHead *out,
                        Err *err) {
    ExpertDisk d;
    if (n < sizeof d)
        return err_set(err, E_FORMAT, "%llu bytes are no expert file",
                       (unsigned long long)file_bytes);
    memcpy(&d, bytes, sizeof d);
    if (d.magic != EXPERT_MAGIC)
        return err_set(err, E_FORMAT, "not an expert file");
    if (d.version != EXPERT_FILE_VERSION)
        return err_set(err, E_UNSUPPORTED, "version %u, this build reads %d", d.version,
                       EXPERT_FILE_VERSION);
    if (d.header_bytes < sizeof d || d.header_bytes > EXPERT_HEADER_MAX)
        return err_set(err, E_FORMAT, "a header of %u bytes", d.header_bytes);
    if (n < d.header_bytes)
        return err_set(err, E_FORMAT, "truncated within the header");
    if (header_hash(bytes, d.header_bytes) != d.header_hash)
        return err_set(err, E_FORMAT, "the header is damaged: its hash is wrong");
    int rc = check_numbers(&d, err);
    ExpertHead h = {.geom = {d.hidden, d.inner, d.bits, d.group, (IqScale)d.scale},
                    .layer = d.layer,
                    .n_experts = d.n_experts,
                    .n_active = d.n_active,
                    .n_layers = d.n_layers,
                    .first_layer = d.first_layer,
                    .model_id = d.model_id,
                    .source = d.source,
                    .loss = d.loss,
                    .hash = d.header_hash};
    if (rc || (rc = iq_check(&h.geom, err)))
        return rc;
    memcpy(h.method, d.method, sizeof h.method);
    size_t need = expert_header_bytes(&h);
    uint64_t data = (uint64_t)iq_units(&h.geom) * (uint64_t)h.n_experts * iq_unit_bytes(&h.geom);
    if (d.header_bytes != need || d.data_bytes != data)
        return err_set(err, E_FORMAT, "sizes in the header do not agree with its dimensions");
    if (file_bytes != need + data)
        return err_set(err, E_FORMAT, "%llu bytes, expected %llu: %s",
                       (unsigned long long)file_bytes, (unsigned long long)(need + data),
                       file_bytes < need + data ? "truncated" : "something was added");
    *out = h;
    return 0;
}

/* ---- files ---- */

static int read_all(int fd, void *to, size_t n, size_t at) {
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, (char *)to + done, n - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return got < 0 ? errno : ENODATA;
        done += (size_t)got;
    }
    return 0;
}

/* How many bytes to read for the header: what its first bytes say, if they can be. */
static size_t wanted_header(const uint8_t *first, size_t got, uint64_t file_bytes) {
    ExpertDisk d;
    if (got < sizeof d)
        return got;
    memcpy(&d, first, sizeof d);
    return d.header_bytes > got && d.header_bytes <= EXPERT_HEADER_MAX &&
                   d.header_bytes <= file_bytes
               ? d.header_bytes
               : got;
}

static int read_header(ExpertFile *f, Err *err) {
    struct stat st;
    if (fstat(f->fd, &st) || !S_ISREG(st.st_mode))
        return err_set(err, E_IO, "%s: not a readable file", f->path);
    uint64_t bytes = (uint64_t)st.st_size;
    size_t n = bytes < 4096 ? (size_t)bytes : 4096;
    f->header = xcalloc(1, 4096);
    int rc = read_all(f->fd, f->header, n, 0);
    size_t more = rc ? n : wanted_header(f->header, n, bytes);
    if (more > n) {
        f->header = xrealloc(f->header, more);
        rc = read_all(f->fd, f->header + n, more - n, n);
    }
    if (rc)
        return err_set(err, E_IO, "%s: %s", f->path, strerror(rc));
    rc = expert_header_parse(f->header, more, bytes, &f->head, err);
    if (rc)
        return err_wrap(err, "%s", f->path);
    f->data_at = expert_header_bytes(&f->head);
    return 0;
}

int expert_file_open(ExpertFile **out, const char *path, Err *err) {
    ExpertFile *f = xcalloc(1, sizeof *f);
    f->path = xstrdup(path);
    f->fd = open(path, O_RDONLY | O_CLOEXEC);
    int rc = f->fd < 0 ? err_set(err, errno == ENOENT ? E_NOTFOUND : E_IO, "%s: %s", path,
                                 strerror(errno))
                       : read_header(f, err);
    if (rc) {
        expert_file_close(f);
        return rc;
    }
    *out = f;
    return 0;
}

void expert_file_close(ExpertFile *f) {
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    free(f->header);
    free(f->path);
    free(f);
}

const ExpertHead *expert_file_head(const ExpertFile *f) {
    return &f->head;
}

static int check_unit(const ExpertFile *f, int expert, int unit, const void *bytes, Err *err) {
    size_t index = (size_t)expert * (size_t)iq_units(&f->head.geom) + (size_t)unit;
    uint64_t want;
    memcpy(&want, f->header + sizeof(ExpertDisk) + index * sizeof want, sizeof want);
    if (XXH3_64bits(bytes, iq_unit_bytes(&f->head.geom)) == want)
        return 0;
    return err_set(err, E_FORMAT, "%s: expert %d, unit %d is damaged: its hash is wrong", f->path,
                   expert, unit);
}

int expert_file_read(const ExpertFile *f, int expert, int unit, int n, void *to, Err *err) {
    size_t units = (size_t)iq_units(&f->head.geom), bytes = iq_unit_bytes(&f->head.geom);
    CHECK(expert >= 0 && expert < f->head.n_experts && unit >= 0 && n >= 1 &&
          (size_t)(unit + n) <= units);
    int rc = read_all(f->fd, to, (size_t)n * bytes,
                      f->data_at + ((size_t)expert * units + (size_t)unit) * bytes);
    if (rc)
        return err_set(err, E_IO, "%s: %s", f->path, strerror(rc));
    for (int i = 0; i < n && rc == 0; i++)
        rc = check_unit(f, expert, unit + i, (const char *)to + (size_t)i * bytes, err);
    return rc;
}

/* ---- verification ---- */

typedef struct Verify {
    const ExpertFile *f;
    _Atomic int next;
    _Atomic int rc; /* of the first failure */
    Err err;        /* by who set rc */
} Verify;

static void *verify_thread(void *arg) {
    Verify *v = arg;
    int units = iq_units(&v->f->head.geom), none = 0;
    void *slice = xmalloc((size_t)units * iq_unit_bytes(&v->f->head.geom));
    for (int e; (e = atomic_fetch_add(&v->next, 1)) < v->f->head.n_experts && !v->rc;) {
        Err err = {0};
        int rc = expert_file_read(v->f, e, 0, units, slice, &err);
        if (rc && atomic_compare_exchange_strong(&v->rc, &none, rc))
            v->err = err;
    }
    free(slice);
    return NULL;
}

int expert_file_verify(const ExpertFile *f, int threads, uint64_t *bytes, Err *err) {
    Verify v = {.f = f};
    pthread_t id[256];
    int started = 0;
    for (; started < threads - 1 && started < 256; started++)
        if (pthread_create(&id[started], NULL, verify_thread, &v))
            break;
    verify_thread(&v);
    for (int i = 0; i < started; i++)
        pthread_join(id[i], NULL);
    *bytes = (uint64_t)f->head.n_experts * (uint64_t)iq_units(&f->head.geom) *
             iq_unit_bytes(&f->head.geom);
    if (v.rc && err)
        *err = v.err;
    return v.rc;
}
