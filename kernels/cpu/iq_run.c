/* See iq_run.h.
 *
 * A call is one list of tasks that threads take in order: quantise the tokens of each expert, then
 * gate and up of all experts, then down of all experts. A task may need earlier ones; since those
 * have been begun before it, waiting for them ends, and since they were begun long before it, it
 * hardly ever waits: there is no barrier within a call. Tasks are small (some 60 to 100 KB of
 * weights), so that the end of the list leaves no thread idle for long. */
#include "kernels/cpu/iq_run.h"

#include "kernels/cpu/iq_kern.h"
#include "kernels/cpu/mem_read.h"
#include "kernels/cpu/pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    AMX_MIN_TOKENS = 5, /* of an expert: with fewer, unpacking for tiles costs more than it gives */
    PAIRS = 2,          /* panels of gate and of up of one task */
    DOWN_PANELS = 4,    /* of one down task */
    DOWN_WIDTH = DOWN_PANELS * IQ_ROWS,
    NEXT_TOKEN = 6,    /* tokens between asking memory for an output and adding to it */
    SMALL_ROWS = 64,   /* calls of more rows are cut into passes */
    PASS_EXPERTS = 16, /* of one pass: about a millisecond */
    SPINS = 1000,      /* before a waiting task lets other threads run */
};

/* One expert of a pass. */
typedef struct Used {
    const uint8_t *unit; /* its slice */
    int first, m;        /* its places in `token` and `share` */
    int row;             /* its first row in the buffers of activations */
    int quant_task;      /* its first task that quantises */
    const IqKern *kern;
    _Atomic int quant_left; /* tasks */
    _Atomic int units_left; /* units without a quantised activation */
} Used;

struct IqRun {
    IqRunConf conf;
    IqIsa isa;
    HostPool *pool;
    size_t ld_x, ld_act; /* bytes from row to row of codes */
    int inner, row_limit;
    int8_t *x, *act;              /* [row_limit, ld_x], [row_limit, ld_act]: codes */
    float *x_scale, *act_scale;   /* [row_limit, hidden / group], [row_limit, n_units] */
    int32_t *x_sum, *act_sum;     /* likewise */
    float *act_f32;               /* [row_limit, inner] before quantisation */
    float *scratch;               /* [threads, SCRATCH] */
    int *first, *at, *token;      /* [n_experts + 1], [n_experts], [max_rows * max_k] */
    float *share;                 /* [max_rows * max_k] */
    Used *used;                   /* [n_experts] of the pass */
    _Atomic int *gate_up_left;    /* [n_experts, n_units] gate and up panel pairs */
    _Atomic int *turn;            /* [down tasks of one expert] whose sum may be added next */
    const uint8_t *const *expert; /* of the call, as everything below */
    const float *in;
    float *out;
    int n_used, n_quant, n_gate_up, n_down; /* of the pass; tasks of one expert */
};

enum { SCRATCH = IQ_MAX_TOKENS * IQ_MAX_PANELS * IQ_ROWS };

/* ---- waiting ---- */

static void wait_value(_Atomic int *at, int value) {
    for (int i = 0; atomic_load_explicit(at, memory_order_acquire) != value; i++) {
        if (i < SPINS)
            __builtin_ia32_pause();
        else
            sched_yield();
    }
}

/* Whether this was the last. */
static bool count_down(_Atomic int *left) {
    return atomic_fetch_sub_explicit(left, 1, memory_order_acq_rel) == 1;
}

/* ---- tasks ---- */

static int padded(int m) {
    return (m + IQ_TILE_ROWS - 1) / IQ_TILE_ROWS * IQ_TILE_ROWS;
}

static void quant_task(IqRun *r, int task) {
    int u = 0;
    while (u + 1 < r->n_used && r->used[u + 1].quant_task <= task)
        u++;
    Used *e = &r->used[u];
    int hidden = r->conf.geom.hidden, group = r->conf.geom.group, groups = hidden / group,
        begin = (task - e->quant_task) * IQ_TILE_ROWS,
        end = begin + IQ_TILE_ROWS < e->m ? begin + IQ_TILE_ROWS : e->m;
    for (int i = begin; i < end; i++) {
        size_t row = (size_t)(e->row + i);
        e->kern->quant(r->in + (size_t)r->token[e->first + i] * (size_t)hidden, hidden, group,
                       r->x + row * r->ld_x, r->x_scale + row * (size_t)groups,
                       r->x_sum + row * (size_t)groups);
    }
    count_down(&e->quant_left);
}

