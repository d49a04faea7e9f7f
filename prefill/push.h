/* KV rows on their way to decode: after each layer of a step, the rows that the step wrote are put
 * into the pages that decode granted. The lists are filled by the loop thread while no step runs
 * and used by rank 0's thread during one. Allocates nothing after push_init. */
#pragma once

#include "base/stat.h"
#include "kernels/kv_layout.h"
#include "proto/kvlink.h"

#include <stdint.h>

/* Rows of one sequence. */
typedef struct PushSeq {
    KvPeer *peer;
    const int32_t *local_page, *remote_page; /* by 64 positions */
    KvLayout remote;                         /* of decode's pool */
    int from, to;                            /* positions */
    int status;                              /* 0, or why a put was refused */
    Err err;
} PushSeq;

typedef struct Push {
    KvLink *link;
    KvLayout local;
    const int *index_slot; /* [layers], borrowed */
    int64_t wait_ms;       /* for room in the link's queue */
    StatCounter *bytes;
    PushSeq *seq; /* [max_seqs] */
    int n_seq, max_seqs;
    KvSeg *seg; /* [max_seg] of one layer and sequence */
    int n_seg, max_seg;
} Push;

/* For steps of at most max_rows tokens of max_seqs sequences. */
void push_init(Push *p, KvLink *link, const KvLayout *local, const int *index_slot, int max_rows,
               int max_seqs, int64_t wait_ms, StatCounter *bytes);
void push_done(Push *p);

/* Loop thread. */
void push_clear(Push *p);
void push_add(Push *p, const PushSeq *seq);

/* Rank 0's thread, when the rows of `layer` are in the pool. Waits for room, up to wait_ms, when
 * the link is behind: what is not sent yet bounds how far the engine runs ahead. */
void push_layer(Push *p, int layer);
