/* Ceilings with their arithmetic, what a shape costs, and layouts for hosts of several kinds. */
#include "doctor_case.h"

#include "deploy/baton/gpu_types.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#define SLOW "tests/unit/deploy/cases/slow_4xh100"

static void assert_near(double v, double expected, double part) {
    if (fabs(v - expected) > part * fabs(expected))
        fail_msg("%.6g, expected %.6g", v, expected);
}

static void what_glm52_costs(void **state) {
    (void)state;
    Shape s;
    model_glm52(&s);
    assert_int_equal(model_moe_layers(&s), 75);
    assert_int_equal(s.n_index_layers, 21);
    assert_near(model_expert_weights(&s), 37.75e6, 1e-3);
    assert_near(model_rest_bytes(&s, 8), 18.7e9, 0.01); /* of 40.3 G active weights, 22.65 routed */
    assert_near(model_rest_held_bytes(&s, 8) - model_rest_bytes(&s, 8), 1.9e9, 0.01);
    assert_near(model_kv_token_bytes(&s, DT_F8E4M3), 78 * 656 + 21 * 132, 1e-9);
    assert_near(model_kv_read_bytes(&s, DT_F8E4M3, 32768), 104.8e6 + 90.8e6, 0.01);
    assert_near(model_distinct_experts(&s, 1), 8, 1e-9);
    assert_near(model_distinct_experts(&s, 4), 30.5, 0.01);
    assert_near(model_distinct_experts(&s, 64), 222, 0.01);
}

static void a_token_takes_the_sum_of_its_parts(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "64", 2);
    case_run(c);
    const Ceiling *v = &c->ceiling;
    assert_near(v->cpu_bytes, 600 * 0.75 * 3 * 6144 * 2048 * 4.125 / 8, 1e-9);
    assert_near(v->cpu_gb_per_s, 8 * 4.8 * 8 * 0.8, 1e-9);
    assert_near(v->cpu_ms, v->cpu_bytes / v->cpu_gb_per_s / 1e6, 1e-9);
    assert_near(v->device_gb_per_s, 4 * 2039 * 0.85, 1e-9);
    assert_near(v->reduce_ms, 156 * 0.024, 1e-9);
    assert_near(v->handover_ms, 75 * 0.020, 1e-9);
    assert_near(v->total_ms, v->cpu_ms + v->device_ms + v->reduce_ms + v->handover_ms, 1e-9);
    assert_near(v->tok_per_s, 1e3 / v->total_ms, 1e-9);
    Buf b = {0};
    CeilingCase cc = {&c->facts, &c->assume, &c->shape, &c->view};
    ceiling_explain(v, &cc, "  ", &b);
    assert_non_null(strstr(b.data, "75 layers x 8 experts x 0.75 not on the device"));
    assert_non_null(strstr(b.data, "156 x 24 us = 3.7 ms"));
    buf_done(&b);
    case_free(c);
}

static void measured_and_set_numbers_come_first(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    const char *how;
    case_usual(c, "cuda", 4, "64", 2);
    case_facts(c, "host.txt", "node0.gb_per_s: 100\nnode1.gb_per_s: 60\n");
    case_run(c);
    assert_near(c->ceiling.cpu_gb_per_s, 120, 1e-9); /* shards are equal: the slower decides */
    case_facts(c, "lscpu.txt", "CPU family: 25\nModel: 17\n");
    assert_near(assume_socket_gb_per_s(&c->assume, &c->facts, &how), 12 * 4.8 * 8 * 0.8, 1e-9);
    assert_non_null(strstr(how, "12 channels"));
    assert_int_equal(assume_set(&c->assume, "socket_gb_per_s=300", NULL), 0);
    assert_near(assume_socket_gb_per_s(&c->assume, &c->facts, &how), 300, 1e-9);
    case_run(c);
    assert_near(ceiling_node_gb_per_s(&c->facts, &c->assume, 2), 150, 1e-9);
    case_free(c);
}

