/* See prefill_rig.h. */
#include "prefill_rig.h"

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
static int n_sent;

int bus_send(BusPeer *peer, const Baton__Envelope *env, const void *blob, size_t blob_len,
             Err *err) {
    (void)blob, (void)blob_len, (void)err;
    assert_non_null(peer);
    assert_true(n_sent < MAX_SENT);
    size_t len = baton__envelope__get_packed_size(env);
    uint8_t *bytes = xmalloc(len);
    baton__envelope__pack(env, bytes);
    sent[n_sent++] = baton__envelope__unpack(NULL, len, bytes);
    free(bytes);
    return 0;
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

const Baton__PrefillDone *rig_done(void) {
    assert_int_equal(n_sent, 1);
    assert_int_equal(sent[0]->body_case, BATON__ENVELOPE__BODY_PREFILL_DONE);
    return sent[0]->prefill_done;
}

/* ---- the engine and its thread ---- */

static StepTask *waiting, *ran;
static KvLayout layout;
static const int *index_slot;
static uint8_t *local_pool;

bool stepper_put(Stepper *s, StepTask *t) {
    (void)s;
    assert_null(waiting);
    assert_null(ran);
    waiting = t;
    return true;
}

bool rig_run(void) {
    if (!waiting)
        return false;
    ran = waiting;
    waiting = NULL;
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

/* Byte k of range `part` of a row. */
static uint8_t row_byte(int token, int pos, int layer, int part, uint64_t k) {
    return (uint8_t)(token * 7 + pos * 13 + layer * 29 + part * 31 + (int)k * 3 + 1);
}

static void write_row(int token, int pos, int layer, int32_t page) {
    KvRange range[3];
    int row = pos % KV_PAGE_TOKENS;
    int n = kv_layout_ranges(&layout, layer, index_slot[layer], page, row, row + 1, range);
    for (int part = 0; part < n; part++)
        for (uint64_t k = 0; k < range[part].bytes; k++)
            local_pool[range[part].offset + k] = row_byte(token, pos, layer, part, k);
}

static void record_step(const OpsBatch *b) {
    rig_step.steps++;
    rig_step.n_seq = b->n_seq;
    rig_step.n_tok = b->n_tok;
    memset(rig_step.n_tokens, 0, sizeof rig_step.n_tokens);
    for (int i = 0; i < b->n_tok; i++)
        if (rig_step.n_tokens[b->seq[i]]++ == 0)
            rig_step.pos[b->seq[i]] = b->pos[i];
}

void engine_kv_hash(Engine *e, const int32_t *page, const int32_t *n_rows, int n, uint64_t *hash) {
    Rig *r = (Rig *)e;
    for (int i = 0; i < n; i++)
        hash[i] =
            kv_hash_page(&r->runtime.layout, r->shape.index_slot, r->pool, page[i], n_rows[i]);
}

int engine_step(Engine *e, const OpsBatch *b, EngineRow *rows, int n_rows,
                const ForwardProbe *probe, Err *err) {
    (void)e;
    record_step(b);
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        for (int i = 0; i < b->n_tok; i++)
            write_row(b->token[i], b->pos[i], layer,
                      b->page_table[b->seq[i] * b->page_stride + b->pos[i] / KV_PAGE_TOKENS]);
        probe->on(probe->arg, FORWARD_KV, layer, NULL);
        probe->on(probe->arg, FORWARD_HIDDEN, layer, NULL);
    }
    for (int i = 0; i < n_rows; i++) {
        assert_int_equal(rows[i].draw, 0);
        rows[i].status = rig_wish.row_status;
        rows[i].out = (SampleOut){.token = 17, .logprob = -0.25f, .n_top = 1, .top_token = {3}};
    }
    return rig_wish.step_status ? err_set(err, rig_wish.step_status, "expertd-1 is gone") : 0;
}

/* ---- the link ---- */

struct KvPeer {
    int decode;
    bool open;
};

typedef struct Pending {
    KvDoneFn done;
    void *arg;
    const KvPeer *peer;
} Pending;

enum { MAX_PEERS = 4096, MAX_PENDING = 256, MAX_NOTICES = 65536 };

static KvPeer link_peers[MAX_PEERS];
static int n_link_peers, n_disconnected, n_puts;
static Pending pending[MAX_PENDING];
static int n_pending;
static Baton__KvReady *notices[MAX_NOTICES];
static int n_notices;
static uint8_t *remote_pool[RIG_DECODES];
static KvLayout remote_layout;

static void *fake_pool(KvLink *l, uint64_t *bytes) {
    (void)l;
    *bytes = kv_pool_bytes(&layout);
    return local_pool;
}

static int fake_connect(KvLink *l, const KvRemote *remote, KvPeer **out, Err *err) {
    (void)l, (void)err;
    assert_true(n_link_peers < MAX_PEERS);
    assert_memory_equal(remote->rkey, "key", 3);
    KvPeer *p = &link_peers[n_link_peers++];
    *p = (KvPeer){.decode = (int)remote->base, .open = true};
    *out = p;
    return 0;
}

static void fake_disconnect(KvLink *l, KvPeer *peer) {
    (void)l;
    assert_true(peer->open);
    assert_null(ran); /* never while the engine may put */
    peer->open = false;
    n_disconnected++;
}

static int fake_put(KvLink *l, KvPeer *peer, const KvSeg *seg, int n, Err *err) {
    (void)l;
    assert_true(peer->open);
    if (rig_wish.put_busy > 0) {
        rig_wish.put_busy--;
        return err_set(err, E_BUSY, "too much is queued");
    }
    if (rig_wish.put_status)
        return err_set(err, rig_wish.put_status, "decode is gone");
    for (int i = 0; i < n; i++) {
        assert_true(seg[i].bytes > 0);
        assert_true(seg[i].local + seg[i].bytes <= kv_pool_bytes(&layout));
        assert_true(seg[i].remote + seg[i].bytes <= kv_pool_bytes(&remote_layout));
        memcpy(remote_pool[peer->decode] + seg[i].remote, local_pool + seg[i].local, seg[i].bytes);
    }
    n_puts += n;
    return 0;
}

static int add_pending(KvPeer *peer, KvDoneFn done, void *arg) {
    assert_true(peer->open);
    assert_true(n_pending < MAX_PENDING);
    pending[n_pending++] = (Pending){done, arg, peer};
    return 0;
}

static int fake_notify(KvLink *l, KvPeer *peer, const void *bytes, size_t len, KvDoneFn done,
                       void *arg, Err *err) {
    (void)l;
    if (rig_wish.notify_status)
        return err_set(err, rig_wish.notify_status, "decode is gone");
    assert_true(n_notices < MAX_NOTICES);
    notices[n_notices] = baton__kv_ready__unpack(NULL, len, bytes);
    assert_non_null(notices[n_notices++]);
    return add_pending(peer, done, arg);
}

static int fake_flush(KvLink *l, KvPeer *peer, KvDoneFn done, void *arg, Err *err) {
    (void)l;
    if (rig_wish.flush_status)
        return err_set(err, rig_wish.flush_status, "decode is gone");
    return add_pending(peer, done, arg);
}

static const KvLinkOps link_ops = {.pool = fake_pool,
                                   .connect = fake_connect,
                                   .disconnect = fake_disconnect,
                                   .put = fake_put,
                                   .notify = fake_notify,
                                   .flush = fake_flush};
static KvLink fake_link = {&link_ops};

bool rig_settle(int status) {
    if (n_pending == 0)
        return false;
    Pending p = pending[0];
    memmove(pending, pending + 1, (size_t)--n_pending * sizeof *pending);
    p.done(p.arg, p.peer->open ? status : E_CANCELED);
    return true;
}

int rig_n_pending(void) {
    return n_pending;
}

int rig_n_disconnected(void) {
    return n_disconnected;
}

int rig_n_puts(void) {
    return n_puts;
}

const Baton__KvReady *rig_notice(int i) {
    return i < n_notices ? notices[i] : NULL;
}

void rig_check_kv(const Rig *r, uint64_t id, int decode, int from, int to) {
    (void)r;
    for (int pos = from; pos < to; pos++)
        for (int layer = 0; layer < RIG_LAYERS; layer++) {
            KvRange range[3];
            int row = pos % KV_PAGE_TOKENS;
            int n =
                kv_layout_ranges(&remote_layout, layer, index_slot[layer],
                                 rig_remote_page(id, pos / KV_PAGE_TOKENS), row, row + 1, range);
            for (int part = 0; part < n; part++)
                for (uint64_t k = 0; k < range[part].bytes; k++)
                    assert_int_equal(remote_pool[decode][range[part].offset + k],
                                     row_byte(pos % RIG_TOKENS, pos, layer, part, k));
        }
}

/* ---- life ---- */

static void on_ready(void *arg) {
    Rig *r = arg;
    r->n_ready++;
}

static void on_idle(void *arg) {
    Rig *r = arg;
    r->n_idle++;
}

static int probe_ok(void *arg, Err *err) {
    (void)arg, (void)err;
    return 0;
}

PrefillLimits rig_limits(void) {
    return (PrefillLimits){.max_waiting = 12,
                           .max_running = 4,
                           .step_tokens = 128,
                           .max_context = 1024,
                           .patience_ms = 60000,
                           .link_ms = 40};
}

static void open_pools(Rig *r) {
    layout = (KvLayout){.dtype = DT_F8E4M3,
                        .n_slots = RIG_LAYERS,
                        .n_index = 1,
                        .kv_lora = 128,
                        .rope = 4,
                        .index_dim = 8,
                        .n_pages = RIG_PAGES};
    remote_layout = layout;
    remote_layout.n_pages = RIG_REMOTE_PAGES;
    index_slot = r->shape.index_slot;
    local_pool = r->pool = xcalloc(1, kv_pool_bytes(&layout));
    for (int i = 0; i < RIG_DECODES; i++)
        remote_pool[i] = xcalloc(1, kv_pool_bytes(&remote_layout));
    r->runtime.layout = layout;
}

Rig *rig_open(const PrefillLimits *limits, bool remote) {
    Rig *r = xcalloc(1, sizeof *r);
    log_init("test", LOG_LV_ERR);
    rig_wish = (RigWish){0};
    rig_step = (RigStep){0};
    n_link_peers = n_disconnected = n_puts = 0;
    for (int i = 0; i < RIG_ROUTERS; i++) {
        baton__hello__init(&routers[i].hello);
        routers[i].hello.name = (char *)"router";
    }
    r->shape = (Shape){.n_layers = RIG_LAYERS, .vocab = RIG_VOCAB, .index_slot = {-1, 0}};
    r->runtime = (Runtime){.engine = (Engine *)r,
                           .shape = &r->shape,
                           .n_tokens = RIG_TOKENS,
                           .n_remote = remote ? 3 : 0,
                           .fingerprint = 0xf00d};
    open_pools(r);
    r->loop = loop_new();
    ExpertWatchConf watch = {
        .loop = r->loop, .probe = remote ? probe_ok : NULL, .on_change = on_ready, .arg = r};
    r->watch = expert_watch_new(&watch);
    expert_watch_worked(r->watch);
    PrefillConf conf = {.limits = *limits,
                        .loop = r->loop,
                        .runtime = &r->runtime,
                        .experts = r->watch,
                        .link = &fake_link,
                        .generation = 0x55,
                        .on_ready = on_ready,
                        .on_idle = on_idle,
                        .arg = r};
    prefill_init(&r->p, &conf);
    r->n_ready = 0;
    return r;
}

void rig_close(Rig *r) {
    waiting = ran = NULL;
    n_pending = 0;
    prefill_done(&r->p);
    expert_watch_free(r->watch);
    loop_free(r->loop);
    rig_forget();
    for (int i = 0; i < n_notices; i++)
        baton__kv_ready__free_unpacked(notices[i], NULL);
    n_notices = 0;
    for (int i = 0; i < RIG_DECODES; i++)
        free(remote_pool[i]);
    free(r->pool);
    free(r);
}

/* ---- messages ---- */

/* Two pages that are neighbours, then a jump: both kinds of segments. */
int32_t rig_remote_page(uint64_t id, int i) {
    return (int32_t)((id * 7 + (uint64_t)i + (uint64_t)(i / 2) * 5) % RIG_REMOTE_PAGES);
}

static void deliver(Rig *r, int router, Baton__Envelope__BodyCase body, void *m) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = body;
    env.prefill = m;
    prefill_on_message(&r->p, rig_router(router), &env);
}

