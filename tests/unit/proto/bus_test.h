/* What the tests of the bus share: a hello, a recorder of events and messages, waiting on a loop,
 * server processes to kill. One thread. */
#pragma once

#include "proto/bus.h"

#include <stdbool.h>
#include <sys/types.h>

enum { SEEN_MAX = 256 };

typedef struct Seen {
    BusEvent event[SEEN_MAX];
    char reason[SEEN_MAX][512];
    int n_events;
    BusPeer *peer;  /* of the last BUS_UP */
    int n[6];       /* per BusEvent */
    int n_messages; /* without Pong */
    int n_pongs;
    bool echo;       /* answers each Quiet with the same and the same blob */
    bool tells;      /* sends a Quiet at each BUS_BACK: it had called its peer silent */
    uint64_t last;   /* request of the last Quiet */
    bool in_order;   /* requests of Quiets rise by one */
    size_t blob_len; /* of the last message */
    uint8_t blob_first, blob_last;
    bool pong_ready;
} Seen;

Baton__Hello bus_test_hello(Baton__Role role, const char *name);
BusCallbacks bus_test_callbacks(Seen *seen);
/* Short times. */
BusConf bus_test_conf(void);
/* Runs the loop until *value is at least `want`; fails the test after timeout_ms. Returns the time
 * it took, in ms. */
int64_t bus_test_wait(Loop *loop, const int *value, int want, int64_t timeout_ms);
void bus_test_run(Loop *loop, int64_t ms);
int bus_test_send_quiet(BusPeer *peer, uint64_t request, const void *blob, size_t len);
/* An "ipc://" endpoint in a directory of its own, the same for the whole process. */
const char *bus_test_endpoint(void);
/* A process with an echoing decode server at endpoint, listening when this returns. */
pid_t bus_test_start_server(const char *endpoint);
/* A process with a router client of endpoint. Both kinds tell. */
pid_t bus_test_start_client(const char *endpoint);
/* First in main: serves as such a process when the arguments say so. */
void bus_test_child(int argc, char **argv);
void bus_test_end(pid_t pid, int sig);
