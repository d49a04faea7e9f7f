/* iq_kern.h in plain C: what the other tables must equal. */
#include "kernels/cpu/iq_body.h"

static float scale_at(const IqPanels *w, int p, int g, int row) {
    uint16_t s;
    memcpy(&s,
           w->scale + (size_t)p * w->scale_panel_step + (size_t)g * w->scale_group_step +
               (size_t)row * 2,
           2);
    return w->type == IQ_SCALE_F16 ? f16_to_f32(s) : bf16_to_f32(s);
}

/* The stored (unsigned) codes of one row of a block, in the order of the columns. */
static void row_codes(const IqPanels *w, const uint8_t *block, int row, uint8_t *out) {
    for (int s = 0; s < w->group; s += IQ_SUB)
        for (int c = 0; c < IQ_SUB; c++) {
            const uint8_t *sub = block + (size_t)s * IQ_ROWS * (size_t)w->bits / 8;
            int low = w->bits == 4 ? c % 32 : c;
            uint8_t byte = sub[low / 4 * 64 + row * 4 + low % 4];
            out[s + c] = w->bits == 8 ? byte : c < 32 ? byte & 15 : byte >> 4;
        }
}

static void panels(const IqPanels *w, const IqActs *a, int m, float *out) {
    size_t width = (size_t)w->n_panels * IQ_ROWS;
    uint8_t code[IQ_MAX_GROUP];
    memset(out, 0, (size_t)m * width * sizeof *out);
    for (int g = 0; g < w->n_groups; g++)
        for (int row = 0; row < w->n_panels * IQ_ROWS; row++) {
            int p = row / IQ_ROWS;
            row_codes(w, w->code + (size_t)p * w->panel_step + (size_t)g * w->group_step,
                      row % IQ_ROWS, code);
            float scale = scale_at(w, p, g, row % IQ_ROWS);
            for (int t = 0; t < m; t++) {
                const int8_t *q = a->q + (size_t)t * a->ld_q + (size_t)g * (size_t)w->group;
                size_t at = (size_t)t * a->ld_g + (size_t)g;
                int32_t dot = 0;
                for (int c = 0; c < w->group; c++)
                    dot += code[c] * q[c];
                dot -= (1 << (w->bits - 1)) * a->sum[at];
                float *sum = &out[(size_t)t * width + (size_t)row];
                *sum = fmaf((float)dot, scale * a->scale[at], *sum);
            }
        }
}

static void silu_mul(float *out, const float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++)
        out[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

const IqKern IQ_KERN_SCALAR = {
    .quant = iq_body_quant,
    .panels = panels,
    .add_scaled = iq_body_add_scaled,
    .silu_mul = silu_mul,
};
