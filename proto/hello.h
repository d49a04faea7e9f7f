/* What two processes must agree on before they work together. Pure; any thread. */
#pragma once

#include "base/err.h"
#include "proto/baton.pb-c.h"

enum { PROTOCOL_VERSION = 1 };

/* Checks the peer's hello against ours: protocol version, then whatever both roles carry (fingerprint, tokenizer, TP, page size, KV dtype and
 * layout, hidden size, experts). E_MISMATCH with the field, both values and both names: "decode-0 has page_tokens 32, router-0 expects 64". */
int hello_check(const Baton__Hello *mine, const Baton__Hello *theirs, Err *err);

/* Whether a prefill and a decode can hand over to each other; the router calls it for every pair. Same rules. */
int hello_check_pair(const Baton__Hello *prefill, const Baton__Hello *decode, Err *err);

/* Deep copy and its release (NULL is fine). */
Baton__Hello *hello_copy(const Baton__Hello *h);
void hello_free(Baton__Hello *h);
