/* See decode_rig.h. */
#include "decode_rig.h"

#include "base/log.h"
#include "kernels/kv_hash.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct BusPeer {
    Baton__Hello hello;
};

RigWish rig_wish;
RigStep rig_step;

static BusPeer routers[RIG_ROUTERS];

/* ---- the bus ---- */

enum { MAX_SENT = 65536 };

static Baton__Envelope *sent[MAX_SENT];
static BusPeer *sent_to[MAX_SENT];
static int n_sent;

int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err) {
    (void)blob, (void)blob_len;
    assert_non_null(peer);
    if (peer == rig_wish.deaf)
        return err_set(err, E_BUSY, "too many frames wait");
    assert_true(n_sent < MAX_SENT);
    size_t len = baton__envelope__get_packed_size(env);
    uint8_t *bytes = xmalloc(len);
    baton__envelope__pack(env, bytes);
    sent[n_sent] = baton__envelope__unpack(NULL, len, bytes);
    sent_to[n_sent++] = peer;
    free(bytes);
    return 0;
}

const Baton__Hello *bus_peer_hello(const BusPeer *peer) {
    return &peer->hello;
}

BusPeer *rig_router(int i) {
    return &routers[i];
}

int rig_n_sent(void) {
    return n_sent;
}

const Baton__Envelope *rig_sent(int i) {
    assert_in_range(i, 0, n_sent - 1);
    return sent[i];
}

BusPeer *rig_sent_to(int i) {
    return sent_to[i];
}

void rig_forget(void) {
    for (int i = 0; i < n_sent; i++)
        baton__envelope__free_unpacked(sent[i], NULL);
    n_sent = 0;
}

const Baton__Failed *rig_failed(void) {
    assert_int_equal(n_sent, 1);
    assert_int_equal(sent[0]->body_case, BATON__ENVELOPE__BODY_FAILED);
    return sent[0]->failed;
}

const Baton__Grant *rig_granted(void) {
    assert_int_equal(n_sent, 1);
    assert_int_equal(sent[0]->body_case, BATON__ENVELOPE__BODY_GRANT);
    return sent[0]->grant;
}

/* ---- the engine thread ---- */

static StepTask *waiting[8], *ran;
static int n_waiting;

bool stepper_put(Stepper *s, StepTask *t) {
    (void)s;
    assert_true(n_waiting < 8);
    for (int i = 0; i < n_waiting; i++)
        assert_ptr_not_equal(waiting[i], t);
    assert_ptr_not_equal(ran, t);
    waiting[n_waiting++] = t;
    return true;
}

bool rig_run(void) {
    assert_null(ran);
    if (n_waiting == 0)
        return false;
    ran = waiting[0];
    memmove(waiting, waiting + 1, (size_t)--n_waiting * sizeof *waiting);
    ran->begin_us = 1000;
    ran->run(ran);
    ran->end_us = 3000;
    return true;
}

void rig_tell(void) {
    StepTask *t = ran;
    assert_non_null(t);
    ran = NULL;
    t->done(t);
}

bool rig_task(void) {
    if (!rig_run())
        return false;
    rig_tell();
    return true;
}

void engine_kv_hash(Engine *e, const int32_t *page, const int32_t *n_rows, int n, uint64_t *hash) {
    Rig *r = (Rig *)e;
    for (int i = 0; i < n; i++)
        hash[i] =
            kv_hash_page(&r->runtime.layout, r->shape.index_slot, r->pool, page[i], n_rows[i]);
}

