/* See doctor_ceiling.h. */
#include "deploy/baton/doctor_ceiling.h"

#include "deploy/baton/gpu_types.h"

#include <stdio.h>
#include <string.h>

/* ---- bandwidths ---- */

double ceiling_node_gb_per_s(const Facts *f, const Assume *a, int node) {
    const char *how;
    int in_socket = 0;
    if (f->node[node].gb_per_s > 0)
        return f->node[node].gb_per_s;
    for (int i = 0; i < f->n_nodes; i++)
        in_socket += f->node[i].present && f->node[i].socket == f->node[node].socket;
    return assume_socket_gb_per_s(a, f, &how) / (in_socket > 0 ? in_socket : 1);
}

double ceiling_gpu_gb_per_s(const Facts *f, const Assume *a, int gpu) {
    const GpuType *t = gpu_type_find(f->gpu[gpu].name);
    return a->gpu_gb_per_s > 0 ? a->gpu_gb_per_s : t ? t->gb_per_s : 0;
}

/* As far as cores can take it. */
static double all_nodes(const CeilingCase *c) {
    int list[FACTS_NODES], n = facts_usable_nodes(c->facts, list);
    double sum = 0;
    for (int i = 0; i < n; i++) {
        double memory = ceiling_node_gb_per_s(c->facts, c->assume, list[i]),
               cores = c->facts->node[list[i]].n_cores * c->assume->core_gb_per_s;
        sum += memory < cores ? memory : cores;
    }
    const char *how;
    return sum > 0 ? sum : assume_socket_gb_per_s(c->assume, c->facts, &how);
}

/* What one expertd reads at: its node's bandwidth, shared with others there, as far as its threads
 * can take it. */
static double expertd_gb_per_s(const CeilingCase *c, const ViewExpertd *x) {
    const View *v = c->view;
    int here = 0;
    for (int i = 0; i < v->n_expertd; i++)
        here += v->expertd[i].node == x->node;
    bool known = x->node >= 0 && x->node < c->facts->n_nodes && c->facts->node[x->node].present;
    int list[FACTS_NODES];
    double part = facts_usable_nodes(c->facts, list) > 1 ? c->assume->unbound_fraction : 1,
           node = known ? ceiling_node_gb_per_s(c->facts, c->assume, x->node) : all_nodes(c) * part;
    double threads = x->threads * c->assume->core_gb_per_s;
    return node / here < threads || threads <= 0 ? node / here : threads;
}

/* All shards are equal, so that the slowest decides. */
static double experts_gb_per_s(const CeilingCase *c) {
    double least = 0;
    for (int i = 0; i < c->view->n_expertd; i++) {
        double v = expertd_gb_per_s(c, &c->view->expertd[i]);
        least = i == 0 || v < least ? v : least;
    }
    return least * c->view->n_expertd;
}

static double device_gb_per_s(const CeilingCase *c) {
    const ViewGroup *g = &c->view->group;
    double least = 0;
    if (!c->view->cuda)
        return all_nodes(c);
    for (int i = 0; i < g->n; i++) {
        double v = ceiling_gpu_gb_per_s(c->facts, c->assume, g->gpu[i]);
        least = i == 0 || v < least ? v : least;
    }
    if (g->n == 0)
        least = c->assume->gpu_gb_per_s;
    return least * c->view->tp * c->assume->gpu_fraction;
}

/* ---- the sum ---- */

/* Mean accepted tokens on code with the MTP layer of GLM-5.2, the one of the step itself included
 * (InferenceX reference curve). */
double ceiling_accepted(int k) {
    static const double mean[CEILING_DRAFT + 1] = {1, 1.84, 2.50, 2.99, 3.33, 3.61};
    return mean[k];
}

static Ceiling of_step(const CeilingCase *c, double experts, double rows) {
    const View *v = c->view;
    const Shape *s = c->shape;
    const Assume *a = c->assume;
    double visits = model_moe_layers(s) * experts, remote = 1 - v->resident,
           weights = model_expert_weights(s);
    bool cuda = v->cuda;
    Ceiling r = {0};
    if (remote > 0 && v->n_expertd > 0) {
        r.cpu_bytes = visits * remote * weights * v->expert_bits / 8;
        r.cpu_gb_per_s = experts_gb_per_s(c);
        r.cpu_ms = r.cpu_bytes / r.cpu_gb_per_s / 1e6;
        r.n_handover = model_moe_layers(s);
        r.handover_ms = r.n_handover * a->handover_us / 1e3;
    }
    double context =
        v->context > 0 && (double)v->context < a->context ? (double)v->context : a->context;
    r.device_bytes = model_rest_bytes(s, cuda ? a->gpu_rest_bits : a->host_rest_bits) +
                     visits * v->resident * weights * a->gpu_expert_bits / 8 +
                     rows * model_kv_read_bytes(s, v->kv, context);
    r.device_gb_per_s = device_gb_per_s(c);
    r.device_ms = r.device_gb_per_s > 0 ? r.device_bytes / r.device_gb_per_s / 1e6 : 0;
    if (cuda && v->tp > 1) {
        r.n_reduce = 2 * s->n_layers;
        r.reduce_us = v->group.worst == FACTS_LINK_NV ? a->nvlink_us : a->pcie_us;
        r.reduce_ms = r.n_reduce * r.reduce_us / 1e3;
    }
    return r;
}

