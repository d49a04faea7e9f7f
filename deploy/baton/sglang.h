/* Options of SGLang, KTransformers and vLLM, translated into Baton's: one table says what becomes
 * of each, and deploy/MIGRATING.md is printed from it. Pure but for what it allocates; one thread.
 *
 * Two forms of text are read: a list of options, one on a line without dashes and with # comments;
 * and a whole command line as a shell takes it (quotes, backslashes, continued lines), in which
 * everything before the server's program is passed over and said to be. */
#pragma once

#include "deploy/baton/services.h"
#include "model/place.h"

enum { SGLANG_NODES = 64, SGLANG_MAX_OPTIONS = 1000, SGLANG_TEXT_MAX = 1 << 20 };

typedef enum SglangState {
    SGLANG_KEPT,
    SGLANG_CHANGED,  /* in another form, which the remark tells */
    SGLANG_NEEDLESS, /* Baton always behaves so, or has nothing that it could mean */
    SGLANG_LOST,
} SglangState;

const char *sglang_state_name(SglangState s); /* "kept", "changed", "not needed", "not kept" */

/* What became of one option. */
typedef struct SglangRemark {
    char option[64], value[160];
    int line;
    SglangState state;
    const char *baton; /* static: where it went, or "" */
    char why[320];
} SglangRemark;

/* What the options ask for, as far as Baton can be configured to it. Negative, 0 or "": not said.
 */
typedef struct SglangWish {
    char model[512], expert_files[512], name[128], host[128], kv_devices[128];
    char log_level[8];
    int64_t port, tp, replicas, context, pool_tokens, max_running, max_waiting, step_tokens,
        step_ms, tokenize_threads;
    int kv_dtype;        /* index into ENGINE_CONF_KV_DTYPES, or -1 */
    int enable_thinking; /* or -1 */

    /* experts in host memory */
    bool offload; /* any option of KTransformers */
    int64_t resident, pools, cpu_threads;
    int node[SGLANG_NODES], n_nodes;
    PlaceStrategy strategy;
    bool update;
    int bits; /* of packed experts: 4, 8, or 0 for the checkpoint's own format */

    bool fp4;        /* the checkpoint is NVFP4 */
    int spec_tokens; /* drafted per step; nothing in Baton takes it */
} SglangWish;

typedef struct Sglang {
    SglangWish wish;
    SglangRemark *remark;
    int n;
} Sglang;

/* Reads text (which is cut up). E_FORMAT or E_LIMIT with "NAME:LINE: option: what was expected". */
int sglang_read(Sglang *out, const char *name, char *text, Err *err);
void sglang_done(Sglang *s);

/* Config files that ask for the same; *docs is the caller's, each with conf_doc_done. Remarks about
 * what the files need are added to s. */
void sglang_docs(Sglang *s, ConfDoc **docs, int *n);

/* The table as Markdown. */
void sglang_print_table(FILE *to);
