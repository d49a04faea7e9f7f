/* Integer-quantised experts: every table against plain C bit for bit, whole calls against
 * dequantised weights, and the questions that decide about AMX. */
#include "kernels/cpu/iq_isa.h"
#include "kernels/cpu/iq_kern.h"
#include "kernels/cpu/iq_run.h"
#include "kernels/quant.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

extern const IqKern IQ_KERN_AMX_MODEL;

static uint32_t rng = 1;

static uint32_t next_u32(void) {
    rng = rng * 1664525u + 1013904223u;
    return rng >> 8;
}

static float uniform(void) {
    return (float)next_u32() / (float)(1 << 23) - 1;
}

/* Tables that run here: the model of tiles wherever AVX-512 does. */
static int tables(const IqKern **out) {
    int n = 0;
    if (iq_isa_usable(IQ_AVX2, NULL))
        out[n++] = &IQ_KERN_AVX2;
    if (iq_isa_usable(IQ_VNNI, NULL)) {
        out[n++] = &IQ_KERN_VNNI;
        out[n++] = &IQ_KERN_AMX_MODEL;
    }
    if (iq_isa_usable(IQ_AMX, NULL))
        out[n++] = &IQ_KERN_AMX;
    return n;
}

/* ---- tables ---- */

enum { MOST_GROUPS = 5, MOST_TOKENS = IQ_MAX_TOKENS };

typedef struct Case {
    IqPanels w;
    IqActs a;
    uint8_t code[IQ_MAX_PANELS * MOST_GROUPS * IQ_ROWS * IQ_MAX_GROUP];
    uint16_t scale[IQ_MAX_PANELS * MOST_GROUPS * IQ_ROWS];
    int8_t q[MOST_TOKENS * (MOST_GROUPS * IQ_MAX_GROUP + 64)];
    float act_scale[MOST_TOKENS * MOST_GROUPS];
    int32_t sum[MOST_TOKENS * MOST_GROUPS];
} Case;

typedef enum Fill { FILL_RANDOM, FILL_EXTREME, FILL_ONE_HOT } Fill;

static int8_t activation(Fill fill, int t, int c) {
    if (fill == FILL_EXTREME)
        return (t + c) % 3 ? 127 : -127;
    if (fill == FILL_ONE_HOT)
        return c == t % IQ_MAX_GROUP ? 1 : 0;
    return (int8_t)((int)(next_u32() % 255) - 127);
}

/* Scales of one, so that sums show the integers themselves, unless random. */
static void fill_case(Case *c, int bits, int group, int panels, int groups, int m, IqScale type,
                      Fill fill) {
    size_t block = (size_t)IQ_ROWS * (size_t)group * (size_t)bits / 8;
    *c = (Case){.w = {.bits = bits,
                      .group = group,
                      .n_panels = panels,
                      .n_groups = groups,
                      .type = type,
                      .code = c->code,
                      .scale = (const uint8_t *)c->scale,
                      .panel_step = block,
                      .group_step = block * (size_t)panels,
                      .scale_panel_step = IQ_ROWS * 2,
                      .scale_group_step = IQ_ROWS * 2 * (size_t)panels},
                .a = {c->q, c->act_scale, c->sum, (size_t)(groups * group) + 64, (size_t)groups}};
    for (size_t i = 0; i < sizeof c->code; i++) {
        c->code[i] = fill == FILL_EXTREME ? (i / 7 % 2   ? 0xff
                                             : bits == 4 ? 0x00
                                                         : 0x01)
                                          : (uint8_t)next_u32();
        if (bits == 8 && c->code[i] == 0)
            c->code[i] = 1; /* the packer has no code -128 */
    }
    for (int i = 0; i < panels * groups * IQ_ROWS; i++)
        c->scale[i] = fill != FILL_RANDOM    ? type == IQ_SCALE_F16 ? 0x3c00 : 0x3f80
                      : type == IQ_SCALE_F16 ? (uint16_t)(next_u32() % 0x4000)
                                             : f32_to_bf16(uniform() * 0.01f);
    /* Rows beyond the last token are never to be seen in a result. */
    memset(c->q, 0x7f, sizeof c->q);
    for (int t = 0; t < m; t++)
        for (int g = 0; g < groups; g++) {
            int32_t sum = 0;
            for (int i = 0; i < group; i++) {
                int8_t v = activation(fill, t, g * group + i);
                c->q[(size_t)t * c->a.ld_q + (size_t)(g * group + i)] = v;
                sum += v;
            }
            c->sum[t * groups + g] = sum;
            c->act_scale[t * groups + g] = fill == FILL_RANDOM ? 0.01f * (uniform() + 1.5f) : 1;
        }
}

