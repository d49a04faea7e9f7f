/* base/topo: counts that agree with each other, pinning that the system confirms, and machines that
 * are not here, described by hwloc. */
#include "base/topo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <hwloc.h>

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int allowed_cpus(cpu_set_t *set) {
    assert_int_equal(sched_getaffinity(0, sizeof *set, set), 0);
    return CPU_COUNT(set);
}

static void cores_of_nodes_add_up(void **state) {
    Topo *t = *state;
    cpu_set_t set;
    int all = topo_n_cores(t, -1), sum = 0;
    for (int node = 0; node < 1024; node++)
        sum += topo_n_cores(t, node);
    assert_true(topo_n_nodes(t) >= 1);
    assert_true(all >= 1 && all <= allowed_cpus(&set));
    assert_int_equal(sum, all);
}

typedef struct Pin {
    const Topo *topo;
    int index, rc, n_cpus, cpu;
    Err err;
} Pin;

static void *pin(void *arg) {
    Pin *p = arg;
    cpu_set_t set;
    p->rc = topo_pin_core(p->topo, -1, p->index, &p->err);
    sched_getaffinity(0, sizeof set, &set);
    p->n_cpus = CPU_COUNT(&set);
    for (p->cpu = 0; !CPU_ISSET(p->cpu, &set); p->cpu++)
        ;
    return NULL;
}

static Pin pin_in_thread(const Topo *t, int index) {
    Pin p = {.topo = t, .index = index};
    pthread_t thread;
    pthread_create(&thread, NULL, pin, &p);
    pthread_join(thread, NULL);
    return p;
}

static void a_pinned_thread_has_one_processor(void **state) {
    Topo *t = *state;
    int n = topo_n_cores(t, -1);
    cpu_set_t used;
    CPU_ZERO(&used);
    for (int i = 0; i < n; i++) {
        Pin p = pin_in_thread(t, i);
        assert_int_equal(p.rc, 0);
        assert_int_equal(p.n_cpus, 1);
        assert_false(CPU_ISSET(p.cpu, &used)); /* every index is another core */
        CPU_SET(p.cpu, &used);
    }
    assert_int_equal(pin_in_thread(t, n).cpu, pin_in_thread(t, 0).cpu); /* modulo their number */
}

static void *bind_first_node(void *arg) {
    Pin *p = arg;
    cpu_set_t set;
    for (int node = 0; node < 1024; node++)
        if (topo_n_cores(p->topo, node) > 0) {
            p->rc = topo_bind_node(p->topo, node, &p->err);
            p->index = topo_n_cores(p->topo, node);
            break;
        }
    sched_getaffinity(0, sizeof set, &set);
    p->n_cpus = CPU_COUNT(&set);
    return NULL;
}

static void a_bound_thread_keeps_to_its_node(void **state) {
    Pin p = {.topo = *state, .rc = 1};
    pthread_t thread;
    pthread_create(&thread, NULL, bind_first_node, &p);
    pthread_join(thread, NULL);
    assert_string_equal(p.err.text, "");
    assert_int_equal(p.rc, 0);
    assert_true(p.n_cpus >= p.index);
}

static void a_node_that_is_not_there_is_refused(void **state) {
    Topo *t = *state;
    Err err = {0};
    assert_int_equal(topo_n_cores(t, 4000), 0);
    assert_int_equal(topo_pin_core(t, 4000, 0, &err), E_NOTFOUND);
    assert_string_equal(err.text, "NUMA node 4000 has no core that this process may use");
    assert_int_equal(topo_bind_node(t, 4000, &err), E_NOTFOUND);
    assert_non_null(strstr(err.text, "there is no NUMA node 4000: this machine has 0"));
    assert_int_equal(topo_bind_node(t, -1, &err), E_NOTFOUND);
    assert_int_equal(topo_core_cpu(t, 4000, 0), -1);
}

/* ---- other machines ---- */

typedef struct Machine {
    const char *synthetic;   /* hwloc's description */
    const char *cpus, *mems; /* lists that the cpuset allows; NULL: all */
    int empty_node;          /* node + 1 without memory; 0: none */
} Machine;

