/* model_check CHECKPOINT_DIR ORACLE [options]: runs a checkpoint against reference results and
 * prints one line per prompt.
 *
 * Checks, per prompt: logits of the last prompt position, hidden states, routes and expert weights,
 * chosen positions, greedy continuation (each step fed with the reference's tokens), MTP logits and
 * recurrent drafts. Exit status 0 when all hold, 1 when one does not, 2 on bad use. */
#include "tests/support/oracle.h"
#include "tests/support/rig.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct Options {
    RigConf rig;
    int chunk, step_rows, max_prompt;
    double tol_short, tol_long,
        margin; /* logits up to 1000 tokens, beyond; margin below which a token may differ */
    bool exact; /* f32 KV: compare inner states too */
    const char *only;
} Options;

/* Collects what the probe shows of a prompt, all chunks one after the other. */
typedef struct Seen {
    Engine *engine;
    const Shape *shape;
    int n; /* rows of the chunks so far */
    int n_prompt, chunk_rows;
    float *hidden;  /* [n_layers, n_prompt, hidden] */
    float *final;   /* [n_prompt, hidden] */
    int32_t *route; /* [n_layers, n_prompt, k] */
    float *weight;  /* [n_layers, n_prompt, k] */
    int32_t *topk;  /* [n_index, n_prompt, K] */
} Seen;

static void on_probe(void *arg, ForwardPoint point, int layer, const Tensor *t) {
    Seen *s = arg;
    const Shape *sh = s->shape;
    size_t np = (size_t)s->n_prompt, at = (size_t)s->n, k = (size_t)sh->n_active,
           h = (size_t)sh->hidden, l = (size_t)layer;
    switch (point) {
    case FORWARD_HIDDEN:
        engine_get(s->engine, t, s->hidden + (l * np + at) * h);
        break;
    case FORWARD_FINAL:
        engine_get(s->engine, t, s->final + at * h);
        s->n += t->rows;
        break;
    case FORWARD_ROUTE:
        engine_get(s->engine, t, s->route + (l * np + at) * k);
        break;
    case FORWARD_WEIGHT:
        engine_get(s->engine, t, s->weight + (l * np + at) * k);
        break;
    case FORWARD_TOPK:
        engine_get(s->engine, t,
                   s->topk + ((size_t)sh->index_slot[layer] * np + at) * (size_t)sh->index_topk);
        break;
    case FORWARD_KV:
        break;
    }
}

static Seen seen_new(Engine *engine, int n_prompt) {
    const Shape *s = engine_shape(engine);
    size_t np = (size_t)n_prompt, layers = (size_t)s->n_layers, k = (size_t)s->n_active;
    return (Seen){
        .engine = engine,
        .shape = s,
        .n_prompt = n_prompt,
        .hidden = xcalloc(layers * np * (size_t)s->hidden, 4),
        .final = xcalloc(np * (size_t)s->hidden, 4),
        .route = xcalloc(layers * np * k, 4),
        .weight = xcalloc(layers * np * k, 4),
        .topk = xcalloc((size_t)s->n_index_layers * np * (size_t)s->index_topk, 4),
    };
}

static void seen_done(Seen *s) {
    free(s->hidden);
    free(s->final);
    free(s->route);
    free(s->weight);
    free(s->topk);
}

static double max_diff(const float *a, const float *b, size_t n) {
    double d = 0;
    for (size_t i = 0; i < n; i++) {
        double x = fabs((double)a[i] - b[i]);
        d = x > d || isnan(x) ? x : d;
        if (isnan(d))
            return INFINITY;
    }
    return d;
}

static double max_magnitude(const float *a, size_t n) {
    double top = 0;
    for (size_t i = 0; i < n; i++)
        top = fabs((double)a[i]) > top ? fabs((double)a[i]) : top;
    return top;
}

static bool has(const int32_t *list, int n, int32_t x) {
    for (int i = 0; i < n; i++)
        if (list[i] == x)
            return true;
    return false;
}

/* Members of b that a holds. */
static int overlap(const int32_t *a, int na, const int32_t *b, int nb) {
    int n = 0;
    for (int i = 0; i < nb; i++)
        n += b[i] >= 0 && has(a, na, b[i]);
    return n;
}

static bool fail(bool ok, const char *name, const char *what, double got, double bound) {
    if (!ok)
        printf("  FAILED %s: %s: %g, expected %g\n", name, what, got, bound);
    return ok;
}

/* Hidden states, routes, weights and positions of the prompts whose inner states the oracle holds.
 */
