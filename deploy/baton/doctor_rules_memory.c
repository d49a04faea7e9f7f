/* Rules about memory nodes, threads and pages. Pure. */
#include "deploy/baton/doctor_rules.h"

#include <stdio.h>
#include <string.h>

enum { TEXT = 256 };

static bool in_list(const int *list, int n, int v) {
    for (int i = 0; i < n; i++)
        if (list[i] == v)
            return true;
    return false;
}

/* The sockets of the nodes, in order. */
static int sockets_of(const Facts *f, const int *node, int n, int *list) {
    int count = 0;
    for (int s = 0; s < f->n_sockets; s++)
        for (int i = 0; i < n; i++)
            if (node[i] < f->n_nodes && f->node[node[i]].present && f->node[node[i]].socket == s) {
                list[count++] = s;
                break;
            }
    return count;
}

static double bandwidth(const RuleCase *c, const int *node, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += ceiling_node_gb_per_s(c->facts, c->assume, node[i]);
    return sum;
}

/* The view with one expertd on each usable node, as far as shards divide. */
static View on_all_nodes(const RuleCase *c, const int *all, int n) {
    View v = *c->view;
    int shards = 1;
    while (shards * 2 <= n && c->shape->moe_inner / 128 % (shards * 2) == 0)
        shards *= 2;
    v.n_expertd = v.n_shards = shards;
    for (int i = 0; i < shards; i++)
        v.expertd[i] = (ViewExpertd){all[i], c->facts->node[all[i]].n_cores, i, true};
    return v;
}

static void say_idle(const RuleCase *c, Findings *out, const int *used, int n_used, const int *all,
                     int n_all) {
    int idle[FACTS_NODES], n_idle = 0, us[FACTS_NODES], as[FACTS_NODES];
    char u[TEXT], i[TEXT], s[TEXT], where[TEXT * 2] = "";
    for (int k = 0; k < n_all; k++)
        if (!in_list(used, n_used, all[k]))
            idle[n_idle++] = all[k];
    View better = on_all_nodes(c, all, n_all);
    if (better.n_expertd <= n_used) {
        finding_add(out, "memory-nodes", FINDING_NOTE, 0,
                    "%d of %d memory nodes hold experts: more shards than %d do not divide an "
                    "expert's %d units",
                    n_used, n_all, n_used, c->shape->moe_inner / 128);
        return;
    }
    int n_us = sockets_of(c->facts, used, n_used, us), n_as = sockets_of(c->facts, all, n_all, as);
    if (n_us == 1 && n_as > 1)
        snprintf(where, sizeof where, "; %s in use %s in socket %d, the other%s idle",
                 n_used == 1   ? "the node"
                 : n_used == 2 ? "both nodes"
                               : "all nodes",
                 n_used == 1 ? "is" : "are", us[0], n_as == 2 ? " socket is" : "s are");
    Finding *f = finding_add(
        out, "memory-nodes", FINDING_WARN, rules_gain(c, &better),
        "%s of the memory nodes are unused: experts are on node %s of %d, nothing on %s%s",
        n_idle * 2 == n_all  ? "half"
        : n_idle * 2 > n_all ? "most"
                             : "some",
        view_list(u, sizeof u, used, n_used), n_all, view_list(i, sizeof i, idle, n_idle), where);
    double now = bandwidth(c, used, n_used), can = bandwidth(c, all, n_all);
    finding_basis(f,
                  "%.1f of %.1f GB/s of memory bandwidth are used (%.1f GB/s per node); sockets "
                  "by node: %s",
                  now, can, can / n_all, c->facts->sockets_how);
    finding_change(f,
                   "one expertd per node: %d of them, [engine] node = %s, [experts] shards = %d, "
                   "shard = 0 to %d",
                   better.n_expertd, view_list(s, sizeof s, all, better.n_expertd),
                   better.n_expertd, better.n_expertd - 1);
}

void rule_memory_nodes(const RuleCase *c, Findings *out) {
    int used[FACTS_NODES], all[FACTS_NODES], n_all = facts_usable_nodes(c->facts, all),
                                             n_used = view_nodes(c->view, used);
    if (c->view->n_expertd == 0)
        return;
    if (n_all == 0) {
        finding_add(out, "memory-nodes", FINDING_UNKNOWN, 0, "memory nodes");
        return;
    }
    for (int i = 0; i < n_used; i++)
        if (!in_list(all, n_all, used[i])) {
            bool there = used[i] < c->facts->n_nodes && c->facts->node[used[i]].present;
            char text[TEXT];
            Finding *f = finding_add(
                out, "memory-nodes", FINDING_FAIL, 0, "an expertd is bound to node %d, %s", used[i],
                there ? "which this process may not use or which has no memory or cores"
                      : "which the host does not have");
            finding_change(f, "[engine] node = one of %s",
                           view_list(text, sizeof text, all, n_all));
            return;
        }
    if (n_used == 0)
        return; /* rule_memory_unbound */
    if (n_used < n_all)
        say_idle(c, out, used, n_used, all, n_all);
    else
        finding_add(out, "memory-nodes", FINDING_OK, 0, "all %d memory nodes hold experts", n_all);
}

