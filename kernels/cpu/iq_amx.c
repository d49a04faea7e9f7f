/* iq_kern.h with AMX, for experts that several tokens want. */
#include "kernels/cpu/iq_amx_body.h"
#include "kernels/cpu/kern.h"

static void silu_mul(float *out, const float *gate, const float *up, int n) {
    kern_avx512()->silu_mul(out, gate, up, n);
}

const IqKern IQ_KERN_AMX = {
    .quant = iq_body_quant,
    .panels = amx_panels,
    .add_scaled = iq_body_add_scaled,
    .silu_mul = silu_mul,
};
