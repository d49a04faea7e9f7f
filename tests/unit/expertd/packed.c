/* See packed.h. */
#include "tests/unit/expertd/packed.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

void packed_path(const Packed *p, int layer, char path[128]) {
    expert_file_path(path, 128, p->dir, layer);
}

void packed_write(const Packed *p, int layer, int bits) {
    ExpertPackConf c = {.weights = p->weights,
                        .dir = p->dir,
                        .geom = {PACKED_HIDDEN, PACKED_INNER, bits, p->group, IQ_SCALE_F16},
                        .threads = 2};
    ExpertPackResult r;
    assert_int_equal(expert_pack_layer(&c, layer, &r, NULL), 0);
}

void packed_new(Packed *out, int bits, int group) {
    *out = (Packed){.dir = "/tmp/baton-store-XXXXXX", .bits = bits, .group = group};
    assert_non_null(mkdtemp(out->dir));
    assert_int_equal(weights_open(&out->weights, "tests/models/tiny-glm52/fp8", NULL), 0);
    for (int l = PACKED_FIRST; l < PACKED_LAYERS; l++)
        packed_write(out, l, bits);
}

void packed_free(Packed *p) {
    char path[128];
    weights_close(p->weights);
    for (int l = PACKED_FIRST; l < PACKED_LAYERS; l++) {
        packed_path(p, l, path);
        unlink(path);
    }
    rmdir(p->dir);
}
