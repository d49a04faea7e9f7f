/* Error values, assertions and allocation that cannot fail. No state; any thread. */
#include "base/err.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Formats through a copy: the arguments may point into the error that is being written. */
static int err_fill(Err *err, int code, const char *fmt, va_list args) {
    char text[sizeof err->text];
    vsnprintf(text, sizeof text, fmt, args);
    for (char *p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = ' ';
    memcpy(err->text, text, sizeof text);
    err->code = code;
    return code;
}

int err_set(Err *err, int code, const char *fmt, ...) {
    if (!err)
        return code;
    va_list args;
    va_start(args, fmt);
    err_fill(err, code, fmt, args);
    va_end(args);
    return code;
}

int err_wrap(Err *err, const char *fmt, ...) {
    if (!err)
        return E_INVAL;
    char context[sizeof err->text];
    va_list args;
    va_start(args, fmt);
    vsnprintf(context, sizeof context, fmt, args);
    va_end(args);
    return err_set(err, err->code, "%s: %s", context, err->text);
}

const char *err_name(int code) {
    switch (code) {
    case E_OK:
        return "ok";
    case E_INVAL:
        return "invalid";
    case E_FORMAT:
        return "format";
    case E_LIMIT:
        return "limit";
    case E_BUSY:
        return "busy";
    case E_PEER:
        return "peer";
    case E_DEADLINE:
        return "deadline";
    case E_UNSUPPORTED:
        return "unsupported";
    case E_MISMATCH:
        return "mismatch";
    case E_NOMEM:
        return "no memory";
    case E_IO:
        return "io";
    case E_CANCELED:
        return "canceled";
    case E_NOTFOUND:
        return "not found";
    default:
        return "unknown";
    }
}

void err_check_failed(const char *file, int line, const char *cond) {
    fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, cond);
    abort();
}

static void *need(void *p, size_t bytes) {
    if (!p) {
        fprintf(stderr, "out of memory: %zu bytes\n", bytes);
        abort();
    }
    return p;
}

void *xmalloc(size_t bytes) {
    return need(malloc(bytes ? bytes : 1), bytes);
}

void *xcalloc(size_t n, size_t bytes) {
    return need(n && bytes ? calloc(n, bytes) : calloc(1, 1), n * bytes);
}

void *xrealloc(void *p, size_t bytes) {
    return need(realloc(p, bytes ? bytes : 1), bytes);
}

char *xstrdup(const char *s) {
    return need(strdup(s), strlen(s) + 1);
}

char *xasprintf(const char *fmt, ...) {
    char *s;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&s, fmt, args);
    va_end(args);
    return need(n < 0 ? NULL : s, 0);
}

void *xaligned(size_t bytes) {
    CHECK(bytes <= SIZE_MAX - 64);
    size_t rounded = bytes ? (bytes + 63) / 64 * 64 : 64;
    void *p = need(aligned_alloc(64, rounded), rounded);
    return memset(p, 0, rounded);
}
