/* The configured services of a deployment: config files of the four daemons, read through the
 * daemons' own option tables, and config files that are still to be written. Start-up of a tool;
 * one thread. */
#pragma once

#include "decode/conf.h"
#include "expertd/conf.h"
#include "prefill/conf.h"
#include "router/options.h"

#include <stdio.h>

typedef enum ServiceKind {
    SERVICE_ROUTER,
    SERVICE_PREFILL,
    SERVICE_DECODE,
    SERVICE_EXPERTD,
    SERVICE_KINDS
} ServiceKind;

const char *service_kind_name(ServiceKind k); /* "router", ... */
const ConfTable *service_kind_table(ServiceKind k);
/* By the begin of the file's name: router.conf, decode-1.conf. False: of none. */
bool service_kind_of(const char *path, ServiceKind *out);

/* ---- a config file to be written ---- */

typedef struct ConfDocLine {
    char *section, *key, *value;
} ConfDocLine;

typedef struct ConfDoc {
    ServiceKind kind;
    char name[64];    /* of the file, without ".conf" */
    char about[240];  /* the comment on top; may be empty */
    char before[120]; /* what the service's environment needs, such as the GPUs; may be empty */
    ConfDocLine *line;
    int n;
} ConfDoc;

void conf_doc_init(ConfDoc *d, ServiceKind kind, const char *name);
void conf_doc_done(ConfDoc *d);
/* Sets "section.key", again if need be; the option must be one of the daemon's table. */
void conf_doc_set(ConfDoc *d, const char *option, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* NULL: not set. */
const char *conf_doc_get(const ConfDoc *d, const char *option);
/* As an INI file, sections in the order of the table. */
void conf_doc_print(const ConfDoc *d, FILE *to);
/* Writes DIR/NAME.conf of all n, making DIR; a file that is there already is refused. */
int conf_docs_write(const ConfDoc *docs, int n, const char *dir, Err *err);

/* ---- services ---- */

typedef struct Service {
    ServiceKind kind;
    char *from; /* path, or name of the ConfDoc */
    union {
        Options router;
        PrefillOpts prefill;
        DecodeOpts decode;
        ExpertdOpts expertd;
    };
} Service;

typedef struct Services {
    Service *at;
    int n;
} Services;

void services_done(Services *s);
/* Adds what path names: one file, or all *.conf of a directory in order of their names. E_INVAL or
 * E_IO with file, line and option, or with a file whose name is of no daemon. */
int services_add(Services *s, const char *path, Err *err);
int services_add_docs(Services *s, const ConfDoc *docs, int n, Err *err);
/* The i-th of a kind; NULL: there are not so many. */
const Service *services_get(const Services *s, ServiceKind kind, int i);
int services_count(const Services *s, ServiceKind kind);
/* Of a prefill or decode; NULL for others. */
const EngineOpts *service_engine(const Service *s);
const ServiceOpts *service_opts(const Service *s);
