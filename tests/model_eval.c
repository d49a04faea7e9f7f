/* model_eval CHECKPOINT_DIR EVAL_DIR VARIANT [options]: answers the held-out questions greedily and
 * compares the share of exact answers with EVAL_DIR/scores.json. A right answer equals the expected
 * text and ends with the expected stop token.
 *
 * Exit status 0 when every set is within one point (or, with fewer questions than the set has,
 * within one answer) of its score. */
#include "model/chat.h"
#include "model/tok.h"
#include "tests/support/experts.h"
#include "tests/support/rig.h"

#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { GROUP = 16, MAX_ANSWER = 160, MAX_PROMPT = 4200, MAX_TEXT = 1 << 20, ROWS = 64 };

typedef struct Eval {
    Rig rig;
    Tok *tok;
    TokScratch *scratch;
    int limit, user, observation;
    const char *kind;
    bool verbose, brief;
} Eval;

/* One question on its way. */
typedef struct Item {
    RigSeq seq;
    int budget; /* tokens that its pages hold */
    int32_t answer[MAX_ANSWER];
    int n_answer, next, end; /* end: the stop token, -1 while none came */
    char *want;
} Item;

static const char *KINDS[] = {"arith",     "arith_direct", "chat",        "facts",    "facts_zh",
                              "json",      "list",         "lookup",      "memory",   "needle_1k",
                              "needle_2k", "needle_4k",    "tool_answer", "tool_call"};

static char *strip(char *s) {
    while (*s == ' ' || *s == '\n')
        s++;
    for (size_t n = strlen(s); n && (s[n - 1] == ' ' || s[n - 1] == '\n');)
        s[--n] = 0;
    return s;
}

/* What the model should say after its thinking: an assistant turn as the template renders it, less
 * the head. */
static char *expected_text(const json_t *expected) {
    ChatOptions opt = chat_options_default();
    Buf out = {0};
    Err err = {0};
    json_t *turn = json_deep_copy(expected), *list = json_array();
    opt.add_generation_prompt = false;
    json_object_set_new(turn, "role", json_string("assistant"));
    json_array_append_new(list, turn);
    CHECK(chat_render(list, NULL, &opt, &out, &err) == 0);
    json_decref(list);
    char *text = buf_take(&out), *tail = strstr(text, "</think>"),
         *copy = xstrdup(tail ? tail + 8 : text);
    free(text);
    return copy;
}

static int start_item(Eval *e, const json_t *q, Item *it, Err *err) {
    ChatOptions opt = chat_options_default();
    TokIds ids = {0};
    Buf text = {0};
    *it = (Item){.end = -1};
    opt.enable_thinking = json_is_true(json_object_get(q, "enable_thinking"));
    int rc =
        chat_render(json_object_get(q, "messages"), json_object_get(q, "tools"), &opt, &text, err);
    if (rc == 0)
        rc = tok_encode(e->tok, e->scratch, text.data, text.len, true, MAX_PROMPT, &ids, err);
    if (rc == 0) {
        it->budget = (int)ids.n + MAX_ANSWER;
        it->seq = rig_seq_new(&e->rig, it->budget);
        it->want = expected_text(json_object_get(q, "expected"));
        rc = rig_append(&e->rig, &it->seq, ids.id, (int)ids.n, 512, 1, NULL, err);
        it->next = rig_argmax(engine_logits(e->rig.engine, 0), engine_shape(e->rig.engine)->vocab);
    }
    buf_done(&text);
    tok_ids_done(&ids);
    return rc;
}

static bool is_stop(const Shape *s, int token) {
    for (int i = 0; i < s->n_eos; i++)
        if (s->eos[i] == token)
            return true;
    return false;
}

/* One step for all items that still run; false when none does. */
static bool step(Eval *e, Item *items, int n, int *rc, Err *err) {
    const Shape *s = engine_shape(e->rig.engine);
    int32_t tok[GROUP], pos[GROUP], seq[GROUP],
        *table = xcalloc((size_t)GROUP * (size_t)e->rig.max_pages, sizeof *table);
    EngineRow rows[GROUP] = {0};
    Item *live[GROUP];
    int m = 0;
    for (int i = 0; i < n; i++) {
        Item *it = &items[i];
        if (it->end >= 0 || it->n_answer == MAX_ANSWER)
            continue;
        if (is_stop(s, it->next)) {
            it->end = it->next;
            continue;
        }
        it->answer[it->n_answer++] = it->next;
        memcpy(table + (size_t)m * (size_t)e->rig.max_pages, it->seq.page,
               (size_t)e->rig.max_pages * sizeof *table);
        tok[m] = it->next, pos[m] = it->seq.n++, seq[m] = m;
        rows[m].row = m;
        live[m++] = it;
    }
    OpsBatch b = {m, m, tok, pos, seq, table, e->rig.max_pages};
    if (m > 0)
        *rc = engine_step(e->rig.engine, &b, rows, m, NULL, err);
    for (int i = 0; i < m; i++)
        live[i]->next = rig_argmax(engine_logits(e->rig.engine, i), s->vocab);
    free(table);
    return m > 0 && *rc == 0;
}

