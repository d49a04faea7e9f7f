/* What two processes must agree on before they work together. Pure; any thread. */
#pragma once

#include "base/err.h"
#include "proto/baton.pb-c.h"

#include <stdbool.h>

enum { PROTOCOL_VERSION = 1, HELLO_NAME_MAX = 63 };

/* Checks the peer's hello against ours: protocol version, that it is well formed (a role, a
 * printable name, a generation), that the two roles talk to each other, then whatever both carry
 * (model, fingerprint, tokenizer, TP, page size, KV dtype and layout, hidden size, experts).
 * E_MISMATCH with the field, both values and both names: "decode-0 has page_tokens 32, router-0
 * expects 64".
 */
int hello_check(const Baton__Hello *mine, const Baton__Hello *theirs, Err *err);

/* Whether a prefill and a decode can hand over to each other; the router calls it for every pair.
 * Same rules. */
int hello_check_pair(const Baton__Hello *prefill, const Baton__Hello *decode, Err *err);

/* Whether both describe the same process. */
bool hello_same_process(const Baton__Hello *a, const Baton__Hello *b);

/* "router", "prefill", "decode", "expertd"; "none" for anything else. */
const char *hello_role_name(Baton__Role role);

/* Deep copy without unknown fields, the caller's, and its release (NULL is fine). */
Baton__Hello *hello_copy(const Baton__Hello *h);
void hello_free(Baton__Hello *h);
