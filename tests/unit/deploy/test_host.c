/* A host's texts from trees that stand for /proc and /sys: nodes, processors, control groups of
 * both versions; and from the host that this runs on. */
#include "deploy/baton/host_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

static char root[64];

static int setup(void **state) {
    (void)state;
    snprintf(root, sizeof root, "/tmp/baton-host-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    char *command = xasprintf("rm -rf '%s'", root);
    int rc = system(command);
    free(command);
    return rc;
}

/* A file of the tree with all folders above it. */
static void put(const char *path, const char *text) {
    char *name = xasprintf("%s%s", root, path);
    for (char *slash = strchr(name + strlen(root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(name, 0755);
        *slash = '/';
    }
    FILE *f = fopen(name, "we");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
    free(name);
}

static Facts *parse(const char *name, const Buf *b) {
    Facts *f = xcalloc(1, sizeof *f);
    Err err = {0};
    facts_init(f);
    char *copy = xstrdup(b->data ? b->data : "");
    if (facts_parse(f, name, copy, &err))
        fail_msg("%s", err.text);
    free(copy);
    return f;
}

static void nodes_with_distances(void **state) {
    (void)state;
    Buf b = {0};
    put("/sys/devices/system/node/node0/cpulist", "0-3,8-11\n");
    put("/sys/devices/system/node/node0/meminfo",
        "Node 0 MemTotal:       2097152 kB\nNode 0 MemFree:        1048576 kB\n");
    put("/sys/devices/system/node/node0/distance", "10 21\n");
    put("/sys/devices/system/node/node2/cpulist", "4-7,12-15\n");
    put("/sys/devices/system/node/node2/distance", "21 10\n");
    host_put_numa(root, &b);
    Facts *f = parse("numactl.txt", &b);
    assert_int_equal(facts_derive(f, 0, NULL), 0);
    assert_int_equal(f->n_nodes, 3);
    assert_false(f->node[1].present);
    assert_int_equal(f->node[0].size_mb, 2048);
    assert_int_equal(f->node[0].free_mb, 1024);
    assert_int_equal(f->node[2].size_mb, -1);
    assert_int_equal(f->distance[0][2], 21);
    assert_int_equal(f->n_sockets, 2);
    assert_int_equal(f->node[2].n_cores, 4);
    free(f);
    buf_done(&b);
}

static void a_system_without_nodes_has_one(void **state) {
    (void)state;
    Buf b = {0};
    put("/sys/devices/system/cpu/online", "0-7\n");
    put("/proc/meminfo", "MemTotal:       16310680 kB\nMemFree:         1048576 kB\n");
    host_put_numa(root, &b);
    Facts *f = parse("numactl.txt", &b);
    assert_int_equal(f->n_nodes, 1);
    assert_int_equal(f->node[0].size_mb, 15928);
    free(f);
    buf_done(&b);
}

static void processors(void **state) {
    (void)state;
    Buf b = {0};
    put("/proc/cpuinfo",
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
        "model name\t: Intel(R) Xeon(R)\nflags\t\t: fpu amx_tile amx_int8 hypervisor\n\n"
        "processor\t: 1\nmodel\t\t: 1\n");
    put("/sys/devices/system/cpu/online", "0-3\n");
    put("/sys/devices/system/cpu/cpu0/topology/physical_package_id", "0\n");
    put("/sys/devices/system/cpu/cpu1/topology/physical_package_id", "1\n");
    put("/sys/devices/system/cpu/cpu2/topology/physical_package_id", "0\n");
    put("/sys/devices/system/cpu/cpu3/topology/physical_package_id", "1\n");
    put("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n");
    host_put_cpu(root, &b);
    Facts *f = parse("lscpu.txt", &b);
    assert_string_equal(f->cpu_name, "Intel(R) Xeon(R)");
    assert_int_equal(f->family, 6);
    assert_int_equal(f->model, 143);
    assert_true(f->has_amx && f->hypervisor);
    assert_int_equal(f->lscpu_sockets, 2);
    assert_int_equal(f->threads_per_core, 2);
    free(f);
    buf_done(&b);
}

static Facts *limits(void) {
    Buf b = {0};
    host_put_limits(root, &b);
    Facts *f = parse("host.txt", &b);
    buf_done(&b);
    return f;
}

static void pages_and_cpuset(void **state) {
    (void)state;
    put("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "12\n");
    put("/proc/sys/kernel/numa_balancing", "1\n");
    put("/proc/self/status", "Name:\tx\nCpus_allowed_list:\t2-3\nMems_allowed_list:\t0\n");
    Facts *f = limits();
    assert_string_equal(f->thp, "never");
    assert_int_equal(f->huge_2m_free, 12);
    assert_int_equal(f->numa_balancing, 1);
    assert_true(f->cpuset_known && facts_cpus_has(&f->cpuset, 3) && !facts_cpus_has(&f->cpuset, 1));
    assert_int_equal(f->cgroup_memory_bytes, INT64_MAX);
    assert_true(f->cgroup_cpus < 0);
    free(f);
}

static void control_groups_of_version_2(void **state) {
    (void)state;
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
    put("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
    put("/sys/fs/cgroup/a/memory.max", "1000000000\n");
    put("/sys/fs/cgroup/a/memory.current", "250000000\n");
    put("/proc/meminfo", "MemAvailable:   99999999 kB\n");
    Facts *f = limits();
    assert_true(f->cgroup_cpus > 1.49 && f->cgroup_cpus < 1.51);
    assert_int_equal(f->cgroup_memory_bytes, 750000000);
    free(f);
}

static void control_groups_of_version_1(void **state) {
    (void)state;
    put("/proc/self/cgroup", "4:memory:/m\n2:cpu,cpuacct:/c\n0::/\n");
    put("/sys/fs/cgroup/cpu/c/cpu.cfs_quota_us", "250000\n");
    put("/sys/fs/cgroup/cpu/c/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    put("/sys/fs/cgroup/memory/m/memory.limit_in_bytes", "4000000000\n");
    put("/sys/fs/cgroup/memory/m/memory.usage_in_bytes", "1000000000\n");
    Facts *f = limits();
    assert_true(f->cgroup_cpus > 2.49 && f->cgroup_cpus < 2.51);
    assert_int_equal(f->cgroup_memory_bytes, 3000000000);
    free(f);
}

static void this_host(void **state) {
    (void)state;
    Facts *f = xcalloc(1, sizeof *f);
    Err err = {0};
    int list[FACTS_NODES];
    host_facts(f);
    if (facts_derive(f, 0, &err))
        fail_msg("%s", err.text);
    assert_true(facts_usable_nodes(f, list) >= 1);
    assert_true(f->node[list[0]].n_cores >= 1);
    assert_true(f->flags_known && *f->isa && *f->amx);
    assert_true(f->n_ucx >= 1);
    assert_true(*f->kv_transport && f->kv_gb_per_s > 0);
    free(f);
}

static void a_node_is_measured(void **state) {
    (void)state;
    Facts *f = xcalloc(1, sizeof *f);
    Err err = {0};
    int list[FACTS_NODES];
    host_facts(f);
    if (facts_derive(f, 0, &err) || host_measure(f, &err))
        fail_msg("%s", err.text);
    int n = facts_usable_nodes(f, list);
    for (int i = 0; i < n; i++)
        assert_true(f->node[list[i]].gb_per_s > 0.005);
    Buf b = {0};
    host_put_measured(f, &b);
    assert_non_null(strstr(b.data, "gb_per_s: "));
    buf_done(&b);
    free(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(nodes_with_distances, setup, teardown),
        cmocka_unit_test_setup_teardown(a_system_without_nodes_has_one, setup, teardown),
        cmocka_unit_test_setup_teardown(processors, setup, teardown),
        cmocka_unit_test_setup_teardown(pages_and_cpuset, setup, teardown),
        cmocka_unit_test_setup_teardown(control_groups_of_version_2, setup, teardown),
        cmocka_unit_test_setup_teardown(control_groups_of_version_1, setup, teardown),
        cmocka_unit_test(this_host),
        cmocka_unit_test(a_node_is_measured),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
