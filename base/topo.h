/* The machine: NUMA nodes, cores that this process may use, pinning. Thin layer over hwloc;
 * start-up only. */
#pragma once

#include "base/err.h"

typedef struct Topo Topo;

int topo_open(Topo **out, Err *err);
void topo_close(Topo *t);

int topo_n_nodes(const Topo *t);
/* Physical cores that the process may use, on one NUMA node (by OS index) or on all (node -1). */
int topo_n_cores(const Topo *t, int node);
/* Binds the calling thread to the index-th allowed physical core of the node (modulo their number);
 * node -1 for any. */
int topo_pin_core(const Topo *t, int node, int index, Err *err);
/* Binds the calling thread, and memory it touches first, to the node. */
int topo_bind_node(const Topo *t, int node, Err *err);