static Topo *machine(Machine m) {
    char path[] = "/tmp/topo-XXXXXX";
    hwloc_topology_t hw;
    hwloc_bitmap_t cpus = hwloc_bitmap_alloc(), mems = hwloc_bitmap_alloc();
    Topo *t = NULL;
    Err err = {0};
    close(mkstemp(path));
    hwloc_topology_init(&hw);
    hwloc_topology_set_flags(hw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
    assert_int_equal(hwloc_topology_set_synthetic(hw, m.synthetic), 0);
    assert_int_equal(hwloc_topology_load(hw), 0);
    if (m.cpus)
        hwloc_bitmap_list_sscanf(cpus, m.cpus);
    if (m.mems)
        hwloc_bitmap_list_sscanf(mems, m.mems);
    if (m.cpus || m.mems)
        assert_int_equal(hwloc_topology_allow(hw, m.cpus ? cpus : NULL, m.mems ? mems : NULL,
                                              HWLOC_ALLOW_FLAG_CUSTOM),
                         0);
    if (m.empty_node)
        hwloc_get_numanode_obj_by_os_index(hw, (unsigned)m.empty_node - 1)
            ->attr->numanode.local_memory = 0;
    assert_int_equal(hwloc_topology_export_xml(hw, path, 0), 0);
    hwloc_topology_destroy(hw);
    hwloc_bitmap_free(cpus);
    hwloc_bitmap_free(mems);
    int rc = topo_open_xml(&t, path, &err);
    unlink(path);
    if (rc)
        fail_msg("%s", err.text);
    return t;
}

/* Every thread up to the number of cores has a processor of its own, of a core of its own. */
static void check_cores(const Topo *t, int node, int cores, int smt) {
    bool core_used[256] = {false};
    assert_int_equal(topo_n_cores(t, node), cores);
    for (int i = 0; i < cores; i++) {
        int cpu = topo_core_cpu(t, node, i);
        assert_true(cpu >= 0 && cpu < 256 && !core_used[cpu / smt]);
        core_used[cpu / smt] = true;
    }
    assert_int_equal(topo_core_cpu(t, node, cores), topo_core_cpu(t, node, 0));
}

static void one_node(void **state) {
    (void)state;
    Topo *t = machine((Machine){.synthetic = "package:1 [numa(memory=64GB)] l3:1 core:6 pu:1"});
    assert_int_equal(topo_n_nodes(t), 1);
    check_cores(t, -1, 6, 1);
    check_cores(t, 0, 6, 1);
    assert_int_equal(topo_check_node(t, 0, NULL), 0);
    topo_close(t);
}

static void two_sockets_of_two_clusters(void **state) {
    (void)state;
    for (int smt = 1; smt <= 2; smt++) {
        char what[128];
        snprintf(what, sizeof what,
                 "package:2 group:2 [numa(memory=128GB)] l3:1(size=32MB) core:8 pu:%d", smt);
        Topo *t = machine((Machine){.synthetic = what});
        assert_int_equal(topo_n_nodes(t), 4);
        check_cores(t, -1, 32, smt);
        for (int node = 0; node < 4; node++) {
            assert_int_equal(topo_check_node(t, node, NULL), 0);
            check_cores(t, node, 8, smt);
            assert_int_equal(topo_core_cpu(t, node, 0), node * 8 * smt);
            assert_int_equal(topo_cache_bytes(t, node), 32000000);
        }
        assert_int_equal(topo_cache_bytes(t, -1), 4 * 32000000);
        topo_close(t);
    }
}

static void eight_nodes(void **state) {
    (void)state;
    Topo *t = machine((Machine){.synthetic = "package:8 [numa(memory=64GB)] core:6 pu:2"});
    assert_int_equal(topo_n_nodes(t), 8);
    for (int node = 0; node < 8; node++)
        check_cores(t, node, 6, 2);
    assert_int_equal(topo_n_cores(t, 8), 0);
    topo_close(t);
}

static void cpusets(void **state) {
    (void)state;
    static const char two[] = "package:2 [numa(memory=64GB)] core:4 pu:2";
    Err err = {0};
    /* Half of the processors: the second half of each node, cut through a core. */
    Topo *t = machine((Machine){.synthetic = two, .cpus = "3-7,11-15"});
    check_cores(t, 0, 3, 2);
    check_cores(t, 1, 3, 2);
    assert_int_equal(topo_core_cpu(t, 0, 0), 3);
    topo_close(t);
    /* One sibling of each core. */
    t = machine((Machine){.synthetic = two, .cpus = "1,3,5,7"});
    check_cores(t, 0, 4, 2);
    assert_int_equal(topo_check_node(t, 1, &err), E_NOTFOUND);
    assert_string_equal(err.text, "NUMA node 1 has no core that this process may use");
    topo_close(t);
    /* One node. */
    t = machine((Machine){.synthetic = two, .cpus = "8-15", .mems = "1"});
    assert_int_equal(topo_n_nodes(t), 1);
    check_cores(t, -1, 4, 2);
    assert_int_equal(topo_check_node(t, 1, NULL), 0);
    assert_int_equal(topo_check_node(t, 0, &err), E_NOTFOUND);
    assert_string_equal(err.text,
                        "this process may not allocate from NUMA node 0: its cpuset allows 1");
    /* All processors, memory of one node. */
    topo_close(t);
    t = machine((Machine){.synthetic = two, .mems = "0"});
    check_cores(t, 1, 4, 2);
    assert_int_equal(topo_check_node(t, 1, &err), E_NOTFOUND);
    assert_int_equal(topo_bind_node(t, 1, &err), E_NOTFOUND);
    topo_close(t);
}

static void nodes_that_lack_something(void **state) {
    (void)state;
    static const char four[] = "package:4 [numa(memory=64GB)] core:2 pu:1";
    Err err = {0};
    Topo *t = machine((Machine){.synthetic = four, .empty_node = 3, .cpus = "0-1,4-7"});
    assert_int_equal(topo_check_node(t, 0, NULL), 0);
    assert_int_equal(topo_check_node(t, 1, &err), E_NOTFOUND);
    assert_string_equal(err.text, "NUMA node 1 has no core that this process may use");
    assert_int_equal(topo_check_node(t, 2, &err), E_NOTFOUND);
    assert_string_equal(err.text, "NUMA node 2 has no memory");
    assert_int_equal(topo_check_node(t, 3, NULL), 0);
    topo_close(t);
    assert_int_equal(topo_open_xml(&t, "tests/unit/base/test_topo.c", &err), E_IO);
    assert_non_null(strstr(err.text, "test_topo.c"));
}

static int open_topo(void **state) {
    return topo_open((Topo **)state, NULL);
}

static int close_topo(void **state) {
    topo_close(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cores_of_nodes_add_up),
        cmocka_unit_test(a_pinned_thread_has_one_processor),
        cmocka_unit_test(a_bound_thread_keeps_to_its_node),
        cmocka_unit_test(a_node_that_is_not_there_is_refused),
        cmocka_unit_test(one_node),
        cmocka_unit_test(two_sockets_of_two_clusters),
        cmocka_unit_test(eight_nodes),
        cmocka_unit_test(cpusets),
        cmocka_unit_test(nodes_that_lack_something),
    };
    return cmocka_run_group_tests(tests, open_topo, close_topo);
}
