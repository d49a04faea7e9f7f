/* A decode service whose bus, engine, engine thread and KV link are replaced by functions that
 * record what they are asked and answer as a test wants. One rig at a time. */
#pragma once

#include "decode/decode.h"

enum { RIG_PAGES = 24, RIG_VOCAB = 64, RIG_TOKENS = 60, RIG_ROUTERS = 2, RIG_GENERATION = 0x77 };

typedef struct Rig {
    Decode d;
    Loop *loop;
    Shape shape;
    Runtime runtime;
    ExpertWatch *watch;
    uint8_t *pool;
    int n_ready, n_idle; /* calls of on_ready and on_idle */
    int probe_status;
} Rig;

/* What the test wants of the fakes. */
typedef struct RigWish {
    int step_status;            /* of the next steps */
    int row_status;             /* of row 0 of the next steps */
    int32_t (*token)(int draw); /* what a row gives; NULL: 10 + draw */
    const BusPeer *deaf;        /* a router that takes no message */
} RigWish;
extern RigWish rig_wish;

/* The last step. */
typedef struct RigStep {
    int n, steps;
    int32_t token[256], pos[256], first_page[256];
} RigStep;
extern RigStep rig_step;

/* remote: some experts are remote, and have answered. */
Rig *rig_open(const DecodeLimits *limits, bool remote);
DecodeLimits rig_limits(void);
/* CHECKs that the link is closed last and that every page comes back. */
void rig_close(Rig *r);

BusPeer *rig_router(int i);

/* Messages to the service. */
void rig_reserve(Rig *r, int router, uint64_t id, int n_prompt, int max_tokens);
void rig_reserve_with(Rig *r, int router, uint64_t id, int n_prompt, const Baton__Sampling *s);
void rig_cancel(Rig *r, uint64_t id, bool writer_quiet);
void rig_quiet(Rig *r, uint64_t id);
/* A notice for request id as its prefill would send it; edit changes it before it is packed. */
void rig_ready(Rig *r, uint64_t id, int32_t first, void (*edit)(Baton__KvReady *m));
/* Grant, KvReady and comparison of hashes: id runs afterwards. */
void rig_start(Rig *r, int router, uint64_t id, int n_prompt, int max_tokens);

/* The engine thread: runs the oldest task, and tells the loop. */
bool rig_run(void);
void rig_tell(void);
bool rig_task(void); /* both */

/* What was sent, oldest first; the envelopes live until rig_forget or rig_close. */
int rig_n_sent(void);
const Baton__Envelope *rig_sent(int i);
BusPeer *rig_sent_to(int i);
void rig_forget(void);
/* The only message since the last rig_forget, which is then forgotten by the next call. */
const Baton__Failed *rig_failed(void);
const Baton__Grant *rig_granted(void);
