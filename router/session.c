/* See session.h. */
#include "router/session.h"

#include "base/clock.h"
#include "base/log.h"
#include "router/failure.h"
#include "router/session_stat.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum State { ST_PARSE, ST_WAIT, ST_RESERVE, ST_PREFILL, ST_STREAM } State;

struct Session {
    Sessions *all;
    Session *prev, *next;
    State state;
    int64_t start_ms, until_ms; /* begin; end of this state's time */
    char id[17];
    char client_id[65]; /* as the client calls it, or "" */
    SessionOut out;
    ApiReq *req;         /* NULL while parsing */
    void *job;           /* while parsing */
    Attempt *attempt;    /* in RESERVE, PREFILL and STREAM */
    uint64_t attempt_id; /* of the latest: what prefill's and decode's logs call it */
    bool retried;
    bool streaming;                 /* a byte of the answer was sent */
    Peer *not_prefill, *not_decode; /* not for the retry */
    ApiError failure;               /* WAIT: what the client gets when no pair comes */
    Answer answer;
    int64_t first_token_ms;
};

struct Sessions {
    SessionPort port;
    SessionLimits limits;
    const ApiModel *model;
    const Tok *tok;
    Attempts attempts;
    Session *list;
    int n;
    bool draining;
    Buf scratch; /* what is about to be sent */
    SessionStat stat;
};

static void attempt_start(Session *s);

static int64_t now_of(const Sessions *all) {
    return all->port.now_ms(all->port.arg);
}

static void enter(Session *s, State state, int64_t span_ms) {
    s->state = state;
    s->until_ms = now_of(s->all) + span_ms;
    int64_t end = s->start_ms + s->all->limits.request_ms;
    if (s->until_ms > end)
        s->until_ms = end;
}

static int64_t left_ms(const Session *s) {
    return s->start_ms + s->all->limits.request_ms - now_of(s->all);
}

/* ---- endings ---- */

static void session_free(Session *s) {
    Sessions *all = s->all;
    if (s->job)
        all->port.abandon(all->port.arg, s->job);
    if (s->attempt)
        attempt_release(&all->attempts, s->attempt, now_of(all));
    if (s->prev)
        s->prev->next = s->next;
    else
        all->list = s->next;
    if (s->next)
        s->next->prev = s->prev;
    all->n--;
    if (s->req)
        api_done(s->req);
    free(s->req);
    answer_done(&s->answer);
    free(s);
    session_stat_running(&all->stat, all->n);
}

static void log_end(const Session *s, const char *how, const char *why) {
    int64_t now = now_of(s->all);
    LOG_INFO("req %s: %s%s%s, %zu prompt tokens, %" PRId64 " answer tokens, first after %" PRId64
             " ms, %" PRId64 " ms%s, attempt %016" PRIx64 ", X-Request-Id %s",
             s->id, how, *why ? ": " : "", why, s->req ? s->req->n_ids : 0, s->answer.n_out,
             s->first_token_ms ? s->first_token_ms - s->start_ms : -1, now - s->start_ms,
             s->retried ? ", retried" : "", s->attempt_id, s->client_id);
    session_stat_end(&s->all->stat, how, now - s->start_ms);
}

static void reply_error(Buf *scratch, const SessionOut *out, const ApiError *e) {
    buf_clear(scratch);
    answer_error(e, scratch);
    out->reply(out->arg, e->status, e->retry_after_ms, scratch->data, scratch->len);
}

/* The one way out with an error. */
static void session_fail(Session *s, const ApiError *e) {
    Buf *scratch = &s->all->scratch;
    log_end(s, e->status < 500 && e->status != 429 ? "refused" : "failed", e->message);
    if (s->streaming) {
        buf_clear(scratch);
        answer_error_event(e, scratch);
        s->out.stream_put(s->out.arg, scratch->data, scratch->len);
        s->out.stream_end(s->out.arg, false);
    } else {
        reply_error(scratch, &s->out, e);
    }
    session_free(s);
}

void session_on_gone(Session *s) {
    log_end(s, "gone", "the client went away");
    session_free(s);
}

static void session_too_slow(Session *s) {
    log_end(s, "gone", "the client reads too slowly");
    s->out.stream_end(s->out.arg, false);
    session_free(s);
}

/* ---- attempts ---- */

/* Ends the attempt and makes another, once, when nothing was sent and again is set; else ends the
 * session with *e. A pair may come back within wait_ms. */
