/* The header of expert files as it stands on disk; for expert_file.c, expert_pack.c, tests and
 * fuzzing. */
#pragma once

#include "model/expert_file.h"

#define EXPERT_MAGIC 0x31505845544142ull /* "BATEXP1" */
enum { EXPERT_HEADER_MAX = 64 << 20 };

/* Followed by the hash of each expert's units, uint64 [n_experts, units], and zeros up to
 * header_bytes. No padding within. */
typedef struct ExpertDisk {
    uint64_t magic;
    uint32_t version, header_bytes;
    uint64_t model_id, source;
    int32_t hidden, inner, bits, group, scale, layer, n_experts, n_active, n_layers, first_layer;
    char method[32];
    double loss;
    uint64_t data_bytes;
    uint64_t header_hash; /* XXH3-64 of everything before and after this field */
} ExpertDisk;

_Static_assert(sizeof(ExpertDisk) == 8 + 8 + 16 + 40 + 32 + 8 + 8 + 8, "no padding");

/* Where the data begin. */
size_t expert_header_bytes(const ExpertHead *h);
/* out[expert_header_bytes] */
void expert_header_write(const ExpertHead *h, const uint64_t *unit_hash, uint8_t *out);
/* Sets header_hash of a header of n bytes. */
void expert_header_seal(uint8_t *header, size_t n);
/* The first n bytes of a file of file_bytes. */
int expert_header_parse(const uint8_t *bytes, size_t n, uint64_t file_bytes, ExpertHead *out,
                        Err *err);
