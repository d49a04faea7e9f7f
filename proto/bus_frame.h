/* Envelopes from bytes that came from outside. Pure; any thread. */
#pragma once

#include "base/err.h"
#include "proto/baton.pb-c.h"

#include <stddef.h>

/* Memory that one envelope may take once unpacked: a few bytes of a frame can name a large struct.
 */
enum { BUS_FRAME_MEMORY_MAX = 64 << 20 };

/* Unpacks and checks. The caller's; release with bus_frame_free. NULL and E_FORMAT or E_LIMIT when
 * the bytes are no valid envelope. */
Baton__Envelope *bus_frame_unpack(const void *bytes, size_t len, Err *err);
void bus_frame_free(Baton__Envelope *env);

/* What a reader may rely on beyond the syntax: there is a body; Reserve has sampling; Prefill has a
 * grant and sampling; KV addresses and reasons are bounded; enumerations are in range. E_FORMAT
 * with the field. */
int bus_frame_check(const Baton__Envelope *env, Err *err);

/* Copies at most n - 1 bytes of text from outside, control characters replaced by '?'. */
void bus_frame_text(char *out, size_t n, const char *text);