static void assumptions_are_refused_by_name(void **state) {
    (void)state;
    Assume a;
    Err err = {0};
    assume_init(&a);
    const char *const bad[] = {"pcie_us",     "pcie_us=",  "pcie_us=x", "pcie_us=-1",
                               "pcie_us=nan", "pcie_uz=3", "=3"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(assume_set(&a, bad[i], &err), E_INVAL);
    assert_int_equal(assume_set(&a, "pcie_uz=3", &err), E_INVAL);
    assert_non_null(strstr(err.text, "did you mean pcie_us?"));
    assert_near(a.pcie_us, 24, 1e-9);
}

static void gpus_by_name(void **state) {
    (void)state;
    assert_near(gpu_type_find("NVIDIA H100 PCIe")->gb_per_s, 2039, 1e-9);
    assert_near(gpu_type_find("NVIDIA H100 80GB HBM3")->gb_per_s, 3350, 1e-9);
    assert_near(gpu_type_find("NVIDIA H200")->memory_gb, 141, 1e-9);
    assert_near(gpu_type_find("NVIDIA GB200")->memory_gb, 186, 1e-9);
    assert_int_equal(gpu_type_find("NVIDIA RTX PRO 6000 Blackwell Server Edition")->capability, 12);
    assert_null(gpu_type_find("Some other card"));
}

typedef struct Found {
    Case *c;
    Better b;
    Services check;
} Found;

/* Every layout passes the daemons' checks and, looked at again, has the ceiling that was said. */
static Found find(Case *c) {
    Found f = {.c = c};
    Err err = {0};
    case_run(c);
    BetterGoal goal = better_goal(&c->services, &c->view, &c->shape);
    CeilingCase given = {&c->facts, &c->assume, &c->shape, &c->view};
    f.b = better_find(&given, &goal);
    if (!f.b.fits)
        return f;
    if (services_add_docs(&f.check, f.b.docs, f.b.n_docs, &err))
        fail_msg("%s", err.text);
    View again;
    assert_int_equal(view_make(&again, &f.check, &c->facts, &c->assume, &c->shape, false, &err), 0);
    again.group = f.b.view.group; /* which GPUs is said in the environment */
    CeilingCase mine = {&c->facts, &c->assume, &c->shape, &again};
    assert_near(ceiling_compute(&mine).tok_per_s, f.b.ceiling.tok_per_s, 1e-3);
    return f;
}

static void drop(Found *f) {
    services_done(&f->check);
    better_done(&f->b);
    case_free(f->c);
}

static const char *option(const Found *f, const char *name, const char *key) {
    for (int i = 0; i < f->b.n_docs; i++)
        if (strcmp(f->b.docs[i].name, name) == 0)
            return conf_doc_get(&f->b.docs[i], key);
    fail_msg("no %s", name);
    return NULL;
}

static void pairs_and_all_nodes_of_the_slow_machine(void **state) {
    (void)state;
    Case *c = case_new(SLOW);
    case_usual(c, "cuda", 4, "64", 2);
    case_set(c, 2, "engine.max_context", "262144");
    case_set(c, 3, "engine.max_context", "262144");
    case_set(c, 3, "sched.max_running", "1");
    Found f = find(c);
    assert_true(f.b.fits && !f.b.shared);
    assert_int_equal(f.b.view.tp, 2);
    assert_int_equal(f.b.n_groups, 3);
    assert_int_equal(f.b.view.n_expertd, 4);
    assert_int_equal(f.b.view.group.worst, FACTS_LINK_NV);
    assert_int_equal(f.b.n_unused, 1);
    assert_int_equal(f.b.unused[0], 6);
    assert_string_equal(option(&f, "expertd-3", "engine.node"), "3");
    assert_string_equal(option(&f, "decode-1", "engine.tp"), "2");
    assert_string_equal(option(&f, "expertd-0", "experts.device"),
                        option(&f, "decode-0", "experts.resident"));
    assert_true(f.b.ceiling.tok_per_s > 1.5 * c->ceiling.tok_per_s);
    drop(&f);
}

static void eight_large_gpus_need_no_expertd(void **state) {
    (void)state;
    Buf csv = {0}, topo = {0};
    buf_puts(&csv, "index, name\n");
    for (int i = 0; i < 8; i++) {
        buf_printf(&csv, "%d, NVIDIA B200\n", i);
        buf_printf(&topo, "%sGPU%d", i ? " " : "", i);
    }
    for (int i = 0; i < 8; i++) {
        buf_printf(&topo, "\nGPU%d", i);
        for (int j = 0; j < 8; j++)
            buf_puts(&topo, i == j ? " X" : " NV18");
    }
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt", "node 0 cpus: 0-31\nnode 1 cpus: 32-63\n");
    case_facts(c, "gpus.csv", csv.data);
    case_facts(c, "topo.txt", topo.data);
    c->assume.gpu_expert_bits = 4.5;
    c->assume.gpu_rest_bits = 16;
    case_usual(c, "cuda", 4, "all", 0);
    Found f = find(c);
    /* 459 GB with KV in groups of four of 180 GB each: prefill and decode side by side. */
    assert_true(f.b.fits && !f.b.shared);
    assert_int_equal(f.b.view.tp, 4);
    assert_int_equal(f.b.resident, 256);
    assert_int_equal(f.b.view.n_expertd, 0);
    drop(&f);
    buf_done(&csv);
    buf_done(&topo);
}

static void one_gpu_is_shared(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt",
               "node 0 cpus: 0-31\nnode 0 size: 800000 MB\nnode 0 free: 700000 MB\n");
    case_facts(c, "gpus.csv", "index, name\n0, NVIDIA H200\n");
    case_usual(c, "cuda", 1, "none", 1);
    Found f = find(c);
    assert_true(f.b.fits && f.b.shared);
    assert_int_equal(f.b.view.tp, 1);
    assert_true(f.b.resident > 0 && f.b.resident < 40);
    drop(&f);
}

