/* Calls through memory that a caller and a daemon on one host share.
 *
 * The caller makes a ring: a memfd, sealed against any change of its size, with a header and slots,
 * each with room for the payload of one call and of its answer. It passes the memfd over an
 * abstract UNIX socket that the daemon names in its hello, and gets the daemon's bell: one word,
 * the same for all callers, that wakes the daemon's worker. A slot goes round FREE, POSTED, DONE:
 * the caller writes the payload and posts; the daemon computes from and into the slot and says
 * done; the caller reads the answer and frees it. Both sides spin for a moment before they sleep on
 * a futex.
 *
 * Nothing in shared memory is believed: sizes are those of the handshake, the daemon copies a
 * slot's header once and checks the copy. What a process of the same user scribbles there can spoil
 * its own answers and wake the worker in vain. A ring lives as long as its socket; the daemon keeps
 * it mapped while a call of it is computed. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHM_NAME_MAX = 63, SHM_MAX_SLOTS = 64, SHM_REASON_MAX = 119, SHM_SPIN_US = 200 };

/* What both sides must agree on. in_bytes, out_bytes: room of one slot, multiples of 64. */
typedef struct ShmGeom {
    uint64_t generation; /* of the daemon */
    uint64_t in_bytes, out_bytes;
    uint32_t n_slots;
} ShmGeom;

/* A call's few numbers; their meaning is the users'. */
typedef struct ShmHead {
    uint32_t a, b, c; /* posted: layer, n_rows, k */
    uint32_t code;    /* done: 0, or why there is no answer */
    char reason[SHM_REASON_MAX + 1];
} ShmHead;

/* ---- the caller's side; one thread at a time ---- */

typedef struct ShmRing ShmRing;

/* E_PEER or E_DEADLINE with the reason when the daemon is on another host or in another network
 * namespace, or refuses. */
int shmring_open(ShmRing **out, const char *name, const ShmGeom *geom, int64_t timeout_ms,
                 Err *err);
void shmring_close(ShmRing *r);
/* All of its memory, to be pinned by a device. */
void *shmring_memory(const ShmRing *r, size_t *bytes);

void *shmring_in(const ShmRing *r, int slot);  /* in_bytes, the caller's to write while FREE */
void *shmring_out(const ShmRing *r, int slot); /* out_bytes, to read while DONE */
/* FREE -> POSTED. The caller knows which of its slots are free: what the slot itself says may be
 * the other side's scribble. */
void shmring_post(ShmRing *r, int slot, const ShmHead *head);
/* Whether it is DONE. */
bool shmring_done(const ShmRing *r, int slot);
/* Whether it is DONE; waits at most timeout_us, of which the first spin_us are spent spinning. From
 * SHM_SPIN_US on other threads of this core get their turn in between; when one has taken a long
 * one, spinning ends, and for a second it is not more than SHM_SPIN_US. */
bool shmring_wait(ShmRing *r, int slot, int64_t timeout_us, int64_t spin_us);
/* DONE -> FREE; the answer's head goes to *head. */
void shmring_release(ShmRing *r, int slot, ShmHead *head);

/* ---- the daemon's side ---- */

typedef struct ShmServer ShmServer;
typedef struct ShmPeer ShmPeer; /* one caller's ring */

/* Starts a thread that takes in rings of exactly `generation` with slots of at most the given room.
 * name: of the abstract socket. */
int shmserver_open(ShmServer **out, const char *name, const ShmGeom *most, Err *err);
/* After the worker has ended. */
void shmserver_close(ShmServer *s);

/* A posted call. */
typedef struct ShmCall {
    ShmPeer *peer;
    int slot;
    ShmHead head;   /* a copy */
    const void *in; /* in the slot: the caller may scribble there */
    void *out;
    uint64_t in_bytes, out_bytes; /* of this ring */
} ShmCall;

/* Worker: the next posted call, which is the worker's until it is answered; false when there is
 * none. Rings whose caller is gone are let go here. */
bool shmserver_take(ShmServer *s, ShmCall *out);
/* Worker: whether nobody waits for the answer any more. */
bool shmserver_gone(ShmServer *s, const ShmCall *c);
/* Worker: POSTED -> DONE. code 0: the answer is in the slot. reason: NULL or text. */
void shmserver_answer(ShmServer *s, const ShmCall *c, uint32_t code, const char *reason);

/* The bell. Any thread rings; the worker reads it, looks for work, and sleeps until it differs. */
void shmserver_ring(ShmServer *s);
uint32_t shmserver_bell(const ShmServer *s);
/* Returns once the bell differs from seen, or after timeout_ms; spins for SHM_SPIN_US * 10 first.
 */
void shmserver_sleep(ShmServer *s, uint32_t seen, int64_t timeout_ms);
int shmserver_n_rings(ShmServer *s);
