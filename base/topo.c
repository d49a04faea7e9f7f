/* See topo.h. Immutable after opening; the binding calls are made by the thread that wants to be
 * bound. */
#include "base/topo.h"

#include <hwloc.h>

#include <errno.h>
#include <stdbool.h>
#include <string.h>

struct Topo {
    hwloc_topology_t hw;
    hwloc_cpuset_t allowed; /* what this process may use: cgroup, affinity of the opening thread */
};

static int open_from(Topo **out, const char *xml, Err *err) {
    Topo *t = xcalloc(1, sizeof *t);
    if (hwloc_topology_init(&t->hw) < 0) {
        free(t);
        return err_set(err, E_IO, "cannot read the machine's topology: %s", strerror(errno));
    }
    t->allowed = hwloc_bitmap_alloc();
    CHECK(t->allowed);
    /* What the process may not use stays visible, so that errors can tell it from what is not
     * there. */
    hwloc_topology_set_flags(t->hw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    if ((xml && hwloc_topology_set_xml(t->hw, xml) < 0) || hwloc_topology_load(t->hw) < 0) {
        int why = errno;
        topo_close(t);
        return err_set(err, E_IO, "cannot read the machine's topology%s%s: %s", xml ? " from " : "",
                       xml ? xml : "", strerror(why));
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

int topo_open(Topo **out, Err *err) {
    return open_from(out, NULL, err);
}

int topo_open_xml(Topo **out, const char *path, Err *err) {
    return open_from(out, path, err);
}

void topo_close(Topo *t) {
    if (!t)
        return;
    hwloc_bitmap_free(t->allowed);
    hwloc_topology_destroy(t->hw);
    free(t);
}

int topo_n_nodes(const Topo *t) {
    int n = hwloc_bitmap_weight(hwloc_topology_get_allowed_nodeset(t->hw));
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

/* The first allowed processor of the index-th allowed core of the node, modulo their number. */
static bool core_processor(const Topo *t, int node, int index, hwloc_cpuset_t set) {
    int n = topo_n_cores(t, node);
    hwloc_obj_t core = NULL;
    if (n == 0)
        return false;
    node_cpus(t, node, set);
    count_cores(t, set, index % n, &core);
    CHECK(core);
    /* One hardware thread of the core: its siblings stay free for helpers of the same thread. */
    hwloc_bitmap_and(set, set, core->cpuset);
    hwloc_bitmap_singlify(set);
    return true;
}

int topo_core_cpu(const Topo *t, int node, int index) {
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    int cpu = core_processor(t, node, index, set) ? hwloc_bitmap_first(set) : -1;
    hwloc_bitmap_free(set);
    return cpu;
}

uint64_t topo_cache_bytes(const Topo *t, int node) {
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    uint64_t sum = 0;
    CHECK(set);
    node_cpus(t, node, set);
    for (hwloc_obj_t c = NULL; (c = hwloc_get_next_obj_by_type(t->hw, HWLOC_OBJ_L3CACHE, c));)
        if (hwloc_bitmap_intersects(c->cpuset, set))
            sum += c->attr->cache.size;
    hwloc_bitmap_free(set);
    return sum;
}

static int no_core(int node, Err *err) {
    return err_set(err, E_NOTFOUND, "NUMA node %d has no core that this process may use", node);
}

int topo_check_node(const Topo *t, int node, Err *err) {
    hwloc_obj_t obj = node < 0 ? NULL : hwloc_get_numanode_obj_by_os_index(t->hw, (unsigned)node);
    char list[128];
    if (!obj) {
        hwloc_bitmap_list_snprintf(list, sizeof list, hwloc_topology_get_topology_nodeset(t->hw));
        return err_set(err, E_NOTFOUND, "there is no NUMA node %d: this machine has %s", node,
                       list);
    }
    if (!hwloc_bitmap_isset(hwloc_topology_get_allowed_nodeset(t->hw), (unsigned)node)) {
        hwloc_bitmap_list_snprintf(list, sizeof list, hwloc_topology_get_allowed_nodeset(t->hw));
        return err_set(err, E_NOTFOUND,
                       "this process may not allocate from NUMA node %d: its cpuset allows %s",
                       node, list);
    }
    if (obj->attr->numanode.local_memory == 0 &&
        hwloc_get_root_obj(t->hw)->total_memory > 0) /* else no node tells its memory */
        return err_set(err, E_NOTFOUND, "NUMA node %d has no memory", node);
    return topo_n_cores(t, node) == 0 ? no_core(node, err) : 0;
}

int topo_pin_core(const Topo *t, int node, int index, Err *err) {
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    bool found = core_processor(t, node, index, set);
    int cpu = found ? hwloc_bitmap_first(set) : -1;
    int rc = found ? hwloc_set_cpubind(t->hw, set, HWLOC_CPUBIND_THREAD) : 0, why = errno;
    hwloc_bitmap_free(set);
    if (!found)
        return no_core(node, err);
    return rc < 0
               ? err_set(err, E_IO, "cannot pin a thread to processor %d: %s", cpu, strerror(why))
               : 0;
}

int topo_bind_node(const Topo *t, int node, Err *err) {
    int rc = topo_check_node(t, node, err);
    if (rc)
        return rc;
    hwloc_cpuset_t set = hwloc_bitmap_alloc();
    CHECK(set);
    node_cpus(t, node, set);
    rc = hwloc_set_cpubind(t->hw, set, HWLOC_CPUBIND_THREAD);
    int why = errno;
    hwloc_bitmap_free(set);
    if (rc < 0)
        return err_set(err, E_IO, "cannot bind a thread to NUMA node %d: %s", node, strerror(why));
    hwloc_obj_t obj = hwloc_get_numanode_obj_by_os_index(t->hw, (unsigned)node);
    rc = hwloc_set_membind(t->hw, obj->nodeset, HWLOC_MEMBIND_BIND,
                           HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET);
    if (rc < 0 && errno != EPERM && errno != ENOSYS)
        return err_set(err, E_IO, "cannot bind memory to NUMA node %d: %s", node, strerror(errno));
    return 0;
}
