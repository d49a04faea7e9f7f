/* Memory of a node: what is granted, what is reported, and what control groups leave. */
#include "expertd/node_mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

enum { MIB = 1 << 20 };

static void test_memory_is_aligned_and_counted(void **state) {
    (void)state;
    for (int node = -1; node <= 0; node++) {
        NodeMem m;
        assert_int_equal(node_mem_new(&m, 5 * MIB + 1, node, NULL), 0);
        assert_int_equal((uintptr_t)m.at % (2 * MIB), 0);
        assert_int_equal(m.bytes, 6 * MIB);
        assert_true(m.bound == (node >= 0 && !*m.unbound));
        NodeMemReport r = node_mem_report(&m, node);
        assert_true(m.reserved || r.local_bytes == 0); /* nothing was touched */
        assert_true(!m.reserved || (r.huge_bytes == m.bytes && m.bound == (node == 0)));
        memset(m.at, 1, m.bytes);
        r = node_mem_report(&m, node);
        assert_true(r.huge_bytes <= m.bytes);
        /* a system without the query says so by node -1 */
        assert_true(r.local_bytes == m.bytes || r.node == -1 || node == 0);
        node_mem_free(&m);
        assert_null(m.at);
        node_mem_free(&m);
    }
}

/* A file's number; -1 when there is none. */
static long number_in(const char *path) {
    long n = -1;
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%ld", &n) != 1)
        n = -1;
    if (f)
        fclose(f);
    return n;
}

/* Reserved pages are taken of the node or of none, all that are needed or none; on a system that
 * has none this is the way without. */
static void test_reserved_pages_of_a_node(void **state) {
    (void)state;
    long left =
        number_in("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages");
    for (long pages = 1; pages <= left + 1 && pages < 64; pages += 5) {
        NodeMem m;
        assert_int_equal(node_mem_new(&m, (size_t)pages * 2 * MIB, 0, NULL), 0);
        assert_int_equal(m.reserved, left >= pages);
        memset(m.at, 1, m.bytes);
        if (m.reserved)
            assert_int_equal(node_mem_report(&m, 0).local_bytes, m.bytes);
        node_mem_free(&m);
    }
    NodeMem m;
    assert_int_equal(node_mem_new(&m, (size_t)(left < 0 ? 1 : left + 1) * 2 * MIB, 0, NULL), 0);
    assert_false(m.reserved);
    node_mem_free(&m);
}

static void test_a_node_that_is_not_there(void **state) {
    (void)state;
    NodeMem m;
    assert_int_equal(node_mem_new(&m, MIB, 1000, NULL), 0);
    assert_false(m.bound);
    assert_true(strlen(m.unbound) > 0);
    node_mem_free(&m);
    assert_int_equal(node_mem_new(&m, MIB, 5000, NULL), 0);
    assert_non_null(strstr(m.unbound, "out of range"));
    node_mem_free(&m);
    Err err = {0};
    assert_int_equal(node_mem_new(&m, (size_t)1 << 62, -1, &err), E_NOMEM);
    assert_non_null(strstr(err.text, "4611686018427387904"));
}

static void test_lock_limit(void **state) {
    (void)state;
    NodeMem m;
    Err err = {0};
    struct rlimit old, low = {MIB, MIB};
    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &old), 0);
    assert_int_equal(node_mem_new(&m, 4 * MIB, -1, NULL), 0);
    low.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &low), 0);
    int rc = node_mem_lock(&m, &err);
    if (rc) { /* with CAP_IPC_LOCK the limit does not count */
        assert_int_equal(rc, E_LIMIT);
        assert_non_null(strstr(err.text, "cannot lock 4194304 bytes: RLIMIT_MEMLOCK is 1048576"));
    }
    setrlimit(RLIMIT_MEMLOCK, &old);
    node_mem_free(&m);
}

/* ---- a tree of files in place of /proc and /sys ---- */

static char root[64];

static void put(const char *path, const char *text) {
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); *p++ = '/') {
        *p = 0;
        mkdir(full, 0755);
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static uint64_t available(int node, const char *want_what) {
    char what[128];
    uint64_t v = node_mem_available(root, node, what, sizeof what);
    assert_string_equal(what, want_what);
    return v;
}

static void test_the_least_of_all_limits(void **state) {
    (void)state;
    snprintf(root, sizeof root, "/tmp/baton-mem-XXXXXX");
    assert_non_null(mkdtemp(root));
    assert_true(available(0, "nothing") == UINT64_MAX);
    put("/proc/meminfo", "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:   800 kB\n");
    assert_int_equal(available(-1, "the system"), 800 * 1024);
    put("/sys/devices/system/node/node1/meminfo",
        "Node 1 MemTotal:  400 kB\nNode 1 MemFree:   100 kB\nNode 1 Inactive(file): 50 kB\n");
    assert_int_equal(available(1, "NUMA node 1"), 150 * 1024);
    assert_int_equal(available(0, "the system"), 800 * 1024);
    put("/proc/self/cgroup", "0::/a/b\n");
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/memory.current", "5\n");
    assert_int_equal(available(1, "NUMA node 1"), 150 * 1024);
    /* the parent's limit counts too; page cache that can be given back does not */
    put("/sys/fs/cgroup/a/memory.max", "100000\n");
    put("/sys/fs/cgroup/a/memory.current", "70000\n");
    put("/sys/fs/cgroup/a/memory.stat", "anon 10\nfile 30000\ninactive_file 20000\n");
    assert_int_equal(available(1, "control group /a"), 50000);
    put("/sys/fs/cgroup/a/b/memory.max", "20\n");
    assert_int_equal(available(1, "control group /a/b"), 15);
    put("/sys/fs/cgroup/a/b/memory.max", "3\n"); /* over its limit already */
    assert_int_equal(available(1, "control group /a/b"), 0);
    put("/sys/fs/cgroup/a/b/memory.max", "max\n");
    /* version 1: a mount of its own, the process's group and those above it */
    put("/proc/self/cgroup", "7:cpu:/x\n5:memory:/jobs/one\n");
    assert_int_equal(available(-1, "the system"), 800 * 1024);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9000\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
    assert_int_equal(available(1, "control group /"), 8000);
    put("/sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes", "700\n");
    put("/sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes", "600\n");
    put("/sys/fs/cgroup/memory/jobs/one/memory.stat", "cache 90\ninactive_file 50\n");
    assert_int_equal(available(1, "control group /jobs/one"), 150);
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", root);
    assert_int_equal(system(command), 0);
}

static void test_this_machine_has_memory(void **state) {
    (void)state;
    char what[128];
    assert_true(node_mem_available("", -1, what, sizeof what) > MIB);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory_is_aligned_and_counted),
        cmocka_unit_test(test_reserved_pages_of_a_node),
        cmocka_unit_test(test_a_node_that_is_not_there),
        cmocka_unit_test(test_lock_limit),
        cmocka_unit_test(test_the_least_of_all_limits),
        cmocka_unit_test(test_this_machine_has_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
