/* Fuzzes the header of an expert file: the first byte says whether its hash and sizes are made
 * right, so that what comes after those checks is reached too. A header that is taken has
 * dimensions that fit the file. */
#include "model/expert_file_int.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 9)
        return 0;
    uint64_t file_bytes;
    memcpy(&file_bytes, data + 1, 8);
    uint8_t *header = xcalloc(size, 1);
    memcpy(header, data + 9, size - 9);
    if (data[0] & 1 && size - 9 >= sizeof(ExpertDisk)) {
        ExpertDisk d;
        memcpy(&d, header, sizeof d);
        d.magic = EXPERT_MAGIC;
        d.version = EXPERT_FILE_VERSION;
        d.header_bytes = (uint32_t)(size - 9);
        memcpy(header, &d, sizeof d);
        expert_header_seal(header, size - 9);
    }
    ExpertHead h;
    Err err = {0};
    int rc = expert_header_parse(header, size - 9, file_bytes, &h, &err);
    CHECK(rc == 0 || (err.code == rc && err.text[0]));
    if (rc == 0) {
        uint64_t units = (uint64_t)iq_units(&h.geom) * (uint64_t)h.n_experts;
        CHECK(h.n_experts >= 1 && h.layer < h.n_layers && h.first_layer >= 0 &&
              h.first_layer <= h.layer &&
              expert_header_bytes(&h) + units * iq_unit_bytes(&h.geom) == file_bytes);
    }
    free(header);
    return 0;
}
