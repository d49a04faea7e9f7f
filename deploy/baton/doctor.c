/* baton doctor: what will limit a service on a host, and what to change. One thread. */
#include "deploy/baton/baton.h"

#include "deploy/baton/doctor_report.h"
#include "deploy/baton/host.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>

static const char USAGE[] =
    "usage: baton doctor [--facts DIR] [--config PATH]... [options]\n"
    "       baton doctor [--facts DIR] --from-sglang FILE [--out DIR] [options]\n"
    "       baton doctor --capture DIR\n\n"
    "Says what will limit the configured services on this host, the most costly first, each with\n"
    "the numbers it rests on, and prints a configuration that uses the host.\n\n"
    "  --config PATH        a config file, or a directory of router*.conf, prefill*.conf,\n"
    "                       decode*.conf, expertd*.conf; may be repeated\n"
    "  --from-sglang FILE   options of SGLang, KTransformers or vLLM instead: a command line, or "
    "one\n"
    "                       option on a line; - for standard input\n"
    "  --out DIR            writes their translation there\n"
    "  --better DIR         writes the better configuration there\n"
    "  --facts DIR          of another host: numactl.txt (numactl -H), lscpu.txt, gpus.csv, "
    "topo.txt\n"
    "                       (nvidia-smi --query-gpu=... --format=csv; nvidia-smi topo -m), "
    "ucx.txt\n"
    "                       (ucx_info -d), host.txt; all of them may be missing\n"
    "  --capture DIR        writes the facts of this host there, and ends\n"
    "  --measure            measures memory, and GPUs where this build has CUDA\n"
    "  --set NAME=VALUE     changes an assumption; the report lists them\n"
    "  --json               for programs\n"
    "  --list-options       prints what becomes of each foreign option, and ends\n\n"
    "Exit status: 0 good, 1 warnings, 2 will not work, 3 wrong use or unreadable input.\n";

enum { USED_WRONGLY = 3, MAX_CONFIGS = 256 };

typedef struct DoctorOpts {
    const char *facts, *capture, *sglang, *out, *better;
    const char *config[MAX_CONFIGS];
    int n_configs;
    bool json, measure, list;
    Assume assume;
    bool bits_set; /* expert_bits or gpu bits are the user's */
} DoctorOpts;

/* ---- command line ---- */

static bool take_option(DoctorOpts *o, int c, const char *v, Err *err) {
    switch (c) {
    case 'f':
        o->facts = v;
        return true;
    case 'k':
        o->capture = v;
        return true;
    case 's':
        o->sglang = v;
        return true;
    case 'o':
        o->out = v;
        return true;
    case 'b':
        o->better = v;
        return true;
    case 'j':
        return o->json = true;
    case 'm':
        return o->measure = true;
    case 'l':
        return o->list = true;
    case 'c':
        if (o->n_configs == MAX_CONFIGS)
            return err_set(err, E_LIMIT, "more than %d --config", MAX_CONFIGS), false;
        o->config[o->n_configs++] = v;
        return true;
    case 'a':
        o->bits_set |= strstr(v, "_bits=") != NULL;
        return assume_set(&o->assume, v, err) == 0;
    default:
        return false;
    }
}

static int check_options(const DoctorOpts *o, Err *err) {
    if (o->sglang && o->n_configs > 0)
        return err_set(err, E_INVAL, "--from-sglang and --config: one of them");
    if (o->out && !o->sglang)
        return err_set(err, E_INVAL,
                       "--out needs --from-sglang (--better writes the better "
                       "configuration)");
    if (o->capture && (o->facts || o->sglang || o->n_configs > 0))
        return err_set(err, E_INVAL, "--capture writes this host's facts and does nothing else");
    if (o->measure && o->facts)
        return err_set(err, E_INVAL, "--measure measures this host, --facts is of another");
    return 0;
}

