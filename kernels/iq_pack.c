/* See iq.h. Plain C without contraction: the same bytes on every machine. */
#include "kernels/iq.h"

#include "kernels/quant.h"

#include <math.h>
#include <string.h>

enum { CANDIDATES = 16 }; /* scales that are tried for each sign of the steepest code */

int iq_check(const IqGeom *g, Err *err) {
    if (g->bits != 4 && g->bits != 8)
        return err_set(err, E_INVAL, "experts of %d bits: expected 4 or 8", g->bits);
    if (g->group != 64 && g->group != 128)
        return err_set(err, E_INVAL, "groups of %d: expected 64 or 128", g->group);
    if (g->scale != IQ_SCALE_F16 && g->scale != IQ_SCALE_BF16)
        return err_set(err, E_INVAL, "scale format %d: expected f16 or bf16", (int)g->scale);
    if (g->hidden < 1 || g->hidden % g->group)
        return err_set(err, E_UNSUPPORTED, "hidden size %d: groups of %d do not divide it",
                       g->hidden, g->group);
    if (g->inner < 1 || g->inner % g->group)
        return err_set(err, E_UNSUPPORTED,
                       "moe_intermediate_size %d: groups of %d do not divide it", g->inner,
                       g->group);
    return 0;
}

/* ---- one group of one row ---- */

static uint16_t store_scale(IqScale type, float s) {
    return type == IQ_SCALE_F16 ? f32_to_f16(s) : f32_to_bf16(s);
}

static float load_scale(IqScale type, uint16_t s) {
    return type == IQ_SCALE_F16 ? f16_to_f32(s) : bf16_to_f32(s);
}

/* w * inv to the nearest integer of [low, high], half to even. The sum with 1.5 * 2^23 has no room
 * for a fraction. */
static inline float code_of(float w, float inv, float low, float high) {
    const float magic = 12582912.0f;
    float v = w * inv;
    v = v < low ? low : v > high ? high : v;
    return v + magic - magic;
}

static float squared_error(const float *w, int n, float scale, float low, float high) {
    float inv = scale != 0 ? 1 / scale : 0, lane[16] = {0};
    for (int i = 0; i < n; i += 16)
        for (int k = 0; k < 16; k++) {
            float d = w[i + k] - code_of(w[i + k], inv, low, high) * scale;
            lane[k] += d * d;
        }
    for (int half = 8; half; half /= 2)
        for (int k = 0; k < half; k++)
            lane[k] += lane[k + half];
    return lane[0];
}

/* Candidates put the largest magnitude between 6.25 and 8.1 steps from 0; negative ones let the
 * longer end of the range, -8, meet a positive weight. */
static uint16_t search_scale(IqScale type, const float *w, int n, float most) {
    uint16_t best = 0;
    float least = INFINITY;
    for (int i = 0; i < 2 * CANDIDATES; i++) {
        float steps = 6.25f + 0.125f * (float)(i / 2);
        uint16_t stored = store_scale(type, i % 2 ? -most / steps : most / steps);
        float error = squared_error(w, n, load_scale(type, stored), -8, 7);
        if (error < least) {
            least = error;
            best = stored;
        }
    }
    return best;
}

/* Chooses the scale of w[n] and writes its codes, unsigned, to code[n]. False when the format has
 * no such scale. */
static bool quantise(const IqGeom *g, const float *w, uint8_t *code, uint16_t *stored,
                     IqLoss *loss) {
    float most = 0, high = g->bits == 4 ? 7 : 127, low = g->bits == 4 ? -8 : -127;
    for (int i = 0; i < g->group; i++)
        most = fabsf(w[i]) > most ? fabsf(w[i]) : most;
    *stored = g->bits == 4 ? search_scale(g->scale, w, g->group, most)
                           : store_scale(g->scale, most / 127);
    float scale = load_scale(g->scale, *stored), inv = scale != 0 ? 1 / scale : 0;
    if (!isfinite(scale) || !isfinite(inv))
        return false;
    for (int i = 0; i < g->group; i++) {
        float c = code_of(w[i], inv, low, high), d = c * scale - w[i];
        code[i] = (uint8_t)((int)c + (1 << (g->bits - 1)));
        loss->square += (double)w[i] * (double)w[i];
        loss->error_square += (double)d * (double)d;
    }
    return true;
}

/* ---- layout ---- */

/* Where the code of (row, col) of a block stands; for 4 bits *high says which nibble. */
static size_t code_at(const IqGeom *g, int row, int col, bool *high) {
    int in_sub = col % IQ_SUB;
    size_t sub = (size_t)(col / IQ_SUB) * IQ_SUB * IQ_ROWS * (size_t)g->bits / 8;
    *high = g->bits == 4 && in_sub >= IQ_SUB / 2;
    if (*high)
        in_sub -= IQ_SUB / 2;
    return sub + (size_t)(in_sub / 4 * 64 + row * 4 + in_sub % 4);
}

