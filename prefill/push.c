/* See push.h. */
#include "prefill/push.h"

#include "base/clock.h"

#include <stdlib.h>
#include <time.h>

enum { ROOM_POLL_NS = 200000, RANGES = 3 };

void push_init(Push *p, KvLink *link, const KvLayout *local, const int *index_slot, int max_rows,
               int max_seqs, int64_t wait_ms, StatCounter *bytes) {
    *p = (Push){.link = link,
                .local = *local,
                .index_slot = index_slot,
                .wait_ms = wait_ms,
                .bytes = bytes,
                .max_seqs = max_seqs};
    p->max_seg = RANGES * (max_rows / KV_PAGE_TOKENS + 2); /* rows may begin and end in a page */
    p->seg = xcalloc((size_t)p->max_seg, sizeof *p->seg);
    p->seq = xcalloc((size_t)max_seqs, sizeof *p->seq);
}

void push_done(Push *p) {
    free(p->seg);
    free(p->seq);
    *p = (Push){0};
}

void push_clear(Push *p) {
    p->n_seq = 0;
}

void push_add(Push *p, const PushSeq *seq) {
    CHECK(p->n_seq < p->max_seqs);
    p->seq[p->n_seq++] = *seq;
}

/* Pages that lie side by side in both pools become one segment. */
static void add_seg(Push *p, KvSeg s) {
    KvSeg *last = p->n_seg > 0 ? &p->seg[p->n_seg - 1] : NULL;
    if (last && last->local + last->bytes == s.local && last->remote + last->bytes == s.remote) {
        last->bytes += s.bytes;
        return;
    }
    CHECK(p->n_seg < p->max_seg);
    p->seg[p->n_seg++] = s;
}

/* The k-th range of every page of a sequence's rows; false when layers like this have no k-th. */
static bool add_range(Push *p, const PushSeq *q, int layer, int k) {
    for (int pos = q->from; pos < q->to;) {
        KvRange here[RANGES], there[RANGES];
        int i = pos / KV_PAGE_TOKENS, row0 = pos % KV_PAGE_TOKENS, row1 = row0 + q->to - pos;
        if (row1 > KV_PAGE_TOKENS)
            row1 = KV_PAGE_TOKENS;
        int n = kv_layout_ranges(&p->local, layer, p->index_slot[layer], q->local_page[i], row0,
                                 row1, here);
        kv_layout_ranges(&q->remote, layer, p->index_slot[layer], q->remote_page[i], row0, row1,
                         there);
        if (k >= n)
            return false;
        add_seg(p, (KvSeg){here[k].offset, there[k].offset, here[k].bytes});
        pos += row1 - row0;
    }
    return true;
}

static int put_all(Push *p, const PushSeq *q, Err *err) {
    int64_t end = clock_now_ms() + p->wait_ms;
    for (;;) {
        int rc = kvlink_put(p->link, q->peer, p->seg, p->n_seg, err);
        if (rc != E_BUSY)
            return rc;
        if (clock_now_ms() > end)
            return err_set(err, E_DEADLINE, "the KV link had no room for %lld ms",
                           (long long)p->wait_ms);
        nanosleep(&(struct timespec){.tv_nsec = ROOM_POLL_NS}, NULL);
    }
}

void push_layer(Push *p, int layer) {
    for (int i = 0; i < p->n_seq; i++) {
        PushSeq *q = &p->seq[i];
        uint64_t bytes = 0;
        if (q->status || q->from >= q->to)
            continue;
        p->n_seg = 0;
        for (int k = 0; k < RANGES && add_range(p, q, layer, k); k++)
            ;
        q->status = put_all(p, q, &q->err);
        for (int k = 0; k < p->n_seg; k++)
            bytes += p->seg[k].bytes;
        if (q->status == 0)
            stat_add(p->bytes, (double)bytes);
    }
}
