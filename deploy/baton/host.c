/* See host.h: the texts of a running system, and where they go. One thread. */
#include "deploy/baton/host_int.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- files ---- */

char *host_read_file(const char *root, const char *path) {
    char *name = xasprintf("%s%s", root, path);
    FILE *f = fopen(name, "re");
    free(name);
    if (!f)
        return NULL;
    /* Files of /proc and /sys tell no size. */
    char *text = xcalloc(FACTS_FILE_MAX + 1, 1);
    size_t n = fread(text, 1, FACTS_FILE_MAX, f);
    bool bad = ferror(f) || memchr(text, 0, n);
    fclose(f);
    if (!bad)
        return text;
    free(text);
    return NULL;
}

char *host_read_line(const char *root, const char *fmt, ...) {
    char *path;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&path, fmt, args);
    va_end(args);
    CHECK(n >= 0);
    char *text = host_read_file(root, path);
    free(path);
    if (text)
        text[strcspn(text, "\n")] = 0;
    return text;
}

/* ---- all texts ---- */

enum { NUMA, CPU, GPUS, TOPO, UCX, HOST, N_TEXTS };

static const char *const NAMES[N_TEXTS] = {"numactl.txt", "lscpu.txt", "gpus.csv",
                                           "topo.txt",    "ucx.txt",   "host.txt"};

static void gather(Buf text[N_TEXTS]) {
    host_put_numa("", &text[NUMA]);
    host_put_cpu("", &text[CPU]);
    host_put_gpus("", &text[GPUS], &text[TOPO]);
    host_put_ucx(&text[UCX]);
    buf_puts(&text[HOST], "# What no tool prints, by `baton doctor --capture`.\n");
    host_put_limits("", &text[HOST]);
    host_put_kv_link(&text[HOST]);
}

static void done(Buf text[N_TEXTS]) {
    for (int i = 0; i < N_TEXTS; i++)
        buf_done(&text[i]);
}

/* A text that is not understood, of a tool of another version, is left out with a word about it. */
static void parse(Facts *f, const Buf text[N_TEXTS]) {
    Facts *before = xcalloc(1, sizeof *before);
    facts_init(f);
    for (int i = 0; i < N_TEXTS; i++) {
        Err err = {0};
        if (text[i].len == 0)
            continue;
        char *copy = xstrdup(text[i].data);
        *before = *f;
        if (facts_parse(f, NAMES[i], copy, &err)) {
            fprintf(stderr, "baton doctor: left out of this host's facts: %s\n", err.text);
            *f = *before;
        }
        free(copy);
    }
    free(before);
}

void host_facts(Facts *f) {
    Buf text[N_TEXTS] = {0};
    gather(text);
    parse(f, text);
    done(text);
}

static int write_text(const char *dir, const char *name, const Buf *b, Err *err) {
    char *path = xasprintf("%s/%s", dir, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644), rc = 0;
    for (size_t at = 0; fd >= 0 && at < b->len;) {
        ssize_t n = write(fd, b->data + at, b->len - at);
        if (n <= 0)
            break;
        at += (size_t)n;
        rc = at < b->len;
    }
    if (fd < 0 || close(fd) != 0 || rc)
        rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    free(path);
    return rc;
}

int host_capture(const char *dir, bool measure, Err *err) {
    Buf text[N_TEXTS] = {0};
    Facts *f = xcalloc(1, sizeof *f);
    int rc = 0;
    gather(text);
    if (mkdir(dir, 0755) && errno != EEXIST)
        rc = err_set(err, E_IO, "%s: %s", dir, strerror(errno));
    if (rc == 0 && measure) {
        parse(f, text);
        rc = facts_derive(f, 0, err);
        if (rc == 0)
            rc = host_measure(f, err);
        if (rc == 0)
            host_put_measured(f, &text[HOST]);
    }
    for (int i = 0; i < N_TEXTS && rc == 0; i++)
        if (text[i].len > 0)
            rc = write_text(dir, NAMES[i], &text[i], err);
    done(text);
    free(f);
    return rc;
}