void rule_memory_unbound(const RuleCase *c, Findings *out) {
    int all[FACTS_NODES], n = facts_usable_nodes(c->facts, all), unbound = 0, crowded = -1;
    for (int i = 0; i < c->view->n_expertd; i++) {
        unbound += c->view->expertd[i].node < 0;
        for (int j = 0; j < i; j++)
            if (c->view->expertd[i].node >= 0 &&
                c->view->expertd[i].node == c->view->expertd[j].node)
                crowded = c->view->expertd[i].node;
    }
    if (n <= 1 || c->view->n_expertd == 0)
        return;
    View better = on_all_nodes(c, all, n);
    if (unbound > 0) {
        Finding *f = finding_add(out, "memory-binding", FINDING_WARN, rules_gain(c, &better),
                                 "%d of %d expertd are bound to no node of %d: they read memory of "
                                 "other nodes",
                                 unbound, c->view->n_expertd, n);
        finding_basis(f, "assumed: such a daemon reaches %.2g of the bandwidth (unbound_fraction)",
                      c->assume->unbound_fraction);
        finding_change(f,
                       "one expertd per node, [engine] node = N and [experts] require_node = yes");
    } else if (crowded >= 0) {
        Finding *f = finding_add(out, "memory-binding", FINDING_WARN, rules_gain(c, &better),
                                 "several expertd are on node %d and share its bandwidth", crowded);
        finding_change(f, "one expertd per node");
    } else {
        finding_add(out, "memory-binding", FINDING_OK, 0, "every expertd has a node of its own");
    }
}

/* What one daemon's slice takes of its node. */
void rule_memory_fit(const RuleCase *c, Findings *out) {
    double slice = view_expert_bytes(c->view, c->services, c->shape) /
                   (c->view->n_shards > 0 ? c->view->n_shards : 1);
    bool known = false;
    for (int i = 0; i < c->view->n_expertd; i++) {
        int node = c->view->expertd[i].node;
        if (node < 0 || node >= c->facts->n_nodes || c->facts->node[node].size_mb < 0)
            continue;
        const FactsNode *n = &c->facts->node[node];
        double size = (double)n->size_mb * 1048576, left = (double)n->free_mb * 1048576;
        known = true;
        if (slice > size) {
            Finding *f = finding_add(out, "memory-fit", FINDING_FAIL, 0,
                                     "a slice of the experts does not fit node %d", node);
            finding_basis(f, "%.1f GB of experts, the node has %.1f GB", slice / 1e9, size / 1e9);
            finding_change(f,
                           "more expertd, each with a smaller slice, or more experts on the GPUs");
            return;
        }
        if (n->free_mb >= 0 && slice > left) {
            Finding *f =
                finding_add(out, "memory-fit", FINDING_WARN, 0,
                            "node %d has less free memory than a slice of the experts", node);
            finding_basis(f, "%.1f GB of experts, %.1f of %.1f GB free", slice / 1e9, left / 1e9,
                          size / 1e9);
            finding_change(f, "free memory of the node: page cache is given back, other programs' "
                              "memory is not");
            return;
        }
    }
    if (known)
        finding_add(out, "memory-fit", FINDING_OK, 0, "experts fit their nodes (%.1f GB each)",
                    slice / 1e9);
}

void rule_sub_numa(const RuleCase *c, Findings *out) {
    int list[FACTS_NODES], n = facts_usable_nodes(c->facts, list);
    if (n == 0 || c->facts->n_sockets == 0 || n <= c->facts->n_sockets)
        return;
    Finding *f = finding_add(out, "sub-numa", FINDING_NOTE, 0,
                             "sub-NUMA clustering: %d memory nodes in %d socket%s", n,
                             c->facts->n_sockets, c->facts->n_sockets > 1 ? "s" : "");
    finding_basis(f, "%s", c->facts->sockets_how);
    finding_change(f, "count nodes, not sockets: one expertd per node");
}

/* ---- threads ---- */

