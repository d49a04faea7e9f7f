/* Each rule of the doctor where it finds something, where all is well, and where nothing is known.
 */
#include "doctor_case.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#define SLOW "tests/unit/deploy/cases/slow_4xh100"
#define FOUR "tests/unit/deploy/facts_4gpu"

/* Index of files that case_usual makes with n expertd. */
enum { E0 = 0, E1 = 1, PREFILL2 = 2, DECODE2 = 3 };

static void nodes_that_hold_nothing(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "64", 2);
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_WARN, "half of the memory nodes are unused");
    case_expect(c, "memory-nodes", FINDING_WARN, "both nodes in use are in socket 0");
    assert_true(case_find(c, "memory-nodes")->gain > 0.6);
    assert_non_null(strstr(case_find(c, "memory-nodes")->change, "0, 1, 2, 3"));
    /* One node of each socket: still half, but no idle socket. */
    case_set(c, E1, "engine.node", "2");
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_WARN, "on node 0, 2 of 4, nothing on 1, 3");
    assert_null(strstr(case_find(c, "memory-nodes")->what, "socket"));
    case_set(c, E1, "engine.node", "7");
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_FAIL, "node 7, which the host does not have");
    case_free(c);
    c = case_new(SLOW);
    case_usual(c, "cuda", 4, "64", 4);
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_OK, "all 4");
    case_expect(c, "sub-numa", FINDING_NOTE, "4 memory nodes in 2 sockets");
    case_facts(c, "host.txt", "mems: 0-2\n");
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_FAIL, "node 3, which this process may not use");
    case_free(c);
    c = case_new(NULL);
    case_usual(c, "cuda", 4, "64", 2);
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_UNKNOWN, "");
    case_free(c);
}

static void three_nodes_and_shards_that_divide(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt", "node 0 cpus: 0-7\nnode 1 cpus: 8-15\nnode 2 cpus: 16-23\n");
    case_usual(c, "cpu", 1, "none", 2);
    case_run(c);
    case_expect(c, "memory-nodes", FINDING_NOTE, "more shards than 2 do not divide");
    case_free(c);
}

static void binding(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_set(c, E0, "engine.node", "-1");
    case_set(c, E1, "engine.node", "-1");
    case_run(c);
    case_expect(c, "memory-binding", FINDING_WARN, "2 of 2 expertd are bound to no node");
    assert_true(case_find(c, "memory-binding")->gain > 0.2);
    case_set(c, E0, "engine.node", "1");
    case_set(c, E1, "engine.node", "1");
    case_run(c);
    case_expect(c, "memory-binding", FINDING_WARN, "several expertd are on node 1");
    case_set(c, E0, "engine.node", "0");
    case_run(c);
    case_expect(c, "memory-binding", FINDING_OK, "");
    case_free(c);
}

static void memory_of_nodes(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt",
               "node 0 cpus: 0-7\nnode 0 size: 150000 MB\nnode 0 free: 140000 MB\n"
               "node 1 cpus: 8-15\nnode 1 size: 500000 MB\nnode 1 free: 490000 MB\n");
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c); /* 76 layers x 256 experts x 19.5 MB in two slices: 189 GB */
    case_expect(c, "memory-fit", FINDING_FAIL, "does not fit node 0");
    assert_non_null(strstr(case_find(c, "memory-fit")->basis, "189.3 GB"));
    c->facts.node[0].size_mb = 500000;
    case_run(c);
    case_expect(c, "memory-fit", FINDING_WARN, "node 0 has less free memory");
    case_set(c, E0, "experts.device", "128"); /* half of it */
    case_run(c);
    case_expect(c, "memory-fit", FINDING_OK, "94.7 GB");
    case_free(c);
}

