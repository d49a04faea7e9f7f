/* Rules about GPUs: memory, links, places. Pure. */
#include "deploy/baton/doctor_rules.h"

#include "deploy/baton/gpu_types.h"

#include <stdio.h>
#include <string.h>

enum { TEXT = 256, MIN_CAPABILITY = 9 };

static const char *link_name(FactsLink l) {
    static const char *const names[] = {"unknown", "itself", "NVLink", "PIX",
                                        "PXB",     "PHB",    "NODE",   "SYS"};
    return names[l];
}

static const char *link_meaning(FactsLink l) {
    return l == FACTS_LINK_SYS    ? "PCIe and the link between NUMA nodes"
           : l == FACTS_LINK_NODE ? "PCIe and several of its host bridges"
           : l == FACTS_LINK_PHB  ? "PCIe and its host bridge"
                                  : "PCIe switches";
}

void rule_gpu_present(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    int n = facts_n_gpus(c->facts);
    if (!v->cuda)
        return;
    if (n == 0) {
        finding_add(out, "gpus", FINDING_UNKNOWN, 0, "GPUs (no gpus.csv, no nvidia-smi)");
        return;
    }
    if (n < v->tp) {
        Finding *f = finding_add(out, "gpus", FINDING_FAIL, 0, "tp = %d, the host has %d GPU%s",
                                 v->tp, n, n > 1 ? "s" : "");
        finding_change(f, "[engine] tp = at most %d", n);
        return;
    }
    for (int i = 0; i < v->group.n; i++) {
        const FactsGpu *g = &c->facts->gpu[v->group.gpu[i]];
        const GpuType *t = gpu_type_find(g->name);
        if (t && t->capability < MIN_CAPABILITY) {
            Finding *f = finding_add(out, "gpus", FINDING_FAIL, 0,
                                     "GPU %d (%s) has compute capability %d.x, %d.0 is needed",
                                     v->group.gpu[i], g->name, t->capability, MIN_CAPABILITY);
            finding_change(f, "CUDA_VISIBLE_DEVICES without it");
            return;
        }
    }
    finding_add(out, "gpus", FINDING_OK, 0, "%d GPUs for tp = %d", n, v->tp);
}

/* ---- memory ---- */

static double memory_gb(const RuleCase *c, int gpu) {
    const FactsGpu *g = &c->facts->gpu[gpu];
    const GpuType *t = gpu_type_find(g->name);
    return c->assume->gpu_memory_gb > 0 ? c->assume->gpu_memory_gb
           : g->memory_mb > 0           ? (double)g->memory_mb * 1048576 / 1e9
           : t                          ? t->memory_gb
                                        : 0;
}

typedef struct GpuNeed {
    double weights, kv, reserve; /* GB per GPU and process */
} GpuNeed;

static GpuNeed need_of(const RuleCase *c) {
    const View *v = c->view;
    const Shape *s = c->shape;
    double moe = model_moe_layers(s), held = model_rest_held_bytes(s, c->assume->gpu_rest_bits),
           expert = model_expert_weights(s) * c->assume->gpu_expert_bits / 8;
    held += v->resident * s->n_experts * (moe + (v->update ? 1 : 0)) * expert;
    return (GpuNeed){held / 1e9 / v->tp, (double)v->pool * model_kv_token_bytes(s, v->kv) / 1e9,
                     c->assume->gpu_reserve_gb};
}

/* Processes on the first group's GPUs: ranks take the GPUs in turn, so that without an environment
 * of their own all take the same. */
static int processes(const RuleCase *c) {
    const View *v = c->view;
    return v->n_prefill + v->n_decode;
}

static void say_two_copies(Findings *out, const GpuNeed *need, double has) {
    double both = 2 * (need->weights + need->kv + need->reserve);
    if (both <= has)
        return;
    Finding *f =
        finding_add(out, "two-copies", FINDING_NOTE, 0,
                    "Baton's prefill and decode each hold weights and a KV pool: translated "
                    "as it is, both do not fit on these GPUs");
    finding_basis(f,
                  "2 x (%.1f GB of weights + %.1f GB of KV + %.1f GB reserve) = %.1f GB per GPU "
                  "of %.1f GB",
                  need->weights, need->kv, need->reserve, both, has);
    finding_change(f, "GPUs of their own for each of the two, as in the configuration below");
}

