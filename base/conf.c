/* Configuration: the INI file, overrides and the command line, all driven by the daemon's option
 * table. Start-up only. */
#include "base/conf.h"

#include "base/conf_value.h"

#include <ini.h>

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <stdbool.h>
#include <string.h>

/* A list of a few hundred endpoints fits. */
#define CONF_LINE_MAX 16384

typedef struct Loader {
    const ConfTable *table;
    void *out;
    Err *err;   /* never NULL */
    int rc;     /* of the first error */
    bool *seen; /* [n_opts] given in the file */

    const char *path;
    FILE *file;
    char *line; /* getline's buffer */
    size_t line_cap;
    int lineno; /* of the line handed to inih last, from 1 */
} Loader;

static int n_opts(const ConfTable *table) {
    int n = 0;
    while (table->opts[n].section)
        n++;
    return n;
}

static int find_opt(const ConfTable *table, const char *section, const char *key) {
    for (int i = 0; table->opts[i].section; i++)
        if (strcmp(table->opts[i].section, section) == 0 && strcmp(table->opts[i].key, key) == 0)
            return i;
    return -1;
}

static bool section_known(const ConfTable *table, const char *section) {
    for (const ConfOpt *o = table->opts; o->section; o++)
        if (strcmp(o->section, section) == 0)
            return true;
    return false;
}

/* Edit distance where a swap of neighbours counts as one; of longer texts than 63 characters,
 * INT_MAX. */
static int edit_distance(const char *a, const char *b) {
    enum { MAX = 64 };
    int n = (int)strlen(a), m = (int)strlen(b), d[MAX][MAX];
    if (n >= MAX || m >= MAX)
        return INT_MAX;
    for (int i = 0; i <= n; i++) {
        for (int j = 0; j <= m; j++) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best)
                best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best)
                best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    }
    return d[n][m];
}

const char *conf_nearest(const char *s, const char *const *names) {
    const char *nearest = NULL;
    int nearest_distance = 0;
    for (; *names; names++) {
        size_t longer = strlen(s) > strlen(*names) ? strlen(s) : strlen(*names);
        int distance = edit_distance(s, *names), limit = longer < 5 ? 1 : (int)(longer + 1) / 3;
        if (distance <= limit && (!nearest || distance < nearest_distance)) {
            nearest = *names;
            nearest_distance = distance;
        }
    }
    return nearest;
}

/* Words the refusal of a name that the table does not have; where is "FILE:LINE" or "--set". */
static int refuse_name(const ConfTable *table, const char *where, const char *section,
                       const char *key, Err *err) {
    int n = n_opts(table), n_names = 0;
    bool known = section_known(table, section);
    const char **names = xcalloc((size_t)n + 1, sizeof *names);
    const char *elsewhere = NULL;
    for (const ConfOpt *o = table->opts; o->section; o++) {
        if (!known)
            names[n_names++] = o->section;
        else if (strcmp(o->section, section) == 0)
            names[n_names++] = o->key;
        if (key && strcmp(o->key, key) == 0)
            elsewhere = o->section;
    }
    const char *near = conf_nearest(known ? key : section, names);
    free(names);
    char hint[200] = "";
    if (near)
        snprintf(hint, sizeof hint, "; did you mean \"%.100s\"?", near);
    else if (elsewhere)
        snprintf(hint, sizeof hint, "; it belongs to [%.100s]", elsewhere);
    if (!known)
        return err_set(err, E_INVAL, "%s: [%s]: unknown section%s", where, section, hint);
    return err_set(err, E_INVAL, "%s: [%s] %s: unknown option%s", where, section, key, hint);
}

/* Parses text for option o into *out. */
static int assign(const ConfOpt *o, const char *where, const char *text, void *out, Err *err) {
    Err why = {0};
    int rc = conf_value_set(o, text, out, &why);
    if (rc)
        return err_set(err, rc, "%s: [%s] %s: %s", where, o->section, o->key, why.text);
    return 0;
}

static int fail(Loader *ld, int code, const char *text) {
    if (!ld->rc)
        ld->rc = err_set(ld->err, code, "%s:%d: %s", ld->path, ld->lineno, text);
    return 0;
}

/* inih calls the handler for keys only, so headers are looked at here; a key under a mistyped one
 * would be named anyway. */
static void check_header(Loader *ld, const char *line) {
    size_t n = strcspn(line + 1, "]");
    char section[64], where[600];
    if (line[1 + n] != ']' || ld->rc)
        return;
    snprintf(section, sizeof section, "%.*s", (int)n, line + 1);
    if (section_known(ld->table, section))
        return;
    snprintf(where, sizeof where, "%s:%d", ld->path, ld->lineno);
    ld->rc = refuse_name(ld->table, where, section, NULL, ld->err);
}

/* Feeds inih one line. It counts lines, which inih keeps to itself, and drops indentation, which
 * inih takes for a continued value. */
