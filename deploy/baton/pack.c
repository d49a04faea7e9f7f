/* baton pack: expert files from a checkpoint, and their verification. One thread, but for those of
 * expert_pack. */
#include "deploy/baton/baton.h"

#include "base/clock.h"
#include "base/topo.h"
#include "model/expert_pack.h"

#include <dirent.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char USAGE[] =
    "usage: baton pack --model DIR --out DIR [options]\n"
    "       baton pack --verify FILE-OR-DIR [--threads N]\n\n"
    "Makes one file per MoE layer from a BF16, FP8 or NVFP4 checkpoint, for [experts] files of\n"
    "expertd. BF16 loses least. Layers whose file is there and complete are kept, so that a run\n"
    "that was stopped goes on where it was.\n\n"
    "  --bits 4|8        bits of a weight (4)\n"
    "  --group 64|128    weights that share a scale (128)\n"
    "  --scale f16|bf16  format of the scales (f16)\n"
    "  --layers A-B      only these layers\n"
    "  --threads N       (all cores)\n";

typedef struct PackOpts {
    const char *model, *out, *verify;
    int bits, group, first, last, threads;
    IqScale scale;
} PackOpts;

static volatile sig_atomic_t stopped;

static void on_signal(int sig) {
    (void)sig;
    stopped = 1;
}

/* ---- options ---- */

static int all_cores(void) {
    Topo *t;
    if (topo_open(&t, NULL))
        return 1;
    int n = topo_n_cores(t, -1);
    topo_close(t);
    return n > 0 ? n : 1;
}

static bool whole_number(const char *s, int low, int high, int *out) {
    char *end;
    errno = 0;
    long v = strtol(s, &end, 10);
    if (!*s || *end || errno || v < low || v > high)
        return false;
    *out = (int)v;
    return true;
}

static bool layer_range(char *s, PackOpts *o) {
    char *dash = strchr(s, '-');
    if (dash)
        *dash = 0;
    return whole_number(s, 0, 4095, &o->first) &&
           whole_number(dash ? dash + 1 : s, o->first, 4095, &o->last);
}

static bool take_option(PackOpts *o, int c, char *v) {
    switch (c) {
    case 'm':
        o->model = v;
        return true;
    case 'o':
        o->out = v;
        return true;
    case 'v':
        o->verify = v;
        return true;
    case 'b':
        return whole_number(v, 4, 8, &o->bits) && (o->bits == 4 || o->bits == 8);
    case 'g':
        return whole_number(v, 64, 128, &o->group) && (o->group == 64 || o->group == 128);
    case 's':
        o->scale = strcmp(v, "bf16") == 0 ? IQ_SCALE_BF16 : IQ_SCALE_F16;
        return strcmp(v, "bf16") == 0 || strcmp(v, "f16") == 0;
    case 'l':
        return layer_range(v, o);
    case 't':
        return whole_number(v, 1, 1024, &o->threads);
    default:
        return false;
    }
}

/* 0, or the exit status. */
static int read_options(PackOpts *o, int argc, char **argv, bool *end) {
    static const struct option table[] = {{"model", 1, 0, 'm'},  {"out", 1, 0, 'o'},
                                          {"verify", 1, 0, 'v'}, {"bits", 1, 0, 'b'},
                                          {"group", 1, 0, 'g'},  {"scale", 1, 0, 's'},
                                          {"layers", 1, 0, 'l'}, {"threads", 1, 0, 't'},
                                          {"help", 0, 0, 'h'},   {0}};
    *o = (PackOpts){.bits = 4, .group = 128, .last = 4095, .threads = all_cores()};
    *end = true;
    for (int c, at = 0; (c = getopt_long(argc, argv, "", table, &at)) != -1;) {
        if (c == 'h') {
            fputs(USAGE, stdout);
            return 0;
        }
        if (c == '?')
            return 2;
        if (!take_option(o, c, optarg)) {
            fprintf(stderr, "baton pack: --%s %s: not one of what is expected\n%s", table[at].name,
                    optarg, USAGE);
            return 2;
        }
    }
    if (optind < argc || (!o->verify && (!o->model || !o->out))) {
        fputs(USAGE, stderr);
        return 2;
    }
    *end = false;
    return 0;
}

/* ---- packing ---- */

typedef struct Progress {
    bool tty;
    int n_layers, at; /* layers to do; the one being done, from 0 */
    int64_t begin_ms, said_ms;
    uint64_t layer_bytes, done_bytes; /* of files written before this layer */
} Progress;

static bool on_progress(void *arg, int layer, int done, int total) {
    Progress *p = arg;
    int64_t now = clock_now_ms();
    if (stopped)
        return false;
    if (now - p->said_ms < (p->tty ? 100 : 10000))
        return true;
    p->said_ms = now;
    double part = (double)done / total, s = (double)(now - p->begin_ms) * 1e-3,
           bytes = (double)p->done_bytes + part * (double)p->layer_bytes,
           left = (double)p->n_layers * (double)p->layer_bytes - bytes;
    char bar[21];
    for (int i = 0; i < 20; i++)
        bar[i] = i < (int)(part * 20) ? '#' : '.';
    bar[20] = 0;
    fprintf(stderr, "%slayer %3d [%s] %d of %d layers, %.2f GB/s, %.0f s left%s",
            p->tty ? "\r" : "", layer, bar, p->at, p->n_layers, bytes / 1e9 / s,
            bytes > 0 ? s * left / bytes : 0, p->tty ? "\033[K" : "\n");
    return true;
}