/* Whether the command ends here, with *status. */
static bool read_options(DoctorOpts *o, int argc, char **argv, int *status) {
    static const struct option table[] = {
        {"facts", 1, 0, 'f'},   {"capture", 1, 0, 'k'}, {"config", 1, 0, 'c'},
        {"json", 0, 0, 'j'},    {"out", 1, 0, 'o'},     {"from-sglang", 1, 0, 's'},
        {"better", 1, 0, 'b'},  {"set", 1, 0, 'a'},     {"list-options", 0, 0, 'l'},
        {"measure", 0, 0, 'm'}, {"help", 0, 0, 'h'},    {0}};
    Err err = {0};
    assume_init(&o->assume);
    *status = USED_WRONGLY;
    optind = 0;
    for (int c; (c = getopt_long(argc, argv, "", table, NULL)) != -1;) {
        if (c == 'h') {
            fputs(USAGE, stdout);
            *status = 0;
            return true;
        }
        if (c == '?') {
            fputs("try baton doctor --help\n", stderr);
            return true;
        }
        if (!take_option(o, c, optarg, &err)) {
            fprintf(stderr, "baton doctor: %s\n", err.text);
            return true;
        }
    }
    /* "--config A B": a shell's pattern. */
    for (; optind < argc && o->n_configs > 0 && o->n_configs < MAX_CONFIGS; optind++)
        o->config[o->n_configs++] = argv[optind];
    if (optind < argc)
        err_set(&err, E_INVAL, "unexpected argument \"%.100s\"", argv[optind]);
    if (err.code || check_options(o, &err)) {
        fprintf(stderr, "baton doctor: %s\n", err.text);
        return true;
    }
    return false;
}

/* ---- reading ---- */

static int read_foreign_text(const char *path, char **out, Err *err) {
    bool in = strcmp(path, "-") == 0;
    FILE *f = in ? stdin : fopen(path, "re");
    if (!f)
        return err_set(err, E_IO, "%s: %s", path, strerror(errno));
    char *text = xcalloc(SGLANG_TEXT_MAX + 2, 1);
    size_t n = fread(text, 1, SGLANG_TEXT_MAX + 1, f);
    int rc = ferror(f) ? err_set(err, E_IO, "%s: %s", path, strerror(errno))
             : n > SGLANG_TEXT_MAX
                 ? err_set(err, E_LIMIT, "%s: larger than %d bytes", path, SGLANG_TEXT_MAX)
             : memchr(text, 0, n) ? err_set(err, E_FORMAT, "%s: zero byte in a text file", path)
                                  : 0;
    if (!in)
        fclose(f);
    if (rc)
        free(text);
    else
        *out = text;
    return rc;
}

/* What the options say of formats, unless the user has. */
static void assume_formats(DoctorOpts *o, const SglangWish *w) {
    if (o->bits_set)
        return;
    if (w->bits > 0)
        o->assume.expert_bits = w->bits;
    if (w->fp4) {
        /* Experts with a scale of 8 bits per 16 weights, everything else BF16. */
        o->assume.gpu_expert_bits = 4.5;
        o->assume.gpu_rest_bits = 16;
    }
}

/* Reads foreign options into services; the files are written when asked for. */
static int take_foreign(DoctorOpts *o, Sglang *s, Services *services, Err *err) {
    char *text = NULL;
    ConfDoc *docs = NULL;
    int n = 0, rc = read_foreign_text(o->sglang, &text, err);
    if (rc == 0)
        rc = sglang_read(s, o->sglang, text, err);
    free(text);
    if (rc)
        return rc;
    assume_formats(o, &s->wish);
    sglang_docs(s, &docs, &n);
    rc = services_add_docs(services, docs, n, err);
    if (rc == 0 && o->out)
        rc = conf_docs_write(docs, n, o->out, err);
    for (int i = 0; i < n; i++)
        conf_doc_done(&docs[i]);
    free(docs);
    return rc;
}

/* The checkpoint's shape where it lies here. */
static int find_shape(const Services *s, Shape *out, bool *assumed, Err *err) {
    *assumed = true;
    for (int i = 0; i < s->n && *assumed; i++) {
        const EngineOpts *e = service_engine(&s->at[i]);
        char *path = e ? xasprintf("%s/config.json", e->dir) : NULL;
        FILE *f = path ? fopen(path, "re") : NULL;
        int rc = f ? shape_load(out, path, err) : 0;
        *assumed = !f;
        if (f)
            fclose(f);
        free(path);
        if (rc)
            return rc;
    }
    if (*assumed)
        model_glm52(out);
    return 0;
}

/* ---- the whole of it ---- */

