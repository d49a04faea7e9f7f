/* See services.h. */
#include "deploy/baton/services.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

const char *service_kind_name(ServiceKind k) {
    static const char *const names[] = {"router", "prefill", "decode", "expertd"};
    return names[k];
}

const ConfTable *service_kind_table(ServiceKind k) {
    const ConfTable *const tables[] = {&options_table, &PREFILL_CONF, &DECODE_CONF, &EXPERTD_CONF};
    return tables[k];
}

bool service_kind_of(const char *path, ServiceKind *out) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    for (int k = 0; k < SERVICE_KINDS; k++) {
        const char *kind = service_kind_name((ServiceKind)k);
        size_t n = strlen(kind);
        if (strncmp(name, kind, n) == 0 && (name[n] == '.' || name[n] == '-' || name[n] == '@')) {
            *out = (ServiceKind)k;
            return true;
        }
    }
    return false;
}

/* Where the options of a service lie. */
static void *opts_of(Service *s) {
    void *const at[] = {&s->router, &s->prefill, &s->decode, &s->expertd};
    return at[s->kind];
}

void services_done(Services *s) {
    for (int i = 0; i < s->n; i++) {
        conf_free(service_kind_table(s->at[i].kind), opts_of(&s->at[i]));
        free(s->at[i].from);
    }
    free(s->at);
    *s = (Services){0};
}

static int add(Services *s, ServiceKind kind, const char *from, const char *path,
               const char *const *overrides, int n, Err *err) {
    Service one = {.kind = kind};
    int rc = conf_load(service_kind_table(kind), path, overrides, n, opts_of(&one), err);
    if (rc)
        return rc;
    one.from = xstrdup(from);
    s->at = xrealloc(s->at, (size_t)(s->n + 1) * sizeof *s->at);
    s->at[s->n++] = one;
    return 0;
}

static int add_file(Services *s, const char *path, Err *err) {
    ServiceKind kind;
    if (!service_kind_of(path, &kind))
        return err_set(err, E_INVAL,
                       "%s: the name tells no daemon; expected router*.conf, prefill*.conf, "
                       "decode*.conf or expertd*.conf",
                       path);
    return add(s, kind, path, path, NULL, 0, err);
}

static int is_conf(const struct dirent *d) {
    size_t n = strlen(d->d_name);
    return d->d_name[0] != '.' && n > 5 && strcmp(d->d_name + n - 5, ".conf") == 0;
}

int services_add(Services *s, const char *path, Err *err) {
    struct stat st;
    struct dirent **list;
    if (stat(path, &st))
        return err_set(err, E_IO, "%s: %s", path, strerror(errno));
    if (!S_ISDIR(st.st_mode))
        return add_file(s, path, err);
    int n = scandir(path, &list, is_conf, alphasort), rc = 0;
    if (n <= 0)
        return err_set(err, E_NOTFOUND, "%s: no *.conf files", path);
    for (int i = 0; i < n; i++) {
        char *file = xasprintf("%s/%s", path, list[i]->d_name);
        if (rc == 0)
            rc = add_file(s, file, err);
        free(file);
        free(list[i]);
    }
    free(list);
    return rc;
}

static int add_doc(Services *s, const ConfDoc *d, Err *err) {
    char **set = xcalloc((size_t)d->n + 1, sizeof *set);
    for (int i = 0; i < d->n; i++)
        set[i] = xasprintf("%s.%s=%s", d->line[i].section, d->line[i].key, d->line[i].value);
    int rc = add(s, d->kind, d->name, NULL, (const char *const *)set, d->n, err);
    for (int i = 0; i < d->n; i++)
        free(set[i]);
    free(set);
    return rc ? err_wrap(err, "%s.conf", d->name) : 0;
}

int services_add_docs(Services *s, const ConfDoc *docs, int n, Err *err) {
    int rc = 0;
    for (int i = 0; i < n && rc == 0; i++)
        rc = add_doc(s, &docs[i], err);
    return rc;
}

const Service *services_get(const Services *s, ServiceKind kind, int i) {
    for (int at = 0; at < s->n; at++)
        if (s->at[at].kind == kind && i-- == 0)
            return &s->at[at];
    return NULL;
}

int services_count(const Services *s, ServiceKind kind) {
    int n = 0;
    for (int i = 0; i < s->n; i++)
        n += s->at[i].kind == kind;
    return n;
}

const EngineOpts *service_engine(const Service *s) {
    return s->kind == SERVICE_PREFILL  ? &s->prefill.engine
           : s->kind == SERVICE_DECODE ? &s->decode.engine
                                       : NULL;
}

const ServiceOpts *service_opts(const Service *s) {
    return s->kind == SERVICE_PREFILL  ? &s->prefill.service
           : s->kind == SERVICE_DECODE ? &s->decode.service
                                       : NULL;
}