void rule_gpu_memory(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    double has = 0;
    if (!v->cuda || v->group.n == 0)
        return;
    for (int i = 0; i < v->group.n; i++) {
        double one = memory_gb(c, v->group.gpu[i]);
        has = i == 0 || one < has ? one : has;
    }
    if (has <= 0) {
        finding_add(out, "gpu-memory", FINDING_UNKNOWN, 0, "memory of the GPUs");
        return;
    }
    GpuNeed need = need_of(c);
    double sum = need.weights + need.kv + need.reserve;
    if (sum > has) {
        Finding *f = finding_add(out, "gpu-memory", FINDING_FAIL, 0,
                                 "weights and KV do not fit the GPUs' memory");
        finding_basis(f,
                      "%.1f GB of weights (%.0f %% of the experts resident) + %.1f GB of KV + "
                      "%.1f GB reserve = %.1f GB per GPU of %.1f GB",
                      need.weights, v->resident * 100, need.kv, need.reserve, sum, has);
        finding_change(f,
                       "fewer resident experts ([experts] resident), fewer pages, or a larger tp");
        return;
    }
    finding_add(out, "gpu-memory", FINDING_OK, 0, "%.1f of %.1f GB of each GPU", sum, has);
    if (v->foreign)
        say_two_copies(out, &need, has);
    else if (processes(c) * sum > has && facts_n_gpus(c->facts) < processes(c) * v->tp) {
        Finding *f = finding_add(out, "gpu-sharing", FINDING_FAIL, 0,
                                 "%d processes with tp = %d do not fit on %d GPUs", processes(c),
                                 v->tp, facts_n_gpus(c->facts));
        finding_basis(f, "%.1f GB per GPU and process, %.1f GB per GPU", sum, has);
        finding_change(f, "a smaller tp, so that each process has GPUs of its own");
    }
}

/* ---- links ---- */

static void list_pairs(const RuleCase *c, char *out, size_t n) {
    const ViewGroup *g = &c->view->group;
    size_t len = 0;
    *out = 0;
    for (int i = 0; i < g->n; i++)
        for (int j = i + 1; j < g->n && len < n; j++)
            if (c->facts->gpu[g->gpu[i]].link[g->gpu[j]] == FACTS_LINK_NV)
                len += (size_t)snprintf(out + len, n - len, "%s%d-%d", len ? ", " : "", g->gpu[i],
                                        g->gpu[j]);
}

void rule_all_reduce(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    const ViewGroup *g = &v->group;
    char pairs[TEXT], list[TEXT];
    if (!v->cuda || v->tp < 2 || g->n < v->tp)
        return;
    if (!c->facts->links_known) {
        finding_add(out, "all-reduce", FINDING_UNKNOWN, 0, "links between GPUs (no topo.txt)");
        return;
    }
    if (g->worst == FACTS_LINK_NV) {
        finding_add(out, "all-reduce", FINDING_OK, 0, "NVLink joins all ranks of a group");
        return;
    }
    View better = *v;
    better.group.worst = FACTS_LINK_NV;
    list_pairs(c, pairs, sizeof pairs);
    Finding *f = finding_add(out, "all-reduce", FINDING_WARN, rules_gain(c, &better),
                             "the all-reduces of tp = %d go over PCIe: %s%s", v->tp,
                             g->some_nv ? "NVLink joins only the pairs " : "no NVLink joins GPUs ",
                             g->some_nv ? pairs : view_list(list, sizeof list, g->gpu, g->n));
    finding_basis(
        f,
        "%.0f all-reduces per token x %.0f us over %s (%s) = %.1f ms; over NVLink x %.0f us "
        "= %.1f ms",
        c->ceiling->n_reduce, c->assume->pcie_us, link_name(g->worst), link_meaning(g->worst),
        c->ceiling->reduce_ms, c->assume->nvlink_us,
        c->ceiling->n_reduce * c->assume->nvlink_us / 1e3);
    finding_change(f, "%s",
                   g->some_nv ? "tp = 2 within a pair, and several instances"
                              : "a smaller tp, or NVLink bridges");
}

/* ---- places ---- */

void rule_gpu_idle(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    int idle[FACTS_GPUS], n = 0, other = 0;
    char list[TEXT];
    int groups = v->foreign ? 1 : processes(c);
    if (!v->cuda || v->group.n == 0)
        return;
    for (int i = 0, at = 0; i < c->facts->n_gpus; i++) {
        const FactsGpu *g = &c->facts->gpu[i];
        if (!g->present || at++ < groups * v->tp)
            continue;
        if (strcmp(g->name, c->facts->gpu[v->group.gpu[0]].name) == 0)
            idle[n++] = i;
        else
            other++;
    }
    if (n == 0) {
        finding_add(out, "gpus-idle", FINDING_OK, 0, "all GPUs of the kind have work");
        return;
    }
    Finding *f =
        finding_add(out, "gpus-idle", FINDING_WARN, 0, "%d GPU%s of the same kind %s idle: %s", n,
                    n > 1 ? "s" : "", n > 1 ? "are" : "is", view_list(list, sizeof list, idle, n));
    finding_basis(f, "%d of %d are used%s", groups * v->tp, facts_n_gpus(c->facts) - other,
                  other ? "; others are of another kind" : "");
    finding_change(f, "prefill on GPUs of its own, or another decode");
}

