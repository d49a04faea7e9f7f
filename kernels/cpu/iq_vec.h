/* What the AVX-512 tables of iq_kern.h share. */
#pragma once

#include "kernels/cpu/iq_kern.h"

#include <immintrin.h>

/* The 16 scales of panel p, group g as fp32, exactly. */
static inline __m512 iq_scales(const IqPanels *w, int p, int g) {
    const uint8_t *at =
        w->scale + (size_t)p * w->scale_panel_step + (size_t)g * w->scale_group_step;
    __m256i raw = _mm256_loadu_si256((const void *)at);
    return w->type == IQ_SCALE_F16
               ? _mm512_cvtph_ps(raw)
               : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
