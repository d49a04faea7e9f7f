/* Computes integer-quantised experts (iq.h) on the threads of one NUMA node.
 *
 * Activations are quantised to int8 with one scale per token and group of columns; products are
 * exact int32; each group's product is scaled and added in fp32 in the order of the groups; a token
 * adds up its experts in the order of their ids. A token's result depends neither on the other
 * tokens nor on the number of threads nor on the kernel: plain C, AVX2, AVX-512 VNNI and AMX give
 * the same int32, and the same fp32 up to SiLU.
 *
 * One thread at a time calls; it takes part as thread 0. */
#pragma once

#include "base/err.h"
#include "kernels/iq.h"

#include <stdbool.h>

/* In order of preference. */
typedef enum IqIsa { IQ_AMX, IQ_VNNI, IQ_AVX2, IQ_SCALAR, IQ_N_ISA } IqIsa;

const char *iq_isa_name(IqIsa isa); /* "amx", "avx512-vnni", "avx2", "scalar" */
/* Whether this process may run it now; why not goes to *why (static text; may be NULL). AMX is
 * asked for from the system at the first question, so ask before other threads start. */
bool iq_isa_usable(IqIsa isa, const char **why);

typedef struct IqRunConf {
    IqGeom geom;
    int n_units;   /* of this shard: the inner channels of its slice are n_units * group */
    int n_experts; /* per layer */
    int max_rows;  /* tokens per call */
    int max_k;     /* experts per token */
    int threads;   /* at least 1, the caller included */
    IqIsa best;    /* nothing better is used; 0: whatever runs here */
    int spin_us;   /* how long idle threads spin before they sleep */
    /* Runs on each thread but the caller's before any work, to pin it. NULL: nothing. */
    void (*on_thread)(void *arg, int thread);
    void *arg;
} IqRunConf;

typedef struct IqRun IqRun;

/* Allocates everything that calls need. E_UNSUPPORTED by iq_check. */
int iq_run_open(IqRun **out, const IqRunConf *conf, Err *err);
void iq_run_close(IqRun *r);
IqIsa iq_run_isa(const IqRun *r); /* the best it uses; few rows take IQ_VNNI where it is IQ_AMX */

/* What one call did. */
typedef struct IqWork {
    int n_experts;  /* distinct ones */
    uint64_t bytes; /* of weights read */
} IqWork;

/* y[n, hidden] = sum over places of weight * expert(x) over the slice; x[n, hidden], id[n, k] (-1:
 * empty place; none twice in a row), weight[n, k]. expert[n_experts] points at the slice of each
 * expert, iq_unit_bytes * n_units, 64-byte aligned.
 *
 * between (NULL: none) is called on the caller's thread now and then while a call of many rows
 * runs, with nothing of it running: it may call iq_run of another IqRun, whose threads may be on
 * the same cores. */
IqWork iq_run(IqRun *r, const uint8_t *const *expert, int n, int k, const float *x,
              const int32_t *id, const float *weight, float *y, void (*between)(void *arg),
              void *arg);

/* GB/s at which the threads of r read n slices as calls have them, doing nothing else: what calls
 * can reach. NULL slices are passed over. */
double iq_run_read(IqRun *r, const uint8_t *const *slice, int n);
