/* Facts of a host: each text as tools really print it, ragged and partial, and what is refused. */
#include "deploy/baton/facts.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#define SLOW "tests/unit/deploy/cases/slow_4xh100"
#define FOUR "tests/unit/deploy/facts_4gpu"

static Facts *f;

static int setup(void **state) {
    *state = f = xcalloc(1, sizeof *f);
    facts_init(f);
    return 0;
}

static int teardown(void **state) {
    free(*state);
    return 0;
}

static int parse(const char *name, const char *text, Err *err) {
    char *copy = xstrdup(text);
    *err = (Err){0};
    int rc = facts_parse(f, name, copy, err);
    free(copy);
    return rc;
}

static void accept(const char *name, const char *text) {
    Err err;
    if (parse(name, text, &err))
        fail_msg("%s", err.text);
}

static void refuse(const char *name, const char *text, const char *where, const char *what) {
    Err err;
    facts_init(f);
    assert_int_equal(parse(name, text, &err), E_FORMAT);
    if (!strstr(err.text, where) || !strstr(err.text, what))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", err.text, where, what);
}

static void the_slow_machine(void **state) {
    (void)state;
    Err err = {0};
    int list[FACTS_NODES];
    assert_int_equal(facts_read(f, SLOW, &err), 0);
    assert_int_equal(facts_derive(f, 0, &err), 0);
    assert_int_equal(f->n_nodes, 4);
    assert_int_equal(f->n_sockets, 2);
    assert_non_null(strstr(f->sockets_how, "GPUs"));
    assert_int_equal(f->node[0].socket, 0);
    assert_int_equal(f->node[1].socket, 0);
    assert_int_equal(f->node[2].socket, 1);
    assert_int_equal(f->node[3].socket, 1);
    assert_int_equal(f->threads_per_core, 2);
    assert_true(f->smt_inferred);
    assert_int_equal(f->node[3].n_cores, 32);
    assert_int_equal(f->node[0].size_mb, 515651);
    assert_int_equal(f->node[1].free_mb, 262974);
    assert_int_equal(facts_usable_nodes(f, list), 4);
    assert_int_equal(facts_n_gpus(f), 7);
    assert_string_equal(f->gpu[6].name, "NVIDIA RTX 6000 Ada Generation");
    assert_int_equal(f->gpu[4].node, 2);
    assert_int_equal(f->gpu[0].link[1], FACTS_LINK_NV);
    assert_int_equal(f->gpu[0].n_nvlink[1], 12);
    assert_int_equal(f->gpu[0].link[2], FACTS_LINK_NODE);
    assert_int_equal(f->gpu[3].link[4], FACTS_LINK_SYS);
}

static void texts_as_tools_print_them(void **state) {
    (void)state;
    Err err = {0};
    assert_int_equal(facts_read(f, FOUR, &err), 0);
    assert_int_equal(facts_derive(f, 0, &err), 0);
    assert_int_equal(f->n_sockets, 2);
    assert_int_equal(f->threads_per_core, 2);
    assert_false(f->smt_inferred);
    assert_int_equal(f->node[1].n_cores, 32);
    assert_true(f->has_amx && f->has_vnni && f->has_avx2);
    assert_int_equal(f->model, 207);
    assert_string_equal(f->cpu_name, "Intel(R) Xeon(R) Platinum 8562Y+");
    assert_int_equal(f->gpu[1].width_now, 8);
    assert_int_equal(f->gpu[2].width_now, 0);
    assert_int_equal(f->gpu[3].gen_max, 0);
    assert_int_equal(f->gpu[3].memory_mb, 143771);
    assert_int_equal(f->gpu[2].node, 1); /* by its affinity */
    assert_int_equal(f->gpu[0].n_nvlink[2], 18);
    assert_int_equal(f->gpu[2].link[3], FACTS_LINK_PHB);
    assert_int_equal(f->memlock_bytes, 8388608);
    assert_string_equal(f->thp, "never");
    assert_int_equal(f->numa_balancing, 1);
    assert_true(f->node[0].gb_per_s > 201 && f->node[1].gb_per_s < 0.1);
    assert_int_equal(f->n_ucx, 2);
    assert_string_equal(f->ucx[1].transport, "tcp");
    assert_string_equal(f->ucx[1].device, "eth0");
}