static bool check_inner(const Oracle *o, const char *name, const Seen *s) {
    const Shape *sh = s->shape;
    int64_t d[3];
    bool ok = true;
    const float *hidden = oracle_f32(o, name, "hidden", d);
    if (!hidden)
        return true;
    ok &= fail(d[0] == sh->n_layers && d[1] == s->n && d[2] == sh->hidden, name, "shape of hidden",
               (double)d[1], s->n);
    size_t n_hidden = (size_t)(d[0] * d[1] * d[2]);
    bool host = strcmp(engine_backend(s->engine), "cuda") != 0;
    double h = max_diff(hidden, s->hidden, n_hidden),
           limit = host ? 1e-3 : 5e-6 * max_magnitude(hidden, n_hidden);
    double f =
        max_diff(oracle_f32(o, name, "final", d), s->final, (size_t)s->n * (size_t)sh->hidden);
    /* The residual has a few channels of several hundred: products of split bf16 numbers, 2e-6 of
     * the largest apart, show there first. */
    ok &= fail(h <= limit, name, "hidden states", h, limit);
    ok &= fail(f <= 1e-3, name, "final states", f, 1e-3);

    const int32_t *route = oracle_i32(o, name, "router_indices", d);
    const float *weight = oracle_f32(o, name, "router_weights", d);
    int k = sh->n_active, first = sh->n_layers - (int)d[0], flips = 0, total = (int)(d[0] * d[1]);
    double w = 0;
    for (int l = 0; l < (int)d[0]; l++)
        for (int t = 0; t < s->n; t++) {
            size_t mine = ((size_t)(l + first) * (size_t)s->n + (size_t)t) * (size_t)k,
                   ref = ((size_t)l * (size_t)s->n + (size_t)t) * (size_t)k;
            if (overlap(s->route + mine, k, route + ref, k) < k)
                flips++;
            else
                w = fmax(w, max_diff(s->weight + mine, weight + ref, (size_t)k));
        }
    ok &= fail(flips * 200 <= total, name, "tokens with other experts", flips, total / 200);
    ok &= fail(w <= 1e-4, name, "expert weights", w, 1e-4);

    const int32_t *topk = oracle_i32(o, name, "topk", d);
    int K = (int)d[2], bad = 0;
    for (int l = 0; l < (int)d[0]; l++)
        for (int t = 0; t < s->n; t++) {
            const int32_t *mine =
                s->topk + ((size_t)l * (size_t)s->n + (size_t)t) * (size_t)sh->index_topk;
            const int32_t *ref = topk + ((size_t)l * (size_t)s->n + (size_t)t) * (size_t)K;
            int n = t + 1 < K ? t + 1 : K;
            bad += overlap(mine, sh->index_topk, ref, K) < n;
        }
    ok &= fail(bad == 0, name, "tokens with other positions", bad, 0);
    printf("  %s: hidden %.1e, final %.1e, expert weights %.1e, other experts %d of %d\n", name, h,
           f, w, flips, total);
    return ok;
}

static bool check_last_positions(const Oracle *o, const char *name, const Seen *s) {
    int64_t d[3];
    const int32_t *ref = oracle_i32(o, name, "topk_last", d);
    bool ok = true;
    for (int l = 0; ref && l < (int)d[1]; l++) {
        const int32_t *mine =
            s->topk + ((size_t)l * (size_t)s->n + (size_t)s->n - 1) * (size_t)s->shape->index_topk;
        int n = overlap(mine, s->shape->index_topk, ref + l * d[2], (int)d[2]);
        ok &= fail(n >= d[2] - 1, name, "positions shared with the reference", n, (double)d[2] - 1);
    }
    return ok;
}

/* Feeds the reference's tokens, step_rows at a time, and compares each choice. */
static bool check_greedy(Rig *r, RigSeq *seq, const json_t *p, const Options *opt) {
    int n, nm, vocab = engine_shape(r->engine)->vocab, wrong = 0, near = 0;
    int32_t *want = oracle_ints(p, "output_ids", &n);
    double *margin = oracle_reals(p, "margins", &nm);
    Err err = {0};
    int rc = 0;
    for (int at = 1; at < n && rc == 0; at += opt->step_rows) {
        int m = n - at < opt->step_rows ? n - at : opt->step_rows;
        rc = rig_append(r, seq, want + at - 1, m, m, m, NULL, &err);
        for (int i = 0; i < m && rc == 0; i++)
            if (rig_argmax(engine_logits(r->engine, i), vocab) != want[at + i]) {
                wrong += margin[at + i] > opt->margin;
                near += margin[at + i] <= opt->margin;
            }
    }
    if (near)
        printf("  %s: %d other tokens at a margin below %g\n", oracle_name(p), near, opt->margin);
    free(want);
    free(margin);
    bool ok = fail(rc == 0, err.text, "step", rc, 0);
    ok &= fail(wrong == 0, oracle_name(p), "other tokens", wrong, 0);
    return ok;
}