static void threads_and_cores(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_set(c, E1, "engine.threads", "64");
    case_run(c);
    case_expect(c, "threads", FINDING_FAIL, "64 threads for 32 physical cores: it does not start");
    assert_non_null(strstr(case_find(c, "threads")->basis, "numbering"));
    case_set(c, E1, "engine.oversubscribe", "yes");
    case_run(c);
    case_expect(c, "threads", FINDING_WARN, "64 threads");
    case_set(c, E0, "engine.threads", "4");
    case_set(c, E1, "engine.threads", "4");
    case_run(c);
    case_expect(c, "threads", FINDING_WARN, "4 threads for 32 cores: too few");
    assert_true(case_find(c, "threads")->gain > 0.5);
    case_set(c, E0, "engine.threads", "32");
    case_set(c, E1, "engine.threads", "0");
    case_run(c);
    case_expect(c, "threads", FINDING_OK, "");
    case_free(c);
}

static void pages_and_balancing(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 4);
    case_run(c);
    case_expect(c, "huge-pages", FINDING_UNKNOWN, "");
    case_expect(c, "numa-balancing", FINDING_UNKNOWN, "");
    case_facts(c, "host.txt", "transparent_hugepage: never\nhuge_2m_free: 10\nnuma_balancing: 1\n");
    case_run(c);
    case_expect(c, "huge-pages", FINDING_WARN, "cannot lie in huge pages");
    case_expect(c, "numa-balancing", FINDING_WARN, "balancing is on");
    case_facts(c, "host.txt", "huge_2m_free: 400000\nnuma_balancing: 0\n");
    case_run(c);
    case_expect(c, "huge-pages", FINDING_OK, "");
    case_expect(c, "numa-balancing", FINDING_OK, "");
    case_free(c);
}

static void shards_fit_together(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "shards", FINDING_OK, "");
    case_expect(c, "experts-held", FINDING_OK, "");
    case_set(c, E1, "experts.shard", "0");
    case_run(c);
    case_expect(c, "shards", FINDING_FAIL, "shard 0 of 2");
    case_set(c, E1, "experts.shards", "4");
    case_run(c);
    case_expect(c, "shards", FINDING_FAIL, "of 4, among 2");
    case_free(c);
    c = case_new(NULL);
    case_usual(c, "cpu", 1, "none", 3);
    case_run(c);
    case_expect(c, "shards", FINDING_FAIL, "3 expertd do not divide");
    case_free(c);
}

static void every_expert_is_held(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_set(c, E0, "experts.device", "65");
    case_run(c);
    case_expect(c, "experts-held", FINDING_FAIL, "leave out 65");
    case_set(c, E0, "experts.device", "64");
    case_run(c);
    case_expect(c, "experts-held", FINDING_OK, "");
    case_set(c, DECODE2, "experts.update_ms", "30s");
    case_run(c);
    case_expect(c, "experts-held", FINDING_FAIL, "leave out 64");
    assert_non_null(strstr(case_find(c, "experts-held")->basis, "changes"));
    case_set(c, PREFILL2, "experts.endpoints", "ipc://e0");
    case_run(c);
    case_expect(c, "experts-held", FINDING_FAIL, "names 1 expertd; 2 are configured");
    case_free(c);
}

static void placement_follows_use_or_not(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "placement", FINDING_WARN, "the first 64 experts");
    case_set(c, DECODE2, "experts.update_ms", "30s");
    case_run(c);
    case_expect(c, "placement", FINDING_OK, "");
    case_set(c, DECODE2, "experts.resident", "none");
    case_run(c);
    assert_false(case_has(c, "placement"));
    case_free(c);
}

static void drafting(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "speculation", FINDING_WARN, "no speculative decoding is configured");
    double gain = case_find(c, "speculation")->gain;
    /* Where all drafted tokens need experts of their own, little is left of it. */
    c->assume.draft_overlap = 0;
    case_run(c);
    assert_true(case_find(c, "speculation")->gain < gain);
    c->spec_tokens = 3;
    case_run(c);
    case_expect(c, "speculation", FINDING_OK, "3 tokens");
    case_free(c);
}

