/* Inside of sglang: the table and how its rows take values. */
#pragma once

#include "deploy/baton/sglang.h"

typedef enum SglangArity { SGLANG_FLAG, SGLANG_ONE, SGLANG_MANY, SGLANG_MAYBE } SglangArity;

typedef struct SglangTake {
    SglangWish *wish;
    SglangRemark *remark; /* has the row's state and words; a taker may change both */
    char *const *value;
    int n;
    char expected[120]; /* filled by a taker that refuses */
} SglangTake;

typedef struct SglangRow {
    const char *names; /* "tp-size|tp|tensor-parallel-size"; NULL: `why` is a heading */
    const char *of;    /* S, K, V: SGLang, KTransformers, vLLM */
    SglangArity arity;
    SglangState state;
    const char *baton; /* "router [http] port", or "" */
    const char *why;
    bool (*take)(SglangTake *t); /* false: the value is wrong, see expected; NULL: none is used */
} SglangRow;

/* Ends with a row that has neither names nor why. */
extern const SglangRow SGLANG_TABLE[];

/* The row of a name with dashes, without those in front; NULL: none. */
const SglangRow *sglang_find(const char *name);

void sglang_say(SglangTake *t, SglangState state, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The single value as a number: digits, or with k, m (thousands) or K, M (1024). */
bool sglang_number(SglangTake *t, int64_t low, int64_t high, int64_t *out);