/* The activations of one unit are complete: to int8. */
static void quant_unit(IqRun *r, Used *e, int unit) {
    int group = r->conf.geom.group, units = r->conf.n_units;
    for (int i = 0; i < e->m; i++) {
        size_t row = (size_t)(e->row + i), at = row * (size_t)units + (size_t)unit;
        e->kern->quant(r->act_f32 + row * (size_t)r->inner + (size_t)unit * (size_t)group, group,
                       group, r->act + row * r->ld_act + (size_t)unit * (size_t)group,
                       &r->act_scale[at], &r->act_sum[at]);
    }
    count_down(&e->units_left);
}

static IqActs acts_from(const int8_t *q, size_t ld_q, const float *scale, const int32_t *sum,
                        size_t ld_g, size_t row) {
    return (IqActs){q + row * ld_q, scale + row * ld_g, sum + row * ld_g, ld_q, ld_g};
}

/* How many of an expert's m tokens go over the weights at a time: as few times as can be, alike,
 * whole tiles. */
static int part_of(int m) {
    int parts = (m + IQ_MAX_TOKENS - 1) / IQ_MAX_TOKENS;
    return parts > 1 ? padded((m + parts - 1) / parts) : m;
}

/* Some panels of gate and those of up between them: 16 inner channels each. */
static void gate_up_task(IqRun *r, int task, float *sums) {
    const IqGeom *g = &r->conf.geom;
    Used *e = &r->used[task / r->n_gate_up];
    int pair = task % r->n_gate_up * PAIRS, per_unit = g->group / IQ_ROWS, unit = pair / per_unit;
    size_t groups = (size_t)(g->hidden / g->group), panel = iq_panel_bytes(g);
    IqPanels w = {.bits = g->bits,
                  .group = g->group,
                  .n_panels = 2 * PAIRS,
                  .n_groups = (int)groups,
                  .type = g->scale,
                  .code = e->unit + (size_t)unit * iq_unit_bytes(g) +
                          (size_t)(pair % per_unit) * 2 * panel,
                  .panel_step = panel,
                  .group_step = iq_block_bytes(g),
                  .scale_panel_step = panel,
                  .scale_group_step = IQ_ROWS * 2};
    w.scale = w.code + groups * w.group_step;
    wait_value(&e->quant_left, 0);
    int step = part_of(e->m);
    for (int t = 0; t < e->m; t += step) {
        int m = step < e->m - t ? step : e->m - t;
        size_t row = (size_t)(e->row + t);
        IqActs a = acts_from(r->x, r->ld_x, r->x_scale, r->x_sum, groups, row);
        e->kern->panels(&w, &a, m, sums);
        for (int i = 0; i < m * PAIRS; i++)
            e->kern->silu_mul(r->act_f32 + (row + (size_t)(i / PAIRS)) * (size_t)r->inner +
                                  (size_t)(pair + i % PAIRS) * IQ_ROWS,
                              sums + i * 2 * IQ_ROWS, sums + (i * 2 + 1) * IQ_ROWS, IQ_ROWS);
    }
    if (count_down(&r->gate_up_left[(e - r->used) * r->conf.n_units + unit]))
        quant_unit(r, e, unit);
}

/* Adds the sums [m, DOWN_WIDTH] of places [first, first + m) to their part of the output. */
static void add_tokens(IqRun *r, const Used *e, int first, int m, int part, const float *sums) {
    size_t hidden = (size_t)r->conf.geom.hidden, at = (size_t)part * DOWN_WIDTH;
    for (int i = 0; i < m; i++) {
        if (i + NEXT_TOKEN < m)
            for (int c = 0; c < DOWN_WIDTH; c += 16)
                __builtin_prefetch(
                    r->out + (size_t)r->token[first + i + NEXT_TOKEN] * hidden + at + c, 1);
        e->kern->add_scaled(r->out + (size_t)r->token[first + i] * hidden + at,
                            sums + (size_t)i * DOWN_WIDTH, r->share[first + i], DOWN_WIDTH);
    }
}

/* Some panels of down: their part of the output of every token of an expert. Each waits for its
 * turn to add, so that sums are in the order of the experts. */
