/* A client's request from its bytes to its last byte: a state machine fed by the tokenizer's
 * workers, the peers, the clock and the client's going away.
 *
 *   PARSE -> RESERVE -> PREFILL -> STREAM -> over      every state has a deadline
 *              ^   (WAIT: no pair for a retry yet)
 *
 * A failed attempt is made again once, under a new id, as long as no byte of the answer was sent.
 * Every session ends in exactly one of: a complete answer, an error (as status, or as an event in a
 * stream that is then broken off), or silence because the client went away. Loop thread only.
 *
 * Everything outside is behind SessionPort and SessionOut, so that tests drive it with fakes. */
#pragma once

#include "router/answer.h"
#include "router/api.h"
#include "router/attempt.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Session Session;
typedef struct Sessions Sessions;

/* How the client hears of it. After reply or stream_end no further call comes. */
typedef struct SessionOut {
    void *arg;
    void (*reply)(void *arg, int status, int64_t retry_after_ms, const char *body, size_t len);
    void (*stream_begin)(void *arg);
    bool (*stream_put)(void *arg, const char *text, size_t len); /* false: the client is too slow */
    void (*stream_end)(void *arg, bool ok);
} SessionOut;

typedef struct SessionPort {
    void *arg;
    int64_t (*now_ms)(void *arg);
    /* Parses and encodes elsewhere; session_on_parsed follows unless the job is abandoned. body is
     * borrowed. NULL: too much waits already. */
    void *(*parse)(void *arg, Session *s, bool chat, const char *body, size_t len);
    void (*abandon)(void *arg, void *job);
    bool (*pick)(void *arg, uint32_t n_prompt, uint32_t n_total, const Peer *not_prefill,
                 const Peer *not_decode, Peer **prefill, Peer **decode);
    AttemptSendFn send;
    int (*max_context)(void *arg); /* of the model and the peers, tokens */
} SessionPort;

typedef struct SessionLimits {
    int max_requests;
    int64_t request_ms;     /* from the first byte to the last */
    int64_t parse_ms;       /* in the tokenizer's queue and hands */
    int64_t reserve_ms;     /* decode's answer to RESERVE */
    int64_t first_token_ms; /* from PREFILL to the first token */
    int64_t stall_ms;       /* between two tokens */
    int64_t retry_wait_ms;  /* for a pair, after a failed attempt */
    int64_t keep_ms;        /* for prefill's last word after a failed attempt */
} SessionLimits;

int sessions_open(Sessions **out, const SessionPort *port, const SessionLimits *limits,
                  const ApiModel *model, const Tok *tok);
/* Every session must be over. NULL is a no-op. */
void sessions_close(Sessions *all);

/* Takes a request; errors are answered through out at once or later. client_id, the
 * X-Request-Id of the answer, is for the log. Returns the session, or NULL when it was answered
 * already. */
Session *session_new(Sessions *all, bool chat, const char *body, size_t len, const char *client_id,
                     const SessionOut *out);
/* req, on the heap, becomes the session's; NULL with *error set when the request was refused. */
void session_on_parsed(Session *s, ApiReq *req, const ApiError *error);
/* The client is gone: nothing of out is called any more, both legs are cancelled. */
void session_on_gone(Session *s);

/* The bus. */
void sessions_on_message(Sessions *all, Peer *peer, const Baton__Envelope *env);
void sessions_on_peer(Sessions *all, Peer *peer, BusEvent event);
/* Deadlines and what is owed; to be called every SESSION_TICK_MS. */
void sessions_tick(Sessions *all);
enum { SESSION_TICK_MS = 50 };

/* From now on new requests get 503. */
void sessions_drain(Sessions *all);
bool sessions_draining(const Sessions *all);
/* Ends what still runs with an error. */
void sessions_abort(Sessions *all);
int sessions_running(const Sessions *all);
/* Attempts of which a peer must still hear or be heard. */
int sessions_attempts(const Sessions *all);
