/* Calls of experts in other processes, for the thread that runs a forward step.
 *
 * One connection per expertd, each holding one slice of every expert: a call goes to all of them
 * before any answer is read, and the answers are added in the order of the slices, so that the same
 * call gives the same bits. On one host they go through shared memory (shmring.h), else as
 * messages; the results are the same. Works without a loop; one thread at a time. To expertd it
 * looks like any client of the bus, one that is silent between calls. A failure names the endpoint
 * and comes within the deadline; the next post connects again what was lost. */
#pragma once

#include "base/err.h"
#include "proto/baton.pb-c.h"

#include <stdint.h>

enum {
    EXPERTLINK_MAX = 64,
    EXPERTLINK_CALLS_MAX = 64,
    EXPERTLINK_K_MAX = 16,
    EXPERTLINK_PATH_MAX = 360,
    EXPERTLINK_SPIN_US = 2000
};

/* How calls travel: shared memory where it can be had, shared memory or not at all, messages. */
typedef enum ExpertLinkTransport {
    EXPERTLINK_AUTO,
    EXPERTLINK_SHM,
    EXPERTLINK_ZMQ
} ExpertLinkTransport;

typedef struct ExpertLink ExpertLink;

/* Connects to n endpoints (1..EXPERTLINK_MAX) and exchanges hellos. Together they must be the
 * shards 0..n-1, each once, of one hidden size and of one format and content of experts; each that
 * comes back later must be what was there before. Takes at most deadline_ms, as does each later
 * call. endpoints and self are copied. E_PEER, E_MISMATCH or E_DEADLINE name the endpoint. */
int expertlink_open(ExpertLink **out, const char *const *endpoints, int n, const Baton__Hello *self,
                    int64_t deadline_ms, Err *err);
/* NULL is a no-op. */
void expertlink_close(ExpertLink *l);
int expertlink_hidden(const ExpertLink *l);
int expertlink_shards(const ExpertLink *l);
/* The hello of the daemon that holds a shard; NULL while it is not connected. */
const Baton__Hello *expertlink_hello(const ExpertLink *l, int shard);

/* From the next post on. Not between post and wait. */
void expertlink_transport(ExpertLink *l, ExpertLinkTransport transport);
/* Posts of up to so many rows will come: shared memory gets room for them at the next probe, or at
 * the first post after a connection was made, so that it need not grow within a post. */
void expertlink_reserve(ExpertLink *l, int n_rows);
/* Answers through shared memory are waited for awake as long as calls of their size usually take,
 * if that is at most most_us; longer ones asleep after a moment. At first EXPERTLINK_SPIN_US. */
void expertlink_spin(ExpertLink *l, int64_t most_us);
/* How the latest calls to a shard went: "shm", or "zmq: " and why; "" before the first. */
const char *expertlink_path(const ExpertLink *l, int shard);
/* The memory through which calls to a shard go, to be pinned by a device; NULL when there is none.
 * Another one after calls that need more room and after failures. */
void *expertlink_memory(const ExpertLink *l, int shard, size_t *bytes);

/* Sends x[n_rows, hidden], expert[n_rows, k] (-1: no remote expert in this place) and
 * weight[n_rows, k] to every daemon, cut into calls of at most its max_rows. All three are copied.
 * Calls of an earlier post are given up. E_LIMIT when more than EXPERTLINK_CALLS_MAX calls would be
 * needed. link is an ExpertLink: the signature is that of a port of the forward pass. */
int expertlink_post(void *link, int layer, int n_rows, int k, const float *x, const int32_t *expert,
                    const float *weight, Err *err);
/* sum[n_rows, hidden] += the partial sums of all daemons, shard 0 first. After a failure sum is
 * unchanged. Fails with what post said when post failed. */
int expertlink_wait(void *link, float *sum, Err *err);

/* Whether all daemons answer now and are ready. Not between post and wait. */
int expertlink_probe(ExpertLink *l, Err *err);