static void gpus_that_are_there(void **state) {
    (void)state;
    Case *c = case_new(FOUR);
    case_usual(c, "cuda", 8, "64", 2);
    case_run(c);
    case_expect(c, "gpus", FINDING_FAIL, "tp = 8, the host has 4 GPUs");
    case_free(c);
    c = case_new(NULL);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "gpus", FINDING_UNKNOWN, "");
    case_facts(c, "gpus.csv", "index, name\n0, NVIDIA L40S\n1, NVIDIA L40S\n");
    case_run(c);
    case_expect(c, "gpus", FINDING_FAIL, "capability 8.x");
    case_free(c);
    c = case_new(FOUR);
    case_usual(c, "cpu", 2, "64", 2);
    case_run(c);
    assert_false(case_has(c, "gpus") || case_has(c, "all-reduce"));
    case_free(c);
}

static void gpu_memory(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 2, "all", 0);
    case_run(c); /* 745 GB over two GPUs of 80 */
    case_expect(c, "gpu-memory", FINDING_FAIL, "do not fit");
    case_set(c, 0, "experts.resident", "20");
    case_set(c, 1, "experts.resident", "20");
    case_run(c);
    case_expect(c, "gpu-memory", FINDING_OK, "of 80.0 GB");
    assert_false(case_has(c, "gpu-sharing")); /* seven GPUs for two groups of two */
    case_set(c, 0, "engine.tp", "4");
    case_set(c, 1, "engine.tp", "4");
    case_set(c, 0, "experts.resident", "64");
    case_set(c, 1, "experts.resident", "64");
    case_run(c);
    case_expect(c, "gpu-sharing", FINDING_FAIL, "2 processes with tp = 4");
    c->foreign = true;
    case_run(c);
    case_expect(c, "two-copies", FINDING_NOTE, "each hold weights");
    case_free(c);
}

static void links(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "32", 4);
    case_run(c);
    case_expect(c, "all-reduce", FINDING_WARN, "NVLink joins only the pairs 0-1, 2-3");
    assert_true(case_find(c, "all-reduce")->gain > 0.05);
    c->assume.pcie_us = c->assume.nvlink_us;
    case_run(c);
    assert_true(case_find(c, "all-reduce")->gain < 1e-9);
    for (int i = 4; i < 6; i++)
        case_set(c, i, "engine.tp", "2");
    case_run(c);
    case_expect(c, "all-reduce", FINDING_OK, "");
    case_free(c);
    c = case_new(NULL);
    case_facts(c, "gpus.csv", "name\nNVIDIA H200\nNVIDIA H200\n");
    case_usual(c, "cuda", 2, "32", 4);
    case_run(c);
    case_expect(c, "all-reduce", FINDING_UNKNOWN, "");
    case_facts(c, "topo.txt", "GPU0 GPU1\nGPU0 X PHB\nGPU1 PHB X\n");
    case_run(c);
    case_expect(c, "all-reduce", FINDING_WARN, "no NVLink joins GPUs 0, 1");
    case_free(c);
}

static void gpus_without_work(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "32", 4);
    c->foreign = true; /* one engine */
    case_run(c);
    case_expect(c, "gpus-idle", FINDING_WARN, "2 GPUs of the same kind");
    for (int i = 4; i < 6; i++)
        case_set(c, i, "engine.tp", "2");
    c->foreign = false; /* two groups of two */
    case_run(c);
    case_expect(c, "gpus-idle", FINDING_WARN, "4, 5");
    case_free(c);
}

static void sides(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "32", 2);
    case_run(c);
    case_expect(c, "gpu-side", FINDING_OK, "");
    case_set(c, E0, "engine.node", "2");
    case_set(c, E1, "engine.node", "3");
    case_run(c);
    case_expect(c, "gpu-side", FINDING_WARN,
                "the GPUs are at socket 0, every expertd is at another");
    case_set(c, PREFILL2, "engine.tp", "8");
    case_set(c, DECODE2, "engine.tp", "8");
    c->facts.gpu[7] = c->facts.gpu[5];
    c->facts.n_gpus = 8;
    case_run(c);
    case_expect(c, "gpu-side", FINDING_WARN, "on both sides");
    case_free(c);
}

