/* base/topo: counts that agree with each other, pinning that the system confirms. */
#include "base/topo.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>

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
    assert_int_equal(topo_bind_node(t, -1, &err), E_NOTFOUND);
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
    };
    return cmocka_run_group_tests(tests, open_topo, close_topo);
}
