/* The report for people. */
#include "deploy/baton/doctor_report.h"

#include <string.h>

enum { WIDTH = 116 };

/* Words of text, wrapped: the first line after head, the others as far in. */
static void wrap(FILE *to, const char *head, const char *text) {
    int indent = (int)strlen(head), at = 0;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (at == 0) {
            at = fprintf(to, "%s%.*s", head, n, text);
        } else if (at + 1 + n > WIDTH) {
            fprintf(to, "\n%*s%.*s", indent, "", n, text);
            at = indent + n;
        } else {
            at += fprintf(to, " %.*s", n, text);
        }
        text += n;
        text += strspn(text, " ");
    }
    if (at)
        fputc('\n', to);
}

/* ---- the host ---- */

static void put_gpus(const Facts *f, FILE *to) {
    bool said[FACTS_GPUS] = {false};
    for (int i = 0; i < f->n_gpus; i++) {
        int n = 0;
        for (int j = i; j < f->n_gpus; j++)
            if (f->gpu[j].present && !said[j] && strcmp(f->gpu[i].name, f->gpu[j].name) == 0) {
                said[j] = true;
                n++;
            }
        if (n > 0)
            fprintf(to, ", %d x %s", n, *f->gpu[i].name ? f->gpu[i].name : "GPU");
    }
}

static void put_host(const Report *r, FILE *to) {
    const Facts *f = r->facts;
    int list[FACTS_NODES], n = facts_usable_nodes(f, list), cores = 0;
    double gb = 0, read = 0;
    const char *how;
    for (int i = 0; i < n; i++) {
        cores += f->node[list[i]].n_cores;
        gb += f->node[list[i]].size_mb > 0 ? (double)f->node[list[i]].size_mb * 1048576 / 1e9 : 0;
        read += ceiling_node_gb_per_s(f, r->assume, list[i]);
    }
    fprintf(to, "host    %s: ", r->facts_from);
    if (n == 0)
        fputs("memory nodes unknown", to);
    else
        fprintf(to, "%d socket%s, %d memory node%s, %d physical cores, %.0f GB", f->n_sockets,
                f->n_sockets == 1 ? "" : "s", n, n == 1 ? "" : "s", cores, gb);
    put_gpus(f, to);
    fputc('\n', to);
    if (n > 0) {
        assume_socket_gb_per_s(r->assume, f, &how);
        fprintf(to, "        %.0f GB/s of memory bandwidth (%s)\n", read,
                f->node[list[0]].gb_per_s > 0 ? "measured" : how);
        fprintf(to, "        sockets: %s\n", f->sockets_how);
    }
}

static void put_config(const Report *r, FILE *to) {
    const View *v = r->view;
    int nodes[FACTS_NODES], n = view_nodes(v, nodes);
    char list[256];
    if (!r->config_from) {
        fputs("config  none given\n", to);
        return;
    }
    fprintf(to, "config  %s: %d prefill, %d decode, tp %d on %s, %.0f of %d experts resident\n",
            r->config_from, v->n_prefill, v->n_decode, v->tp, v->cuda ? "GPUs" : "the host",
            v->resident * r->shape->n_experts, r->shape->n_experts);
    if (v->n_expertd > 0)
        fprintf(to, "        %d expertd on node %s, %d threads each, %.4g bits per weight\n",
                v->n_expertd, view_list(list, sizeof list, nodes, n), v->expertd[0].threads,
                v->expert_bits);
    if (r->shape_assumed)
        fputs("        no config.json was found: the shape of GLM-5.2 is taken\n", to);
}

/* ---- findings ---- */

static void put_finding(const Finding *f, int number, FILE *to) {
    char gain[32] = "";
    if (f->gain > 0.0005)
        snprintf(gain, sizeof gain, "  +%.0f %%", f->gain * 100);
    fprintf(to, "\n%2d. %-5s%s%s\n", number, finding_level_name(f->level), f->id, gain);
    wrap(to, "    ", f->what);
    wrap(to, "    numbers: ", f->basis);
    wrap(to, "    change:  ", f->change);
}