static char *on_read(char *to, int room, void *arg) {
    Loader *ld = arg;
    errno = 0;
    ssize_t n = ld->rc ? -1 : getline(&ld->line, &ld->line_cap, ld->file);
    if (n < 0) {
        if (!ld->rc && errno)
            ld->rc = err_set(ld->err, E_IO, "cannot read %s: %s", ld->path, strerror(errno));
        return NULL;
    }
    ld->lineno++;
    const char *line = ld->line;
    if (memchr(line, '\0', (size_t)n))
        return fail(ld, E_FORMAT, "zero byte in a text file"), NULL;
    while (isspace((unsigned char)*line))
        line++;
    size_t len = (size_t)n - (size_t)(line - ld->line);
    if (len + 1 > (size_t)room)
        return fail(ld, E_LIMIT, "line too long"), NULL;
    if (*line == '[')
        check_header(ld, line);
    memcpy(to, line, len + 1);
    return to;
}

static int on_option(void *arg, const char *section, const char *key, const char *value) {
    Loader *ld = arg;
    char where[600];
    if (ld->rc)
        return 0;
    snprintf(where, sizeof where, "%s:%d", ld->path, ld->lineno);
    if (!*section) {
        ld->rc = err_set(ld->err, E_INVAL, "%s: %s: option before the first [section]", where, key);
        return 0;
    }
    int i = find_opt(ld->table, section, key);
    if (i < 0)
        ld->rc = refuse_name(ld->table, where, section, key, ld->err);
    else if (ld->seen[i])
        ld->rc = err_set(ld->err, E_INVAL, "%s: [%s] %s: given twice", where, section, key);
    else
        ld->rc = assign(&ld->table->opts[i], where, value, ld->out, ld->err);
    if (ld->rc)
        return 0;
    ld->seen[i] = true;
    return 1;
}

static int load_file(Loader *ld) {
    ld->file = fopen(ld->path, "re");
    if (!ld->file)
        return err_set(ld->err, E_IO, "cannot open %s: %s", ld->path, strerror(errno));
    ini_use_stack = false;
    ini_initial_alloc = ini_max_line = CONF_LINE_MAX;
    ini_allow_multiline = false;
    int bad_line = ini_parse_stream(on_read, ld, on_option, ld);
    fclose(ld->file);
    free(ld->line);
    /* inih reports the first bad line; it precedes ours when inih itself could not read that line.
     */
    if (bad_line > 0 && (!ld->rc || bad_line < ld->lineno))
        ld->rc = err_set(ld->err, E_FORMAT, "%s:%d: expected [section], key = value or a comment",
                         ld->path, bad_line);
    return ld->rc;
}

static int apply_override(const ConfTable *table, const char *text, bool *seen, void *out,
                          Err *err) {
    char section[64], key[64];
    int end = 0;
    if (sscanf(text, "%63[^.=].%63[^=]=%n", section, key, &end) != 2 || end == 0)
        return err_set(err, E_INVAL, "--set %s: expected section.key=value", text);
    int i = find_opt(table, section, key);
    if (i < 0)
        return refuse_name(table, "--set", section, key, err);
    seen[i] = true;
    return assign(&table->opts[i], "--set", text + end, out, err);
}

int conf_load(const ConfTable *table, const char *path, const char *const *overrides, int n,
              void *out, Err *err) {
    Err local = {0};
    int count = n_opts(table);
    Loader ld = {.table = table, .out = out, .err = err ? err : &local, .path = path};
    ld.seen = xcalloc((size_t)count, sizeof *ld.seen);
    for (int i = 0; i < count; i++) {
        const char *def = table->opts[i].def;
        Err why = {0};
        /* A default outside its own range is a bug of the table; strings of required options start
         * empty. */
        if (def || table->opts[i].type == CONF_STR)
            CHECK(conf_value_set(&table->opts[i], def ? def : "", out, &why) == 0);
    }
    int rc = path ? load_file(&ld) : 0;
    for (int i = 0; i < n && !rc; i++)
        rc = apply_override(table, overrides[i], ld.seen, out, ld.err);
    for (int i = 0; i < count && !rc; i++)
        if (!table->opts[i].def && !ld.seen[i])
            rc = err_set(ld.err, E_INVAL, "%s: [%s] %s: required option is missing",
                         path ? path : table->program, table->opts[i].section, table->opts[i].key);
    free(ld.seen);
    if (rc)
        conf_free(table, out);
    return rc;
}

void conf_free(const ConfTable *table, void *out) {
    for (const ConfOpt *o = table->opts; o->section; o++) {
        if (o->type != CONF_STR)
            continue;
        char **s = (char **)((char *)out + o->offset);
        free(*s);
        *s = NULL;
    }
}