static void a_host_without_gpus(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt", "node 0 cpus: 0-31\nnode 1 cpus: 32-63\nnode 2 cpus: 64-95\n");
    Found f = find(c);
    assert_true(f.b.fits && !f.b.view.cuda);
    assert_int_equal(f.b.view.n_expertd, 2); /* three do not divide an expert */
    assert_string_equal(option(&f, "decode-0", "engine.backend"), "cpu");
    assert_string_equal(option(&f, "expertd-0", "engine.threads"), "24");
    drop(&f);
}

static void what_does_not_fit_is_said(void **state) {
    (void)state;
    Case *c = case_new(NULL);
    case_facts(c, "numactl.txt", "node 0 cpus: 0-7\nnode 0 size: 64000 MB\n");
    Found f = find(c);
    assert_false(f.b.fits);
    assert_non_null(strstr(f.b.why, "node 0 has 67.1 GB"));
    assert_int_equal(f.b.n_docs, 0);
    drop(&f);
    c = case_new(NULL);
    case_facts(c, "gpus.csv", "index, name\n0, NVIDIA H200\n");
    case_usual(c, "cuda", 1, "none", 1);
    case_set(c, 1, "engine.pages", "900000"); /* 3 TB of KV */
    case_set(c, 2, "engine.pages", "900000");
    f = find(c);
    assert_false(f.b.fits);
    assert_non_null(strstr(f.b.why, "KV pool of 57600000 tokens"));
    drop(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_glm52_costs),
        cmocka_unit_test(a_token_takes_the_sum_of_its_parts),
        cmocka_unit_test(measured_and_set_numbers_come_first),
        cmocka_unit_test(assumptions_are_refused_by_name),
        cmocka_unit_test(gpus_by_name),
        cmocka_unit_test(pairs_and_all_nodes_of_the_slow_machine),
        cmocka_unit_test(eight_large_gpus_need_no_expertd),
        cmocka_unit_test(one_gpu_is_shared),
        cmocka_unit_test(a_host_without_gpus),
        cmocka_unit_test(what_does_not_fit_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