static void add_up(Ceiling *r, double tokens) {
    r->total_ms = r->cpu_ms + r->device_ms + r->reduce_ms + r->handover_ms;
    r->tok_per_s = r->total_ms > 0 ? 1e3 * tokens / r->total_ms : 0;
    r->memory_tok_per_s = r->cpu_ms > 0 ? 1e3 * tokens / r->cpu_ms : 0;
}

Ceiling ceiling_compute(const CeilingCase *c) {
    Ceiling r = of_step(c, c->shape->n_active, 1);
    add_up(&r, 1);
    return r;
}

Ceiling ceiling_compute_draft(const CeilingCase *c, int k) {
    const Shape *s = c->shape;
    double more = model_distinct_experts(s, k + 1) - s->n_active;
    Ceiling r = of_step(c, s->n_active + more * (1 - c->assume->draft_overlap), k + 1);
    /* A draft reads one layer and the head. */
    double rest = model_rest_bytes(s, c->view->cuda ? c->assume->gpu_rest_bits
                                                    : c->assume->host_rest_bits),
           head = 2.0 * s->hidden * s->vocab, layer = (rest - head) / s->n_layers;
    if (r.device_gb_per_s > 0)
        r.device_ms += k * (head + layer) / r.device_gb_per_s / 1e6;
    add_up(&r, ceiling_accepted(k));
    return r;
}

/* ---- words ---- */

static void explain_experts(const Ceiling *v, const CeilingCase *c, const char *indent, Buf *out) {
    const View *w = c->view;
    const Shape *s = c->shape;
    if (v->cpu_ms <= 0) {
        buf_printf(out, "%sexperts in host memory   none\n", indent);
        return;
    }
    buf_printf(out,
               "%sexperts in host memory   %d layers x %d experts x %.4g not on the device x 3 x "
               "%d x %d weights x %.4g bit / 8 = %.3g GB\n",
               indent, model_moe_layers(s), s->n_active, 1 - w->resident, s->hidden, s->moe_inner,
               w->expert_bits, v->cpu_bytes / 1e9);
    buf_printf(out,
               "%s                         / (%d shards x %.1f GB/s = %.1f GB/s) = %.1f ms, "
               "by itself %.1f tok/s\n",
               indent, w->n_expertd, v->cpu_gb_per_s / w->n_expertd, v->cpu_gb_per_s, v->cpu_ms,
               v->memory_tok_per_s);
}

void ceiling_explain(const Ceiling *v, const CeilingCase *c, const char *indent, Buf *out) {
    explain_experts(v, c, indent, out);
    if (v->device_gb_per_s > 0 && c->view->cuda)
        buf_printf(out,
                   "%sGPUs                     %.3g GB / (%d x %.0f GB/s x %.2f = %.0f GB/s) = "
                   "%.1f ms\n",
                   indent, v->device_bytes / 1e9, c->view->tp,
                   v->device_gb_per_s / c->view->tp / c->assume->gpu_fraction,
                   c->assume->gpu_fraction, v->device_gb_per_s, v->device_ms);
    else if (v->device_gb_per_s > 0)
        buf_printf(out, "%sall else on the host     %.3g GB / %.1f GB/s = %.1f ms\n", indent,
                   v->device_bytes / 1e9, v->device_gb_per_s, v->device_ms);
    else
        buf_printf(out,
                   "%sGPUs                     unknown: no GPU of a known type; --set "
                   "gpu_gb_per_s=N\n",
                   indent);
    if (v->n_reduce > 0)
        buf_printf(out, "%sall-reduces              %.0f x %.0f us = %.1f ms\n", indent,
                   v->n_reduce, v->reduce_us, v->reduce_ms);
    if (v->n_handover > 0)
        buf_printf(out, "%shand-over                %.0f x %.0f us = %.1f ms\n", indent,
                   v->n_handover, c->assume->handover_us, v->handover_ms);
    buf_printf(out, "%stogether                 %.1f ms: %.1f tok/s\n", indent, v->total_ms,
               v->tok_per_s);
}
