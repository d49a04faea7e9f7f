/* The hand-over: KvReady behind the last puts, and the proof, for a request that is given up, that
 * nothing of it can be written any more. The link calls back for every notice and flush, by its own
 * timeout at the latest. Loop thread. */
#include "prefill/prefill.h"

#include "base/clock.h"
#include "base/log.h"

#include <inttypes.h>
#include <stdlib.h>

/* ---- what KvReady says ---- */

typedef struct First {
    Baton__TokenOut token;
    Baton__Logprob top[SAMPLE_MAX_TOP];
    Baton__Logprob *top_at[SAMPLE_MAX_TOP];
} First;

static void fill_first(First *f, const PrefillRequest *r) {
    f->token = (Baton__TokenOut)BATON__TOKEN_OUT__INIT;
    f->token.token = (uint32_t)r->first.token;
    if (!r->params.logprobs)
        return;
    f->token.logprob = r->first.logprob;
    f->token.n_top = (size_t)r->first.n_top;
    f->token.top = f->top_at;
    for (int i = 0; i < r->first.n_top; i++) {
        f->top[i] = (Baton__Logprob)BATON__LOGPROB__INIT;
        f->top[i].token = (uint32_t)r->first.top_token[i];
        f->top[i].logprob = r->first.top_logprob[i];
        f->top_at[i] = &f->top[i];
    }
}

static void on_settled(void *arg, int status);

/* Queues the notice that ends a transfer. whole: all KV is there; otherwise decode only learns that
 * no more of it will come. */
static int notify(Prefill *p, PrefillRequest *r, bool whole, Err *err) {
    Baton__KvReady m = BATON__KV_READY__INIT;
    First first;
    m.ticket = r->ticket;
    m.generation = r->peer->generation;
    m.request = r->id;
    m.prefill_generation = p->conf.generation;
    if (whole) {
        int skipped = r->have / KV_PAGE_TOKENS;
        fill_first(&first, r);
        m.first = &first.token;
        m.n_tokens = (uint32_t)r->n_prompt;
        m.n_page_hash = (size_t)(r->n_pages - skipped);
        m.page_hash = r->hash + skipped;
    }
    size_t len = baton__kv_ready__get_packed_size(&m);
    uint8_t *bytes = xmalloc(len);
    baton__kv_ready__pack(&m, bytes);
    int rc = kvlink_notify(p->conf.link, r->peer->kv, bytes, len, on_settled, r, err);
    free(bytes);
    return rc;
}

/* ---- what the link answers ---- */

/* The link is done with r, one way or the other: whatever was put for it has ended. */
static void on_settled(void *arg, int status) {
    PrefillRequest *r = arg;
    Prefill *p = r->owner;
    PrefillPeer *peer = r->peer;
    r->pending = false;
    if (status && !r->doomed)
        prefill_doom(r, BATON__FAIL_CODE__FAIL_TRANSFER,
                     status == E_UNSUPPORTED
                         ? "UCX has no way from prefill's GPU memory to decode's"
                         : "KV could not be written to decode");
    prefill_over(p, r);
    if (status)
        prefill_peer_failed(p, peer);
    prefill_steps_pump(p);
}

/* Whether the link will call back for r. It must before its peer is disconnected: what it had no
 * room for is owed. */
static bool queued(PrefillRequest *r, int rc) {
    bool owed = rc == E_BUSY;
    r->peer->n_owed += owed - r->owed;
    r->owed = owed;
    r->pending = rc == 0;
    return rc == 0 || owed;
}

void prefill_deliver(Prefill *p, PrefillRequest *r) {
    Err err = {0};
    r->state = PREFILL_NOTIFYING;
    if (!queued(r, notify(p, r, true, &err)))
        prefill_fail(p, r, BATON__FAIL_CODE__FAIL_TRANSFER, err.text);
}

void prefill_close(Prefill *p, PrefillRequest *r) {
    r->state = PREFILL_CLOSING;
    if (r->router && !r->wrote) {
        prefill_over(p, r); /* the router tells decode */
        return;
    }
    if (!r->router && queued(r, notify(p, r, false, NULL)))
        return; /* nobody else would tell decode */
    if (!queued(r, kvlink_flush(p->conf.link, r->peer->kv, on_settled, r, NULL))) {
        r->unproven = r->wrote;
        prefill_over(p, r);
    }
}

void prefill_deliver_again(Prefill *p, PrefillRequest *r) {
    if (r->owed && r->state == PREFILL_NOTIFYING)
        prefill_deliver(p, r);
    else if (r->owed)
        prefill_close(p, r);
}
