/* A growable byte buffer. Not thread safe. */
#include "base/buf.h"

#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Makes room for n more bytes and the NUL. */
static void buf_grow(Buf *b, size_t n) {
    CHECK(n < SIZE_MAX / 4 && b->len < SIZE_MAX / 4);
    size_t wanted = b->len + n + 1;
    if (wanted <= b->cap)
        return;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < wanted)
        cap += cap / 2;
    b->data = xrealloc(b->data, cap);
    b->cap = cap;
}

void buf_put(Buf *b, const void *bytes, size_t n) {
    buf_grow(b, n);
    if (n)
        memcpy(b->data + b->len, bytes, n);
    b->len += n;
    b->data[b->len] = '\0';
}

void buf_puts(Buf *b, const char *s) {
    buf_put(b, s, strlen(s));
}

void buf_printf(Buf *b, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    CHECK(n >= 0);
    buf_grow(b, (size_t)n);
    va_start(args, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, args);
    va_end(args);
    b->len += (size_t)n;
}

void buf_clear(Buf *b) {
    b->len = 0;
    if (b->data)
        b->data[0] = '\0';
}

void buf_done(Buf *b) {
    free(b->data);
    *b = (Buf){0};
}

char *buf_take(Buf *b) {
    buf_grow(b, 0);
    b->data[b->len] = '\0';
    char *s = b->data;
    *b = (Buf){0};
    return s;
}