static bool finish_item(Eval *e, Item *it, const json_t *q) {
    TokDecoder d = {0};
    Buf out = {0};
    for (int i = 0; i < it->n_answer; i++)
        tok_decode(e->tok, &d, it->answer[i], false, &out);
    tok_decode_end(&d, &out);
    char *text = buf_take(&out), *answer = text;
    for (char *p; (p = strstr(answer, "</think>"));)
        answer = p + 8;
    bool calls = json_array_size(json_object_get(json_object_get(q, "expected"), "tool_calls")) > 0;
    bool right = !strcmp(strip(answer), it->want) && it->end == (calls ? e->observation : e->user);
    if (!right && e->verbose)
        printf("    want %s\n    got  %s (ends with %d)\n", it->want, text, it->end);
    free(text);
    free(it->want);
    rig_seq_free(&e->rig, &it->seq, it->budget);
    return right;
}

static int run_set(Eval *e, const char *dir, const char *kind, int *n_right, int *n_asked,
                   Err *err) {
    char path[512], *line = NULL;
    size_t cap = 0;
    int rc = 0;
    snprintf(path, sizeof path, "%s/%s.jsonl", dir, kind);
    FILE *f = fopen(path, "r");
    if (!f)
        return err_set(err, E_IO, "cannot open %s: %m", path);
    *n_right = *n_asked = 0;
    for (bool more = true; more && rc == 0;) {
        Item items[GROUP];
        json_t *question[GROUP];
        int n = 0;
        while (n < GROUP && *n_asked + n < e->limit && (more = getline(&line, &cap, f) > 0)) {
            question[n] = json_loads(line, 0, NULL);
            CHECK(question[n]);
            rc = start_item(e, question[n], &items[n], err);
            n++;
            if (rc)
                break;
        }
        more = more && n == GROUP;
        while (rc == 0 && step(e, items, n, &rc, err))
            ;
        for (int i = 0; i < n; i++) {
            *n_right += rc == 0 && finish_item(e, &items[i], question[i]);
            json_decref(question[i]);
        }
        *n_asked += n;
    }
    free(line);
    fclose(f);
    return rc;
}

/* Whether right of asked is near enough to the published share: within one point, or one answer
 * when the share is finer than the sample. */
static bool near(int right, int asked, double score) {
    double slack = 0.01 * asked > 1.0 ? 0.01 * asked : 1.0;
    return right >= score * asked - slack - 1e-9;
}

static int run_all(Eval *e, const char *dir, const char *variant) {
    char path[512];
    snprintf(path, sizeof path, "%s/scores.json", dir);
    json_t *all = json_load_file(path, 0, NULL),
           *scores = json_object_get(json_object_get(all, variant), "accuracy");
    int bad = scores ? 0 : 1;
    double mean = 0, want_mean = 0;
    int n_sets = 0;
    if (!scores)
        fprintf(stderr, "%s has no scores of %s\n", path, variant);
    for (size_t i = 0; scores && i < sizeof KINDS / sizeof *KINDS; i++) {
        int right, asked;
        Err err = {0};
        if ((e->kind && strcmp(e->kind, KINDS[i])) || (e->brief && strstr(KINDS[i], "needle")))
            continue;
        if (run_set(e, dir, KINDS[i], &right, &asked, &err)) {
            fprintf(stderr, "%s: %s\n", KINDS[i], err.text);
            bad = 1;
            break;
        }
        double want = json_number_value(json_object_get(scores, KINDS[i]));
        bool ok = near(right, asked, want);
        printf("%-12s %3d of %3d right (%.1f %%), reference %.1f %%  %s\n", KINDS[i], right, asked,
               100.0 * right / asked, 100 * want, ok ? "ok" : "FAILED");
        fflush(stdout);
        bad |= !ok;
        mean += (double)right / asked;
        want_mean += want;
        n_sets++;
    }
    if (n_sets > 1) {
        bool ok = mean / n_sets >= want_mean / n_sets - 0.01;
        printf("mean         %.2f %%, reference %.2f %%  %s\n", 100 * mean / n_sets,
               100 * want_mean / n_sets, ok ? "ok" : "FAILED");
        bad |= !ok;
    }
    json_decref(all);
    return bad;
}

/* Perplexity of EVAL_DIR/heldout.txt after the tokens that begin every text, beside the reference.
 */