typedef struct Doctor {
    DoctorOpts opts;
    Facts facts;
    Services services;
    Sglang sglang;
    Shape shape;
    bool shape_assumed;
    View view;
    Ceiling ceiling;
    Findings findings;
    Better better;
} Doctor;

static int gather(Doctor *d, Err *err) {
    DoctorOpts *o = &d->opts;
    int rc = o->facts ? facts_read(&d->facts, o->facts, err) : 0;
    if (!o->facts)
        host_facts(&d->facts);
    if (rc == 0)
        rc = facts_derive(&d->facts, (int)o->assume.sockets, err);
    if (rc == 0 && o->measure)
        rc = host_measure(&d->facts, err);
    if (rc == 0 && o->sglang)
        rc = take_foreign(o, &d->sglang, &d->services, err);
    return rc;
}

static int read_configs(Doctor *d, Err *err) {
    int rc = 0;
    for (int i = 0; i < d->opts.n_configs && rc == 0; i++)
        rc = services_add(&d->services, d->opts.config[i], err);
    if (rc == 0)
        rc = find_shape(&d->services, &d->shape, &d->shape_assumed, err);
    if (rc == 0)
        rc = view_make(&d->view, &d->services, &d->facts, &d->opts.assume, &d->shape,
                       d->opts.sglang != NULL, err);
    return rc;
}

static int judge(Doctor *d, Err *err) {
    DoctorOpts *o = &d->opts;
    CeilingCase c = {&d->facts, &o->assume, &d->shape, &d->view};
    d->view.spec_tokens = d->sglang.wish.spec_tokens;
    d->ceiling = ceiling_compute(&c);
    RuleCase rule = {&d->facts, &o->assume, &d->shape, &d->services, &d->view, &d->ceiling};
    rules_run(&rule, &d->findings);
    BetterGoal goal = better_goal(&d->services, &d->view, &d->shape);
    d->better = better_find(&c, &goal);
    Services check = {0};
    int rc = services_add_docs(&check, d->better.docs, d->better.n_docs, err);
    services_done(&check);
    if (rc == 0 && o->better && !d->better.fits)
        rc = err_set(err, E_NOMEM, "--better: %s", d->better.why);
    return rc || !o->better ? rc
                            : conf_docs_write(d->better.docs, d->better.n_docs, o->better, err);
}

static int say(Doctor *d) {
    DoctorOpts *o = &d->opts;
    Report r = {.facts_from = o->facts ? o->facts : "this host",
                .config_from = o->sglang          ? o->sglang
                               : o->n_configs > 0 ? o->config[0]
                                                  : NULL,
                .facts = &d->facts,
                .assume = &o->assume,
                .shape = &d->shape,
                .shape_assumed = d->shape_assumed,
                .view = &d->view,
                .ceiling = &d->ceiling,
                .findings = &d->findings,
                .better = &d->better,
                .sglang = o->sglang ? &d->sglang : NULL,
                .status = rules_status(&d->findings)};
    if (o->json)
        report_json(&r, stdout);
    else
        report_text(&r, stdout);
    return r.status;
}

static int examine(Doctor *d) {
    Err err = {0};
    int status = USED_WRONGLY, rc = gather(d, &err);
    if (rc == 0) {
        status = 2; /* a configuration that its daemon refuses does not work */
        rc = read_configs(d, &err);
    }
    if (rc == 0) {
        status = USED_WRONGLY;
        rc = judge(d, &err);
    }
    if (rc)
        fprintf(stderr, "baton doctor: %s\n", err.text);
    else
        status = say(d);
    better_done(&d->better);
    findings_done(&d->findings);
    sglang_done(&d->sglang);
    services_done(&d->services);
    return status;
}

int baton_doctor(int argc, char **argv) {
    static Doctor d;
    Err err = {0};
    int status;
    if (read_options(&d.opts, argc, argv, &status))
        return status;
    if (d.opts.list) {
        sglang_print_table(stdout);
        return 0;
    }
    if (!d.opts.capture)
        return examine(&d);
    if (host_capture(d.opts.capture, d.opts.measure, &err) == 0)
        return 0;
    fprintf(stderr, "baton doctor: %s\n", err.text);
    return USED_WRONGLY;
}
