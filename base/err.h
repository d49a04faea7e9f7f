/* Error values, assertions and allocation that cannot fail.
 *
 * A fallible function returns 0 or a negative E_ code. The first detector words the error in *err;
 * callers pass it on and may add context once with err_wrap. Any Err pointer may be NULL. */
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

enum {
    E_OK = 0,
    E_INVAL = -10001,       /* bad argument or bad value from outside */
    E_FORMAT = -10002,      /* bytes that do not parse */
    E_LIMIT = -10003,       /* larger than a stated bound */
    E_BUSY = -10004,        /* no capacity now; trying later may succeed */
    E_PEER = -10005,        /* a peer died, refused or broke the protocol */
    E_DEADLINE = -10006,    /* a wait ran out of time */
    E_UNSUPPORTED = -10007, /* well formed, but not something this build does */
    E_MISMATCH = -10008,    /* two things that must agree do not */
    E_NOMEM = -10009,       /* memory of a pool or device is exhausted */
    E_IO = -10010,          /* the operating system refused */
    E_CANCELED = -10011,    /* given up on request */
    E_NOTFOUND = -10012     /* no such thing */
};

typedef struct Err {
    int code;       /* 0 or E_ code */
    char text[500]; /* one line, lower case, no trailing period */
} Err;

/* Fills *err (may be NULL) and returns code, so that `return err_set(...)` reads well. */
int err_set(Err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Puts "context: " before the text of *err and returns its code; E_INVAL when err is NULL. */
int err_wrap(Err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Name of a code: "invalid", "busy", ... Never NULL. */
const char *err_name(int code);

/* Prints file, line and the condition, then aborts. Kept in release builds; for broken invariants
 * only. */
#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (__builtin_expect(!(cond), 0))                                                          \
            err_check_failed(__FILE__, __LINE__, #cond);                                           \
    } while (0)

#ifdef NDEBUG
#define DCHECK(cond) ((void)sizeof(cond))
#else
#define DCHECK(cond) CHECK(cond)
#endif

_Noreturn void err_check_failed(const char *file, int line, const char *cond);

/* Allocation that ends the process with a message when memory is out. Zeroed where the name says
 * calloc. Free with free(). */
void *xmalloc(size_t bytes);
void *xcalloc(size_t n, size_t bytes);
void *xrealloc(void *p, size_t bytes);
char *xstrdup(const char *s);
char *xasprintf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* 64-byte aligned, zeroed. Free with free(). */
void *xaligned(size_t bytes);
