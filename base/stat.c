/* Metrics in the Prometheus text format: one registry per process. Creation and rendering take a
 * lock; updates are atomic. */
#include "base/stat.h"

#include "base/err.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define STAT_BOUNDS_MAX 32

typedef enum StatKind { STAT_COUNTER, STAT_GAUGE, STAT_HIST } StatKind;

typedef struct Series {
    struct Series *next; /* of the same family, in order of creation */
    char *labels;
    _Atomic double value; /* counter, gauge; the sum of a histogram */
    int n_bounds;
    double bounds[STAT_BOUNDS_MAX];
    _Atomic uint64_t buckets[STAT_BOUNDS_MAX + 1]; /* not cumulative; the last is +Inf */
} Series;

struct StatCounter {
    Series s;
};
struct StatGauge {
    Series s;
};
struct StatHist {
    Series s;
};

typedef struct Family {
    struct Family *next;
    char *name, *help;
    StatKind kind;
    Series *series;
} Family;

static pthread_mutex_t stat_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the lists, not the values */
static Family *stat_families;

static bool name_ok(const char *name) {
    if (!isalpha((unsigned char)*name) && *name != '_')
        return false;
    for (; *name; name++)
        if (!isalnum((unsigned char)*name) && *name != '_' && *name != ':')
            return false;
    return true;
}

static Family *family_get(const char *name, const char *help, StatKind kind) {
    Family **at = &stat_families;
    for (; *at; at = &(*at)->next)
        if (strcmp((*at)->name, name) == 0) {
            CHECK((*at)->kind == kind);
            return *at;
        }
    CHECK(name_ok(name));
    Family *f = xcalloc(1, sizeof *f);
    f->name = xstrdup(name);
    f->help = xstrdup(help);
    f->kind = kind;
    *at = f;
    return f;
}

/* The series of that name and labels; made on first use. */
static Series *series_get(const char *name, const char *labels, const char *help, StatKind kind,
                          const double *bounds, int n) {
    CHECK(n >= 0 && n <= STAT_BOUNDS_MAX);
    pthread_mutex_lock(&stat_lock);
    Series **at = &family_get(name, help, kind)->series;
    while (*at && strcmp((*at)->labels, labels) != 0)
        at = &(*at)->next;
    if (!*at) {
        Series *s = xcalloc(1, sizeof *s);
        s->labels = xstrdup(labels);
        s->n_bounds = n;
        for (int i = 0; i < n; i++) {
            CHECK(i == 0 || bounds[i] > bounds[i - 1]);
            s->bounds[i] = bounds[i];
        }
        *at = s;
    }
    Series *s = *at;
    pthread_mutex_unlock(&stat_lock);
    return s;
}

StatCounter *stat_counter(const char *name, const char *labels, const char *help) {
    return (StatCounter *)series_get(name, labels, help, STAT_COUNTER, NULL, 0);
}

StatGauge *stat_gauge(const char *name, const char *labels, const char *help) {
    return (StatGauge *)series_get(name, labels, help, STAT_GAUGE, NULL, 0);
}

StatHist *stat_hist(const char *name, const char *labels, const char *help, const double *bounds,
                    int n) {
    return (StatHist *)series_get(name, labels, help, STAT_HIST, bounds, n);
}

StatHist *stat_hist_seconds(const char *name, const char *labels, const char *help) {
    static const double seconds[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                     0.5,   1,      2.5,   5,    10,    30,   60};
    return stat_hist(name, labels, help, seconds, sizeof seconds / sizeof *seconds);
}

static void add_double(_Atomic double *to, double v) {
    double seen = atomic_load_explicit(to, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(to, &seen, seen + v, memory_order_relaxed,
                                                  memory_order_relaxed))
        ;
}

void stat_add(StatCounter *c, double v) {
    DCHECK(v >= 0);
    add_double(&c->s.value, v);
}

double stat_counter_value(const StatCounter *c) {
    return atomic_load_explicit(&c->s.value, memory_order_relaxed);
}

void stat_set(StatGauge *g, double v) {
    atomic_store_explicit(&g->s.value, v, memory_order_relaxed);
}

double stat_gauge_value(const StatGauge *g) {
    return atomic_load_explicit(&g->s.value, memory_order_relaxed);
}

void stat_observe(StatHist *h, double v) {
    int i = 0;
    while (i < h->s.n_bounds && !(v <= h->s.bounds[i]))
        i++;
    atomic_fetch_add_explicit(&h->s.buckets[i], 1, memory_order_relaxed);
    add_double(&h->s.value, v);
}

static void put_number(Buf *out, double v) {
    if (isnan(v))
        buf_puts(out, "NaN");
    else if (isinf(v))
        buf_puts(out, v > 0 ? "+Inf" : "-Inf");
    else if (fabs(v) < 1e15 && v == (double)(int64_t)v)
        buf_printf(out, "%lld", (long long)v);
    else
        buf_printf(out, "%.15g", v);
}

/* "name{labels,extra} " with the braces only where needed. */
static void put_key(Buf *out, const char *name, const char *suffix, const char *labels,
                    const char *extra) {
    buf_printf(out, "%s%s", name, suffix);
    if (*labels || *extra)
        buf_printf(out, "{%s%s%s}", labels, *labels && *extra ? "," : "", extra);
    buf_puts(out, " ");
}

static void put_value(Buf *out, const char *name, const char *suffix, const char *labels,
                      double v) {
    put_key(out, name, suffix, labels, "");
    put_number(out, v);
    buf_puts(out, "\n");
}

static void put_hist(Buf *out, const char *name, const Series *s) {
    uint64_t total = 0;
    for (int i = 0; i <= s->n_bounds; i++) {
        char le[48];
        if (i < s->n_bounds)
            snprintf(le, sizeof le, "le=\"%g\"", s->bounds[i]);
        else
            snprintf(le, sizeof le, "le=\"+Inf\"");
        total += atomic_load_explicit(&s->buckets[i], memory_order_relaxed);
        put_key(out, name, "_bucket", s->labels, le);
        buf_printf(out, "%llu\n", (unsigned long long)total);
    }
    put_value(out, name, "_sum", s->labels, atomic_load_explicit(&s->value, memory_order_relaxed));
    put_value(out, name, "_count", s->labels, (double)total);
}

void stat_render(Buf *out) {
    static const char *const kinds[] = {"counter", "gauge", "histogram"};
    pthread_mutex_lock(&stat_lock);
    for (const Family *f = stat_families; f; f = f->next) {
        buf_printf(out, "# HELP %s ", f->name);
        for (const char *p = f->help; *p; p++) {
            if (*p == '\n' || *p == '\\')
                buf_puts(out, *p == '\n' ? "\\n" : "\\\\");
            else
                buf_put(out, p, 1);
        }
        buf_printf(out, "\n# TYPE %s %s\n", f->name, kinds[f->kind]);
        for (const Series *s = f->series; s; s = s->next) {
            if (f->kind == STAT_HIST)
                put_hist(out, f->name, s);
            else
                put_value(out, f->name, "", s->labels,
                          atomic_load_explicit(&s->value, memory_order_relaxed));
        }
    }
    pthread_mutex_unlock(&stat_lock);
}