/* Help text as comment lines of at most 98 columns. */
static void print_comment(FILE *to, const char *text) {
    int column = 0;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (column > 0 && column + 1 + n > 98) {
            fputc('\n', to);
            column = 0;
        }
        column += fprintf(to, "%s%.*s", column ? " " : "# ", n, text);
        text += n;
        text += strspn(text, " ");
    }
    if (column)
        fputc('\n', to);
}

void conf_print(const ConfTable *table, const void *values, FILE *to) {
    const char *section = NULL;
    if (!values) {
        fprintf(to, "# %s: %s\n", table->program, table->about);
        fputs("# Options that are commented out show their defaults. A comment starts with # or ;, "
              "after a value with \" ;\".\n",
              to);
    }
    for (const ConfOpt *o = table->opts; o->section; o++) {
        if (!section || strcmp(section, o->section) != 0)
            fprintf(to, "%s[%s]\n", section || !values ? "\n" : "", o->section);
        section = o->section;
        if (values) {
            fprintf(to, "%s = ", o->key);
            conf_value_print(o, values, to);
            fputc('\n', to);
            continue;
        }
        Buf expected = {0};
        conf_value_expected(o, &expected);
        fputc('\n', to);
        print_comment(to, o->help);
        if (o->type != CONF_STR)
            fprintf(to, "# Takes %s.\n", expected.data);
        buf_done(&expected);
        if (o->def)
            fprintf(to, "#%s = %s\n", o->key, o->def);
        else
            fprintf(to, "# Required.\n#%s =\n", o->key);
    }
}

static int usage(const ConfTable *table) {
    printf("%s: %s\n\n"
           "usage: %s [--config FILE] [--set SECTION.KEY=VALUE]...\n"
           "  --config FILE            read options from FILE\n"
           "  --set SECTION.KEY=VALUE  override one option; may be repeated\n"
           "  --check                  check the options, print \"ok\" or what is wrong, and end\n"
           "  --print-config           print the options in effect and end\n"
           "  --print-defaults         print an example file with every option explained and end\n"
           "  --help, --version\n",
           table->program, table->about, table->program);
    return 0;
}

typedef enum ConfAction {
    ACT_RUN,
    ACT_CHECK,
    ACT_PRINT,
    ACT_DEFAULTS,
    ACT_HELP,
    ACT_VERSION,
    ACT_BAD
} ConfAction;

/* Reads the command line; *path and overrides[argc] borrow from argv. */
static ConfAction read_args(const ConfTable *table, int argc, char **argv, const char **path,
                            const char **overrides, int *n) {
    enum { OPT_CONFIG = 256, OPT_SET, OPT_ACTION };
    static const struct option options[] = {
        {"config", required_argument, NULL, OPT_CONFIG},
        {"set", required_argument, NULL, OPT_SET},
        {"check", no_argument, NULL, OPT_ACTION + ACT_CHECK},
        {"print-config", no_argument, NULL, OPT_ACTION + ACT_PRINT},
        {"print-defaults", no_argument, NULL, OPT_ACTION + ACT_DEFAULTS},
        {"help", no_argument, NULL, OPT_ACTION + ACT_HELP},
        {"version", no_argument, NULL, OPT_ACTION + ACT_VERSION},
        {0}};
    ConfAction action = ACT_RUN;
    optind = 0; /* getopt starts afresh: a test process comes here more than once */
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == OPT_CONFIG)
            *path = optarg;
        else if (c == OPT_SET)
            overrides[(*n)++] = optarg;
        else if (c >= OPT_ACTION)
            action = (ConfAction)(c - OPT_ACTION);
        else
            return ACT_BAD; /* getopt has said why */
    }
    if (optind < argc) {
        fprintf(stderr, "%s: unexpected argument \"%s\"\n", table->program, argv[optind]);
        return ACT_BAD;
    }
    return action;
}

int conf_main(const ConfTable *table, int argc, char **argv, void *out, int *exit_status) {
    const char *path = NULL, **overrides = xcalloc((size_t)argc + 1, sizeof *overrides);
    int n = 0, end = 1;
    ConfAction action = read_args(table, argc, argv, &path, overrides, &n);
    *exit_status = 0;
    if (action == ACT_BAD) {
        fprintf(stderr, "try %s --help\n", table->program);
        *exit_status = 2;
    } else if (action == ACT_HELP) {
        usage(table);
    } else if (action == ACT_VERSION) {
        printf("%s %s\n", table->program, BATON_VERSION);
    } else if (action == ACT_DEFAULTS) {
        conf_print(table, NULL, stdout);
    } else {
        Err err = {0};
        if (conf_load(table, path, overrides, n, out, &err)) {
            fprintf(stderr, "%s: %s\n", table->program, err.text);
            *exit_status = 2;
        } else if (action == ACT_RUN) {
            end = 0;
        } else {
            if (action == ACT_CHECK)
                puts("ok");
            else
                conf_print(table, out, stdout);
            conf_free(table, out);
        }
    }
    free(overrides);
    return end;
}
