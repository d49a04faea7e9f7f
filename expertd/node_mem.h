/* Memory of one NUMA node in huge pages, and what the system really gave. Start-up only. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct NodeMem {
    void *at; /* 2 MiB aligned */
    size_t bytes;
    bool reserved;     /* of the system's pool of reserved huge pages */
    bool bound;        /* to the node */
    char unbound[120]; /* why not; "" when no node was asked for */
} NodeMem;

/* Reserves address space of `bytes`, rounded up to 2 MiB, of node's memory (-1: any): reserved huge
 * pages where enough are free, which are taken at once; else transparent ones are asked for, and
 * nothing is touched yet. A system that refuses the binding leaves it unbound and says so. E_NOMEM
 * with the number of bytes. */
int node_mem_new(NodeMem *out, size_t bytes, int node, Err *err);
void node_mem_free(NodeMem *m);

/* What touched memory is made of. */
typedef struct NodeMemReport {
    uint64_t huge_bytes;  /* in pages of 2 MiB or more */
    uint64_t local_bytes; /* on the node asked for; with node -1, on whichever has most */
    int node;             /* that node; -1 when the system does not tell */
} NodeMemReport;

NodeMemReport node_mem_report(const NodeMem *m, int node);

/* Locks it into memory. E_LIMIT with both numbers when RLIMIT_MEMLOCK is smaller. */
int node_mem_lock(const NodeMem *m, Err *err);

/* How much memory this process may still take on the node (-1: any): the least of what the node,
 * the system and the process's control groups have left. *what names the one that is least. root is
 * "" but in tests, which put a tree of their own before /proc and /sys. UINT64_MAX when nothing
 * tells. */
uint64_t node_mem_available(const char *root, int node, char *what, size_t n);