int engine_step(Engine *e, const OpsBatch *b, EngineRow *rows, int n_rows,
                const ForwardProbe *probe, Err *err) {
    (void)e, (void)probe;
    assert_int_equal(b->n_tok, n_rows);
    assert_int_equal(b->n_seq, n_rows);
    rig_step.n = n_rows;
    rig_step.steps++;
    for (int i = 0; i < n_rows; i++) {
        assert_int_equal(rows[i].row, i);
        assert_int_equal(b->seq[i], i);
        rig_step.token[i] = b->token[i];
        rig_step.pos[i] = b->pos[i];
        rig_step.first_page[i] = b->page_table[i * b->page_stride];
        rows[i].status = i == 0 ? rig_wish.row_status : 0;
        rows[i].out =
            (SampleOut){.token = rig_wish.token ? rig_wish.token(rows[i].draw) : 10 + rows[i].draw,
                        .logprob = -0.5f,
                        .n_top = sampler_params(rows[i].sampler)->n_top};
        for (int k = 0; k < rows[i].out.n_top; k++)
            rows[i].out.top_token[k] = k;
    }
    return rig_wish.step_status ? err_set(err, rig_wish.step_status, "expertd-1 is gone") : 0;
}

/* ---- the link ---- */

static uint8_t *link_pool;

static void *fake_pool(KvLink *l, uint64_t *bytes) {
    (void)l;
    *bytes = 1;
    return link_pool;
}

static void fake_describe(KvLink *l, KvRemote *out) {
    (void)l;
    *out = (KvRemote){.address = "addr",
                      .address_len = 4,
                      .rkey = "key",
                      .rkey_len = 3,
                      .base = 0x1000,
                      .bytes = 1 << 20};
}

static const KvLinkOps link_ops = {.pool = fake_pool, .describe = fake_describe};
static KvLink fake_link = {&link_ops};

/* ---- life ---- */

static void on_ready(void *arg) {
    Rig *r = arg;
    r->n_ready++;
}

static void on_idle(void *arg) {
    Rig *r = arg;
    r->n_idle++;
}

static int probe(void *arg, Err *err) {
    Rig *r = arg;
    return r->probe_status ? err_set(err, r->probe_status, "expertd-1 does not answer") : 0;
}

DecodeLimits rig_limits(void) {
    return (DecodeLimits){.max_running = 8,
                          .max_batch = 8,
                          .max_context = 512,
                          .transfer_ms = 60000,
                          .verify = true,
                          .quarantine_budget = 0.5};
}

static void fill_pool(Rig *r) {
    size_t bytes = kv_pool_bytes(&r->runtime.layout);
    r->pool = xmalloc(bytes);
    for (size_t i = 0; i < bytes; i++)
        r->pool[i] = (uint8_t)(i * 131 + i / 251);
    link_pool = r->pool;
}

Rig *rig_open(const DecodeLimits *limits, bool remote) {
    Rig *r = xcalloc(1, sizeof *r);
    log_init("test", LOG_LV_ERR);
    rig_wish = (RigWish){0};
    rig_step = (RigStep){0};
    for (int i = 0; i < RIG_ROUTERS; i++) {
        baton__hello__init(&routers[i].hello);
        routers[i].hello.name = (char *)"router";
    }
    r->shape = (Shape){.n_layers = 2, .vocab = RIG_VOCAB, .index_slot = {0, -1}};
    r->runtime = (Runtime){.engine = (Engine *)r,
                           .shape = &r->shape,
                           .n_tokens = RIG_TOKENS,
                           .n_remote = remote ? 3 : 0,
                           .fingerprint = 0xf00d,
                           .layout = {.dtype = DT_F32,
                                      .n_slots = 2,
                                      .n_index = 1,
                                      .kv_lora = 4,
                                      .rope = 2,
                                      .index_dim = 2,
                                      .n_pages = RIG_PAGES}};
    fill_pool(r);
    r->loop = loop_new();
    ExpertWatchConf watch = {.loop = r->loop,
                             .probe = remote ? probe : NULL,
                             .probe_arg = r,
                             .on_change = on_ready,
                             .arg = r};
    r->watch = expert_watch_new(&watch);
    expert_watch_worked(r->watch);
    DecodeConf conf = {.limits = *limits,
                       .loop = r->loop,
                       .runtime = &r->runtime,
                       .experts = r->watch,
                       .link = &fake_link,
                       .generation = RIG_GENERATION,
                       .on_ready = on_ready,
                       .on_idle = on_idle,
                       .arg = r};
    decode_init(&r->d, &conf);
    r->n_ready = 0;
    return r;
}