static void lanes(void **state) {
    (void)state;
    Case *c = case_new(FOUR);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "pcie", FINDING_WARN, "GPU 1 has 8 PCIe lanes of more");
    c->facts.gpu[1].width_now = 16;
    case_run(c);
    case_expect(c, "pcie", FINDING_OK, ""); /* generation 1 is how it idles */
    case_facts(c, "host.txt", "gpu0.h2d_gb_per_s: 55.1\ngpu0.d2h_gb_per_s: 12.5\n");
    case_run(c);
    case_expect(c, "pcie", FINDING_WARN, "between host and GPU 0 are slow");
    case_facts(c, "host.txt", "gpu0.d2h_gb_per_s: 54.0\n");
    case_run(c);
    case_expect(c, "pcie", FINDING_OK, "");
    c->facts.gpu[0].gen_max = 3;
    case_run(c);
    case_expect(c, "pcie", FINDING_WARN, "generation 3");
    case_free(c);
}

static void limits(void **state) {
    (void)state;
    Case *c = case_new(FOUR); /* memlock 8 MiB, shm 64 MiB, AMX refused; UCX knows tcp and self */
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c);
    case_expect(c, "memlock", FINDING_OK, "");
    case_expect(c, "dev-shm", FINDING_WARN, "small for the GPUs'");
    case_expect(c, "amx", FINDING_WARN, "may not use it");
    case_expect(c, "cgroup", FINDING_UNKNOWN, "");
    case_facts(c, "ucx.txt", "# Transport: rc_mlx5\n");
    case_run(c);
    case_expect(c, "memlock", FINDING_WARN, "a network card cannot register");
    case_set(c, E1, "experts.lock", "yes");
    case_run(c);
    case_expect(c, "memlock", FINDING_FAIL, "experts cannot be locked");
    case_facts(c, "host.txt",
               "memlock: unlimited\nshm: 99999999999\namx: granted\n"
               "cgroup_memory: 1000000000\n");
    case_run(c);
    case_expect(c, "memlock", FINDING_OK, "");
    case_expect(c, "dev-shm", FINDING_OK, "");
    case_expect(c, "amx", FINDING_OK, "AMX may be used");
    case_expect(c, "cgroup", FINDING_FAIL, "does not hold the experts");
    case_facts(c, "host.txt", "cgroup_memory: unlimited\ncgroup_cpus: 16\n");
    case_run(c);
    case_expect(c, "cgroup", FINDING_WARN, "quota");
    assert_true(case_find(c, "cgroup")->gain > 2.9); /* 64 threads on 16 processors */
    case_free(c);
    c = case_new(NULL);
    case_usual(c, "cpu", 2, "64", 2);
    case_facts(c, "lscpu.txt", "Flags: avx2\n");
    case_facts(c, "host.txt", "shm: 67108864\n");
    case_run(c);
    case_expect(c, "amx", FINDING_WARN, "AVX2");
    case_expect(c, "dev-shm", FINDING_WARN, "KV pools do not fit");
    case_free(c);
}

static void transports(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_usual(c, "cpu", 2, "64", 2);
    case_run(c);
    case_expect(c, "kv-transport", FINDING_UNKNOWN, "");
    case_facts(c, "ucx.txt", "# Transport: tcp\n# Device: eth0\n");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_WARN, "goes over TCP");
    case_facts(c, "ucx.txt", "# Transport: posix\n# Transport: rc_mlx5\n");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_OK, "over posix within this host, over rc_mlx5");
    case_facts(c, "host.txt", "kv_transport: tcp/eth0\nkv_gb_per_s: 1.5\n");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_WARN, "KV goes over tcp/eth0");
    case_set(c, PREFILL2, "kvlink.transports", "self,dc_mlx5");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_FAIL, "prefill asks for transports");
    case_set(c, PREFILL2, "kvlink.transports", "");
    case_set(c, DECODE2, "engine.backend", "cuda");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_OK, "over rc_mlx5 within this host");
    c->facts.n_ucx = 1; /* tcp */
    case_run(c);
    case_expect(c, "kv-transport", FINDING_FAIL, "no cuda_ipc");
    case_set(c, DECODE2, "kvlink.transports", "self,tcp");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_WARN, "goes over TCP");
    case_facts(c, "ucx.txt", "# Transport: cuda_ipc\n");
    case_run(c);
    case_expect(c, "kv-transport", FINDING_OK, "KV goes over cuda_ipc");
    case_free(c);
}

