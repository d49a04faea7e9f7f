/* The most tokens per second that memory and links allow at one stream, with the arithmetic. Pure.
 *
 * A token's time is the sum of its parts, since each layer needs the one before it:
 *   experts in host memory   visits x share not on the device x bytes of an expert / bandwidth of
 *                            the nodes that hold them, the slowest shard deciding
 *   the device               everything else and the resident share, over its memory's bandwidth,
 *                            and the KV that attention reads
 *   all-reduces              two per layer, when there are several ranks on GPUs
 *   hand-over                one call of all expertd per MoE layer */
#pragma once

#include "base/buf.h"
#include "deploy/baton/doctor_view.h"

enum { CEILING_DRAFT = 5 };

typedef struct Ceiling {
    double cpu_bytes, cpu_gb_per_s, cpu_ms;
    double device_bytes, device_gb_per_s, device_ms;
    double n_reduce, reduce_us, reduce_ms;
    double n_handover, handover_ms;
    double total_ms, tok_per_s;
    double memory_tok_per_s; /* by the host's memory alone; 0: no experts there */
} Ceiling;

/* What a ceiling is computed of. */
typedef struct CeilingCase {
    const Facts *facts;
    const Assume *assume;
    const Shape *shape;
    const View *view;
} CeilingCase;

/* Bandwidth of the node: measured, or its part of the socket's. */
double ceiling_node_gb_per_s(const Facts *f, const Assume *a, int node);
/* Of one GPU: set, of its type, or 0 when neither is known. */
double ceiling_gpu_gb_per_s(const Facts *f, const Assume *a, int gpu);

Ceiling ceiling_compute(const CeilingCase *c);
/* Of a step that verifies k drafted tokens, per token that comes out of it. */
Ceiling ceiling_compute_draft(const CeilingCase *c, int k);
/* Mean tokens that such a step gives, the bonus token included; k up to CEILING_DRAFT. */
double ceiling_accepted(int k);

/* Appends the arithmetic, one part on a line, each line after `indent`. */
void ceiling_explain(const Ceiling *v, const CeilingCase *c, const char *indent, Buf *out);
