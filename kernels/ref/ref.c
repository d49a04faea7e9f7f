/* The reference backend: norms, linear layers, rope, routing and experts in plain C. Sums run in
 * double and round once, so that a faster backend is judged against the better number. Each
 * function runs on its rank's thread. */
#include "kernels/ref/ref.h"

#include <math.h>
#include <stdlib.h>

static void ref_embed(Dev *d, Tensor out, const Mat *table) {
    for (int t = 0; t < d->batch.n_tok; t++)
        mat_row_f32(&table->view, d->token[t], host_row(out, t));
}

static void ref_gather_rows(Dev *d, Tensor out, Tensor x, const int32_t *row, int m) {
    (void)d;
    for (int i = 0; i < m; i++)
        memcpy(host_row(out, i), host_row(x, row[i]), (size_t)x.cols * sizeof(float));
}

static void ref_rms_norm(Dev *d, Tensor out, Tensor x, Tensor w, float eps) {
    (void)d;
    for (int t = 0; t < x.rows; t++) {
        const float *in = host_row(x, t), *weight = host_row(w, 0);
        float *o = host_row(out, t);
        double sum = 0;
        for (int i = 0; i < x.cols; i++)
            sum += (double)in[i] * in[i];
        float inv = (float)(1.0 / sqrt(sum / x.cols + (double)eps));
        for (int i = 0; i < x.cols; i++)
            o[i] = in[i] * inv * weight[i];
    }
}

static void ref_layer_norm(Dev *d, Tensor out, Tensor x, Tensor w, Tensor b, float eps) {
    (void)d;
    for (int t = 0; t < x.rows; t++) {
        const float *in = host_row(x, t), *weight = host_row(w, 0), *bias = host_row(b, 0);
        float *o = host_row(out, t);
        double mean = 0, var = 0;
        for (int i = 0; i < x.cols; i++)
            mean += in[i];
        mean /= x.cols;
        for (int i = 0; i < x.cols; i++)
            var += (in[i] - mean) * (in[i] - mean);
        float inv = (float)(1.0 / sqrt(var / x.cols + (double)eps));
        for (int i = 0; i < x.cols; i++)
            o[i] = (float)(in[i] - mean) * inv * weight[i] + bias[i];
    }
}

float ref_dot(const float *a, const float *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return (float)sum;
}

/* out[t] = x[t] . W^T for all rows t of x; one dequantised weight row at a time */
static void matmul(Tensor out, Tensor x, const MatView *w) {
    float *row = xmalloc((size_t)w->cols * sizeof(float));
    for (int r = 0; r < w->rows; r++) {
        mat_row_f32(w, r, row);
        for (int t = 0; t < x.rows; t++)
            host_row(out, t)[r] = ref_dot(host_row(x, t), row, w->cols);
    }
    free(row);
}

static void ref_linear(Dev *d, Tensor out, Tensor x, const Mat *w) {
    (void)d;
    DCHECK(x.cols == w->view.cols && out.cols == w->view.rows && x.rows == out.rows);
    matmul(out, x, &w->view);
}

static void ref_rope(Dev *d, Tensor x, int heads, int stride, int at, int dim, float theta) {
    for (int t = 0; t < x.rows; t++) {
        for (int i = 0; i < dim / 2; i++) {
            double angle = d->pos[t] * pow((double)theta, -2.0 * i / dim);
            float c = (float)cos(angle), s = (float)sin(angle);
            for (int h = 0; h < heads; h++) {
                float *p = host_row(x, t) + h * stride + at + 2 * i;
                float a = p[0], b = p[1];
                p[0] = a * c - b * s;
                p[1] = b * c + a * s;
            }
        }
    }
}

static void ref_add(Dev *d, Tensor x, Tensor y) {
    (void)d;
    for (int t = 0; t < x.rows; t++)
        for (int i = 0; i < x.cols; i++)
            host_row(x, t)[i] += host_row(y, t)[i];
}

static float silu(float x) {
    return (float)(x / (1.0 + exp(-(double)x)));
}

