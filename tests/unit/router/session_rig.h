/* What session tests drive a Sessions with: two prefills, two decodes and a client that only record
 * what they are told, and a clock that the test sets. */
#pragma once

#include "router/session.h"

enum { RIG_SENT_MAX = 256 };

typedef struct RigSent {
    Peer *peer;
    Baton__Envelope__BodyCase what;
    uint64_t request;
    bool writer_quiet; /* of a cancel */
} RigSent;

typedef struct RigClient {
    int n_answers; /* replies and stream ends: never more than one */
    int status;    /* of the reply */
    int64_t retry_after_ms;
    bool begun, ended_ok;
    bool slow; /* takes nothing more */
    Buf text;
} RigClient;

typedef struct Rig {
    Sessions *all;
    Tok *tok;
    ApiModel model;
    int64_t now_ms;
    Peer prefill[2], decode[2];
    bool down[2][2]; /* [decode?][index]: neither picked nor sent to */
    bool deaf[2][2]; /* picked, but refuses messages */
    RigSent sent[RIG_SENT_MAX];
    int n_sent;
    RigClient client;
    Session *session;
    bool parser_full;
    int n_parsing, n_abandoned;
    Buf body;
} Rig;

extern Rig rig;

int rig_setup(void **state);
int rig_teardown(void **state);

/* Has a chat request arrive with these further fields, for instance "\"stream\":true". */
void rig_request(const char *fields);
/* The parser's result for it, with a prompt of n_ids tokens. */
void rig_parsed(size_t n_ids);
/* Both, then decode's grant: the request waits for its first token. */
void rig_to_prefill(const char *fields);
/* And its first token, "a". */
void rig_to_stream(const char *fields);

void rig_grant(Peer *from, uint64_t request);
/* text: one token per byte. */
void rig_tokens(Peer *from, uint64_t request, const char *text, Baton__Finish finish);
void rig_prefill_done(Peer *from, uint64_t request);
void rig_failed(Peer *from, uint64_t request, Baton__FailCode code, bool quiet);
void rig_peer(Peer *peer, BusEvent event); /* sets down, too */
/* Lets ms pass, ticking. */
void rig_pass(int64_t ms);

/* The latest message of that kind, which must exist. */
const RigSent *rig_last(Baton__Envelope__BodyCase what);
int rig_count(Baton__Envelope__BodyCase what);
/* The latest cancel to that peer, or NULL. */
const RigSent *rig_cancel_to(const Peer *peer);
