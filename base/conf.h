/* Configuration: one option table per daemon, one INI file, overrides from the command line.
 *
 * A table row names an option once: section, key, type, default, range, help and where it lands in
 * the daemon's struct. Parsing, range checks, --check, --print-config and the shipped example files
 * all come from the table. Unknown sections and keys are errors that name file, line and the
 * nearest known name, and so is an option given twice. Precedence: default < file < command line.
 * Start-up only; not thread safe. */
#pragma once

#include "base/err.h"

#include <stdint.h>
#include <stdio.h>

typedef enum ConfType {
    CONF_STR,  /* char *, heap, freed by conf_free; never NULL */
    CONF_INT,  /* int64_t within [min, max] */
    CONF_REAL, /* double within [min, max] */
    CONF_BOOL, /* bool; yes/no, true/false, on/off, 1/0 */
    CONF_ENUM, /* int, index into choices "a|b|c" */
    CONF_SIZE, /* int64_t bytes; suffixes K, M, G, T (1024) */
    CONF_MS,   /* int64_t milliseconds; suffixes ms, s, min */
} ConfType;

typedef struct ConfOpt {
    const char *section, *key;
    ConfType type;
    const char *def;     /* default as text; NULL: the option is required */
    double min, max;     /* INT, REAL, SIZE, MS; ignored when both are 0 */
    const char *choices; /* ENUM */
    const char *help;    /* one or two sentences, units included */
    size_t offset;       /* of the field in the daemon's config struct */
} ConfOpt;

typedef struct ConfTable {
    const char *program; /* "baton-router" */
    const char *about;   /* one line */
    const ConfOpt *opts; /* ends with a row whose section is NULL */
} ConfTable;

/* Reads path (NULL: defaults only) and then the n overrides "section.key=value" into *out, a zeroed
 * struct that the caller owns. E_INVAL or E_IO with "FILE:LINE: [section] key: what was expected".
 * On failure *out is released again. */
int conf_load(const ConfTable *table, const char *path, const char *const *overrides, int n,
              void *out, Err *err);

/* Frees the strings of *out and zeroes them. */
void conf_free(const ConfTable *table, void *out);

/* Writes an INI file. values NULL: the defaults with the help text as comments (the shipped
 * example); else the effective values. */
void conf_print(const ConfTable *table, const void *values, FILE *to);

/* The command line that every daemon shares: --config FILE, --set section.key=value, --check,
 * --print-config,
 * --print-defaults, --help, --version.
 * Returns 0 when the daemon should run with *out filled; otherwise the process should end with
 * *exit_status (0 or 2). */
int conf_main(const ConfTable *table, int argc, char **argv, void *out, int *exit_status);

/* The name in names (NULL-terminated) nearest to s by edit distance, or NULL when none is near. */
const char *conf_nearest(const char *s, const char *const *names);
