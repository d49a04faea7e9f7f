/* A KvLink that misbehaves on purpose, for tests: it forwards to another link, except for its
 * rules. Rules are text, separated by commas:
 *
 *   drop-notice=N       the next N notices are reported sent and never delivered
 *   duplicate-notice=N  the next N notices are delivered twice
 *   delay-notice=MS     every notice leaves MS milliseconds after the puts before it have ended
 *   corrupt-page=N      one byte of the Nth put (when all its bytes are equal: of the next put
 * where they are not) arrives with another value fail-after=N        the Nth put is refused with
 * E_PEER, and what else goes to its peer; flushes work, so that quiet can be proven reset=N at the
 * Nth put the connection breaks: its bytes are lost, what waits or follows fails, and nothing is
 * written any more silence=N           the next N connections carry nothing: puts vanish, notices
 * and flushes end after timeout_ms with E_DEADLINE, or at disconnect with E_CANCELED
 *
 * NAME%P instead of NAME=N: each notice, put or connection, with a probability of P percent;
 * delay-notice=MS%P: each notice. Puts, notices and connections are counted over the whole link,
 * from 1. The same seed and the same calls give the same faults.
 *
 * The pool is never changed: a corrupted byte is read from another place of the same put. put may
 * come from any thread; all other calls belong to the loop's. */
#pragma once

#include "proto/kvlink.h"

typedef struct KvFaultConf {
    Loop *loop; /* of the inner link, too */
    const char *rules;
    uint64_t seed;
    int64_t timeout_ms; /* for silence: what the inner link has */
} KvFaultConf;

/* Takes *inner (out may be inner); closing *out closes it. E_INVAL, with *inner left alone, for a
 * rule that does not exist or has no proper number, by its name. */
int kvlink_fault_new(KvLink **out, KvLink **inner, const KvFaultConf *conf, Err *err);