static void check_tables(Case *c, int m) {
    static float want[MOST_TOKENS * IQ_MAX_PANELS * IQ_ROWS],
        got[MOST_TOKENS * IQ_MAX_PANELS * IQ_ROWS + 1];
    const IqKern *table[4];
    size_t n = (size_t)m * (size_t)c->w.n_panels * IQ_ROWS;
    IQ_KERN_SCALAR.panels(&c->w, &c->a, m, want);
    for (int i = 0, k = tables(table); i < k; i++) {
        memset(got, 0xff, sizeof got);
        table[i]->panels(&c->w, &c->a, m, got);
        assert_memory_equal(got, want, n * sizeof *got);
        assert_true(isnan(got[n]));
    }
}

static void test_tables_give_the_same_bits(void **state) {
    (void)state;
    static const int tokens[] = {1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 64, 127, 128};
    Case *c = malloc(sizeof *c);
    for (int bits = 4; bits <= 8; bits += 4)
        for (int group = 64; group <= 128; group += 64)
            for (int fill = FILL_RANDOM; fill <= FILL_ONE_HOT; fill++)
                for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
                    int panels = i % 2 ? 2 : 4, groups = 1 + (int)i % MOST_GROUPS;
                    fill_case(c, bits, group, panels, groups, tokens[i],
                              i % 3 ? IQ_SCALE_F16 : IQ_SCALE_BF16, (Fill)fill);
                    check_tables(c, tokens[i]);
                }
    free(c);
}

/* Plain C is itself right: the layout of iq.h, spelled out. */
static void test_plain_products(void **state) {
    (void)state;
    Case *c = malloc(sizeof *c);
    fill_case(c, 4, 128, 2, 1, 128, IQ_SCALE_F16, FILL_ONE_HOT);
    static float out[128 * 32];
    IQ_KERN_SCALAR.panels(&c->w, &c->a, 128, out);
    for (int t = 0; t < 128; t++) /* token t picks column t */
        for (int row = 0; row < 32; row++) {
            int in_sub = t % 64, low = in_sub % 32;
            uint8_t byte =
                c->code[(size_t)(row / 16) * 1024 + (size_t)(t / 64) * 512 +
                        (size_t)(low / 4) * 64 + (size_t)(row % 16) * 4 + (size_t)(low % 4)];
            int code = (in_sub < 32 ? byte & 15 : byte >> 4) - 8;
            assert_true(out[t * 32 + row] == (float)code);
        }
    free(c);
}

static void test_quantised_activations(void **state) {
    (void)state;
    const IqKern *table[4];
    float x[256], scale[2], scale2[2];
    int8_t q[256], q2[256];
    int32_t sum[2], sum2[2];
    for (int round = 0; round < 300; round++) {
        for (int i = 0; i < 256; i++)
            x[i] = uniform() * (round % 3 ? 1 : 1e4f) * (i < 128 && round % 5 == 0 ? 0 : 1);
        if (round == 7)
            x[130] = INFINITY;
        if (round == 8)
            x[3] = NAN;
        if (round == 9)
            x[200] = 1e-42f;
        IQ_KERN_SCALAR.quant(x, 256, 128, q, scale, sum);
        for (int g = 0; g < 2; g++) {
            int32_t total = 0;
            float amax = 0;
            bool finite = true;
            for (int i = 0; i < 128; i++) {
                finite &= isfinite(x[g * 128 + i]) != 0;
                amax = fmaxf(amax, fabsf(x[g * 128 + i]));
                total += q[g * 128 + i];
            }
            assert_int_equal(total, sum[g]);
            assert_int_equal(finite, !isnan(scale[g]));
            for (int i = 0; i < 128 && finite; i++)
                assert_true(fabsf(q[g * 128 + i] * scale[g] - x[g * 128 + i]) <=
                            0.5001f * amax / 127);
        }
        for (int i = 0, k = tables(table); i < k; i++) {
            table[i]->quant(x, 256, 128, q2, scale2, sum2);
            assert_memory_equal(q, q2, sizeof q);
            assert_memory_equal(sum, sum2, sizeof sum);
            assert_true(memcmp(scale, scale2, sizeof scale) == 0 || isnan(scale[0] + scale[1]));
        }
    }
}

