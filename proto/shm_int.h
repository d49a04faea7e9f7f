/* The shared memory itself and the handshake, for both sides of shmring.h. */
#pragma once

#include "proto/shmring.h"

#include <stdatomic.h>

#define SHM_MAGIC 0x31474e495242ull /* "BRING1" */
enum { SHM_HEADER_BYTES = 4096, SHM_SLOT_HEAD_BYTES = 256 };

typedef enum SlotState { SLOT_FREE, SLOT_POSTED, SLOT_DONE } SlotState;

/* At the begin of each slot; then in_bytes, then out_bytes. */
typedef struct SlotShared {
    _Atomic uint32_t state; /* a futex word; only its owner of the moment changes it */
    _Atomic uint32_t waits; /* the caller sleeps or is about to */
    uint8_t pad[56];
    ShmHead head;
} SlotShared;

_Static_assert(sizeof(SlotShared) <= SHM_SLOT_HEAD_BYTES, "room for a slot's head");

/* The daemon's page, mapped by all callers. */
typedef struct BellShared {
    _Atomic uint32_t word; /* a futex word */
    _Atomic uint32_t sleepers;
} BellShared;

/* The caller's one message, beside the memfd; the answer is one ShmWelcome beside the bell's memfd,
 * or without it when refused. */
typedef struct ShmHello {
    uint64_t magic;
    ShmGeom geom;
} ShmHello;

typedef struct ShmWelcome {
    uint64_t magic;
    char refused[SHM_REASON_MAX + 1]; /* "" when taken */
} ShmWelcome;

static inline size_t shm_slot_bytes(const ShmGeom *g) {
    return SHM_SLOT_HEAD_BYTES + (size_t)g->in_bytes + (size_t)g->out_bytes;
}
static inline size_t shm_ring_bytes(const ShmGeom *g) {
    return SHM_HEADER_BYTES + (size_t)g->n_slots * shm_slot_bytes(g);
}
static inline SlotShared *shm_slot(void *base, const ShmGeom *g, int slot) {
    return (SlotShared *)((char *)base + SHM_HEADER_BYTES + (size_t)slot * shm_slot_bytes(g));
}

/* shm_socket.c */

/* Fills the address of an abstract socket and returns its length. */
struct sockaddr_un;
unsigned shm_address(struct sockaddr_un *at, const char *name);
/* One message with at most one descriptor (-1: none); *fd is the receiver's to close. -1 with errno
 * on failure. */
int shm_send(int sock, const void *m, size_t n, int fd);
int shm_receive(int sock, void *m, size_t n, int *fd);
/* A sealed memfd of n bytes that the system has really set aside, mapped at *at. -1 with errno. */
int shm_memory(const char *name, size_t n, void **at);
/* What is wrong with a memfd that came over sock, or NULL: it is of a process of this user or of
 * root, of exactly n bytes, and never of another size, so that no access to it faults. */
const char *shm_check(int sock, int memory, size_t n);

void shm_wake(_Atomic uint32_t *word);
/* Until *word differs from value or the time is over; may return early. */
void shm_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_us);