static void attempt_failed(Session *s, const ApiError *e, bool again, int64_t wait_ms) {
    Sessions *all = s->all;
    if (s->attempt) {
        attempt_release(&all->attempts, s->attempt, now_of(all));
        s->attempt = NULL;
    }
    if (!again || s->retried || s->streaming) {
        session_fail(s, e);
        return;
    }
    LOG_INFO("req %s: trying again: attempt %016" PRIx64 ": %s", s->id, s->attempt_id, e->message);
    session_stat_retry(&all->stat);
    s->retried = true;
    s->failure = *e;
    enter(s, ST_WAIT, wait_ms);
    attempt_start(s);
}

static void answer_start(Session *s) {
    AnswerConf conf = {.tok = s->all->tok,
                       .model = s->all->model->name,
                       .id = s->id,
                       .created = clock_wall_s(),
                       .chat = s->req->chat,
                       .include_usage = s->req->include_usage,
                       .logprobs = s->req->sampling.logprobs,
                       .thinking = s->req->chat && s->req->options.enable_thinking,
                       .think_end = s->all->model->think_end,
                       .n_prompt = s->req->n_ids};
    answer_init(&s->answer, &conf);
}

/* Asks a decode to take the request, or stays in WAIT while a retry may. */
static void attempt_start(Session *s) {
    Sessions *all = s->all;
    Peer *prefill, *decode;
    Err err = {0};
    uint32_t n_prompt = (uint32_t)s->req->n_ids;
    if (!all->port.pick(all->port.arg, n_prompt, n_prompt + s->req->sampling.max_tokens,
                        s->not_prefill, s->not_decode, &prefill, &decode)) {
        ApiError e =
            failure_unavailable("not_ready", "no prefill and decode can serve this now", 1000);
        if (s->state != ST_WAIT)
            session_fail(s, &e);
        return;
    }
    answer_start(s);
    s->attempt = attempt_new(&all->attempts, prefill, decode, s);
    s->attempt_id = s->attempt->id;
    if (attempt_reserve(&all->attempts, s->attempt, s->req, left_ms(s), &err)) {
        attempt_decode_over(s->attempt, true); /* it never heard of it */
        ApiError e = failure_unavailable("no_capacity", "decode does not take messages now", 1000);
        s->not_decode = decode;
        attempt_failed(s, &e, true, 0);
        return;
    }
    LOG_DEBUG("req %s: attempt %016" PRIx64 ", decode %s, prefill %s", s->id, s->attempt->id,
              decode->endpoint, prefill->endpoint);
    enter(s, ST_RESERVE, all->limits.reserve_ms);
}

/* ---- from the tokenizer ---- */

Session *session_new(Sessions *all, bool chat, const char *body, size_t len, const char *client_id,
                     const SessionOut *out) {
    ApiError e = {0};
    if (all->draining) {
        e = failure_unavailable("draining", "this server is shutting down", 1000);
    } else if (all->n >= all->limits.max_requests) {
        api_refuse(&e, 429, "rate_limit_error", "no_capacity", NULL,
                   "%d requests are being served already", all->n);
        e.retry_after_ms = 1000;
    }
    if (e.status) {
        session_stat_end(&all->stat, "failed", 0);
        reply_error(&all->scratch, out, &e);
        return NULL;
    }
    Session *s = xcalloc(1, sizeof *s);
    s->all = all;
    s->out = *out;
    s->start_ms = now_of(all);
    snprintf(s->id, sizeof s->id, "%016" PRIx64, clock_unique());
    s->next = all->list;
    if (s->next)
        s->next->prev = s;
    all->list = s;
    all->n++;
    session_stat_running(&all->stat, all->n);
    snprintf(s->client_id, sizeof s->client_id, "%s", client_id);
    enter(s, ST_PARSE, all->limits.parse_ms);
    LOG_DEBUG("req %s: %s, %zu bytes", s->id, chat ? "chat" : "completion", len);
    s->job = all->port.parse(all->port.arg, s, chat, body, len);
    if (s->job)
        return s;
    api_refuse(&e, 429, "rate_limit_error", "no_capacity", NULL,
               "too many requests wait for the tokenizer");
    e.retry_after_ms = 1000;
    session_fail(s, &e);
    return NULL;
}

void session_on_parsed(Session *s, ApiReq *req, const ApiError *error) {
    ApiError e;
    Sessions *all = s->all;
    CHECK(s->state == ST_PARSE);
    s->job = NULL;
    s->req = req;
    if (!req) {
        session_fail(s, error);
        return;
    }
    if (api_fit(all->model, req, all->port.max_context(all->port.arg), &e)) {
        session_fail(s, &e);
        return;
    }
    attempt_start(s);
}

