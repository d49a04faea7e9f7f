/* NUMA nodes, allowed cores, pinning. Start-up only, but the binding calls are made by the thread
 * that wants to be bound. */
#include "base/topo.h"

#include <hwloc.h>

#include <errno.h>
#include <stdbool.h>
#include <string.h>

struct Topo {
    hwloc_topology_t hw;
    hwloc_cpuset_t allowed; /* what this process may use: cgroup, affinity of the opening thread */
};

int topo_open(Topo **out, Err *err) {
    Topo *t = xcalloc(1, sizeof *t);
    if (hwloc_topology_init(&t->hw) < 0) {
        free(t);
        return err_set(err, E_IO, "cannot read the machine's topology: %s", strerror(errno));
    }
    t->allowed = hwloc_bitmap_alloc();
    CHECK(t->allowed);
    if (hwloc_topology_load(t->hw) < 0) {
        int why = errno;
        topo_close(t);
        return err_set(err, E_IO, "cannot read the machine's topology: %s", strerror(why));
    }
    hwloc_const_cpuset_t all = hwloc_topology_get_allowed_cpuset(t->hw);
    if (hwloc_get_cpubind(t->hw, t->allowed, HWLOC_CPUBIND_THREAD) < 0)
        hwloc_bitmap_copy(t->allowed,
                          all); /* an unbound thread may use all that the system allows */
    else
        hwloc_bitmap_and(t->allowed, t->allowed, all);
    *out = t;
    return 0;
}

void topo_close(Topo *t) {
    if (!t)
        return;
    hwloc_bitmap_free(t->allowed);
    hwloc_topology_destroy(t->hw);
    free(t);
}

int topo_n_nodes(const Topo *t) {
    int n = hwloc_get_nbobjs_by_type(t->hw, HWLOC_OBJ_NUMANODE);
    return n > 0 ? n : 1;
}

/* The allowed processors of the node, or of all nodes for -1, in set. False when there is no such
 * node. */
static bool node_cpus(const Topo *t, int node, hwloc_cpuset_t set) {
    hwloc_bitmap_copy(set, t->allowed);
    if (node < 0)
        return true;
    hwloc_obj_t obj = hwloc_get_numanode_obj_by_os_index(t->hw, (unsigned)node);
    if (!obj)
        return false;
    hwloc_bitmap_and(set, set, obj->cpuset);
    return true;
}

/* Counts the cores with a processor in set; the one numbered index (or none) goes to *found. A
 * machine that does not tell its cores counts processors. */
static int count_cores(const Topo *t, hwloc_const_cpuset_t set, int index, hwloc_obj_t *found) {
    int n = 0, depth = hwloc_get_type_or_below_depth(t->hw, HWLOC_OBJ_CORE);
    for (hwloc_obj_t core = NULL; (core = hwloc_get_next_obj_by_depth(t->hw, depth, core));)
        if (hwloc_bitmap_intersects(core->cpuset, set) && n++ == index && found)
            *found = core;
    return n;
}

int topo_n_cores(const Topo *t, int node) {
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    int n = node_cpus(t, node, set) ? count_cores(t, set, -1, NULL) : 0;
    hwloc_bitmap_free(set);
    return n;
}

static int no_such_node(int node, Err *err) {
    return err_set(err, E_NOTFOUND, "NUMA node %d has no core that this process may use", node);
}

int topo_pin_core(const Topo *t, int node, int index, Err *err) {
    int n = topo_n_cores(t, node);
    if (n == 0)
        return no_such_node(node, err);
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    hwloc_obj_t core = NULL;
    node_cpus(t, node, set);
    count_cores(t, set, index % n, &core);
    CHECK(core);
    /* One hardware thread of the core: its siblings stay free for helpers of the same thread. */
    hwloc_bitmap_and(set, set, core->cpuset);
    hwloc_bitmap_singlify(set);
    int rc = hwloc_set_cpubind(t->hw, set, HWLOC_CPUBIND_THREAD), why = errno;
    hwloc_bitmap_free(set);
    return rc < 0 ? err_set(err, E_IO, "cannot pin a thread to core %u: %s", core->logical_index,
                            strerror(why))
                  : 0;
}

int topo_bind_node(const Topo *t, int node, Err *err) {
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    bool ok = node >= 0 && node_cpus(t, node, set) && !hwloc_bitmap_iszero(set);
    int rc = ok ? hwloc_set_cpubind(t->hw, set, HWLOC_CPUBIND_THREAD) : 0, why = errno;
    hwloc_bitmap_free(set);
    if (!ok)
        return no_such_node(node, err);
    if (rc < 0)
        return err_set(err, E_IO, "cannot bind a thread to NUMA node %d: %s", node, strerror(why));
    /* Without the right to set a policy (containers) the system's default holds: first touch, which
     * a bound thread does on its node. */
    hwloc_obj_t obj = hwloc_get_numanode_obj_by_os_index(t->hw, (unsigned)node);
    rc = hwloc_set_membind(t->hw, obj->nodeset, HWLOC_MEMBIND_BIND,
                           HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET);
    if (rc < 0 && errno != EPERM && errno != ENOSYS)
        return err_set(err, E_IO, "cannot bind memory to NUMA node %d: %s", node, strerror(errno));
    return 0;
}