static void put_row(const IqGeom *g, int row, const uint8_t *code, uint8_t *block) {
    for (int c = 0; c < g->group; c++) {
        bool high;
        size_t at = code_at(g, row, c, &high);
        if (g->bits == 8)
            block[at] = code[c];
        else if (high)
            block[at] |= (uint8_t)(code[c] << 4); /* its low nibble has been written */
        else
            block[at] = code[c];
    }
}

typedef struct Source {
    const char *name;
    const float *w; /* row 0, column 0 of the block */
    size_t ld;
    int row0, col0; /* of the block in its matrix, for messages */
} Source;

static int pack_block(const IqGeom *g, const Source *s, uint8_t *block, uint8_t *scales,
                      IqLoss *loss, Err *err) {
    for (int r = 0; r < IQ_ROWS; r++) {
        const float *w = s->w + (size_t)r * s->ld;
        uint8_t code[IQ_MAX_GROUP];
        uint16_t scale;
        for (int c = 0; c < g->group; c++)
            if (!isfinite(w[c]))
                return err_set(err, E_INVAL, "%s: weight [%d, %d] is not finite", s->name,
                               s->row0 + r, s->col0 + c);
        if (!quantise(g, w, code, &scale, loss))
            return err_set(
                err, E_INVAL, "%s: weights [%d, %d] and on need a scale that %s does not have",
                s->name, s->row0 + r, s->col0, g->scale == IQ_SCALE_F16 ? "f16" : "bf16");
        put_row(g, r, code, block);
        memcpy(scales + r * 2, &scale, 2);
    }
    return 0;
}

static int pack_panel(const IqGeom *g, const char *name, const float *w, int row0, uint8_t *out,
                      IqLoss *loss, Err *err) {
    int groups = g->hidden / g->group, rc = 0;
    uint8_t *scales = out + (size_t)groups * iq_block_bytes(g);
    for (int k = 0; k < groups && rc == 0; k++) {
        int col = k * g->group;
        Source s = {name, w + (size_t)row0 * (size_t)g->hidden + col, (size_t)g->hidden, row0, col};
        rc = pack_block(g, &s, out + (size_t)k * iq_block_bytes(g), scales + k * IQ_ROWS * 2, loss,
                        err);
    }
    return rc;
}

int iq_pack_unit(const IqGeom *g, const float *gate, const float *up, const float *down,
                 uint8_t *out, IqLoss *loss, Err *err) {
    int rc = 0;
    uint8_t *at = out, *scales = out + iq_down_at(g) + iq_down_scales_at(g);
    memset(out, 0, iq_unit_bytes(g)); /* padding */
    for (int row = 0; row < g->group && rc == 0; row += IQ_ROWS) {
        rc = pack_panel(g, "gate_proj", gate, row, at, loss, err);
        at += iq_panel_bytes(g);
        if (rc == 0)
            rc = pack_panel(g, "up_proj", up, row, at, loss, err);
        at += iq_panel_bytes(g);
    }
    for (int row = 0; row < g->hidden && rc == 0; row += IQ_ROWS) {
        Source s = {"down_proj", down + (size_t)row * (size_t)g->group, (size_t)g->group, row, 0};
        rc = pack_block(g, &s, at, scales, loss, err);
        at += iq_block_bytes(g);
        scales += IQ_ROWS * 2;
    }
    return rc;
}

float iq_weight(const IqGeom *g, const uint8_t *unit, IqMatrix m, int row, int col) {
    const uint8_t *block, *scales;
    int panel = row / IQ_ROWS, in_panel = row % IQ_ROWS, k = col / g->group;
    if (m == IQ_DOWN) {
        block = unit + iq_down_at(g) + (size_t)panel * iq_block_bytes(g);
        scales = unit + iq_down_at(g) + iq_down_scales_at(g) + (size_t)panel * IQ_ROWS * 2;
    } else {
        const uint8_t *at = unit + (size_t)(2 * panel + (m == IQ_UP)) * iq_panel_bytes(g);
        block = at + (size_t)k * iq_block_bytes(g);
        scales = at + (size_t)(g->hidden / g->group) * iq_block_bytes(g) + (size_t)k * IQ_ROWS * 2;
    }
    bool high;
    uint8_t byte = block[code_at(g, in_panel, col % g->group, &high)];
    uint16_t scale;
    memcpy(&scale, scales + in_panel * 2, 2);
    int code = g->bits == 8 ? byte - 128 : (high ? byte >> 4 : byte & 15) - 8;
    return (float)code * load_scale(g->scale, scale);
}
