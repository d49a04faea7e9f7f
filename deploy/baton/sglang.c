/* See sglang.h: reading of the text and looking up of options. */
#include "deploy/baton/sglang.h"

#include "deploy/baton/sglang_int.h"
#include "deploy/baton/sglang_words.h"

#include <ctype.h>
#include <string.h>

const char *sglang_state_name(SglangState s) {
    static const char *const names[] = {"kept", "changed", "not needed", "not kept"};
    return names[s];
}

/* ---- the table ---- */

static bool named(const char *names, const char *name) {
    size_t n = strlen(name);
    for (;;) {
        size_t len = strcspn(names, "|");
        if (len == n && strncmp(names, name, n) == 0)
            return true;
        if (!names[len])
            return false;
        names += len + 1;
    }
}

const SglangRow *sglang_find(const char *name) {
    for (const SglangRow *r = SGLANG_TABLE; r->names || r->why; r++)
        if (r->names && named(r->names, name))
            return r;
    return NULL;
}

/* The known name that is nearest; static text. */
static void nearest(const char *name, char *out, size_t n) {
    enum { MAX = 512 };
    char *names[MAX + 1] = {NULL};
    int count = 0;
    for (const SglangRow *r = SGLANG_TABLE; r->names || r->why; r++)
        for (const char *at = r->names; at && count < MAX;) {
            size_t len = strcspn(at, "|");
            names[count++] = xasprintf("%.*s", (int)len, at);
            at = at[len] ? at + len + 1 : NULL;
        }
    const char *near = conf_nearest(name, (const char *const *)names);
    snprintf(out, n, "%s%s%s", near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    for (int i = 0; i < count; i++)
        free(names[i]);
}

static void print_names(const char *names, FILE *to) {
    for (const char *at = names; at;) {
        size_t len = strcspn(at, "|");
        fprintf(to, "%s`--%.*s`", at == names ? "" : ", ", (int)len, at);
        at = at[len] ? at + len + 1 : NULL;
    }
}

void sglang_print_table(FILE *to) {
    for (const SglangRow *r = SGLANG_TABLE; r->names || r->why; r++) {
        if (!r->names) {
            fprintf(to, "%s### %s\n\n| option | of | | Baton | |\n|---|---|---|---|---|\n",
                    r == SGLANG_TABLE ? "" : "\n", r->why);
            continue;
        }
        fputs("| ", to);
        print_names(r->names, to);
        fprintf(to, " | %s | %s | %s | %s |\n", r->of, sglang_state_name(r->state), r->baton,
                r->why);
    }
}

/* ---- options ---- */

#define NAME_CHARS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-."

typedef struct Reader {
    Sglang *s;
    const char *name; /* of the text */
    SglangWord *word;
    int n;
} Reader;

static SglangRemark *remark(Sglang *s, const char *option, int line) {
    s->remark = xrealloc(s->remark, (size_t)(s->n + 1) * sizeof *s->remark);
    SglangRemark *r = &s->remark[s->n++];
    *r = (SglangRemark){.line = line, .state = SGLANG_LOST, .baton = ""};
    snprintf(r->option, sizeof r->option, "%s", option);
    return r;
}

/* For people: control characters do not reach a terminal. */
static void join(char *out, size_t n, char *const *value, int count) {
    size_t len = 0;
    *out = 0;
    for (int i = 0; i < count && len < n; i++)
        len += (size_t)snprintf(out + len, n - len, "%s%s", i ? " " : "", value[i]);
    for (char *p = out; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
}

static int refuse(const Reader *r, int line, const char *option, const char *expected,
                  const char *found, Err *err) {
    return err_set(err, E_FORMAT, "%.150s:%d: %.60s: expected %.120s, found \"%.60s\"", r->name,
                   line, option, expected, found);
}

static int check_arity(const Reader *r, const SglangRow *row, const char *option, int line,
                       char *const *value, int n, Err *err) {
    if (row->arity == SGLANG_FLAG && n > 0)
        return refuse(r, line, option, "no value", value[0], err);
    if ((row->arity == SGLANG_ONE || row->arity == SGLANG_MANY) && n == 0)
        return refuse(r, line, option, "a value", "nothing", err);
    if (row->arity == SGLANG_ONE && n > 1)
        return refuse(r, line, option, "one value", value[1], err);
    for (int i = 0; i < n; i++) {
        const char *dollar = strchr(value[i], '$');
        if (dollar && (isalpha((unsigned char)dollar[1]) || dollar[1] == '{' || dollar[1] == '('))
            return refuse(r, line, option, "a value: shell variables are not known here", value[i],
                          err);
    }
    return 0;
}

static int take_option(Reader *r, const char *given, int line, char *const *value, int n,
                       Err *err) {
    char option[64];
    size_t len = 0;
    given += strspn(given, "-");
    for (; given[len] && len + 1 < sizeof option; len++)
        option[len] = given[len] == '_' ? '-' : given[len];
    option[len] = 0;
    if (given[len] || len == 0 || strspn(option, NAME_CHARS) != len)
        return refuse(r, line, "option", "a name of 1 to 63 letters, digits, - and .", given, err);
    if (r->s->n >= SGLANG_MAX_OPTIONS)
        return err_set(err, E_LIMIT, "%.180s:%d: more than %d options", r->name, line,
                       SGLANG_MAX_OPTIONS);
    const SglangRow *row = sglang_find(option);
    int rc = row ? check_arity(r, row, option, line, value, n, err) : 0;
    if (rc)
        return rc;
    SglangRemark *m = remark(r->s, option, line);
    join(m->value, sizeof m->value, value, n);
    if (!row) {
        char near[100];
        nearest(option, near, sizeof near);
        snprintf(m->why, sizeof m->why, "Unknown option%s", near);
        return 0;
    }
    m->state = row->state;
    m->baton = row->baton;
    snprintf(m->why, sizeof m->why, "%s", row->why);
    SglangTake t = {.wish = &r->s->wish, .remark = m, .value = value, .n = n};
    if (row->take && !row->take(&t))
        return refuse(r, line, option, t.expected, value[0], err);
    return 0;
}

/* Takes the option at word i with the values behind it, up to end; "--name=value" has one of its
 * own. */
static int take_words(Reader *r, int i, int end, Err *err) {
    char *option = r->word[i].text, *equals = strchr(option, '=');
    char **value = xcalloc((size_t)(end - i) + 1, sizeof *value);
    int n = 0;
    if (equals) {
        *equals = 0;
        value[n++] = equals + 1;
    }
    for (int j = i + 1; j < end; j++)
        value[n++] = r->word[j].text;
    int rc = take_option(r, option, r->word[i].line, value, n, err);
    free(value);
    return rc;
}

/* ---- a list ---- */

static int read_list(Reader *r, Err *err) {
    int rc = 0;
    for (int i = 0, end; i < r->n && rc == 0; i = end) {
        for (end = i + 1; end < r->n && !r->word[end].first;)
            end++;
        rc = take_words(r, i, end, err);
    }
    return rc;
}

/* ---- a command ---- */

static bool is_option(const SglangWord *w) {
    const char *s = w->text;
    return !w->quoted && s[0] == '-' &&
           (isalpha((unsigned char)s[1]) || (s[1] == '-' && isalpha((unsigned char)s[2])));
}

static bool is_command(const Reader *r) {
    for (int i = 0; i < r->n; i++)
        if (is_option(&r->word[i]) && r->word[i].text[1] == '-')
            return true;
    return false;
}

static bool ends_with(const char *s, const char *end) {
    size_t n = strlen(s), m = strlen(end);
    return n >= m && strcmp(s + n - m, end) == 0;
}

/* Index behind the server's program: "-m sglang.launch_server", "sglang serve", "vllm serve". Where
 * none is, the first option. */
static int find_program(const Reader *r, bool *serve) {
    for (int i = 0; i < r->n; i++) {
        const char *w = r->word[i].text;
        *serve = i + 1 < r->n && (ends_with(w, "vllm") || ends_with(w, "sglang")) &&
                 strcmp(r->word[i + 1].text, "serve") == 0;
        if (*serve)
            return i + 2;
        if (strstr(w, "sglang.launch_server") || ends_with(w, "launch_server.py") ||
            strstr(w, "vllm.entrypoints"))
            return i + 1;
    }
    int i = 0;
    while (i < r->n && !is_option(&r->word[i]))
        i++;
    return i;
}

static void say_before(Reader *r, int end) {
    for (int i = 0; i < end; i++) {
        char *w = r->word[i].text;
        size_t n = strspn(w, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789");
        if (n == 0 || w[n] != '=' || isdigit((unsigned char)*w))
            continue;
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)n, w);
        SglangRemark *m = remark(r->s, name, r->word[i].line);
        join(m->value, sizeof m->value, &(char *){w + n + 1}, 1);
        if (strcmp(name, "CUDA_VISIBLE_DEVICES") == 0) {
            m->state = SGLANG_CHANGED;
            m->baton = "environment of prefill and decode";
        }
        snprintf(m->why, sizeof m->why, "%s",
                 *m->baton ? "Each of the two sees the GPUs that its environment names."
                           : "Nothing in Baton is switched by environment variables.");
    }
    for (int i = 0; i < end; i++)
        if (ends_with(r->word[i].text, "numactl")) {
            SglangRemark *m = remark(r->s, "numactl", r->word[i].line);
            snprintf(m->why, sizeof m->why,
                     "expertd binds itself to its node; prefill and decode are not bound.");
        }
}

/* Where the shell ends a command. */
static bool ends_command(const SglangWord *w) {
    static const char *const ends[] = {"&", "&&", "|", "||", ";", ">", ">>", "<", "2>&1", "2>"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends && !w->quoted; i++)
        if (strcmp(w->text, ends[i]) == 0)
            return true;
    return false;
}

static int read_command(Reader *r, Err *err) {
    bool serve;
    int i = find_program(r, &serve), n = r->n, rc = 0;
    say_before(r, i);
    for (int j = i; j < n; j++)
        if (ends_command(&r->word[j]))
            n = j;
    if (serve && i < n && !is_option(&r->word[i])) {
        char *model[1] = {r->word[i].text};
        rc = take_option(r, "model", r->word[i].line, model, 1, err);
        i++;
    }
    for (int end; i < n && rc == 0; i = end) {
        if (!is_option(&r->word[i]))
            return refuse(r, r->word[i].line, "command", "an option", r->word[i].text, err);
        for (end = i + 1; end < n && !is_option(&r->word[end]);)
            end++;
        rc = take_words(r, i, end, err);
    }
    return rc;
}

/* ---- life ---- */

int sglang_read(Sglang *out, const char *name, char *text, Err *err) {
    Sglang s = {.wish = {.port = -1,
                         .kv_dtype = -1,
                         .enable_thinking = -1,
                         .resident = -1,
                         .strategy = PLACE_UNIFORM,
                         .bits = 4}};
    Reader r = {.s = &s, .name = name};
    int rc = sglang_words(text, name, &r.word, &r.n, err);
    if (rc == 0 && r.n == 0)
        rc = err_set(err, E_FORMAT, "%.180s: no options", name);
    if (rc == 0)
        rc = is_command(&r) ? read_command(&r, err) : read_list(&r, err);
    free(r.word);
    if (rc) {
        sglang_done(&s);
        return rc;
    }
    *out = s;
    return 0;
}

void sglang_done(Sglang *s) {
    free(s->remark);
    *s = (Sglang){0};
}
