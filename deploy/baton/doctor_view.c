/* See doctor_view.h. */
#include "deploy/baton/doctor_view.h"

#include "model/expert_file.h"
#include "model/place.h"

#include <stdio.h>
#include <string.h>

static const Dtype KV_DTYPES[] = {DT_F32, DT_BF16, DT_F8E4M3};

/* ---- GPUs ---- */

ViewGroup view_group(const Facts *f, const int *gpu, int n) {
    ViewGroup g = {.n = n, .worst = FACTS_LINK_SELF};
    for (int i = 0; i < n; i++) {
        g.gpu[i] = gpu[i];
        for (int j = 0; j < i; j++) {
            FactsLink link = f->gpu[gpu[i]].link[gpu[j]];
            if (link == FACTS_LINK_NONE)
                link = f->gpu[gpu[j]].link[gpu[i]];
            g.some_nv |= link == FACTS_LINK_NV;
            g.worst = link > g.worst ? link : g.worst;
        }
    }
    return g;
}

/* Ranks take the GPUs in turn. */
static ViewGroup first_group(const Facts *f, int tp) {
    int list[8], n = 0;
    for (int i = 0; i < f->n_gpus && n < tp && n < 8; i++)
        if (f->gpu[i].present)
            list[n++] = i;
    return view_group(f, list, n);
}

const char *view_list(char *out, size_t n, const int *list, int count) {
    size_t len = 0;
    snprintf(out, n, "none");
    for (int i = 0; i < count && len < n; i++)
        len += (size_t)snprintf(out + len, n - len, "%s%d", i ? ", " : "", list[i]);
    return out;
}

/* ---- experts ---- */

static int count_resident(const EngineOpts *e, const Shape *s, double *share, Err *err) {
    bool *resident;
    /* Recorded counts change which experts are resident, not how many. */
    PlaceStrategy strategy =
        (PlaceStrategy)e->strategy == PLACE_FREQUENCY ? PLACE_UNIFORM : (PlaceStrategy)e->strategy;
    PlaceConf conf = {.strategy = strategy, .resident = e->resident, .file = e->placement};
    int rc = place_decide(&conf, s, &resident, err), held = 0;
    if (rc)
        return err_wrap(err, "[experts]");
    for (int l = 0; l < s->n_layers; l++)
        for (int x = 0; x < s->n_experts && !s->layer_dense[l]; x++)
            held += resident[l * s->n_experts + x];
    free(resident);
    *share = (double)held / (model_moe_layers(s) * (double)s->n_experts);
    return 0;
}

/* Bits of the files' weights when they can be read here. */
static bool bits_of_files(const char *dir, double *bits) {
    char path[4096];
    for (int layer = 0; layer < SHAPE_MAX_LAYERS; layer++) {
        ExpertFile *f;
        expert_file_path(path, sizeof path, dir, layer);
        if (expert_file_open(&f, path, NULL))
            continue;
        const IqGeom *g = &expert_file_head(f)->geom;
        *bits = g->bits + 16.0 / g->group;
        expert_file_close(f);
        return true;
    }
    return false;
}

static void look_at_expertd(View *v, const Services *s, const Facts *f, const Assume *a) {
    v->expert_bits = a->expert_bits + 16 / a->expert_group;
    for (int i = 0; i < services_count(s, SERVICE_EXPERTD) && i < VIEW_EXPERTD; i++) {
        const ExpertdOpts *o = &services_get(s, SERVICE_EXPERTD, i)->expertd;
        ViewExpertd *x = &v->expertd[v->n_expertd++];
        bool known = o->node >= 0 && o->node < f->n_nodes && f->node[o->node].present;
        int cores = 0;
        for (int n = 0; n < f->n_nodes; n++)
            cores += f->node[n].n_cores;
        *x = (ViewExpertd){.node = (int)o->node,
                           .threads = o->threads > 0 ? (int)o->threads
                                      : known        ? f->node[o->node].n_cores
                                                     : cores,
                           .shard = (int)o->shard,
                           .packed = *o->files != 0};
        v->n_shards = (int)o->n_shards;
        if (!x->packed)
            v->expert_bits = a->gpu_expert_bits;
        else
            (void)bits_of_files(o->files, &v->expert_bits);
    }
}

int view_nodes(const View *v, int *list) {
    int n = 0;
    for (int node = 0; node < FACTS_NODES; node++)
        for (int i = 0; i < v->n_expertd; i++)
            if (v->expertd[i].node == node) {
                list[n++] = node;
                break;
            }
    return n;
}

double view_expert_bytes(const View *v, const Services *s, const Shape *shape) {
    const Service *x = services_get(s, SERVICE_EXPERTD, 0);
    bool *device;
    double held = shape->n_experts;
    if (!x)
        return 0;
    if (place_parse(x->expertd.device, shape, &device, NULL) == 0) {
        int first = 0; /* a MoE layer, all of which are alike */
        while (first < shape->n_layers && shape->layer_dense[first])
            first++;
        for (int e = 0; e < shape->n_experts && first < shape->n_layers; e++)
            held -= device[first * shape->n_experts + e];
        free(device);
    }
    return held * (model_moe_layers(shape) + shape->n_mtp) * model_expert_weights(shape) *
           v->expert_bits / 8;
}

/* ---- all of it ---- */

static int64_t pool_tokens(const EngineOpts *e, const Shape *s) {
    double token = model_kv_token_bytes(s, KV_DTYPES[e->kv_dtype]);
    int64_t pages =
        e->pages > 0 ? e->pages : (int64_t)((double)e->pool_bytes / (token * KV_PAGE_TOKENS));
    return pages * KV_PAGE_TOKENS;
}

int view_make(View *out, const Services *s, const Facts *f, const Assume *a, const Shape *shape,
              bool foreign, Err *err) {
    View v = {.foreign = foreign,
              .services = s->n > 0,
              .tp = 1,
              .resident = 1,
              .kv = DT_BF16,
              .n_prefill = services_count(s, SERVICE_PREFILL),
              .n_decode = services_count(s, SERVICE_DECODE)};
    const Service *decode = services_get(s, SERVICE_DECODE, 0),
                  *prefill = services_get(s, SERVICE_PREFILL, 0), *any = decode ? decode : prefill;
    look_at_expertd(&v, s, f, a);
    if (any) {
        const EngineOpts *e = service_engine(any);
        v.cuda = strcmp(e->backend, "cuda") == 0;
        v.tp = (int)e->tp;
        v.kv = KV_DTYPES[e->kv_dtype];
        v.strategy = (PlaceStrategy)e->strategy;
        v.update = e->update_ms > 0;
        v.context = e->max_context > 0 ? e->max_context : shape->max_positions;
        v.pool = pool_tokens(e, shape);
        int rc = count_resident(e, shape, &v.resident, err);
        if (rc)
            return err_wrap(err, "%s", any->from);
    }
    if (prefill)
        v.prefill_pool = pool_tokens(&prefill->prefill.engine, shape);
    if (decode)
        v.max_running = (int)decode->decode.max_running;
    if (v.cuda)
        v.group = first_group(f, v.tp);
    *out = v;
    return 0;
}
