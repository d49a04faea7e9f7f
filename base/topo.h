/* The machine: NUMA nodes, cores that this process may use, pinning, memory of a node. Thin layer
 * over hwloc; start-up only. Nodes are named by their OS index. */
#pragma once

#include "base/err.h"

#include <stdint.h>

typedef struct Topo Topo;

int topo_open(Topo **out, Err *err);
/* A machine described by an XML file of hwloc, to be asked about; binding to it does nothing. */
int topo_open_xml(Topo **out, const char *path, Err *err);
void topo_close(Topo *t);

/* Nodes that the process may allocate from; at least 1. */
int topo_n_nodes(const Topo *t);
/* Physical cores that the process may use, on one NUMA node or on all (node -1). */
int topo_n_cores(const Topo *t, int node);
/* Whether a service can live on the node: it exists, its memory may be used and is there, and so
 * are cores. E_NOTFOUND says which of these fails. */
int topo_check_node(const Topo *t, int node, Err *err);
/* The processor (OS index) that topo_pin_core takes; -1 when there is none. */
int topo_core_cpu(const Topo *t, int node, int index);
/* Last-level caches of the cores that the process may use on the node (-1: all); 0 when unknown. */
uint64_t topo_cache_bytes(const Topo *t, int node);

/* Binds the calling thread to the index-th allowed physical core of the node (modulo their number);
 * node -1 for any. */
int topo_pin_core(const Topo *t, int node, int index, Err *err);
/* Binds the calling thread, and memory it touches first, to the node; E_NOTFOUND as
 * topo_check_node. A system that refuses the memory's part (containers) leaves its default: the
 * node of the thread that touches it. */
int topo_bind_node(const Topo *t, int node, Err *err);
