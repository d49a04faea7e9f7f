/* What the files of expertlink share. Everything belongs to the calling thread. */
#pragma once

#include "proto/bus.h"
#include "proto/bus_wire.h"
#include "proto/expertlink.h"
#include "proto/shmring.h"

#include <stdbool.h>

enum {
    SIZE_LIMIT = 1 << 20, /* of hidden and max_rows: no product of sizes overflows */
    SIZE_CLASSES = 21,    /* of the rows of a post: powers of two */
};

typedef enum State {
    STATE_CLOSED,   /* no socket; the next post connects */
    STATE_GREETING, /* hello sent */
    STATE_GREETED,  /* hello accepted, first ping sent */
    STATE_READY,
} State;

/* One expertd. */
typedef struct Daemon {
    char *endpoint;
    void *socket, *monitor;
    State state;
    Baton__Hello *hello; /* its own, of the current connection */
    uint64_t pong_seq;   /* the latest answered ping */
    bool pong_ready;
    char pong_reason[BUS_REASON_MAX + 1];
    uint64_t first_call; /* of the current post; its calls are numbered on from here */
    int n_calls, n_open; /* sent; not yet answered */
    bool answered[EXPERTLINK_CALLS_MAX];
    float *y; /* [y_rows, hidden] */
    int y_rows;
    ShmRing *ring;                  /* NULL: calls go as messages */
    int ring_slots, ring_rows;      /* its slots, and the rows of one */
    bool ring_tried;                /* on this connection, without success */
    bool on_ring;                   /* the current post */
    int64_t posted_us;              /* when that was */
    int64_t took_us[SIZE_CLASSES];  /* posts of a size usually; 0: not known */
    char path[EXPERTLINK_PATH_MAX]; /* "shm", or "zmq: why" */
} Daemon;

struct ExpertLink {
    Baton__Hello *self; /* owned */
    BusWireConf wire;
    void *context;
    int64_t deadline_ms;
    int n, hidden;
    char format[32]; /* with hidden > 0: of all daemons, now and later, as is `stored` */
    uint64_t stored; /* their expert_hash */
    Daemon daemon[EXPERTLINK_MAX];
    int by_shard[EXPERTLINK_MAX]; /* index into daemon */
    uint64_t next_call, ping_seq;
    int64_t give_up_ms; /* of the current post */
    int n_rows;         /* of the current post; -1: none under way */
    Err post_err;       /* why the last post failed */
    ExpertLinkTransport transport;
    int reserve_rows;
    int64_t spin_us; /* at most */
    uint8_t *blob;   /* one call's second frame */
    size_t blob_bytes;
    BusWireMsg msg;
};

/* The rows of one post. */
typedef struct ExpertRows {
    int layer, n, k;
    const float *x;        /* [n, hidden] */
    const int32_t *expert; /* [n, k] */
    const float *weight;   /* [n, k] */
} ExpertRows;

/* Rows [first, first + n) of r as the payload of one call at `to`; returns its end. */
void *expertlink_payload(const ExpertLink *l, const ExpertRows *r, int first, int n, void *to);

/* expertlink_shm.c */

/* Makes sure that d has a ring with room for a post of n_rows rows and for what is reserved, or
 * says in d->path why not: then d->ring is NULL. Fails only where the configuration insists on a
 * ring. */
int expertlink_ring_ready(ExpertLink *l, Daemon *d, int n_rows, Err *err);
/* Posts call i of the current post. */
void expertlink_ring_post(ExpertLink *l, Daemon *d, int i, const ExpertRows *r, int first, int n);
/* Takes in what is done; E_PEER when the daemon refused a call. */
int expertlink_ring_take(const ExpertLink *l, Daemon *d, Err *err);
/* Waits for the first call that is not done. */
void expertlink_ring_wait(const ExpertLink *l, Daemon *d, int64_t timeout_us);
/* Call i's answer, valid until the next post. */
const float *expertlink_ring_answer(const Daemon *d, int i);
/* Gives the ring up, with whatever is under way in it. */
void expertlink_ring_drop(Daemon *d);
