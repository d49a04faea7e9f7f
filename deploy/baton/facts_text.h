/* Lines, words and numbers of the facts' texts. Internal to the facts' parsers. */
#pragma once

#include "deploy/baton/facts.h"

typedef struct FactsText {
    const char *name;
    char *rest;
    int line; /* of the one handed out last, from 1 */
} FactsText;

/* The next line without its end, trailing space and terminal escapes; NULL at the end. */
char *facts_text_line(FactsText *t);
/* The next word of *at, cut off; NULL when there is none. */
char *facts_text_word(char **at);
/* s without space around. */
char *facts_text_trim(char *s);

int facts_text_fail(const FactsText *t, Err *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A whole decimal number of [low, high], nothing else. */
bool facts_text_int(const char *s, int64_t low, int64_t high, int64_t *out);
/* The same for a number that ends at a space or a letter ("81559 MiB"). */
bool facts_text_quantity(const char *s, int64_t low, int64_t high, int64_t *out);
bool facts_text_real(const char *s, double low, double high, double *out);
/* "0-31,128-159" or "0 1 2", below limit; false on anything else. Empty text gives an empty set. */
bool facts_text_list(const char *s, int limit, FactsCpus *out);

/* Copies what fits, without control characters. */
void facts_text_copy(char *out, size_t n, const char *s);

int facts_numa_parse(Facts *f, FactsText *t, Err *err);
int facts_cpu_parse(Facts *f, FactsText *t, Err *err);
int facts_gpu_parse_csv(Facts *f, FactsText *t, Err *err);
int facts_gpu_parse_topo(Facts *f, FactsText *t, Err *err);
int facts_ucx_parse(Facts *f, FactsText *t, Err *err);
int facts_host_parse(Facts *f, FactsText *t, Err *err);
