/* A prefill service whose bus, engine, engine thread and KV link are replaced by functions that
 * record what they are asked and answer as a test wants. The engine writes rows that depend on
 * token, position and layer alone; the link writes at once, and calls back when told. One rig at a
 * time. */
#pragma once

#include "prefill/prefill.h"

enum {
    RIG_PAGES = 16,
    RIG_REMOTE_PAGES = 40,
    RIG_VOCAB = 64,
    RIG_TOKENS = 60,
    RIG_ROUTERS = 2,
    RIG_DECODES = 3,
    RIG_LAYERS = 2
};

typedef struct Rig {
    Prefill p;
    Loop *loop;
    Shape shape;
    Runtime runtime;
    ExpertWatch *watch;
    uint8_t *pool;
    int n_ready, n_idle; /* calls of on_ready and on_idle */
} Rig;

typedef struct RigWish {
    int step_status, row_status;
    int put_status, notify_status, flush_status; /* refused at once */
    int put_busy;                                /* so many puts find no room first */
} RigWish;
extern RigWish rig_wish;

/* The last step: tokens per sequence, in the order of the batch. */
typedef struct RigStep {
    int n_seq, n_tok, n_tokens[64], pos[64], steps;
} RigStep;
extern RigStep rig_step;

PrefillLimits rig_limits(void);
/* remote: some experts are remote, and have answered. */
Rig *rig_open(const PrefillLimits *limits, bool remote);
/* CHECKs that every page comes back. */
void rig_close(Rig *r);

BusPeer *rig_router(int i);

/* PREFILL of n_prompt tokens to a decode whose generation is 100 + decode; its page i is
 * rig_remote_page(id, i). edit changes the message before it is handled. */
void rig_prefill(Rig *r, int router, uint64_t id, int n_prompt, int decode,
                 void (*edit)(Baton__Prefill *m));
int32_t rig_remote_page(uint64_t id, int i);
void rig_cancel(Rig *r, uint64_t id);

/* The engine thread. */
bool rig_run(void);
void rig_tell(void);
bool rig_task(void); /* both */

/* The link: ends the oldest flush or notice; false when none is under way. */
bool rig_settle(int status);
int rig_n_pending(void);
int rig_n_disconnected(void);
int rig_n_puts(void);
/* Notices that arrived, oldest first; NULL when there are not so many. */
const Baton__KvReady *rig_notice(int i);
/* Asserts that decode holds what the engine wrote for positions [from, to) of request id. */
void rig_check_kv(const Rig *r, uint64_t id, int decode, int from, int to);

/* The bus: what was sent, oldest first, until rig_forget or rig_close. */
int rig_n_sent(void);
const Baton__Envelope *rig_sent(int i);
void rig_forget(void);
const Baton__Failed *rig_failed(void);    /* the only message */
const Baton__PrefillDone *rig_done(void); /* the only message */