static void sockets_from_distances(void **state) {
    (void)state;
    Err err = {0};
    accept("numactl.txt", "available: 4 nodes (0-3)\nnode 0 cpus: 0-3\nnode 1 cpus: 4-7\n"
                          "node 2 cpus: 8-11\nnode 3 cpus: 12-15\nnode distances:\n"
                          "node   0   1   2   3 \n  0:  10  12  21  21\n  1:  12  10  21  21\n"
                          "  2:  21  21  10  12\n  3:  21  21  12  10\n");
    assert_int_equal(facts_derive(f, 0, &err), 0);
    assert_int_equal(f->n_sockets, 2);
    assert_int_equal(f->node[1].socket, 0);
    assert_int_equal(f->node[3].socket, 1);
    assert_int_equal(f->threads_per_core, 0);
    assert_int_equal(f->node[3].n_cores, 4);
    assert_int_equal(facts_derive(f, 4, &err), 0);
    assert_int_equal(f->n_sockets, 4);
    assert_int_equal(facts_derive(f, 3, &err), E_INVAL);
    assert_non_null(strstr(err.text, "3 sockets"));
}

static void a_cpuset_takes_cores_and_nodes_away(void **state) {
    (void)state;
    int list[FACTS_NODES];
    accept("numactl.txt", "node 0 cpus: 0-7\nnode 0 size: 100 MB\nnode 1 cpus: 8-15\n"
                          "node 1 size: 100 MB\nnode 2 cpus:\nnode 2 size: 100 MB\n");
    accept("host.txt", "cpuset: 0-3,8-15\nmems: 0,2\n");
    assert_int_equal(facts_derive(f, 0, NULL), 0);
    assert_int_equal(f->node[0].n_cores, 4);
    assert_int_equal(f->node[1].n_cores, 8);
    assert_int_equal(facts_usable_nodes(f, list), 1);
    assert_int_equal(list[0], 0);
}

static void lscpu_alone_gives_nodes(void **state) {
    (void)state;
    accept("lscpu.txt", "Socket(s):  1\nThread(s) per core: 1\nNUMA node0 CPU(s): 0-7\n"
                        "NUMA node1 CPU(s): -\n");
    assert_int_equal(facts_derive(f, 0, NULL), 0);
    assert_int_equal(f->n_nodes, 2);
    assert_int_equal(f->n_sockets, 1);
    assert_int_equal(f->node[0].size_mb, -1);
}

static void links_alone_give_gpus(void **state) {
    (void)state;
    accept("topo.txt", "GPU0 GPU1\nGPU0 X NV4\nGPU1 NV4 X\n");
    assert_int_equal(facts_n_gpus(f), 2);
    assert_string_equal(f->gpu[1].name, "");
}

