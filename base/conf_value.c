/* One configuration value: text to a field and back, with ranges and units. Start-up only. */
#include "base/conf_value.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>
#include <strings.h>

typedef struct Unit {
    const char *suffix;
    int64_t factor;
} Unit;

/* Largest first: the printer takes the first that divides. */
static const Unit size_units[] = {{"T", 1LL << 40}, {"G", 1LL << 30}, {"M", 1LL << 20},
                                  {"K", 1LL << 10}, {"", 1},          {NULL, 0}};
static const Unit time_units[] = {{"min", 60000}, {"s", 1000}, {"ms", 1}, {"", 1}, {NULL, 0}};
static const Unit no_units[] = {{"", 1}, {NULL, 0}};

static const Unit *units_of(ConfType type) {
    return type == CONF_SIZE ? size_units : type == CONF_MS ? time_units : no_units;
}

static bool ranged(const ConfOpt *o) {
    return o->min != 0 || o->max != 0;
}

/* An integer with an optional unit behind it; false on any other text and on overflow. */
static bool parse_integer(const char *text, const Unit *units, int64_t *out) {
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || errno || isspace((unsigned char)*text))
        return false;
    end += strspn(end, " \t");
    for (; units->suffix; units++)
        if (strcmp(end, units->suffix) == 0)
            return !__builtin_mul_overflow(v, units->factor, out);
    return false;
}

static bool parse_real(const char *text, double *out) {
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v) || isspace((unsigned char)*text))
        return false;
    *out = v;
    return true;
}

static bool parse_bool(const char *text, bool *out) {
    static const char *const words[] = {"no", "yes", "false", "true", "off", "on", "0", "1"};
    for (int i = 0; i < 8; i++)
        if (strcasecmp(text, words[i]) == 0) {
            *out = i % 2;
            return true;
        }
    return false;
}

static bool parse_choice(const char *text, const char *choices, int *out) {
    size_t len = strlen(text);
    for (int i = 0;; i++) {
        size_t n = strcspn(choices, "|");
        if (n == len && strncmp(choices, text, n) == 0) {
            *out = i;
            return true;
        }
        if (!choices[n])
            return false;
        choices += n + 1;
    }
}

/* What an INI line cannot carry is refused from every source, so that --print-config can always be
 * read back. */
static bool string_ok(const char *text) {
    if (*text == ';' || isspace((unsigned char)*text))
        return false;
    for (const char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f || (*p == ' ' && (p[1] == ';' || !p[1])))
            return false;
    return true;
}

/* The value of an INT, SIZE or MS in the largest unit that leaves no rest. */
static void put_units(Buf *out, int64_t v, const Unit *u) {
    while (v == 0 ? u->factor != 1 : v % u->factor != 0)
        u++;
    buf_printf(out, "%lld%s", (long long)(v / u->factor), v == 0 ? "" : u->suffix);
}

void conf_value_expected(const ConfOpt *o, Buf *out) {
    static const char *const what[] = {
        [CONF_STR] = "text without control characters or \" ;\"",
        [CONF_INT] = "an integer",
        [CONF_REAL] = "a number",
        [CONF_BOOL] = "yes or no",
        [CONF_ENUM] = "one of ",
        [CONF_SIZE] = "bytes with suffix K, M, G or T",
        [CONF_MS] = "a time with suffix ms, s or min",
    };
    buf_puts(out, what[o->type]);
    if (o->type == CONF_ENUM) {
        for (const char *p = o->choices; *p; p++)
            buf_put(out, *p == '|' ? ", " : p, *p == '|' ? 2 : 1);
    } else if (o->type == CONF_REAL && ranged(o)) {
        buf_printf(out, ", from %g to %g", o->min, o->max);
    } else if ((o->type == CONF_INT || o->type == CONF_SIZE || o->type == CONF_MS) && ranged(o)) {
        buf_puts(out, ", from ");
        put_units(out, (int64_t)o->min, units_of(o->type));
        buf_puts(out, " to ");
        put_units(out, (int64_t)o->max, units_of(o->type));
    }
}

static bool in_range(const ConfOpt *o, double v) {
    return !ranged(o) || (v >= o->min && v <= o->max);
}

int conf_value_set(const ConfOpt *o, const char *text, void *out, Err *err) {
    void *field = (char *)out + o->offset;
    int64_t integer;
    double real;
    bool ok = false;
    switch (o->type) {
    case CONF_STR:
        ok = string_ok(text);
        if (ok) {
            free(*(char **)field);
            *(char **)field = xstrdup(text);
        }
        break;
    case CONF_INT:
    case CONF_SIZE:
    case CONF_MS:
        ok = parse_integer(text, units_of(o->type), &integer) && in_range(o, (double)integer) &&
             (o->type == CONF_INT || integer >= 0);
        if (ok)
            *(int64_t *)field = integer;
        break;
    case CONF_REAL:
        ok = parse_real(text, &real) && in_range(o, real);
        if (ok)
            *(double *)field = real;
        break;
    case CONF_BOOL:
        ok = parse_bool(text, field);
        break;
    case CONF_ENUM:
        ok = parse_choice(text, o->choices, field);
        break;
    }
    if (ok)
        return 0;
    Buf expected = {0};
    conf_value_expected(o, &expected);
    int rc = err_set(err, E_INVAL, "expected %s, found \"%.100s\"", expected.data, text);
    buf_done(&expected);
    return rc;
}

static void print_choice(const char *choices, int index, FILE *to) {
    while (index-- > 0)
        choices += strcspn(choices, "|") + 1;
    fprintf(to, "%.*s", (int)strcspn(choices, "|"), choices);
}

void conf_value_print(const ConfOpt *o, const void *values, FILE *to) {
    const void *field = (const char *)values + o->offset;
    Buf units = {0};
    switch (o->type) {
    case CONF_STR:
        fputs(*(char *const *)field, to);
        break;
    case CONF_INT:
    case CONF_SIZE:
    case CONF_MS:
        put_units(&units, *(const int64_t *)field, units_of(o->type));
        fputs(units.data, to);
        break;
    case CONF_REAL:
        fprintf(to, "%.17g", *(const double *)field);
        break;
    case CONF_BOOL:
        fputs(*(const bool *)field ? "yes" : "no", to);
        break;
    case CONF_ENUM:
        print_choice(o->choices, *(const int *)field, to);
        break;
    }
    buf_done(&units);
}