/* MTP over the prompt and the first k answer tokens, then recurrent drafts. Leaves the sequence
 * longer: the caller drops it. */
static bool check_drafts(Rig *r, const int32_t *all, int n, const json_t *round, const char *name,
                         int *n_good) {
    int vocab = engine_shape(r->engine)->vocab,
        k = (int)json_integer_value(json_object_get(round, "after")), len = n + k, nd;
    int32_t *want = oracle_ints(round, "drafts", &nd);
    RigSeq seq = rig_seq_new(r, len + nd);
    Err err = {0};
    int rc = rig_append(r, &seq, all, len, len, 0, NULL, &err), equal = 0;
    if (rc == 0)
        rc = rig_mtp(r, &seq, all + 1, 0, len, 0, false, &err);
    for (int i = 0; i < nd && rc == 0; i++) {
        int32_t draft = rig_argmax(engine_logits(r->engine, 0), vocab);
        equal += draft == want[i];
        if (i + 1 < nd)
            rc = rig_mtp(r, &seq, &draft, len + i, 1, i == 0 ? len - 1 : 0, true, &err);
    }
    *n_good += equal;
    free(want);
    rig_seq_free(r, &seq, len + nd);
    return fail(rc == 0, err.text[0] ? err.text : name, "MTP step", rc, 0);
}

static bool check_mtp(Rig *r, const Oracle *o, const json_t *p, const Options *opt) {
    const char *name = oracle_name(p);
    int n, no, vocab = engine_shape(r->engine)->vocab, n_good = 0, n_drafts = 0;
    int64_t d[3];
    const float *ref = oracle_f32(o, name, "mtp_logits", d);
    if (!ref || !opt->rig.mtp)
        return true;
    int32_t *ids = oracle_ints(p, "ids", &n), *out = oracle_ints(p, "output_ids", &no);
    int32_t *all = xcalloc((size_t)(n + no), sizeof *all);
    memcpy(all, ids, (size_t)n * sizeof *all);
    memcpy(all + n, out, (size_t)no * sizeof *all);

    RigSeq seq = rig_seq_new(r, n);
    Err err = {0};
    int rc = rig_append(r, &seq, all, n, n, 0, NULL, &err);
    if (rc == 0)
        rc = rig_mtp(r, &seq, all + 1, 0, n, 0, false, &err);
    double diff = rc ? INFINITY : max_diff(ref, engine_logits(r->engine, 0), (size_t)vocab);
    rig_seq_free(r, &seq, n);
    bool ok = fail(diff <= opt->tol_short, name, "MTP logits", diff, opt->tol_short);

    size_t i;
    const json_t *round;
    json_array_foreach(json_object_get(p, "mtp"), i, round) {
        ok &= check_drafts(r, all, n, round, name, &n_good);
        n_drafts += 3;
    }
    printf("  %s: MTP logits %.1e, drafts %d of %d\n", name, diff, n_good, n_drafts);
    ok &= fail(n_good * 50 >= n_drafts * 49, name, "equal drafts", n_good, n_drafts);
    free(all);
    free(ids);
    free(out);
    return ok;
}

static bool check_prompt(Rig *r, const Oracle *o, const json_t *p, const Options *opt) {
    const char *name = oracle_name(p);
    int n, vocab = engine_shape(r->engine)->vocab;
    int64_t d[3];
    int32_t *ids = oracle_ints(p, "ids", &n);
    double tol = n <= 1000 ? opt->tol_short : opt->tol_long;
    RigSeq seq = rig_seq_new(r, n + 64);
    Seen seen = seen_new(r->engine, n);
    ForwardProbe probe = {&seen, on_probe};
    Err err = {0};
    int rc = rig_append(r, &seq, ids, n, opt->chunk, 1, &probe, &err);
    double diff =
        rc ? INFINITY
           : max_diff(oracle_f32(o, name, "logits", d), engine_logits(r->engine, 0), (size_t)vocab);
    bool ok = fail(rc == 0, rc ? err.text : name, "prefill", rc, 0);
    ok &= fail(diff <= tol, name, "logits", diff, tol);
    if (rc == 0 && opt->exact) {
        ok &= check_inner(o, name, &seen);
        ok &= check_last_positions(o, name, &seen);
    }
    if (rc == 0)
        ok &= check_greedy(r, &seq, p, opt);
    rig_seq_free(r, &seq, n + 64);
    ok &= check_mtp(r, o, p, opt);
    printf("%-14s %5d tokens: logits %.1e of %.0e  %s\n", name, n, diff, tol, ok ? "ok" : "FAILED");
    fflush(stdout);
    seen_done(&seen);
    free(ids);
    return ok;
}