static int pack_layers(const PackOpts *o, const Weights *w, Err *err) {
    const Shape *s = weights_shape(w);
    int layers = s->n_layers + s->n_mtp, rc = 0;
    Progress p = {.tty = isatty(2), .begin_ms = clock_now_ms()};
    ExpertPackConf conf = {.weights = w,
                           .dir = o->out,
                           .geom = {s->hidden, s->moe_inner, o->bits, o->group, o->scale},
                           .threads = o->threads,
                           .progress = on_progress,
                           .arg = &p};
    if ((rc = iq_check(&conf.geom, err)) || (rc = expert_pack_check(&conf, err)))
        return rc;
    for (int l = o->first; l < layers && l <= o->last; l++)
        p.n_layers += !s->layer_dense[l];
    if (p.n_layers == 0)
        return err_set(err, E_INVAL, "no layer of these has experts");
    p.layer_bytes =
        (uint64_t)iq_units(&conf.geom) * (uint64_t)s->n_experts * iq_unit_bytes(&conf.geom);
    for (int l = o->first; l < layers && l <= o->last && rc == 0; l++) {
        ExpertPackResult r;
        if (s->layer_dense[l])
            continue;
        if ((rc = expert_pack_layer(&conf, l, &r, err)))
            break;
        fprintf(stderr, "%s", p.tty ? "\r\033[K" : "");
        if (r.kept)
            printf("layer %d: kept, error %.3f %%\n", l, r.loss * 100);
        else
            printf("layer %d: %.1f MB, error %.3f %%, worst expert %d with %.3f %%\n", l,
                   (double)r.bytes / 1e6, r.loss * 100, r.worst_expert, r.worst * 100);
        fflush(stdout);
        p.done_bytes += r.kept ? 0 : p.layer_bytes;
        p.n_layers -= r.kept;
        p.at += !r.kept;
    }
    return rc;
}

static int pack(const PackOpts *o, Err *err) {
    Weights *w;
    if (mkdir(o->out, 0755) && errno != EEXIST)
        return err_set(err, E_IO, "%s: %s", o->out, strerror(errno));
    int rc = weights_open(&w, o->model, err);
    if (rc)
        return rc;
    struct sigaction act = {.sa_handler = on_signal};
    sigaction(SIGINT, &act, NULL);
    sigaction(SIGTERM, &act, NULL);
    rc = pack_layers(o, w, err);
    weights_close(w);
    return rc;
}

/* ---- verification ---- */

static int verify_file(const char *path, int threads, Err *err) {
    ExpertFile *f;
    uint64_t bytes = 0;
    int64_t begin = clock_now_us();
    int rc = expert_file_open(&f, path, err);
    if (rc)
        return rc;
    const ExpertHead *h = expert_file_head(f);
    char name[64];
    expert_file_path(name, sizeof name, "", h->layer);
    const char *slash = strrchr(path, '/');
    if (strcmp(slash ? slash : path, slash ? name : name + 1) != 0)
        rc = err_set(err, E_MISMATCH, "%s: holds layer %d", path, h->layer);
    else
        rc = expert_file_verify(f, threads, &bytes, err);
    char format[32];
    expert_file_format(format, sizeof format, &h->geom);
    if (rc == 0)
        printf("%s: layer %d, %d experts, %s, model %016llx, all hashes right, %.2f GB/s\n", path,
               h->layer, h->n_experts, format, (unsigned long long)h->model_id,
               (double)bytes / 1e3 / (double)(clock_now_us() - begin));
    expert_file_close(f);
    return rc;
}

static int is_expert_file(const struct dirent *d) {
    const char *dot = strrchr(d->d_name, '.');
    return dot && strcmp(dot, ".experts") == 0;
}

static int verify(const PackOpts *o, Err *err) {
    struct stat st;
    struct dirent **list;
    if (stat(o->verify, &st))
        return err_set(err, E_IO, "%s: %s", o->verify, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return verify_file(o->verify, o->threads, err);
    int n = scandir(o->verify, &list, is_expert_file, alphasort), rc = 0;
    if (n <= 0)
        return err_set(err, E_NOTFOUND, "%s: no expert files", o->verify);
    for (int i = 0; i < n; i++) {
        char *path = xasprintf("%s/%s", o->verify, list[i]->d_name);
        if (rc == 0)
            rc = verify_file(path, o->threads, err);
        free(path);
        free(list[i]);
    }
    free(list);
    return rc;
}

int baton_pack(int argc, char **argv) {
    PackOpts o;
    bool end;
    int status = read_options(&o, argc, argv, &end);
    if (end)
        return status;
    Err err = {0};
    if (o.verify ? verify(&o, &err) : pack(&o, &err)) {
        fprintf(stderr, "%sbaton pack: %s\n", isatty(2) ? "\r\033[K" : "", err.text);
        return 1;
    }
    return 0;
}