static void fill_grant(Baton__Grant *g, uint64_t id, int decode, uint32_t *page, int n_pages) {
    g->request = id;
    g->generation = 100 + (uint64_t)decode;
    g->kv_address = (ProtobufCBinaryData){4, (uint8_t *)"addr"};
    g->kv_rkey = (ProtobufCBinaryData){3, (uint8_t *)"key"};
    g->kv_base = (uint64_t)decode;
    g->kv_bytes = kv_pool_bytes(&remote_layout);
    g->total_pages = RIG_REMOTE_PAGES;
    g->page = page;
    g->n_page = (size_t)n_pages;
    g->kv_layout_hash = kv_layout_hash(&layout);
    g->fingerprint = 0xf00d;
    g->ticket = id + 1000;
    for (int i = 0; i < n_pages; i++)
        page[i] = (uint32_t)rig_remote_page(id, i);
}

void rig_prefill(Rig *r, int router, uint64_t id, int n_prompt, int decode,
                 void (*edit)(Baton__Prefill *m)) {
    Baton__Prefill m = BATON__PREFILL__INIT;
    Baton__Grant g = BATON__GRANT__INIT;
    Baton__Sampling s = BATON__SAMPLING__INIT;
    uint32_t prompt[2048], page[64];
    for (int i = 0; i < n_prompt; i++)
        prompt[i] = (uint32_t)(i % RIG_TOKENS);
    fill_grant(&g, id, decode, page, kv_pages_of(n_prompt));
    s.top_p = 1, s.repetition_penalty = 1, s.max_tokens = 10;
    m.request = id;
    m.prompt = prompt;
    m.n_prompt = (size_t)n_prompt;
    m.sampling = &s;
    m.grant = &g;
    m.deadline_ms = 60000;
    if (edit)
        edit(&m);
    deliver(r, router, BATON__ENVELOPE__BODY_PREFILL, &m);
}

void rig_cancel(Rig *r, uint64_t id) {
    Baton__Cancel m = BATON__CANCEL__INIT;
    m.request = id;
    m.reason = (char *)"test";
    deliver(r, 0, BATON__ENVELOPE__BODY_CANCEL, &m);
}