static void say_threads(const RuleCase *c, Findings *out, const ViewExpertd *x, int cores) {
    const Service *s = services_get(c->services, SERVICE_EXPERTD, (int)(x - c->view->expertd));
    bool allowed = s && s->expertd.oversubscribe;
    Finding *f = finding_add(out, "threads", x->packed && !allowed ? FINDING_FAIL : FINDING_WARN, 0,
                             "an expertd has %d threads for %d physical cores%s", x->threads, cores,
                             x->packed && !allowed ? ": it does not start" : "");
    finding_basis(f,
                  "node %d; second threads of a core slow the first down, in reports up to ten "
                  "times%s",
                  x->node,
                  c->facts->smt_inferred
                      ? "; two threads per core follow from the numbering of processors"
                      : "");
    finding_change(f, "[engine] threads = 0 takes the physical cores of the node");
}

void rule_threads(const RuleCase *c, Findings *out) {
    bool known = false;
    for (int i = 0; i < c->view->n_expertd; i++) {
        const ViewExpertd *x = &c->view->expertd[i];
        int cores =
            x->node >= 0 && x->node < c->facts->n_nodes ? c->facts->node[x->node].n_cores : 0;
        for (int n = 0; n < c->facts->n_nodes && x->node < 0; n++)
            cores += c->facts->node[n].n_cores;
        if (cores == 0)
            continue;
        known = true;
        if (x->threads > cores) {
            say_threads(c, out, x, cores);
            return;
        }
        double reach = x->threads * c->assume->core_gb_per_s,
               node = x->node >= 0 ? ceiling_node_gb_per_s(c->facts, c->assume, x->node) : 0;
        if (reach < node) {
            View better = *c->view;
            for (int j = 0; j < better.n_expertd; j++)
                better.expertd[j].threads = cores;
            Finding *f =
                finding_add(out, "threads", FINDING_WARN, rules_gain(c, &better),
                            "an expertd on node %d has %d threads for %d cores: too few to "
                            "read at the memory's speed",
                            x->node, x->threads, cores);
            finding_basis(f, "%d x %.3g GB/s (core_gb_per_s) against %.1f GB/s of the node",
                          x->threads, c->assume->core_gb_per_s, node);
            finding_change(f, "[engine] threads = 0 takes all %d", cores);
            return;
        }
    }
    if (known)
        finding_add(out, "threads", FINDING_OK, 0, "threads do not exceed physical cores");
    else if (c->view->n_expertd > 0)
        finding_add(out, "threads", FINDING_UNKNOWN, 0, "physical cores");
}

/* ---- pages ---- */

void rule_huge_pages(const RuleCase *c, Findings *out) {
    double need = view_expert_bytes(c->view, c->services, c->shape),
           reserved = (double)c->facts->huge_2m_free * (2 << 20);
    if (c->view->n_expertd == 0)
        return;
    if (!*c->facts->thp && c->facts->huge_2m_free < 0) {
        finding_add(out, "huge-pages", FINDING_UNKNOWN, 0, "huge pages");
    } else if (strcmp(c->facts->thp, "never") != 0 || reserved >= need) {
        finding_add(out, "huge-pages", FINDING_OK, 0, "huge pages can be had (transparent: %s)",
                    *c->facts->thp ? c->facts->thp : "unknown");
    } else {
        Finding *f = finding_add(out, "huge-pages", FINDING_WARN, c->assume->huge_page_gain,
                                 "experts cannot lie in huge pages");
        finding_basis(f,
                      "transparent_hugepage is never, %.1f GB are reserved, %.1f GB of experts "
                      "are to be held; assumed huge_page_gain",
                      reserved > 0 ? reserved / 1e9 : 0, need / 1e9);
        finding_change(f, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    }
}

void rule_numa_balancing(const RuleCase *c, Findings *out) {
    int list[FACTS_NODES];
    if (c->view->n_expertd == 0 || facts_usable_nodes(c->facts, list) < 2)
        return;
    if (c->facts->numa_balancing < 0) {
        finding_add(out, "numa-balancing", FINDING_UNKNOWN, 0, "NUMA balancing");
    } else if (c->facts->numa_balancing == 0) {
        finding_add(out, "numa-balancing", FINDING_OK, 0, "NUMA balancing is off");
    } else {
        Finding *f = finding_add(out, "numa-balancing", FINDING_WARN, 0,
                                 "the kernel's NUMA balancing is on: it unmaps pages to see who "
                                 "touches them");
        finding_basis(f, "kernel.numa_balancing = %d; experts are bound and need not move",
                      c->facts->numa_balancing);
        finding_change(f, "sysctl kernel.numa_balancing=0");
    }
}