/* ---- calls ---- */

enum { HIDDEN = 256, EXPERTS = 9, K = 4 };

typedef struct Model {
    IqGeom g;
    uint8_t *expert[EXPERTS]; /* whole */
} Model;

static Model model_new(int bits, int group, int inner) {
    Model m = {.g = {HIDDEN, inner, bits, group, IQ_SCALE_F16}};
    size_t n = (size_t)group * HIDDEN;
    float *w = malloc(3 * n * sizeof *w);
    for (int e = 0; e < EXPERTS; e++) {
        m.expert[e] = aligned_alloc(64, (size_t)iq_units(&m.g) * iq_unit_bytes(&m.g));
        for (int u = 0; u < iq_units(&m.g); u++) {
            IqLoss loss = {0};
            for (size_t i = 0; i < 3 * n; i++)
                w[i] = uniform() * 0.1f;
            assert_int_equal(iq_pack_unit(&m.g, w, w + n, w + 2 * n,
                                          m.expert[e] + (size_t)u * iq_unit_bytes(&m.g), &loss,
                                          NULL),
                             0);
        }
    }
    free(w);
    return m;
}

static void model_free(Model *m) {
    for (int e = 0; e < EXPERTS; e++)
        free(m->expert[e]);
}

/* What the expert gives in double from the stored weights, without rounding of activations. */
static void expert_exact(const Model *m, int e, const float *x, double *y) {
    const IqGeom *g = &m->g;
    for (int u = 0; u < iq_units(g); u++) {
        const uint8_t *unit = m->expert[e] + (size_t)u * iq_unit_bytes(g);
        for (int i = 0; i < g->group; i++) {
            double gate = 0, up = 0;
            for (int c = 0; c < HIDDEN; c++) {
                gate += (double)iq_weight(g, unit, IQ_GATE, i, c) * (double)x[c];
                up += (double)iq_weight(g, unit, IQ_UP, i, c) * (double)x[c];
            }
            double act = gate / (1 + exp(-gate)) * up;
            for (int r = 0; r < HIDDEN; r++)
                y[r] += act * (double)iq_weight(g, unit, IQ_DOWN, r, i);
        }
    }
}

typedef struct Call {
    int n;
    float x[600 * HIDDEN], weight[600 * K], y[600 * HIDDEN];
    int32_t id[600 * K];
} Call;

static Call *call_new(int n, int first_expert) {
    Call *c = malloc(sizeof *c);
    c->n = n;
    for (int i = 0; i < n * HIDDEN; i++)
        c->x[i] = uniform();
    for (int t = 0; t < n; t++)
        for (int i = 0; i < K; i++) {
            /* distinct: one step apart from a random begin; some places are empty */
            int e = (int)((next_u32() % EXPERTS + (uint32_t)i) % EXPERTS);
            for (int j = 0; j < i; j++)
                if (c->id[t * K + j] == e)
                    e = -1;
            c->id[t * K + i] = e < first_expert ? -1 : e;
            c->weight[t * K + i] = uniform();
        }
    return c;
}

static IqRunConf conf_of(const Model *m, int n_units, int threads) {
    return (IqRunConf){.geom = m->g,
                       .n_units = n_units,
                       .n_experts = EXPERTS,
                       .max_rows = 600,
                       .max_k = K,
                       .threads = threads,
                       .spin_us = 20};
}

