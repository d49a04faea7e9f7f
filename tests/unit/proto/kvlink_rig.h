/* What the tests of the KV link share: a link with its loop, work that ends, and a receiver or
 * a writer in another process.
 *
 * Either is this program started again (kvlink_rig_main). The receiver is there to be asked. For
 * every notice, a KvCheck, it compares the named bytes of its pool with their pattern and answers
 * by one character. It ends when its input is closed, so that it never outlives a test. */
#pragma once

#include "proto/kvlink.h"

#include <sys/types.h>

enum { RIG_WAIT_MS = 20000 };

typedef struct Done {
    int n, n_failed, status; /* status: the last failure */
} Done;

typedef struct KvCheck {
    uint64_t at, bytes, seed;
} KvCheck;

typedef struct Child {
    pid_t pid;
    int in, out; /* closing `in` ends the child */
    KvRemote remote;
} Child;

/* First thing in main: runs the receiver and ends the process when asked for one. */
void kvlink_rig_main(int argc, char **argv);

KvLink *kvlink_rig_open(Loop *loop, const char *transports, const char *devices,
                        uint64_t pool_bytes, int64_t timeout_ms, KvNoticeFn on_notice, void *arg);
KvPeer *kvlink_rig_connect(KvLink *writer, KvLink *reader);
void on_done(void *arg, int status);
void on_no_notice(void *arg, const void *bytes, size_t len);

/* Runs the loop for about a millisecond. */
void turn(Loop *loop);
/* Until done->n == n; fails the test after RIG_WAIT_MS. */
void wait_done(Loop *loop, const Done *done, int n);

void pattern_fill(unsigned char *bytes, size_t len, uint64_t seed);
bool pattern_holds(const unsigned char *bytes, size_t len, uint64_t seed);

/* netns NULL: this one. */
void child_start(Child *c, const char *transports, const char *devices, uint64_t pool_bytes,
                 const char *netns);
/* A process that writes its whole pool into the reader's, with notices of its
 * process id, again and again. */
void child_start_writer(Child *c, const char *transports, KvLink *reader);
/* Whether the next check held; fails the test when no answer comes. */
bool child_verdict(Child *c);
void child_kill(Child *c);
/* Asks it to end and fails the test unless it does so cleanly. */
void child_stop(Child *c);

/* Puts check.bytes at check.at of both pools, pattern and notice included. */
int rig_send(KvLink *l, KvPeer *p, KvCheck check, Done *done);