static void ref_silu_mul(Dev *d, Tensor out, Tensor gate, Tensor up) {
    (void)d;
    for (int t = 0; t < gate.rows; t++)
        for (int i = 0; i < gate.cols; i++)
            host_row(out, t)[i] = silu(host_row(gate, t)[i]) * host_row(up, t)[i];
}

/* The k best of choice, lowest id first among equals, into id ascending. */
static void pick_experts(const float *choice, int n, int k, int32_t *id) {
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int e = 0; e < n; e++) {
            int taken = 0;
            for (int j = 0; j < i; j++)
                taken |= id[j] == e;
            if (!taken && (best < 0 || choice[e] > choice[best]))
                best = e;
        }
        id[i] = best;
    }
    for (int i = 1; i < k; i++)
        for (int j = i; j > 0 && id[j] < id[j - 1]; j--) {
            int32_t x = id[j];
            id[j] = id[j - 1];
            id[j - 1] = x;
        }
}

static void ref_moe_route(Dev *d, Tensor id, Tensor weight, Tensor logits, Tensor bias, bool norm,
                          float scale) {
    (void)d;
    int n = logits.cols, k = id.cols;
    float *s = xmalloc((size_t)n * 2 * sizeof(float)), *choice = s + n;
    for (int t = 0; t < logits.rows; t++) {
        for (int e = 0; e < n; e++) {
            s[e] = (float)(1.0 / (1.0 + exp(-(double)host_row(logits, t)[e])));
            choice[e] = s[e] + host_row(bias, 0)[e];
        }
        int32_t *ids = host_row_i32(id, t);
        pick_experts(choice, n, k, ids);
        float sum = 0;
        for (int i = 0; i < k; i++)
            sum += s[ids[i]];
        float factor = norm ? scale / (sum + 1e-20f) : scale;
        for (int i = 0; i < k; i++)
            host_row(weight, t)[i] = s[ids[i]] * factor;
    }
    free(s);
}

static void one_expert(const Experts *e, int id, const float *x, float weight, float *y) {
    const MatView *gate = &e->gate[id], *up = &e->up[id], *down = &e->down[id];
    int inner = gate->rows, hidden = gate->cols;
    float *mem = xmalloc((size_t)(inner + 2 * hidden + down->cols) * sizeof(float));
    float *act = mem, *row = mem + inner, *row2 = row + hidden, *drow = row2 + hidden;
    for (int i = 0; i < inner; i++) {
        mat_row_f32(gate, i, row);
        mat_row_f32(up, i, row2);
        act[i] = silu(ref_dot(row, x, hidden)) * ref_dot(row2, x, hidden);
    }
    for (int r = 0; r < down->rows; r++) {
        mat_row_f32(down, r, drow);
        y[r] += weight * ref_dot(drow, act, inner);
    }
    free(mem);
}

static void ref_experts(Dev *d, Tensor y, Tensor x, Tensor id, Tensor weight, const Experts *e) {
    (void)d;
    for (int t = 0; t < x.rows; t++)
        for (int i = 0; i < id.cols; i++) {
            int32_t ex = host_row_i32(id, t)[i];
            if (ex >= 0 && e->gate[ex].data)
                one_expert(e, ex, host_row(x, t), host_row(weight, t)[i], host_row(y, t));
        }
}

static int ref_open(const DevConf *conf, Dev **dev, Err *err) {
    return host_open(ops_ref(), conf, dev, err);
}

static Ops make_table(void) {
    Ops t = {
        .name = "ref",
        .open = ref_open,
        .embed = ref_embed,
        .gather_rows = ref_gather_rows,
        .rms_norm = ref_rms_norm,
        .layer_norm = ref_layer_norm,
        .linear = ref_linear,
        .rope = ref_rope,
        .add = ref_add,
        .silu_mul = ref_silu_mul,
        .mla_absorb = ref_mla_absorb,
        .mla_expand = ref_mla_expand,
        .index_select = ref_index_select,
        .mla_attend = ref_mla_attend,
        .moe_route = ref_moe_route,
        .experts = ref_experts,
    };
    host_ops_fill(&t);
    return t;
}

static Ops table;

__attribute__((constructor)) static void table_init(void) {
    table = make_table();
}

const Ops *ops_ref(void) {
    return &table;
}