static void test_calls_against_double(void **state) {
    (void)state;
    static const struct {
        int bits, group, inner, n;
    } cases[] = {{4, 64, 128, 1}, {4, 128, 256, 3}, {8, 64, 64, 2}, {8, 128, 256, 40}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Model m = model_new(cases[i].bits, cases[i].group, cases[i].inner);
        Call *c = call_new(cases[i].n, 0);
        IqRunConf conf = conf_of(&m, iq_units(&m.g), 2);
        IqRun *r;
        assert_int_equal(iq_run_open(&r, &conf, NULL), 0);
        IqWork work = iq_run(r, (const uint8_t *const *)m.expert, c->n, K, c->x, c->id, c->weight,
                             c->y, NULL, NULL);
        double error = 0, square = 0;
        bool used[EXPERTS] = {false};
        for (int t = 0; t < c->n; t++) {
            double want[HIDDEN] = {0};
            for (int k = 0; k < K; k++)
                if (c->id[t * K + k] >= 0) {
                    double part[HIDDEN] = {0};
                    used[c->id[t * K + k]] = true;
                    expert_exact(&m, c->id[t * K + k], c->x + t * HIDDEN, part);
                    for (int h = 0; h < HIDDEN; h++)
                        want[h] += (double)c->weight[t * K + k] * part[h];
                }
            for (int h = 0; h < HIDDEN; h++) {
                double d = (double)c->y[t * HIDDEN + h] - want[h];
                error += d * d;
                square += want[h] * want[h];
            }
        }
        assert_true(sqrt(error / square) < 0.02); /* int8 activations, twice */
        int n_used = 0;
        for (int e = 0; e < EXPERTS; e++)
            n_used += used[e];
        assert_int_equal(work.n_experts, n_used);
        assert_int_equal(work.bytes, (size_t)n_used * (size_t)iq_units(&m.g) * iq_unit_bytes(&m.g));
        iq_run_close(r);
        free(c);
        model_free(&m);
    }
}

/* Tokens alone, in any company, with any number of threads and any table of vectors: the same bits.
 */
static void test_company_threads_and_tables_do_not_matter(void **state) {
    (void)state;
    Model m = model_new(4, 64, 128);
    Call *all = call_new(600, 0), *one = malloc(sizeof *one);
    IqRunConf conf = conf_of(&m, 2, 3);
    IqRun *r;
    assert_int_equal(iq_run_open(&r, &conf, NULL), 0);
    iq_run(r, (const uint8_t *const *)m.expert, all->n, K, all->x, all->id, all->weight, all->y,
           NULL, NULL);
    for (int isa = IQ_AMX; isa <= IQ_AVX2; isa++)
        for (int threads = 1; threads <= 4; threads++) {
            conf.best = (IqIsa)isa;
            if (!iq_isa_usable((IqIsa)isa, NULL))
                continue;
            IqRun *other;
            conf.threads = threads;
            assert_int_equal(iq_run_open(&other, &conf, NULL), 0);
            for (int n = 1; n <= 130; n += n < 34 ? 1 : 32) {
                int at = (int)(next_u32() % (uint32_t)(all->n - n));
                iq_run(other, (const uint8_t *const *)m.expert, n, K, all->x + at * HIDDEN,
                       all->id + at * K, all->weight + at * K, one->y, NULL, NULL);
                assert_memory_equal(one->y, all->y + at * HIDDEN,
                                    (size_t)n * HIDDEN * sizeof(float));
            }
            iq_run_close(other);
        }
    iq_run_close(r);
    free(all);
    free(one);
    model_free(&m);
}

/* Slices of the units add up to the whole but for the rounding of the last sums. */
static void test_shards_add_up(void **state) {
    (void)state;
    Model m = model_new(4, 64, 512); /* 8 units */
    Call *c = call_new(33, 0);
    float *sum = malloc(sizeof c->y), *whole = malloc(sizeof c->y);
    for (int shards = 1; shards <= 8; shards *= 2) {
        IqRunConf conf = conf_of(&m, 8 / shards, 2);
        IqRun *r;
        memset(sum, 0, sizeof c->y);
        assert_int_equal(iq_run_open(&r, &conf, NULL), 0);
        for (int s = 0; s < shards; s++) {
            const uint8_t *slice[EXPERTS];
            for (int e = 0; e < EXPERTS; e++)
                slice[e] = m.expert[e] + (size_t)(s * conf.n_units) * iq_unit_bytes(&m.g);
            iq_run(r, slice, c->n, K, c->x, c->id, c->weight, c->y, NULL, NULL);
            for (int i = 0; i < c->n * HIDDEN; i++)
                sum[i] += c->y[i];
        }
        if (shards == 1)
            memcpy(whole, sum, (size_t)(c->n * HIDDEN) * sizeof *sum);
        for (int i = 0; i < c->n * HIDDEN; i++)
            assert_true(fabsf(sum[i] - whole[i]) <= 1e-5f * (1 + fabsf(whole[i])));
        iq_run_close(r);
    }
    free(sum);
    free(whole);
    free(c);
    model_free(&m);
}

