/* Fuzzes config.json. A refusal has words and writes nothing; a shape that is taken keeps the
 * bounds that the rest of the code builds on. */
#include "model/shape.h"

#include <limits.h>
#include <string.h>

static void check_layers(const Shape *s) {
    int n = s->n_layers + s->n_mtp, slot = 0;
    CHECK(s->n_layers >= 1 && s->n_mtp >= 0 && s->n_mtp <= 1 && n <= SHAPE_MAX_LAYERS);
    CHECK(s->layer_has_index[0] && (!s->n_mtp || s->layer_has_index[n - 1]));
    for (int i = 0; i < n; i++) {
        CHECK(s->index_slot[i] == (s->layer_has_index[i] ? slot : -1));
        slot += s->layer_has_index[i];
    }
    CHECK(s->n_index_layers == slot - s->n_mtp);
}

static void check_shape(const Shape *s) {
    check_layers(s);
    CHECK(s->n_active >= 1 && s->n_active <= s->n_experts);
    CHECK(s->n_active <= SHAPE_MAX_TOPK_EXPERTS);
    CHECK(s->rope >= 2 && s->rope % 2 == 0 && s->rope <= s->index_dim);
    CHECK(s->kv_lora > 0 && s->kv_lora % 128 == 0);
    CHECK(s->eps > 0 && s->rope_theta >= 1 && s->routed_scale > 0);
    CHECK(s->n_eos >= 1 && s->n_eos <= SHAPE_MAX_EOS);
    for (int i = 0; i < s->n_eos; i++)
        CHECK(s->eos[i] >= 0 && s->eos[i] < s->vocab);
    CHECK((int64_t)s->vocab * s->hidden <= INT_MAX);
    CHECK((int64_t)s->n_heads * s->v_dim * s->hidden <= INT_MAX);
    for (int tp = 1; tp <= 8; tp++)
        if (shape_check_tp(s, tp, NULL) == 0)
            CHECK(s->n_heads % tp == 0 && s->vocab % tp == 0 && s->moe_inner / tp % 16 == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Shape s, before;
    Err err = {0};
    memset(&s, 0x55, sizeof s);
    before = s;
    if (shape_parse(&s, (const char *)data, size, &err) == 0)
        check_shape(&s);
    else
        CHECK(err.code != 0 && err.text[0] && memcmp(&s, &before, sizeof s) == 0);
    return 0;
}
