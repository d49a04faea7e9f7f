/* Config files to be written; see services.h. */
#include "deploy/baton/services.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void conf_doc_init(ConfDoc *d, ServiceKind kind, const char *name) {
    *d = (ConfDoc){.kind = kind};
    snprintf(d->name, sizeof d->name, "%s", name);
}

void conf_doc_done(ConfDoc *d) {
    for (int i = 0; i < d->n; i++) {
        free(d->line[i].section);
        free(d->line[i].key);
        free(d->line[i].value);
    }
    free(d->line);
    *d = (ConfDoc){0};
}

static ConfDocLine *find(const ConfDoc *d, const char *option) {
    size_t n = strcspn(option, ".");
    for (int i = 0; i < d->n; i++)
        if (strlen(d->line[i].section) == n && strncmp(d->line[i].section, option, n) == 0 &&
            strcmp(d->line[i].key, option + n + 1) == 0)
            return &d->line[i];
    return NULL;
}

void conf_doc_set(ConfDoc *d, const char *option, const char *fmt, ...) {
    ConfDocLine *line = find(d, option);
    char *value;
    va_list args;
    va_start(args, fmt);
    int len = vasprintf(&value, fmt, args);
    va_end(args);
    CHECK(len >= 0);
    if (line) {
        free(line->value);
        line->value = value;
        return;
    }
    size_t n = strcspn(option, ".");
    CHECK(option[n]);
    d->line = xrealloc(d->line, (size_t)(d->n + 1) * sizeof *d->line);
    d->line[d->n++] =
        (ConfDocLine){xasprintf("%.*s", (int)n, option), xstrdup(option + n + 1), value};
}

const char *conf_doc_get(const ConfDoc *d, const char *option) {
    const ConfDocLine *line = find(d, option);
    return line ? line->value : NULL;
}

void conf_doc_print(const ConfDoc *d, FILE *to) {
    const char *section = "";
    if (*d->about)
        fprintf(to, "# %s\n", d->about);
    if (*d->before)
        fprintf(to, "# %s\n", d->before);
    for (const ConfOpt *o = service_kind_table(d->kind)->opts; o->section; o++)
        for (int i = 0; i < d->n; i++) {
            if (strcmp(d->line[i].section, o->section) != 0 || strcmp(d->line[i].key, o->key) != 0)
                continue;
            if (strcmp(section, o->section) != 0)
                fprintf(to, "%s[%s]\n", *section ? "\n" : "", o->section);
            section = o->section;
            fprintf(to, "%s = %s\n", o->key, d->line[i].value);
        }
}

/* Nothing that exists is written over: it may be someone's work. */
static int write_one(const ConfDoc *d, const char *dir, Err *err) {
    char *path = xasprintf("%s/%s.conf", dir, d->name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644), rc = 0;
    FILE *to = fd < 0 ? NULL : fdopen(fd, "w");
    if (!to) {
        rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    } else {
        conf_doc_print(d, to);
        bool bad = ferror(to);
        if (fclose(to) != 0 || bad)
            rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    }
    free(path);
    return rc;
}

int conf_docs_write(const ConfDoc *docs, int n, const char *dir, Err *err) {
    int rc = 0;
    if (mkdir(dir, 0755) && errno != EEXIST)
        return err_set(err, E_IO, "%s: %s", dir, strerror(errno));
    for (int i = 0; i < n && rc == 0; i++)
        rc = write_one(&docs[i], dir, err);
    return rc;
}