/* ---- from the peers ---- */

static void on_failed(Sessions *all, Peer *peer, const Baton__Failed *f) {
    Attempt *a = attempt_find(&all->attempts, f->request);
    if (!a)
        return;
    bool decode = a->decode == peer && !a->decode_done;
    if (!decode && a->prefill != peer)
        return; /* not its request, or not any more */
    Session *s = a->owner;
    if (decode)
        attempt_decode_over(a, false);
    if (!s) {
        if (!decode && f->quiet)
            attempt_quiet(&all->attempts, a);
        return;
    }
    bool over = decode || s->state != ST_STREAM; /* once tokens come, prefill has done its part */
    if (!decode && f->quiet)
        attempt_quiet(&all->attempts, a);
    if (!over)
        return;
    ApiError e = failure_of(f, decode ? "decode" : "prefill");
    /* A damaged transfer deserves another try by the same two; anything else another instance. */
    if (f->code != BATON__FAIL_CODE__FAIL_TRANSFER) {
        s->not_decode = decode ? peer : NULL;
        s->not_prefill = decode ? NULL : peer;
    }
    attempt_failed(s, &e, failure_worth_again(f->code), 0);
}

static void on_grant(Sessions *all, Peer *peer, Baton__Grant *grant) {
    Attempt *a = attempt_find(&all->attempts, grant->request);
    Session *s = a ? a->owner : NULL;
    Err err = {0};
    if (!s || a->decode != peer || s->state != ST_RESERVE)
        return; /* late, or twice */
    if (attempt_prefill(&all->attempts, a, s->req, grant, left_ms(s), &err)) {
        s->not_prefill = a->prefill;
        ApiError e = failure_unavailable("no_capacity", "prefill does not take messages now", 1000);
        attempt_failed(s, &e, true, 0);
        return;
    }
    enter(s, ST_PREFILL, all->limits.first_token_ms);
}

static void on_prefill_done(Sessions *all, Peer *peer, const Baton__PrefillDone *done) {
    Attempt *a = attempt_find(&all->attempts, done->request);
    if (!a || a->prefill != peer || !a->wrote)
        return;
    session_stat_prefill(&all->stat, done);
    attempt_quiet(&all->attempts, a);
}

/* Sends the events that are ready. False: the session is over. */
static bool stream_out(Session *s) {
    Buf *out = &s->all->scratch;
    if (out->len == 0)
        return true;
    if (!s->streaming) {
        s->out.stream_begin(s->out.arg);
        s->streaming = true;
    }
    if (s->out.stream_put(s->out.arg, out->data, out->len))
        return true;
    session_too_slow(s);
    return false;
}

static void session_complete(Session *s) {
    Buf *out = &s->all->scratch;
    attempt_decode_over(s->attempt, true);
    buf_clear(out);
    if (s->req->stream) {
        answer_last_events(&s->answer, out);
        if (!stream_out(s))
            return;
        s->out.stream_end(s->out.arg, true);
    } else {
        answer_whole(&s->answer, out);
        s->out.reply(s->out.arg, 200, 0, out->data, out->len);
    }
    log_end(s, "complete", s->answer.finish == BATON__FINISH__FINISH_STOP ? "stop" : "length");
    session_free(s);
}

static void on_step(Sessions *all, Peer *peer, const Baton__TokenStep *step) {
    Attempt *a = attempt_find(&all->attempts, step->request);
    Session *s = a ? a->owner : NULL;
    if (!s || a->decode != peer || (s->state != ST_PREFILL && s->state != ST_STREAM))
        return;
    if (s->state == ST_PREFILL) {
        s->first_token_ms = now_of(all);
        session_stat_first(&all->stat, s->first_token_ms - s->start_ms);
    }
    session_stat_tokens(&all->stat, step->n_out);
    enter(s, ST_STREAM, all->limits.stall_ms);
    for (size_t i = 0; i < step->n_out; i++)
        answer_token(&s->answer, step->out[i]);
    if (step->finish != BATON__FINISH__FINISH_NONE) {
        answer_finish(&s->answer, step->finish);
        session_complete(s);
    } else if (s->req->stream) {
        buf_clear(&all->scratch);
        answer_events(&s->answer, &all->scratch);
        stream_out(s);
    }
}