/* Odd calls: no expert at all, experts that are not there, one expert for all tokens, and numbers
 * that are not finite, which stay with their token. */
static void test_odd_calls(void **state) {
    (void)state;
    Model m = model_new(4, 128, 128);
    IqRunConf conf = conf_of(&m, 1, 2);
    IqRun *r;
    assert_int_equal(iq_run_open(&r, &conf, NULL), 0);
    Call *c = call_new(600, 2);
    const uint8_t *held[EXPERTS];
    for (int e = 0; e < EXPERTS; e++)
        held[e] = e < 2 ? NULL : m.expert[e];
    IqWork work = iq_run(r, held, 600, K, c->x, c->id, c->weight, c->y, NULL, NULL);
    assert_int_equal(work.n_experts, EXPERTS - 2);
    for (int i = 0; i < 600 * K; i++)
        c->id[i] = -1;
    work = iq_run(r, held, 600, K, c->x, c->id, c->weight, c->y, NULL, NULL);
    assert_int_equal(work.n_experts, 0);
    for (int i = 0; i < 600 * HIDDEN; i++)
        assert_true(c->y[i] == 0);
    for (int t = 0; t < 600; t++)
        c->id[t * K + 1] = 5;
    c->x[3 * HIDDEN + 7] = NAN;
    c->x[4 * HIDDEN + 200] = INFINITY;
    work = iq_run(r, held, 600, K, c->x, c->id, c->weight, c->y, NULL, NULL);
    assert_int_equal(work.n_experts, 1);
    for (int t = 0; t < 600; t++)
        for (int h = 0; h < HIDDEN; h++)
            assert_int_equal(isfinite(c->y[t * HIDDEN + h]) != 0, t != 3 && t != 4);
    iq_run_close(r);
    iq_run_close(NULL);
    free(c);
    model_free(&m);
}

typedef struct Inner {
    IqRun *run;
    const Model *m;
    Call *call;
    float want[HIDDEN];
    int n;
} Inner;

static void run_inner(void *arg) {
    Inner *in = arg;
    iq_run(in->run, (const uint8_t *const *)in->m->expert, 1, K, in->call->x, in->call->id,
           in->call->weight, in->call->y, NULL, NULL);
    assert_memory_equal(in->call->y, in->want, sizeof in->want);
    in->n++;
}

static void test_small_calls_run_inside_of_large_ones(void **state) {
    (void)state;
    Model m = model_new(4, 64, 128);
    IqRunConf conf = conf_of(&m, 2, 2);
    IqRun *large;
    Inner in = {.m = &m, .call = call_new(1, 0)};
    Call *c = call_new(600, 0);
    float *alone = malloc(sizeof c->y);
    assert_int_equal(iq_run_open(&large, &conf, NULL), 0);
    conf.max_rows = 64;
    assert_int_equal(iq_run_open(&in.run, &conf, NULL), 0);
    iq_run(in.run, (const uint8_t *const *)m.expert, 1, K, in.call->x, in.call->id, in.call->weight,
           in.want, NULL, NULL);
    iq_run(large, (const uint8_t *const *)m.expert, 600, K, c->x, c->id, c->weight, alone, NULL,
           NULL);
    iq_run(large, (const uint8_t *const *)m.expert, 600, K, c->x, c->id, c->weight, c->y, run_inner,
           &in);
    assert_true(in.n >= 1);
    assert_memory_equal(c->y, alone, sizeof c->y);
    iq_run(large, (const uint8_t *const *)m.expert, 64, K, c->x, c->id, c->weight, c->y, run_inner,
           NULL); /* small itself: never interrupted */
    iq_run_close(large);
    iq_run_close(in.run);
    free(in.call);
    free(c);
    free(alone);
    model_free(&m);
}

/* ---- AMX ---- */