static void down_task(IqRun *r, int task, float *sums) {
    const IqGeom *g = &r->conf.geom;
    int u = task / r->n_down, part = task % r->n_down;
    Used *e = &r->used[u];
    IqPanels w = {.bits = g->bits,
                  .group = g->group,
                  .n_panels = DOWN_PANELS,
                  .n_groups = r->conf.n_units,
                  .type = g->scale,
                  .panel_step = iq_block_bytes(g),
                  .group_step = iq_unit_bytes(g),
                  .scale_panel_step = IQ_ROWS * 2,
                  .scale_group_step = iq_unit_bytes(g)};
    w.code = e->unit + iq_down_at(g) + (size_t)part * DOWN_PANELS * w.panel_step;
    w.scale = e->unit + iq_down_at(g) + iq_down_scales_at(g) +
              (size_t)part * DOWN_PANELS * w.scale_panel_step;
    wait_value(&e->units_left, 0);
    int step = part_of(e->m);
    for (int t = 0; t < e->m; t += step) {
        int m = step < e->m - t ? step : e->m - t;
        IqActs a = acts_from(r->act, r->ld_act, r->act_scale, r->act_sum, (size_t)w.n_groups,
                             (size_t)(e->row + t));
        e->kern->panels(&w, &a, m, sums);
        if (t == 0)
            wait_value(&r->turn[part], u);
        add_tokens(r, e, e->first + t, m, part, sums);
    }
    atomic_store_explicit(&r->turn[part], u + 1, memory_order_release);
}

static void run_task(void *arg, int task, int thread) {
    IqRun *r = arg;
    float *sums = r->scratch + (size_t)thread * SCRATCH;
    int gate_up = r->n_quant, down = gate_up + r->n_used * r->n_gate_up;
    if (task < gate_up)
        quant_task(r, task);
    else if (task < down)
        gate_up_task(r, task - gate_up, sums);
    else
        down_task(r, task - down, sums);
}

/* ---- a call ---- */

/* Sorts places by expert; tokens of an expert stay ascending. */
static void group_places(IqRun *r, int n, int k, const int32_t *id, const float *weight) {
    int n_experts = r->conf.n_experts;
    memset(r->first, 0, (size_t)(n_experts + 1) * sizeof *r->first);
    for (int i = 0; i < n * k; i++)
        if (id[i] >= 0)
            r->first[id[i] + 1]++;
    for (int e = 0; e < n_experts; e++) {
        r->first[e + 1] += r->first[e];
        r->at[e] = r->first[e];
    }
    for (int i = 0; i < n * k; i++)
        if (id[i] >= 0) {
            int at = r->at[id[i]]++;
            r->token[at] = i / k;
            r->share[at] = weight[i];
        }
}

static const IqKern *kern_of(IqIsa isa) {
    static const IqKern *const table[] = {&IQ_KERN_AMX, &IQ_KERN_VNNI, &IQ_KERN_AVX2,
                                          &IQ_KERN_SCALAR};
    return table[isa];
}

/* Adds an expert to the pass; false when it does not fit any more. */
static bool take(IqRun *r, int expert, int *rows) {
    int m = r->first[expert + 1] - r->first[expert];
    bool tiles = r->isa == IQ_AMX && m >= AMX_MIN_TOKENS;
    int need = tiles ? padded(m) : m;
    if (*rows + need > r->row_limit)
        return false;
    Used *e = &r->used[r->n_used];
    CHECK(r->expert[expert]);
    e->unit = r->expert[expert];
    e->first = r->first[expert];
    e->m = m;
    e->row = *rows;
    e->quant_task = r->n_quant;
    e->kern = kern_of(tiles || r->isa != IQ_AMX ? r->isa : IQ_VNNI);
    int tasks = padded(m) / IQ_TILE_ROWS;
    atomic_store_explicit(&e->quant_left, tasks, memory_order_relaxed);
    atomic_store_explicit(&e->units_left, r->conf.n_units, memory_order_relaxed);
    for (int u = 0; u < r->conf.n_units; u++)
        atomic_store_explicit(&r->gate_up_left[r->n_used * r->conf.n_units + u],
                              r->conf.geom.group / IQ_ROWS / PAIRS, memory_order_relaxed);
    r->n_quant += tasks;
    r->n_used++;
    *rows += need;
    return true;
}

/* Fills the pass with experts from *next on. */
static void fill_pass(IqRun *r, int *next, int most) {
    int rows = 0;
    r->n_used = r->n_quant = 0;
    for (; *next < r->conf.n_experts && r->n_used < most; (*next)++)
        if (r->first[*next + 1] > r->first[*next] && !take(r, *next, &rows))
            break;
    for (int i = 0; i < r->n_down; i++)
        atomic_store_explicit(&r->turn[i], 0, memory_order_relaxed);
}

