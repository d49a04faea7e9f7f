/* Experts from expert files: this shard's slice of every MoE layer in memory of the node, and their
 * computation. Internal to store; opened on the loop thread, used by the worker thread. */
#pragma once

#include "expertd/node_mem.h"
#include "expertd/store.h"
#include "kernels/cpu/iq_run.h"

typedef struct StoreFiles StoreFiles;

/* What the files of a directory say together. */
typedef struct FilesHead {
    IqGeom geom;
    int n_experts, n_active;   /* of a layer, of a token */
    int n_layers, first_layer; /* layers with experts: first_layer .. n_layers - 1 */
    uint64_t model_id;
    uint64_t hash; /* of all files' hashes */
} FilesHead;

/* Opens all files of conf->files, which must be of one model and geometry and leave no layer out,
 * checks that the slice and the workspace fit the memory that is left, reads it and checks its
 * hashes. held[n_layers, n_experts] is allocated and the caller's. Errors name file, layer or the
 * numbers.
 */
int store_files_open(StoreFiles **out, const StoreConf *conf, bool **held, Err *err);
void store_files_close(StoreFiles *f);

const FilesHead *store_files_head(const StoreFiles *f);
uint64_t store_files_bytes(const StoreFiles *f);
uint64_t store_files_work_bytes(const StoreFiles *f);
const NodeMem *store_files_memory(const StoreFiles *f);
IqIsa store_files_isa(const StoreFiles *f);

/* The files' part of a store that has one. */
StoreFiles *store_files(Store *s);
/* GB/s of reading a thousand slices or so with the compute threads, other ones at each call. */
double store_files_read(StoreFiles *f);

/* Last-level cache of the cores that compute, in bytes. */
uint64_t store_files_cache(const StoreFiles *f);

/* As store_selftest. */
int store_files_selftest(StoreFiles *f, Err *err);

/* As store_compute. */
StoreWork store_files_compute(StoreFiles *f, int layer, int n, int k, const float *x,
                              const int32_t *id, const float *weight, float *y,
                              void (*between)(void *arg), void *arg);
