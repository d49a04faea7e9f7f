/* See session_rig.h. */
#include "session_rig.h"

#include "base/log.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

Rig rig;

static bool is_decode(const Peer *p) {
    return p->role == BATON__ROLE__ROLE_DECODE;
}

/* ---- the port ---- */

static int64_t port_now(void *arg) {
    (void)arg;
    return rig.now_ms;
}

static void *port_parse(void *arg, Session *s, bool chat, const char *body, size_t len) {
    (void)arg, (void)s;
    assert_true(chat);
    buf_clear(&rig.body);
    buf_put(&rig.body, body, len);
    rig.n_parsing += !rig.parser_full;
    return rig.parser_full ? NULL : &rig;
}

static void port_abandon(void *arg, void *job) {
    (void)arg;
    assert_ptr_equal(job, &rig);
    rig.n_abandoned++;
}

static Peer *first_up(Peer *peers, const bool *down, const Peer *not_this) {
    for (int i = 0; i < 2; i++)
        if (!down[i] && &peers[i] != not_this)
            return &peers[i];
    return NULL;
}

static bool port_pick(void *arg, uint32_t n_prompt, uint32_t n_total, const Peer *not_prefill,
                      const Peer *not_decode, Peer **prefill, Peer **decode) {
    (void)arg;
    assert_true(n_total > n_prompt);
    Peer *p = first_up(rig.prefill, rig.down[0], not_prefill);
    Peer *d = first_up(rig.decode, rig.down[1], not_decode);
    if (!p || !d)
        return false;
    *prefill = p;
    *decode = d;
    return true;
}

static int port_send(void *arg, Peer *peer, const Baton__Envelope *env, Err *err) {
    (void)arg;
    int d = is_decode(peer);
    if (rig.down[d][peer->index] || rig.deaf[d][peer->index])
        return err_set(err, E_BUSY, "not now");
    assert_true(rig.n_sent < RIG_SENT_MAX);
    RigSent *s = &rig.sent[rig.n_sent++];
    *s = (RigSent){.peer = peer, .what = env->body_case};
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_RESERVE:
        s->request = env->reserve->request;
        assert_int_equal(env->reserve->n_prompt, 3);
        assert_true(env->reserve->deadline_ms > 0 && env->reserve->deadline_ms <= 10000);
        break;
    case BATON__ENVELOPE__BODY_PREFILL:
        s->request = env->prefill->request;
        assert_int_equal(env->prefill->grant->ticket, 77);
        break;
    case BATON__ENVELOPE__BODY_CANCEL:
        s->request = env->cancel->request;
        s->writer_quiet = env->cancel->writer_quiet;
        break;
    case BATON__ENVELOPE__BODY_QUIET:
        s->request = env->quiet->request;
        break;
    default:
        fail_msg("a router does not send %d", (int)env->body_case);
    }
    return 0;
}

static int port_max_context(void *arg) {
    (void)arg;
    return rig.model.max_context;
}

/* ---- the client ---- */

static void out_reply(void *arg, int status, int64_t retry_after_ms, const char *body, size_t len) {
    RigClient *c = arg;
    assert_false(c->begun);
    assert_int_equal(c->n_answers++, 0);
    c->status = status;
    c->retry_after_ms = retry_after_ms;
    buf_put(&c->text, body, len);
}

static void out_begin(void *arg) {
    RigClient *c = arg;
    assert_false(c->begun);
    assert_int_equal(c->n_answers, 0);
    c->begun = true;
}

static bool out_put(void *arg, const char *text, size_t len) {
    RigClient *c = arg;
    assert_true(c->begun);
    assert_int_equal(c->n_answers, 0);
    if (!c->slow)
        buf_put(&c->text, text, len);
    return !c->slow;
}

static void out_end(void *arg, bool ok) {
    RigClient *c = arg;
    assert_int_equal(c->n_answers++, 0);
    c->ended_ok = ok;
}

/* ---- set-up ---- */

int rig_setup(void **state) {
    Err err = {0};
    (void)state;
    memset(&rig, 0, sizeof rig);
    log_init("test", LOG_LV_ERR);
    rig.now_ms = 1000;
    if (tok_open(&rig.tok, "tests/models/tiny-glm52/fp8/tokenizer.json", &err))
        return -1;
    rig.model = (ApiModel){.name = "m",
                           .max_context = 100,
                           .default_max_tokens = 20,
                           .n_tokens = tok_size(rig.tok),
                           .temperature = 1,
                           .top_p = 1,
                           .think_end = tok_added_id(rig.tok, "</think>")};
    for (int i = 0; i < 2; i++) {
        rig.prefill[i] = (Peer){
            .role = BATON__ROLE__ROLE_PREFILL, .index = i, .endpoint = (char *)(i ? "p1" : "p0")};
        rig.decode[i] = (Peer){
            .role = BATON__ROLE__ROLE_DECODE, .index = i, .endpoint = (char *)(i ? "d1" : "d0")};
    }
    SessionPort port = {.now_ms = port_now,
                        .parse = port_parse,
                        .abandon = port_abandon,
                        .pick = port_pick,
                        .send = port_send,
                        .max_context = port_max_context};
    SessionLimits limits = {.max_requests = 2,
                            .request_ms = 10000,
                            .parse_ms = 1000,
                            .reserve_ms = 500,
                            .first_token_ms = 3000,
                            .stall_ms = 2000,
                            .retry_wait_ms = 300,
                            .keep_ms = 5000};
    return sessions_open(&rig.all, &port, &limits, &rig.model, rig.tok);
}