static void put_brief(const Findings *f, FindingLevel level, const char *head, FILE *to) {
    Buf b = {0};
    for (int i = 0; i < f->n; i++)
        if (f->at[i].level == level)
            buf_printf(&b, "%s%s", b.len ? "; " : "", f->at[i].what);
    if (b.len) {
        fputc('\n', to);
        wrap(to, head, b.data);
    }
    buf_done(&b);
}

static void put_findings(const Report *r, FILE *to) {
    const Findings *f = r->findings;
    int number = 0;
    for (int i = 0; i < f->n; i++)
        if (f->at[i].level > FINDING_UNKNOWN)
            put_finding(&f->at[i], ++number, to);
    if (number > 0)
        fputs("\n+N %: tokens per second at one stream, if this alone is changed, by the ceilings "
              "below\n",
              to);
    put_brief(f, FINDING_OK, "fine: ", to);
    put_brief(f, FINDING_UNKNOWN, "not known here: ", to);
}

/* ---- ceilings ---- */

/* Other systems draft; nothing in Baton does yet. */
static void put_draft(const CeilingCase *c, Buf *out) {
    int k = c->view->spec_tokens < CEILING_DRAFT ? c->view->spec_tokens : CEILING_DRAFT;
    if (k == 0)
        return;
    Ceiling v = ceiling_compute_draft(c, k);
    buf_printf(out, "  with %d drafted tokens    %.1f ms for %.2f tokens: %.1f tok/s\n", k,
               v.total_ms, ceiling_accepted(k), v.tok_per_s);
}

static void put_ceilings(const Report *r, FILE *to) {
    Buf b = {0};
    CeilingCase c = {r->facts, r->assume, r->shape, r->view};
    if (r->config_from && r->view->n_decode > 0) {
        buf_puts(&b, "\nceiling of this configuration, one stream\n");
        ceiling_explain(r->ceiling, &c, "  ", &b);
        put_draft(&c, &b);
    }
    if (r->better->fits) {
        c.view = &r->better->view;
        buf_puts(&b, "\nceiling of the configuration below\n");
        ceiling_explain(&r->better->ceiling, &c, "  ", &b);
    }
    if (b.len)
        fputs(b.data, to);
    buf_done(&b);
    fputs("\nassumptions (--set NAME=VALUE)\n", to);
    for (const AssumeRow *a = ASSUME_TABLE; a->name; a++)
        fprintf(to, "  %-16s %8.4g  %s\n", a->name, assume_get(r->assume, a), a->help);
}

/* ---- configurations ---- */

static void put_better(const Report *r, FILE *to) {
    const Better *b = r->better;
    char list[128];
    if (!b->fits) {
        fprintf(to, "\nno configuration of this host fits: %s\n", b->why);
        return;
    }
    fputs("\na configuration that uses the host", to);
    if (b->n_unused > 0)
        fprintf(to, ", but for GPU %s", view_list(list, sizeof list, b->unused, b->n_unused));
    fputs(" (--better DIR writes it)\n", to);
    if (r->view->foreign && b->ceiling.tok_per_s < r->ceiling->tok_per_s)
        fputs(
            "Its ceiling is below the given one's: one engine holds the weights once, prefill and "
            "decode each hold them.\n",
            to);
    for (int i = 0; i < b->n_docs; i++) {
        fprintf(to, "\n--- %s.conf\n", b->docs[i].name);
        conf_doc_print(&b->docs[i], to);
    }
}

static void put_translation(const Sglang *s, FILE *to) {
    fputs("options\n", to);
    for (int i = 0; i < s->n; i++) {
        const SglangRemark *m = &s->remark[i];
        char head[800];
        snprintf(head, sizeof head, "%s%s%s: %s%s%s%s%s", m->option, *m->value ? " " : "", m->value,
                 sglang_state_name(m->state), *m->baton ? ", " : "", m->baton, *m->why ? ". " : "",
                 m->why);
        wrap(to, "  ", head);
    }
    fputc('\n', to);
}

void report_text(const Report *r, FILE *to) {
    static const char *const verdict[] = {"good", "works, with warnings", "will not work"};
    if (r->sglang)
        put_translation(r->sglang, to);
    put_host(r, to);
    put_config(r, to);
    put_findings(r, to);
    put_ceilings(r, to);
    put_better(r, to);
    fprintf(to, "\n%s\n", verdict[r->status]);
}