static int run_text(Eval *e, const char *dir, const char *variant, Err *err) {
    char path[512];
    TokIds ids = {0};
    size_t n_text = 0;
    snprintf(path, sizeof path, "%s/heldout.txt", dir);
    FILE *f = fopen(path, "r");
    if (!f)
        return err_set(err, E_IO, "cannot open %s: %m", path);
    char *text = xcalloc(1, MAX_TEXT + 32);
    n_text = (size_t)sprintf(text, "[gMASK]<sop>");
    n_text += fread(text + n_text, 1, MAX_TEXT, f);
    fclose(f);
    int rc = tok_encode(e->tok, e->scratch, text, n_text, true, MAX_PROMPT, &ids, err);
    RigSeq seq = rig_seq_new(&e->rig, MAX_PROMPT);
    int vocab = engine_shape(e->rig.engine)->vocab, n = (int)ids.n;
    double nll = 0;
    for (int at = 0; at < n && rc == 0; at += ROWS) {
        int rows = n - at < ROWS ? n - at : ROWS;
        rc = rig_append(&e->rig, &seq, ids.id + at, rows, ROWS, rows, NULL, err);
        for (int i = 0; i < rows && rc == 0 && at + i + 1 < n; i++) {
            const float *logit = engine_logits(e->rig.engine, i);
            double top = (double)logit[rig_argmax(logit, vocab)], sum = 0;
            for (int v = 0; v < vocab; v++)
                sum += exp((double)logit[v] - top);
            if (at + i >= 1) /* the second of the first two tokens says nothing */
                nll += top + log(sum) - (double)logit[ids.id[at + i + 1]];
        }
    }
    snprintf(path, sizeof path, "%s/scores.json", dir);
    json_t *all = json_load_file(path, 0, NULL), *want = json_object_get(all, variant);
    for (const char *const *key =
             (const char *const[]){"perplexity", "heldout_text", "value", NULL};
         *key; key++)
        want = json_object_get(want, *key);
    if (rc == 0)
        printf("heldout.txt: perplexity %.1f over %d tokens, reference %.1f\n", exp(nll / (n - 2)),
               n - 2, json_number_value(want));
    json_decref(all);
    rig_seq_free(&e->rig, &seq, MAX_PROMPT);
    tok_ids_done(&ids);
    free(text);
    return rc;
}

static int usage(void) {
    fprintf(stderr, "usage: model_eval CHECKPOINT_DIR EVAL_DIR VARIANT [--limit N] [--kind NAME] "
                    "[--backend B] [--tp N] [--threads N] [--kv f32|bf16|fp8] "
                    "[--experts DIR: expert files for all routed experts] "
                    "[--text: the perplexity of heldout.txt alone] "
                    "[--verbose] [--brief: without the long prompts]\n");
    return 2;
}

static int open_experts(LocalExperts *local, const char *dir, RigConf *conf, Err *err) {
    Shape shape;
    char path[512];
    if (!dir)
        return 0;
    snprintf(path, sizeof path, "%s/config.json", conf->dir);
    int rc = shape_load(&shape, path, err);
    if (rc == 0)
        rc = local_experts_open(local, dir, &shape, err);
    conf->resident = local->resident;
    conf->port = &local->port;
    return rc;
}

int main(int argc, char **argv) {
    static const struct option longs[] = {{"limit", 1, 0, 'l'},
                                          {"kind", 1, 0, 'i'},
                                          {"backend", 1, 0, 'b'},
                                          {"tp", 1, 0, 't'},
                                          {"threads", 1, 0, 'j'},
                                          {"kv", 1, 0, 'k'},
                                          {"verbose", 0, 0, 'v'},
                                          {"brief", 0, 0, 'q'},
                                          {"experts", 1, 0, 'e'},
                                          {"text", 0, 0, 'x'},
                                          {0}};
    Eval e = {.limit = 1 << 30};
    RigConf conf = {.max_rows = 512, .max_seqs = GROUP, .max_context = 4352};
    const char *experts = NULL;
    bool only_text = false;
    for (int c; (c = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        switch (c) {
        case 'l':
            e.limit = atoi(optarg);
            break;
        case 'i':
            e.kind = optarg;
            break;
        case 'b':
            conf.backend = optarg;
            break;
        case 't':
            conf.tp = atoi(optarg);
            break;
        case 'j':
            conf.threads = atoi(optarg);
            break;
        case 'k':
            conf.kv_dtype = !strcmp(optarg, "bf16")  ? DT_BF16
                            : !strcmp(optarg, "fp8") ? DT_F8E4M3
                                                     : DT_F32;
            break;
        case 'e':
            experts = optarg;
            break;
        case 'x':
            only_text = true;
            break;
        case 'v':
            e.verbose = true;
            break;
        case 'q':
            e.brief = true;
            break;
        default:
            return usage();
        }
    }
    if (argc - optind != 3)
        return usage();
    char path[512];
    Err err = {0};
    conf.dir = argv[optind];
    snprintf(path, sizeof path, "%s/tokenizer.json", conf.dir);
    LocalExperts local = {0};
    if (tok_open(&e.tok, path, &err) || open_experts(&local, experts, &conf, &err) ||
        rig_open(&e.rig, &conf, &err)) {
        fprintf(stderr, "model_eval: %s\n", err.text);
        return 2;
    }
    e.scratch = tok_scratch_new(e.tok);
    e.user = tok_added_id(e.tok, "<|user|>");
    e.observation = tok_added_id(e.tok, "<|observation|>");
    int rc = only_text ? run_text(&e, argv[optind + 1], argv[optind + 2], &err)
                       : run_all(&e, argv[optind + 1], argv[optind + 2]);
    if (only_text && rc)
        fprintf(stderr, "model_eval: %s\n", err.text);
    tok_scratch_free(e.scratch);
    rig_close(&e.rig);
    local_experts_close(&local);
    tok_close(e.tok);
    return rc;
}