static void pairs_agree(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_usual(c, "cpu", 2, "64", 2);
    case_run(c);
    case_expect(c, "pair", FINDING_OK, "");
    case_set(c, DECODE2, "engine.kv_dtype", "bf16");
    case_run(c);
    case_expect(c, "pair", FINDING_FAIL, "[engine] kv_dtype");
    case_free(c);
    c = case_new(NULL);
    case_conf(c, SERVICE_DECODE, "decode", "model.dir=m", "engine.pages=99999", NULL);
    case_run(c);
    case_expect(c, "pair", FINDING_NOTE, "0 prefill and 1 decode");
    case_free(c);
}

static void pools(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_usual(c, "cuda", 2, "64", 2);
    case_run(c); /* 4096 pages are 8 x 32768 tokens */
    case_expect(c, "kv-pool", FINDING_OK, "262144 tokens of KV (14.1 GB) for 8 x 32768");
    case_expect(c, "kv-dtype", FINDING_OK, "fp8, 53940 B");
    case_set(c, DECODE2, "sched.max_running", "9");
    case_run(c);
    case_expect(c, "kv-pool", FINDING_WARN, "holds 8 of 9 requests");
    assert_non_null(strstr(case_find(c, "kv-pool")->change, "pages = 4608"));
    case_set(c, PREFILL2, "engine.pages", "511");
    case_run(c);
    case_expect(c, "kv-pool", FINDING_FAIL, "does not hold one request");
    assert_non_null(strstr(case_find(c, "kv-pool")->change, "pages = 512"));
    case_set(c, DECODE2, "engine.kv_dtype", "bf16");
    case_run(c);
    case_expect(c, "kv-dtype", FINDING_WARN, "stored as bf16");
    case_free(c);
}

static void the_most_costly_comes_first(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "64", 2);
    c->foreign = true;
    case_run(c);
    const Findings *f = &c->findings;
    assert_string_equal(f->at[0].id, "memory-nodes");
    assert_int_equal(rules_status(f), 1);
    for (int i = 1; i < f->n; i++)
        assert_true(f->at[i - 1].level > f->at[i].level ||
                    (f->at[i - 1].level == f->at[i].level && f->at[i - 1].gain >= f->at[i].gain));
    case_set(c, E1, "experts.shard", "0");
    case_run(c);
    assert_string_equal(c->findings.at[0].id, "shards");
    assert_int_equal(rules_status(&c->findings), 2);
    case_free(c);
    c = case_new(NULL);
    case_run(c);
    assert_int_equal(rules_status(&c->findings), 0);
    case_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_that_hold_nothing),
        cmocka_unit_test(three_nodes_and_shards_that_divide),
        cmocka_unit_test(binding),
        cmocka_unit_test(memory_of_nodes),
        cmocka_unit_test(threads_and_cores),
        cmocka_unit_test(pages_and_balancing),
        cmocka_unit_test(shards_fit_together),
        cmocka_unit_test(every_expert_is_held),
        cmocka_unit_test(placement_follows_use_or_not),
        cmocka_unit_test(drafting),
        cmocka_unit_test(gpus_that_are_there),
        cmocka_unit_test(gpu_memory),
        cmocka_unit_test(links),
        cmocka_unit_test(gpus_without_work),
        cmocka_unit_test(sides),
        cmocka_unit_test(lanes),
        cmocka_unit_test(limits),
        cmocka_unit_test(transports),
        cmocka_unit_test(pairs_agree),
        cmocka_unit_test(pools),
        cmocka_unit_test(the_most_costly_comes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