static struct {
    bool has_feature, has_palette, saved, tiles;
    int refuse; /* errno of the request */
    bool grant;
} machine;

static bool fake_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4]) {
    memset(r, 0, 16);
    if (leaf == 7)
        r[3] = machine.has_feature ? 1u << 24 | 1u << 25 : 0;
    if (leaf == 1)
        r[2] = 1u << 27;
    if (leaf == 0x1d && machine.has_palette) {
        r[0] = subleaf == 0 ? 1 : 1024u << 16 | 8192u;
        r[1] = subleaf == 0 ? 0 : 8u << 16 | 64u;
        r[2] = subleaf == 0 ? 0 : 16;
    }
    return leaf != 0x1d || machine.has_palette;
}

static uint64_t fake_xcr0(void) {
    return machine.saved ? 7ull << 16 : 7;
}

static int fake_arch_prctl(int code, void *at) {
    if (code == 0x1022)
        *(uint64_t *)at = machine.grant ? 3ull << 17 : 0;
    return code == 0x1023 ? machine.refuse : 0;
}

static bool fake_tiles(void) {
    return machine.tiles;
}

static void test_amx_is_really_probed(void **state) {
    (void)state;
    const IqAmxProbe p = {fake_cpuid, fake_xcr0, fake_arch_prctl, fake_tiles};
    const char *why = NULL;
    static const int refusals[] = {EPERM, ENOSYS, EINVAL, ENOMEM};
#define GOOD()                                                                                     \
    (machine.has_feature = machine.has_palette = machine.saved = machine.tiles = machine.grant =   \
         true,                                                                                     \
     machine.refuse = 0)
    GOOD();
    assert_true(iq_amx_probe(&p, &why));
    machine.has_feature = false;
    assert_false(iq_amx_probe(&p, &why));
    assert_non_null(strstr(why, "does not offer AMX"));
    GOOD();
    machine.has_palette = false;
    assert_false(iq_amx_probe(&p, &why));
    assert_non_null(strstr(why, "palette"));
    GOOD();
    machine.saved = false;
    assert_false(iq_amx_probe(&p, &why));
    assert_non_null(strstr(why, "operating system"));
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        GOOD();
        machine.refuse = refusals[i];
        assert_false(iq_amx_probe(&p, &why));
        assert_non_null(strstr(why, "refuses"));
    }
    GOOD();
    machine.grant = false;
    assert_false(iq_amx_probe(&p, &why));
    GOOD();
    machine.tiles = false;
    assert_false(iq_amx_probe(&p, &why));
    assert_non_null(strstr(why, "cannot be configured"));
#undef GOOD
}

static void test_best_set_can_be_named(void **state) {
    (void)state;
    const char *why = NULL;
    assert_true(iq_isa_usable(IQ_SCALAR, &why));
    assert_string_equal(why, "");
    if (!iq_isa_usable(IQ_AMX, &why))
        assert_true(strlen(why) > 0);
    Model m = model_new(4, 64, 64);
    IqRunConf conf = conf_of(&m, 1, 1);
    IqRun *r;
    for (int isa = IQ_AMX; isa < IQ_N_ISA; isa++) {
        conf.best = (IqIsa)isa;
        assert_int_equal(iq_run_open(&r, &conf, NULL), 0);
        assert_true(iq_run_isa(r) >= (IqIsa)isa && iq_isa_usable(iq_run_isa(r), NULL));
        assert_true(!iq_isa_usable((IqIsa)isa, NULL) || iq_run_isa(r) == (IqIsa)isa);
        iq_run_close(r);
    }
    Err err = {0};
    conf.geom.hidden = 100;
    assert_int_equal(iq_run_open(&r, &conf, &err), E_UNSUPPORTED);
    model_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_products),
        cmocka_unit_test(test_tables_give_the_same_bits),
        cmocka_unit_test(test_quantised_activations),
        cmocka_unit_test(test_calls_against_double),
        cmocka_unit_test(test_company_threads_and_tables_do_not_matter),
        cmocka_unit_test(test_shards_add_up),
        cmocka_unit_test(test_odd_calls),
        cmocka_unit_test(test_small_calls_run_inside_of_large_ones),
        cmocka_unit_test(test_amx_is_really_probed),
        cmocka_unit_test(test_best_set_can_be_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