static void hostile_texts_name_file_and_line(void **state) {
    (void)state;
    refuse("x/numactl.txt", "node 0 cpus: 0-3\nnode 1 cpus: 3-7\n", "x/numactl.txt:2",
           "processor in common");
    refuse("numactl.txt", "node 64 cpus: 0\n", ":1", "64 nodes");
    refuse("numactl.txt", "node 99999999999 cpus: 0\n", ":1", "node");
    refuse("numactl.txt", "node -1 cpus: 0\n", ":1", "node -1");
    refuse("numactl.txt", "\nnode 0 cpus: 0-4096\n", ":2", "below 4096");
    refuse("numactl.txt", "node 0 cpus: 3-1\n", ":1", "3-1");
    refuse("numactl.txt", "node 0 size: -5 MB\n", ":1", "megabytes");
    refuse("numactl.txt", "node 0 size: 5 MB\nnode 0 size: 5 MB\n", ":2", "twice");
    refuse("numactl.txt", "node 0 pages: 5 MB\n", ":1", "pages");
    refuse("numactl.txt", "node distances:\nnode 0 1\n 0: 10\n", ":3", "2 distances");
    refuse("numactl.txt", "node distances:\nnode 0 1\n 70: 10 20\n", ":3", "node number");
    refuse("gpus.csv", "index, uuid\n0, x\n", ":1", "\"name\"");
    refuse("gpus.csv", "index, name\n0\n", ":2", "1 fields");
    refuse("gpus.csv", "index, name\n0, a, b\n", ":2", "more fields");
    refuse("gpus.csv", "index, name\n32, a\n", ":2", "field 1");
    refuse("gpus.csv", "index, name\n3, a\n3, a\n", ":3", "GPU 3 is given twice");
    refuse("gpus.csv", "name, pcie.link.width.max\na, 99999999999999999999\n", ":2", "field 2");
    refuse("topo.txt", "GPU0 GPU1\nGPU0 X\n", ":2", "1 links");
    refuse("topo.txt", "GPU0 GPU1\nGPU0 X NV999\n", ":2", "NV999");
    refuse("topo.txt", "GPU0 GPU1\nGPU0 NV2 X\n", ":2", "column of GPU0");
    refuse("topo.txt", "GPU0 GPU0\n", ":1", "twice");
    refuse("topo.txt", "hello\n", ":1", "header");
    refuse("lscpu.txt", "Socket(s): many\n", ":1", "many");
    refuse("lscpu.txt", "no colon\n", ":1", "name: value");
    refuse("ucx.txt", "<html>\n", ":1", "#");
    refuse("host.txt", "memlok: 5\n", ":1", "memlok");
    refuse("host.txt", "memlock: 5x\n", ":1", "5x");
    refuse("host.txt", "node3.cores: all\n", ":1", "all");
    refuse("host.txt", "node64.cores: 1\n", ":1", "unknown");
    refuse("host.txt", "kv_gb_per_s: nan\n", ":1", "nan");
}

static void contradictions_are_errors(void **state) {
    (void)state;
    Err err = {0};
    accept("numactl.txt", "node 0 cpus: 0-3\n");
    assert_int_equal(parse("lscpu.txt", "NUMA node0 CPU(s): 0-7\n", &err), E_FORMAT);
    assert_non_null(strstr(err.text, "other processors"));
    accept("gpus.csv", "name, numa_node\na, 2\n");
    assert_int_equal(facts_derive(f, 0, &err), E_MISMATCH);
    assert_non_null(strstr(err.text, "GPU 0 is at NUMA node 2"));
}

static void a_directory_without_facts_is_said(void **state) {
    (void)state;
    Err err = {0};
    assert_int_equal(facts_read(f, "tests/unit/deploy", &err), E_NOTFOUND);
    assert_non_null(strstr(err.text, "numactl.txt"));
    assert_int_equal(facts_read(f, "tests/no/such", &err), E_IO);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_slow_machine, setup, teardown),
        cmocka_unit_test_setup_teardown(texts_as_tools_print_them, setup, teardown),
        cmocka_unit_test_setup_teardown(sockets_from_distances, setup, teardown),
        cmocka_unit_test_setup_teardown(a_cpuset_takes_cores_and_nodes_away, setup, teardown),
        cmocka_unit_test_setup_teardown(lscpu_alone_gives_nodes, setup, teardown),
        cmocka_unit_test_setup_teardown(links_alone_give_gpus, setup, teardown),
        cmocka_unit_test_setup_teardown(hostile_texts_name_file_and_line, setup, teardown),
        cmocka_unit_test_setup_teardown(contradictions_are_errors, setup, teardown),
        cmocka_unit_test_setup_teardown(a_directory_without_facts_is_said, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
