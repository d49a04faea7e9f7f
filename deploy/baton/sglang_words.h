/* Words of a shell's command line. Pure. */
#pragma once

#include "base/err.h"

#include <stdbool.h>

typedef struct SglangWord {
    char *text;
    int line;
    bool first;  /* of its line */
    bool quoted; /* at its begin: never an option or a comment */
} SglangWord;

/* Cuts text into words; *words is the caller's to free, their texts lie in text. Comments go from a
 * # at a word's begin to the end of the line. E_FORMAT with NAME:LINE: an open quote. */
int sglang_words(char *text, const char *name, SglangWord **words, int *n, Err *err);
