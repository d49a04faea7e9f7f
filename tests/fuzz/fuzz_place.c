/* Fuzzes the placement file. What is taken names experts of MoE layers, and dense layers stay
 * resident. */
#include "model/place.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const Shape shape = {
        .n_layers = 5, .n_mtp = 1, .n_experts = 16, .layer_dense = {true, false}};
    char *text = xcalloc(size + 1, 1);
    memcpy(text, data, size);
    bool *resident = NULL;
    Err err = {0};
    int rc = place_parse_file("fuzz", text, &shape, &resident, &err);
    CHECK(rc == 0 ? resident != NULL : !resident && err.code == rc && err.text[0]);
    for (int e = 0; e < shape.n_experts && rc == 0; e++)
        CHECK(resident[e]);
    free(resident);
    free(text);
    return 0;
}