static int usage(void) {
    fprintf(stderr, "usage: model_check CHECKPOINT_DIR ORACLE_PREFIX [--backend B] [--tp N] "
                    "[--threads N] [--kv f32|bf16|fp8] [--chunk N]\n"
                    "                   [--step-rows N] [--max-prompt N] [--only NAME] "
                    "[--tol-short X] [--tol-long X] [--margin X]\n");
    return 2;
}

static int parse(int argc, char **argv, Options *opt) {
    static const struct option longs[] = {
        {"backend", 1, 0, 'b'},    {"tp", 1, 0, 't'},     {"threads", 1, 0, 'j'},
        {"kv", 1, 0, 'k'},         {"chunk", 1, 0, 'c'},  {"step-rows", 1, 0, 'r'},
        {"max-prompt", 1, 0, 'm'}, {"only", 1, 0, 'o'},   {"tol-short", 1, 0, 's'},
        {"tol-long", 1, 0, 'l'},   {"margin", 1, 0, 'g'}, {0}};
    *opt = (Options){.rig = {.max_rows = 512, .mtp = true, .max_context = 4352, .max_seqs = 2},
                     .chunk = 512,
                     .step_rows = 1,
                     .max_prompt = 1 << 30,
                     .tol_short = 1e-3,
                     .tol_long = 1e-2,
                     .margin = 0.01,
                     .exact = true};
    for (int c; (c = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        switch (c) {
        case 'b':
            opt->rig.backend = optarg;
            break;
        case 't':
            opt->rig.tp = atoi(optarg);
            break;
        case 'j':
            opt->rig.threads = atoi(optarg);
            break;
        case 'c':
            opt->chunk = atoi(optarg);
            break;
        case 'r':
            opt->step_rows = atoi(optarg);
            break;
        case 'm':
            opt->max_prompt = atoi(optarg);
            break;
        case 'o':
            opt->only = optarg;
            break;
        case 's':
            opt->tol_short = atof(optarg);
            break;
        case 'l':
            opt->tol_long = atof(optarg);
            break;
        case 'g':
            opt->margin = atof(optarg);
            break;
        case 'k':
            opt->rig.kv_dtype = !strcmp(optarg, "bf16")  ? DT_BF16
                                : !strcmp(optarg, "fp8") ? DT_F8E4M3
                                                         : DT_F32;
            opt->exact = opt->rig.kv_dtype == DT_F32;
            break;
        default:
            return -1;
        }
    }
    bool bad = argc - optind != 2 || opt->chunk < 1 || opt->chunk > 512 || opt->step_rows < 1 ||
               opt->step_rows > 64;
    opt->rig.dir = bad ? NULL : argv[optind];
    return bad ? -1 : optind;
}

int main(int argc, char **argv) {
    Options opt;
    Oracle *oracle;
    Rig rig;
    Err err = {0};
    int at = parse(argc, argv, &opt);
    if (at < 0)
        return usage();
    if (oracle_open(&oracle, argv[at + 1], &err) || rig_open(&rig, &opt.rig, &err)) {
        fprintf(stderr, "model_check: %s\n", err.text);
        return 2;
    }
    printf("%s, %s, tp %d, kv %s, chunk %d, rows per step %d\n", opt.rig.dir,
           engine_backend(rig.engine), opt.rig.tp ? opt.rig.tp : 1, dtype_name(opt.rig.kv_dtype),
           opt.chunk, opt.step_rows);
    int n_ok = 0, n = 0;
    for (int i = 0; i < oracle_n_prompts(oracle); i++) {
        const json_t *p = oracle_prompt(oracle, i);
        if ((opt.only && strcmp(opt.only, oracle_name(p))) ||
            json_integer_value(json_object_get(p, "n_prompt")) > opt.max_prompt)
            continue;
        n_ok += check_prompt(&rig, oracle, p, &opt);
        n++;
    }
    printf("%d of %d prompts agree with the reference\n", n_ok, n);
    rig_close(&rig);
    oracle_close(oracle);
    return n > 0 && n_ok == n ? 0 : 1;
}