int rig_teardown(void **state) {
    (void)state;
    sessions_abort(rig.all);
    sessions_close(rig.all);
    tok_close(rig.tok);
    buf_done(&rig.body);
    buf_done(&rig.client.text);
    return 0;
}

/* ---- driving ---- */

void rig_request(const char *fields) {
    SessionOut out = {.arg = &rig.client,
                      .reply = out_reply,
                      .stream_begin = out_begin,
                      .stream_put = out_put,
                      .stream_end = out_end};
    Buf body = {0};
    buf_printf(&body, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]%s%s}",
               *fields ? "," : "", fields);
    rig.session = session_new(rig.all, true, body.data, body.len, "c", &out);
    buf_done(&body);
}

void rig_parsed(size_t n_ids) {
    ApiError e;
    ApiReq *req = xcalloc(1, sizeof *req);
    if (api_parse(&rig.model, true, rig.body.data, rig.body.len, req, &e)) {
        free(req);
        session_on_parsed(rig.session, NULL, &e);
        return;
    }
    req->ids = xcalloc(n_ids, sizeof *req->ids);
    req->n_ids = n_ids;
    session_on_parsed(rig.session, req, &e);
}

void rig_to_prefill(const char *fields) {
    rig_request(fields);
    rig_parsed(3);
    const RigSent *reserve = rig_last(BATON__ENVELOPE__BODY_RESERVE);
    rig_grant(reserve->peer, reserve->request);
}

void rig_to_stream(const char *fields) {
    rig_to_prefill(fields);
    const RigSent *reserve = rig_last(BATON__ENVELOPE__BODY_RESERVE);
    rig_tokens(reserve->peer, reserve->request, "a", BATON__FINISH__FINISH_NONE);
}

void rig_grant(Peer *from, uint64_t request) {
    Baton__Grant grant = BATON__GRANT__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    grant.request = request;
    grant.ticket = 77;
    env.body_case = BATON__ENVELOPE__BODY_GRANT;
    env.grant = &grant;
    sessions_on_message(rig.all, from, &env);
}

static uint32_t byte_id(char byte) {
    size_t n;
    for (int32_t id = 0; id < tok_size(rig.tok); id++) {
        const char *bytes = tok_bytes(rig.tok, id, &n);
        if (n == 1 && *bytes == byte)
            return (uint32_t)id;
    }
    fail_msg("no token for that byte");
    return 0;
}

void rig_tokens(Peer *from, uint64_t request, const char *text, Baton__Finish finish) {
    Baton__TokenOut out[8], *outs[8];
    Baton__TokenStep step = BATON__TOKEN_STEP__INIT, *steps[] = {&step};
    Baton__Tokens tokens = BATON__TOKENS__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    for (; *text; text++) {
        outs[step.n_out] = &out[step.n_out];
        baton__token_out__init(&out[step.n_out]);
        out[step.n_out++].token = byte_id(*text);
    }
    step.request = request;
    step.out = outs;
    step.finish = finish;
    tokens.n_step = 1;
    tokens.step = steps;
    env.body_case = BATON__ENVELOPE__BODY_TOKENS;
    env.tokens = &tokens;
    sessions_on_message(rig.all, from, &env);
}

void rig_prefill_done(Peer *from, uint64_t request) {
    Baton__PrefillDone done = BATON__PREFILL_DONE__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    done.request = request;
    env.body_case = BATON__ENVELOPE__BODY_PREFILL_DONE;
    env.prefill_done = &done;
    sessions_on_message(rig.all, from, &env);
}

void rig_failed(Peer *from, uint64_t request, Baton__FailCode code, bool quiet) {
    Baton__Failed failed = BATON__FAILED__INIT;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    failed.request = request;
    failed.code = code;
    failed.reason = (char *)"told so";
    failed.retry_after_ms = 2500;
    failed.quiet = quiet;
    env.body_case = BATON__ENVELOPE__BODY_FAILED;
    env.failed = &failed;
    sessions_on_message(rig.all, from, &env);
}

void rig_peer(Peer *peer, BusEvent event) {
    rig.down[is_decode(peer)][peer->index] = event == BUS_GONE || event == BUS_SILENT;
    if (event != BUS_UP)
        sessions_on_peer(rig.all, peer, event);
}

void rig_pass(int64_t ms) {
    for (int64_t end = rig.now_ms + ms; rig.now_ms < end;) {
        rig.now_ms += SESSION_TICK_MS;
        sessions_tick(rig.all);
    }
}

/* ---- looking ---- */

const RigSent *rig_last(Baton__Envelope__BodyCase what) {
    for (int i = rig.n_sent - 1; i >= 0; i--)
        if (rig.sent[i].what == what)
            return &rig.sent[i];
    fail_msg("nothing of kind %d was sent", (int)what);
    return NULL;
}

int rig_count(Baton__Envelope__BodyCase what) {
    int n = 0;
    for (int i = 0; i < rig.n_sent; i++)
        n += rig.sent[i].what == what;
    return n;
}

const RigSent *rig_cancel_to(const Peer *peer) {
    for (int i = rig.n_sent - 1; i >= 0; i--)
        if (rig.sent[i].what == BATON__ENVELOPE__BODY_CANCEL && rig.sent[i].peer == peer)
            return &rig.sent[i];
    return NULL;
}
