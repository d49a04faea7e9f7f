/* Expert files: the routed experts of one layer in the layout of kernels/iq.h, independent of the
 * number of shards.
 *
 * A directory holds one file "layer-NNN.experts" per MoE layer (the MTP layer included). A file is
 * a header with magic, version, the model's id, dimensions, layer, method and geometry, a hash of
 * itself, and for each expert and unit a hash of its bytes; then from offset data_at (a multiple of
 * 4096) on expert e, unit u at data_at + (e * units + u) * iq_unit_bytes. Little-endian.
 *
 * Reading checks all of the header against the file's size and itself before anything is believed.
 * Immutable after opening; any thread may read. */
#pragma once

#include "base/err.h"
#include "kernels/iq.h"

#include <stdbool.h>

enum { EXPERT_FILE_VERSION = 2 };

/* What a file says of itself. */
typedef struct ExpertHead {
    IqGeom geom;
    int layer, n_experts;
    int n_active;      /* experts of a token */
    int n_layers;      /* of the model, MTP layers included */
    int first_layer;   /* of the model's layers with experts */
    uint64_t model_id; /* weights_id of the checkpoint that was packed */
    uint64_t source;   /* its weights_fingerprint: which format of the model it was */
    char method[32];   /* how codes were chosen: "rtn-search" for 4 bits, "rtn" for 8 */
    double loss;       /* relative rms error over the layer's weights */
    uint64_t hash;     /* of all this and of every unit; only of a file that was read */
} ExpertHead;

typedef struct ExpertFile ExpertFile;

/* "DIR/layer-NNN.experts" into path[n]. */
void expert_file_path(char *path, size_t n, const char *dir, int layer);
/* "int4-g128-f16" and so on, into name[n]. */
void expert_file_format(char *name, size_t n, const IqGeom *g);

/* E_IO, E_NOTFOUND, E_FORMAT (not such a file, damaged header, truncated, too long), E_UNSUPPORTED
 * (another version) with the path and what is wrong. */
int expert_file_open(ExpertFile **out, const char *path, Err *err);
void expert_file_close(ExpertFile *f);
const ExpertHead *expert_file_head(const ExpertFile *f);

/* Reads units [unit, unit + n) of an expert into to[n * iq_unit_bytes] and checks their hashes:
 * E_FORMAT names path, expert and unit. Any thread, several at a time. The bytes do not stay
 * mapped, and the page cache may drop them. */
int expert_file_read(const ExpertFile *f, int expert, int unit, int n, void *to, Err *err);

/* Checks every hash on `threads` threads; *bytes is what was read. */
int expert_file_verify(const ExpertFile *f, int threads, uint64_t *bytes, Err *err);
