/* A growable byte buffer that is always NUL-terminated. Embedded; zero-initialise, then buf_done.
 * Not thread safe. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct Buf {
    char *data; /* NULL while empty */
    size_t len, cap;
} Buf;

void buf_put(Buf *b, const void *bytes, size_t n);
void buf_puts(Buf *b, const char *s);
void buf_printf(Buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_clear(Buf *b); /* keeps the memory */
void buf_done(Buf *b);
/* Gives the bytes (never NULL, NUL-terminated, free with free()) to the caller and empties the
 * buffer. */
char *buf_take(Buf *b);
