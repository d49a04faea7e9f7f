/* KV rows of a host pool: stored formats to fp32 and back. Called on rank threads; no state. */
#include "kernels/host.h"

#include <float.h>

static void bf16_out(const uint8_t *p, int n, float *out) {
    for (int i = 0; i < n; i++) {
        uint16_t v;
        memcpy(&v, p + 2 * i, 2);
        out[i] = bf16_to_f32(v);
    }
}

static void bf16_in(uint8_t *p, int n, const float *in) {
    for (int i = 0; i < n; i++) {
        uint16_t v = f32_to_bf16(in[i]);
        memcpy(p + 2 * i, &v, 2);
    }
}

static void f8_out(const uint8_t *p, int n, float scale, float *out) {
    for (int i = 0; i < n; i++)
        out[i] = f8e4m3_to_f32(p[i]) * scale;
}

static void f8_in(uint8_t *p, int n, float scale, const float *in) {
    for (int i = 0; i < n; i++)
        p[i] = f32_to_f8e4m3(in[i] / scale);
}

static float max_abs(const float *x, int n) {
    float m = 0;
    for (int i = 0; i < n; i++)
        m = fmaxf(m, fabsf(x[i]));
    return m;
}

void host_kv_latent(const Dev *d, int slot, int64_t page, int row, float *out) {
    const KvLayout *l = &d->kv;
    const uint8_t *p =
        d->kv_pool + kv_latent_page_offset(l, slot, page) + (uint64_t)row * kv_latent_row_bytes(l);
    int n = l->kv_lora + l->rope;
    if (l->dtype == DT_F32) {
        memcpy(out, p, (size_t)n * sizeof(float));
    } else if (l->dtype == DT_BF16) {
        bf16_out(p, n, out);
    } else {
        const uint8_t *scales = p + l->kv_lora;
        int groups = l->kv_lora / KV_SCALE_GROUP;
        for (int g = 0; g < groups; g++) {
            float scale;
            memcpy(&scale, scales + 4 * g, 4);
            f8_out(p + g * KV_SCALE_GROUP, KV_SCALE_GROUP, scale, out + g * KV_SCALE_GROUP);
        }
        bf16_out(scales + 4 * groups, l->rope, out + l->kv_lora);
    }
}

void host_kv_put_latent(const Dev *d, int slot, int64_t page, int row, const float *in) {
    const KvLayout *l = &d->kv;
    uint8_t *p =
        d->kv_pool + kv_latent_page_offset(l, slot, page) + (uint64_t)row * kv_latent_row_bytes(l);
    int n = l->kv_lora + l->rope;
    if (l->dtype == DT_F32) {
        memcpy(p, in, (size_t)n * sizeof(float));
    } else if (l->dtype == DT_BF16) {
        bf16_in(p, n, in);
    } else {
        uint8_t *scales = p + l->kv_lora;
        int groups = l->kv_lora / KV_SCALE_GROUP;
        for (int g = 0; g < groups; g++) {
            const float *x = in + g * KV_SCALE_GROUP;
            float scale = fmaxf(max_abs(x, KV_SCALE_GROUP) / 448.0f, FLT_MIN);
            memcpy(scales + 4 * g, &scale, 4);
            f8_in(p + g * KV_SCALE_GROUP, KV_SCALE_GROUP, scale, x);
        }
        bf16_in(scales + 4 * groups, l->rope, in + l->kv_lora);
    }
}

void host_kv_key(const Dev *d, int index_slot, int64_t page, int row, float *out) {
    const KvLayout *l = &d->kv;
    const uint8_t *p = d->kv_pool + kv_index_page_offset(l, index_slot, page);
    size_t dim = (size_t)l->index_dim, r = (size_t)row;
    if (l->dtype == DT_F32) {
        memcpy(out, p + 4 * r * dim, 4 * dim);
    } else if (l->dtype == DT_BF16) {
        bf16_out(p + 2 * r * dim, l->index_dim, out);
    } else {
        float scale;
        memcpy(&scale, p + KV_PAGE_TOKENS * dim + 4 * r, 4);
        f8_out(p + r * dim, l->index_dim, scale, out);
    }
}

void host_kv_put_key(const Dev *d, int index_slot, int64_t page, int row, const float *in) {
    const KvLayout *l = &d->kv;
    uint8_t *p = d->kv_pool + kv_index_page_offset(l, index_slot, page);
    size_t dim = (size_t)l->index_dim, r = (size_t)row;
    if (l->dtype == DT_F32) {
        memcpy(p + 4 * r * dim, in, 4 * dim);
    } else if (l->dtype == DT_BF16) {
        bf16_in(p + 2 * r * dim, l->index_dim, in);
    } else {
        /* a power of two, rounded up, as the paged index kernels of GPUs expect */
        float scale = exp2f(ceilf(log2f(fmaxf(max_abs(in, l->index_dim), 1e-4f) / 448.0f)));
        memcpy(p + KV_PAGE_TOKENS * dim + 4 * r, &scale, 4);
        f8_in(p + r * dim, l->index_dim, scale, in);
    }
}