void rig_close(Rig *r) {
    ran = NULL;
    n_waiting = 0;
    decode_done(&r->d);
    expert_watch_free(r->watch);
    loop_free(r->loop);
    rig_forget();
    free(r->pool);
    free(r);
}

/* ---- messages ---- */

static void deliver(Rig *r, int router, Baton__Envelope__BodyCase body, void *m) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = body;
    env.reserve = m;
    decode_on_message(&r->d, rig_router(router), &env);
}

void rig_reserve_with(Rig *r, int router, uint64_t id, int n_prompt, const Baton__Sampling *s) {
    Baton__Reserve m = BATON__RESERVE__INIT;
    m.request = id;
    m.n_prompt = (size_t)n_prompt;
    m.prompt = xcalloc((size_t)n_prompt + 1, sizeof *m.prompt);
    for (int i = 0; i < n_prompt; i++)
        m.prompt[i] = (uint32_t)(i % RIG_TOKENS);
    m.sampling = (Baton__Sampling *)s;
    m.deadline_ms = 60000;
    deliver(r, router, BATON__ENVELOPE__BODY_RESERVE, &m);
    free(m.prompt);
}

void rig_reserve(Rig *r, int router, uint64_t id, int n_prompt, int max_tokens) {
    Baton__Sampling s = BATON__SAMPLING__INIT;
    s.top_p = 1;
    s.repetition_penalty = 1;
    s.max_tokens = (uint32_t)max_tokens;
    rig_reserve_with(r, router, id, n_prompt, &s);
}

void rig_cancel(Rig *r, uint64_t id, bool writer_quiet) {
    Baton__Cancel m = BATON__CANCEL__INIT;
    m.request = id;
    m.reason = (char *)"test";
    m.writer_quiet = writer_quiet;
    deliver(r, 0, BATON__ENVELOPE__BODY_CANCEL, &m);
}

void rig_quiet(Rig *r, uint64_t id) {
    Baton__Quiet m = BATON__QUIET__INIT;
    m.request = id;
    deliver(r, 0, BATON__ENVELOPE__BODY_QUIET, &m);
}

void rig_ready(Rig *r, uint64_t id, int32_t first, void (*edit)(Baton__KvReady *m)) {
    const DecodeRequest *q = decode_requests_find(&r->d.requests, id);
    Baton__KvReady m = BATON__KV_READY__INIT;
    Baton__TokenOut token = BATON__TOKEN_OUT__INIT;
    uint64_t hash[RIG_PAGES];
    assert_non_null(q);
    m.n_page_hash = (size_t)q->n_granted;
    for (int i = 0; i < q->n_granted; i++)
        hash[i] = kv_hash_page(&r->runtime.layout, r->shape.index_slot, r->pool, q->page[i],
                               kv_page_rows(q->n_prompt, i));
    m.page_hash = hash;
    m.ticket = q->ticket;
    m.generation = RIG_GENERATION;
    m.request = id;
    m.n_tokens = (uint32_t)q->n_prompt;
    m.prefill_generation = 5;
    token.token = (uint32_t)first;
    m.first = &token;
    if (edit)
        edit(&m);
    size_t len = baton__kv_ready__get_packed_size(&m);
    uint8_t *bytes = xmalloc(len + 1);
    baton__kv_ready__pack(&m, bytes);
    decode_on_notice(&r->d, bytes, len);
    free(bytes);
}

void rig_start(Rig *r, int router, uint64_t id, int n_prompt, int max_tokens) {
    rig_reserve(r, router, id, n_prompt, max_tokens);
    rig_ready(r, id, 9, NULL);
    DecodeRequest *q = decode_requests_find(&r->d.requests, id);
    for (int i = 0; i < 20 && q->state == DECODE_VERIFYING; i++)
        assert_true(rig_task());
}