static int gpu_socket(const RuleCase *c, int gpu) {
    int node = c->facts->gpu[gpu].node;
    return node >= 0 && node < c->facts->n_nodes && c->facts->node[node].present
               ? c->facts->node[node].socket
               : -1;
}

/* Rows go from the GPUs to every expertd and back; a group that reaches over the sockets' link does
 * so for its all-reduces too. */
void rule_gpu_side(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    char text[TEXT];
    int nodes[FACTS_NODES], n_nodes = view_nodes(v, nodes), first = -1;
    bool known = false, across = false, near = n_nodes == 0;
    if (!v->cuda || v->group.n == 0 || c->facts->n_sockets < 2)
        return;
    for (int i = 0; i < v->group.n; i++) {
        int socket = gpu_socket(c, v->group.gpu[i]);
        known |= socket >= 0;
        across |= first >= 0 && socket >= 0 && socket != first;
        first = first < 0 ? socket : first;
        for (int k = 0; k < n_nodes && socket >= 0; k++)
            near |= nodes[k] < c->facts->n_nodes && c->facts->node[nodes[k]].socket == socket;
    }
    if (!known) {
        finding_add(out, "gpu-side", FINDING_UNKNOWN, 0, "the GPUs' memory nodes");
    } else if (across) {
        Finding *f = finding_add(out, "gpu-side", FINDING_WARN, 0,
                                 "GPUs %s of one group are on both sides of the sockets' link",
                                 view_list(text, sizeof text, v->group.gpu, v->group.n));
        finding_change(f, "CUDA_VISIBLE_DEVICES = GPUs of one socket for each service");
    } else if (!near) {
        Finding *f = finding_add(out, "gpu-side", FINDING_WARN, 0,
                                 "the GPUs are at socket %d, every expertd is at another", first);
        finding_basis(f, "each layer's rows cross the link between sockets twice");
        finding_change(f, "experts on the nodes of socket %d as well", first);
    } else {
        finding_add(out, "gpu-side", FINDING_OK, 0, "GPUs and experts share a side");
    }
}

/* Whether copies were measured far below what the lanes carry. */
static bool say_slow_copies(Findings *out, const FactsGpu *g, int gpu, int width) {
    static const double lane[] = {0, 0.25, 0.5, 0.985, 1.97, 3.94, 7.56};
    int gen = g->gen_max < 6 ? g->gen_max : 6;
    double can = gen > 0 ? lane[gen] * width : 0,
           least = g->h2d_gb_per_s < g->d2h_gb_per_s ? g->h2d_gb_per_s : g->d2h_gb_per_s;
    if (least <= 0 || can <= 0 || least >= 0.6 * can)
        return false;
    Finding *f = finding_add(out, "pcie", FINDING_WARN, 0,
                             "copies between host and GPU %d are slow for its lanes", gpu);
    finding_basis(f, "%.1f GB/s to it, %.1f from it; %d lanes of generation %d carry %.1f",
                  g->h2d_gb_per_s, g->d2h_gb_per_s, width, g->gen_max, can);
    finding_change(f, "look for a switch shared with other GPUs, an IOMMU, or memory on the other "
                      "socket");
    return true;
}

void rule_pcie(const RuleCase *c, Findings *out) {
    bool known = false;
    if (!c->view->cuda)
        return;
    for (int i = 0; i < c->view->group.n; i++) {
        const FactsGpu *g = &c->facts->gpu[c->view->group.gpu[i]];
        int width = g->width_now > 0 ? g->width_now : g->width_max;
        known |= width > 0 || g->h2d_gb_per_s > 0;
        if (width > 0 && (width < 16 || width < g->width_max)) {
            Finding *f = finding_add(out, "pcie", FINDING_WARN, 0, "GPU %d has %d PCIe lanes%s",
                                     c->view->group.gpu[i], width,
                                     width < g->width_max ? " of more that it could have" : "");
            finding_basis(f,
                          "width %d now, %d at most, generation %d at most (an idle GPU lowers "
                          "its generation, never its width)",
                          width, g->width_max, g->gen_max);
            finding_change(f, "another slot or riser, or the lanes' setting in the firmware");
            return;
        }
        if (g->gen_max > 0 && g->gen_max < 4) {
            Finding *f = finding_add(out, "pcie", FINDING_WARN, 0, "GPU %d has PCIe generation %d",
                                     c->view->group.gpu[i], g->gen_max);
            finding_basis(f, "%d lanes of generation %d carry half of what generation %d does",
                          width, g->gen_max, g->gen_max + 1);
            finding_change(f, "a slot of a later generation");
            return;
        }
        if (say_slow_copies(out, g, c->view->group.gpu[i], width))
            return;
    }
    if (known)
        finding_add(out, "pcie", FINDING_OK, 0, "PCIe width and generation");
    else if (c->view->group.n > 0)
        finding_add(out, "pcie", FINDING_UNKNOWN, 0, "PCIe width");
}
