/* See facts_text.h. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* nvidia-smi underlines its header: ESC [ numbers m. */
static void drop_escapes(char *s) {
    char *to = s;
    while (*s) {
        if (s[0] == '\033' && s[1] == '[') {
            s += 2 + strspn(s + 2, "0123456789;");
            s += *s != 0;
        } else {
            *to++ = *s++;
        }
    }
    *to = 0;
}

char *facts_text_line(FactsText *t) {
    char *line = t->rest;
    if (!line || !*line)
        return NULL;
    char *end = strchr(line, '\n');
    t->rest = end ? end + 1 : NULL;
    if (end)
        *end = 0;
    t->line++;
    drop_escapes(line);
    for (size_t n = strlen(line); n > 0 && isspace((unsigned char)line[n - 1]);)
        line[--n] = 0;
    return line;
}

char *facts_text_word(char **at) {
    char *word = *at + strspn(*at, " \t");
    if (!*word)
        return NULL;
    char *end = word + strcspn(word, " \t");
    *at = *end ? end + 1 : end;
    *end = 0;
    return word;
}

char *facts_text_trim(char *s) {
    s += strspn(s, " \t");
    for (size_t n = strlen(s); n > 0 && isspace((unsigned char)s[n - 1]);)
        s[--n] = 0;
    return s;
}

int facts_text_fail(const FactsText *t, Err *err, const char *fmt, ...) {
    char what[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    return err_set(err, E_FORMAT, "%.180s:%d: %s", t->name, t->line, what);
}

static bool number(const char *s, int64_t low, int64_t high, int64_t *out, char **end) {
    if (!isdigit((unsigned char)*s))
        return false;
    errno = 0;
    long long v = strtoll(s, end, 10);
    if (errno || v < low || v > high)
        return false;
    *out = v;
    return true;
}

bool facts_text_int(const char *s, int64_t low, int64_t high, int64_t *out) {
    char *end;
    int64_t v;
    if (!number(s, low, high, &v, &end) || *end)
        return false;
    *out = v;
    return true;
}

bool facts_text_quantity(const char *s, int64_t low, int64_t high, int64_t *out) {
    char *end;
    int64_t v;
    if (!number(s, low, high, &v, &end) || (*end && *end != ' ' && !isalpha((unsigned char)*end)))
        return false;
    *out = v;
    return true;
}

bool facts_text_real(const char *s, double low, double high, double *out) {
    char *end;
    if (!isdigit((unsigned char)*s))
        return false;
    double v = strtod(s, &end);
    if (*end || !isfinite(v) || v < low || v > high)
        return false;
    *out = v;
    return true;
}

bool facts_text_list(const char *s, int limit, FactsCpus *out) {
    FactsCpus set = {0};
    while (*(s += strspn(s, " \t,"))) {
        int64_t first, last;
        char *end;
        if (!number(s, 0, limit - 1, &first, &end))
            return false;
        last = first;
        if (*end == '-' && !number(end + 1, first, limit - 1, &last, &end))
            return false;
        if (*end && !strchr(" \t,", *end))
            return false;
        for (int64_t i = first; i <= last; i++)
            set.bits[i / 64] |= 1ull << (i % 64);
        s = end;
    }
    *out = set;
    return true;
}

void facts_text_copy(char *out, size_t n, const char *s) {
    size_t len = 0;
    for (; *s && len + 1 < n; s++)
        if ((unsigned char)*s >= 0x20 && *s != 0x7f)
            out[len++] = *s;
    out[len] = 0;
}