void sessions_on_message(Sessions *all, Peer *peer, const Baton__Envelope *env) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_GRANT:
        on_grant(all, peer, env->grant);
        break;
    case BATON__ENVELOPE__BODY_PREFILL_DONE:
        on_prefill_done(all, peer, env->prefill_done);
        break;
    case BATON__ENVELOPE__BODY_TOKENS:
        for (size_t i = 0; i < env->tokens->n_step; i++)
            on_step(all, peer, env->tokens->step[i]);
        break;
    case BATON__ENVELOPE__BODY_FAILED:
        on_failed(all, peer, env->failed);
        break;
    default:
        LOG_WARN("%s: sent a message that is not for a router (%d)", peer->endpoint,
                 (int)env->body_case);
    }
}

/* A leg of the session's attempt is dead or silent. */
static void on_lost(void *arg, Attempt *a, bool decode) {
    Session *s = a->owner;
    (void)arg;
    if (!decode && s->state == ST_STREAM) /* prefill has done its part */
        return;
    ApiError e =
        failure_unavailable("peer_lost", decode ? "decode was lost" : "prefill was lost", 1000);
    attempt_failed(s, &e, true, s->all->limits.retry_wait_ms);
}

/* Its process may run on, but not for this session. */
static void lose_legs(Sessions *all, Peer *peer) {
    Session *next;
    for (Session *s = all->list; s; s = next) {
        next = s->next; /* nothing here makes sessions */
        Attempt *a = s->attempt;
        if (a && a->decode == peer)
            on_lost(NULL, a, true);
        else if (a && a->prefill == peer)
            on_lost(NULL, a, false);
    }
}

/* Sessions that wait for a pair look for one again. */
static void wake_waiting(Sessions *all) {
    Session *next;
    for (Session *s = all->list; s; s = next) {
        next = s->next;
        if (s->state == ST_WAIT)
            attempt_start(s);
    }
}

void sessions_on_peer(Sessions *all, Peer *peer, BusEvent event) {
    if (event == BUS_SILENT || event == BUS_RESET)
        lose_legs(all, peer);
    if (event == BUS_RESET)
        attempts_reset(&all->attempts, peer);
    if (event == BUS_GONE)
        attempts_gone(&all->attempts, peer, on_lost, all);
    else
        attempts_pump(&all->attempts, now_of(all));
}

/* ---- time ---- */

static void on_deadline(Session *s) {
    static const char *const names[] = {
        [ST_PARSE] = "the tokenizer did not get to it in time",
        [ST_WAIT] = "",
        [ST_RESERVE] = "decode did not answer in time",
        [ST_PREFILL] = "no first token came in time",
        [ST_STREAM] = "no further token came in time",
    };
    ApiError e;
    bool spent = left_ms(s) <= 0;
    if (s->state == ST_WAIT && !spent) {
        session_fail(s, &s->failure);
        return;
    }
    api_refuse(&e, 504, "server_error", "timeout", NULL, "%s",
               spent ? "the request took too long" : names[s->state]);
    if (s->state == ST_RESERVE)
        s->not_decode = s->attempt->decode;
    attempt_failed(s, &e, !spent && s->state == ST_RESERVE, 0);
}

void sessions_tick(Sessions *all) {
    int64_t now = now_of(all);
    wake_waiting(all);
    Session *next;
    for (Session *s = all->list; s; s = next) {
        next = s->next;
        if (now >= s->until_ms)
            on_deadline(s);
    }
    attempts_pump(&all->attempts, now);
    session_stat_attempts(&all->stat, all->attempts.n, all->attempts.n_dropped);
}

/* ---- all of them ---- */

int sessions_open(Sessions **out, const SessionPort *port, const SessionLimits *limits,
                  const ApiModel *model, const Tok *tok) {
    Sessions *all = xcalloc(1, sizeof *all);
    all->port = *port;
    all->limits = *limits;
    all->model = model;
    all->tok = tok;
    all->attempts.send = port->send;
    all->attempts.arg = port->arg;
    all->attempts.keep_ms = limits->keep_ms;
    session_stat_init(&all->stat);
    *out = all;
    return 0;
}

void sessions_close(Sessions *all) {
    if (!all)
        return;
    CHECK(all->n == 0);
    attempts_done(&all->attempts);
    buf_done(&all->scratch);
    free(all);
}

void sessions_drain(Sessions *all) {
    all->draining = true;
}

bool sessions_draining(const Sessions *all) {
    return all->draining;
}

void sessions_abort(Sessions *all) {
    ApiError e = failure_unavailable("draining", "this server is shutting down", 1000);
    while (all->list)
        session_fail(all->list, &e);
}

int sessions_running(const Sessions *all) {
    return all->n;
}

int sessions_attempts(const Sessions *all) {
    return all->attempts.n;
}
