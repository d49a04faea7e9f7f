/* The table of the CUDA backend, and the operations that are one launch. Each function runs on its
 * rank's thread. */
#include "kernels/cuda/cuda.h"

static void op_embed(Dev *d, Tensor out, const Mat *table) {
    cuda_enter(d);
    cuda_embed(&table->m, d->token, out.at, d->rows.rows, out.ld, d->stream);
}

static void op_gather_rows(Dev *d, Tensor out, Tensor x, const int32_t *row, int m) {
    cuda_enter(d);
    cuda_take_rows(cuda_view(tensor_head(out, m)), cuda_view(x), row, d->stream);
}

static void op_rms_norm(Dev *d, Tensor out, Tensor x, Tensor w, float eps) {
    cuda_enter(d);
    cuda_rms_norm(cuda_view(out), cuda_view(x), w.at, eps, d->stream);
}

static void op_layer_norm(Dev *d, Tensor out, Tensor x, Tensor w, Tensor b, float eps) {
    cuda_enter(d);
    cuda_layer_norm(cuda_view(out), cuda_view(x), w.at, b.at, eps, d->stream);
}

static void op_linear(Dev *d, Tensor out, Tensor x, const Mat *w) {
    DCHECK(x.cols == w->m.cols && out.cols == w->m.rows && x.rows == out.rows);
    cuda_enter(d);
    cuda_linear(&(CudaLinear){.w = w->m,
                              .x = x.at,
                              .out = out.at,
                              .m = x.rows,
                              .x_ld = x.ld,
                              .out_ld = out.ld,
                              .n_sm = d->n_sm},
                d->stream);
}

/* Number of the capture that the stream is in, 0 for none. */
static unsigned long long capture_of(const Dev *d) {
    enum cudaStreamCaptureStatus status;
    unsigned long long id = 0;
    cuda_must(cudaStreamGetCaptureInfo(d->stream, &status, &id, NULL, NULL, NULL, NULL),
              "asking for the capture");
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

/* Angles are made once per batch, shape and graph; every layer uses them. */
static void op_rope(Dev *d, Tensor x, int heads, int stride, int at, int dim, float theta) {
    cuda_enter(d);
    float *angle =
        cuda_work(d, CUDA_WORK_ROPE, (size_t)d->conf.max_rows * (size_t)dim * sizeof(float));
    unsigned long long capture = capture_of(d);
    if (!d->rope_valid || d->rope_capture != capture || d->rope_dim != dim ||
        d->rope_theta != theta) {
        cuda_rope_angles(angle, d->pos, d->rows.rows, dim, theta, d->stream);
        d->rope_valid = true;
        d->rope_capture = capture;
        d->rope_dim = dim;
        d->rope_theta = theta;
    }
    cuda_rope(cuda_view(x), angle, heads, stride, at, dim, d->stream);
}

static void op_clear(Dev *d, Tensor x) {
    cuda_enter(d);
    cuda_clear(cuda_view(x), d->stream);
}

static void op_add(Dev *d, Tensor x, Tensor y) {
    cuda_enter(d);
    cuda_add(cuda_view(x), cuda_view(y), d->stream);
}

static void op_silu_mul(Dev *d, Tensor out, Tensor gate, Tensor up) {
    cuda_enter(d);
    cuda_silu_mul(cuda_view(out), cuda_view(gate), cuda_view(up), d->stream);
}

static void op_mla_absorb(Dev *d, Tensor out, Tensor q, const Mat *kv_b, int heads, int nope,
                          int v) {
    int lora = kv_b->m.cols, rope = out.cols / heads - lora;
    cuda_enter(d);
    cuda_heads_absorb(&(CudaHeads){.w = kv_b->m,
                                   .x = q.at,
                                   .out = out.at,
                                   .m = q.rows,
                                   .x_ld = q.ld,
                                   .out_ld = out.ld,
                                   .heads = heads,
                                   .step = nope + v,
                                   .n = nope,
                                   .x_step = nope + rope,
                                   .out_step = lora + rope,
                                   .tail = rope},
                      d->stream);
}

static void op_mla_expand(Dev *d, Tensor out, Tensor x, const Mat *kv_b, int heads, int nope,
                          int v) {
    cuda_enter(d);
    cuda_heads_expand(&(CudaHeads){.w = kv_b->m,
                                   .x = x.at,
                                   .out = out.at,
                                   .m = x.rows,
                                   .x_ld = x.ld,
                                   .out_ld = out.ld,
                                   .heads = heads,
                                   .step = nope + v,
                                   .first = nope,
                                   .n = v,
                                   .x_step = kv_b->m.cols,
                                   .out_step = v},
                      d->stream);
}

static void op_moe_route(Dev *d, Tensor id, Tensor weight, Tensor logits, Tensor bias, bool norm,
                         float scale) {
    cuda_enter(d);
    cuda_route(&(CudaRoute){.logits = cuda_view(logits),
                            .bias = bias.at,
                            .id = id.at,
                            .weight = weight.at,
                            .id_ld = id.ld,
                            .weight_ld = weight.ld,
                            .k = id.cols,
                            .norm = norm,
                            .scale = scale},
               d->stream);
}

static const Ops table = {
    .name = "cuda",
    .device_memory = true,
    .open = cuda_open,
    .close = cuda_close,
    .mat_load = cuda_mat_load,
    .mat_free = cuda_mat_free,
    .experts_load = cuda_experts_load,
    .experts_free = cuda_experts_free,
    .tensor_new = cuda_tensor_new,
    .tensor_shared = cuda_tensor_new, /* one memory for each rank */
    .tensor_free = cuda_tensor_free,
    .upload = cuda_upload,
    .download = cuda_download,
    .pool_new = cuda_pool_new,
    .pool_free = cuda_pool_free,
    .pool_enter = cuda_pool_enter,
    .pool_copy = cuda_pool_copy,
    .mark = cuda_mark,
    .reach = cuda_reach,
    .kv_hash = cuda_kv_hash,
    .kv_bind = cuda_kv_bind,
    .batch_set = cuda_batch_set,
    .embed = op_embed,
    .gather_rows = op_gather_rows,
    .rms_norm = op_rms_norm,
    .layer_norm = op_layer_norm,
    .linear = op_linear,
    .rope = op_rope,
    .clear = op_clear,
    .add = op_add,
    .silu_mul = op_silu_mul,
    .mla_absorb = op_mla_absorb,
    .mla_expand = op_mla_expand,
    .kv_write = cuda_kv_write,
    .index_select = cuda_index_select,
    .mla_attend = cuda_mla_attend,
    .moe_route = op_moe_route,
    .experts = cuda_experts,
    .all_reduce = cuda_all_reduce,
    .gather_cols = cuda_gather_cols,
};

const Ops *ops_cuda(Err *err) {
    (void)err;
    return &table;
}