IqWork iq_run(IqRun *r, const uint8_t *const *expert, int n, int k, const float *x,
              const int32_t *id, const float *weight, float *y, void (*between)(void *arg),
              void *arg) {
    IqWork work = {0};
    CHECK(n >= 1 && n <= r->conf.max_rows && k >= 1 && k <= r->conf.max_k);
    memset(y, 0, (size_t)n * (size_t)r->conf.geom.hidden * sizeof *y);
    group_places(r, n, k, id, weight);
    r->expert = expert;
    r->in = x;
    r->out = y;
    int most = n > SMALL_ROWS ? PASS_EXPERTS : r->conf.n_experts;
    for (int next = 0;;) {
        fill_pass(r, &next, most);
        if (r->n_used == 0)
            break;
        pool_run(r->pool, r->n_quant + r->n_used * (r->n_gate_up + r->n_down), run_task, r);
        work.n_experts += r->n_used;
        if (between && n > SMALL_ROWS)
            between(arg);
    }
    work.bytes =
        (uint64_t)work.n_experts * (uint64_t)r->conf.n_units * iq_unit_bytes(&r->conf.geom);
    return work;
}

/* ---- reading alone ---- */

double iq_run_read(IqRun *r, const uint8_t *const *slice, int n) {
    return mem_read(r->pool, slice, n, (size_t)r->conf.n_units * iq_unit_bytes(&r->conf.geom));
}

/* ---- life ---- */

/* In huge pages where the system grants them: tiles take rows that are far apart. */
static void *new_buffer(size_t n, size_t size) {
    size_t huge = 2 << 20, bytes = (n * size + huge - 1) / huge * huge;
    void *p = aligned_alloc(huge, bytes);
    CHECK(p);
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static void alloc_buffers(IqRun *r) {
    const IqRunConf *c = &r->conf;
    size_t rows = (size_t)r->row_limit, groups = (size_t)(c->geom.hidden / c->geom.group),
           units = (size_t)c->n_units, places = (size_t)c->max_rows * (size_t)c->max_k,
           experts = (size_t)c->n_experts;
    r->x = new_buffer(rows, r->ld_x);
    r->x_scale = new_buffer(rows * groups, sizeof *r->x_scale);
    r->x_sum = new_buffer(rows * groups, sizeof *r->x_sum);
    r->act = new_buffer(rows, r->ld_act);
    r->act_scale = new_buffer(rows * units, sizeof *r->act_scale);
    r->act_sum = new_buffer(rows * units, sizeof *r->act_sum);
    r->act_f32 = new_buffer(rows * (size_t)r->inner, sizeof *r->act_f32);
    r->scratch = new_buffer((size_t)c->threads * SCRATCH, sizeof *r->scratch);
    r->first = xcalloc(experts + 1, sizeof *r->first);
    r->at = xcalloc(experts, sizeof *r->at);
    r->token = xcalloc(places, sizeof *r->token);
    r->share = xcalloc(places, sizeof *r->share);
    r->used = xcalloc(experts, sizeof *r->used);
    r->gate_up_left = xcalloc(experts * units, sizeof *r->gate_up_left);
    r->turn = xcalloc((size_t)r->n_down, sizeof *r->turn);
}

int iq_run_open(IqRun **out, const IqRunConf *conf, Err *err) {
    int rc = iq_check(&conf->geom, err);
    if (rc)
        return rc;
    CHECK(conf->n_units >= 1 && conf->n_units <= iq_units(&conf->geom) && conf->threads >= 1);
    IqRun *r = xcalloc(1, sizeof *r);
    int small = conf->max_rows < SMALL_ROWS ? conf->max_rows : SMALL_ROWS;
    r->conf = *conf;
    r->isa = conf->best;
    while (!iq_isa_usable(r->isa, NULL))
        r->isa++;
    r->inner = conf->n_units * conf->geom.group;
    /* Rows are not a multiple of 4096 bytes apart, so that they do not share a set of the L1 cache.
     * Every expert fits, and so do small calls, whose few tokens per expert tiles pad. */
    r->ld_x = (size_t)conf->geom.hidden + 64;
    r->ld_act = (size_t)r->inner + 64;
    r->row_limit = padded(conf->max_rows);
    if (r->row_limit < small * conf->max_k * 2)
        r->row_limit = padded(small * conf->max_k * 2);
    r->n_gate_up = r->inner / (IQ_ROWS * PAIRS);
    r->n_down = conf->geom.hidden / (IQ_ROWS * DOWN_PANELS);
    alloc_buffers(r);
    PoolConf pool = {conf->threads, conf->spin_us, conf->on_thread, conf->arg};
    rc = pool_new(&r->pool, &pool, err);
    if (rc) {
        iq_run_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void iq_run_close(IqRun *r) {
    if (!r)
        return;
    pool_free(r->pool);
    void *const all[] = {r->x,           r->x_scale,
                         r->x_sum,       r->act,
                         r->act_scale,   r->act_sum,
                         r->act_f32,     r->scratch,
                         r->first,       r->at,
                         r->token,       r->share,
                         r->used,        (void *)r->gate_up_left,
                         (void *)r->turn};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free(r);
}

IqIsa iq_run_isa(const IqRun *r) {
    return r->isa;
}
