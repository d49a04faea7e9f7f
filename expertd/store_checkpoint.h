/* Experts in the format of a checkpoint, whose mapping they borrow, on a host device of their own;
 * the numerics are those of prefill and decode. Internal to store; opened on the loop thread, used
 * by the worker thread. */
#pragma once

#include "expertd/store.h"

typedef struct StoreCheckpoint StoreCheckpoint;

/* held[layers, n_experts] is allocated and the caller's. */
int store_checkpoint_open(StoreCheckpoint **out, const Weights *w, const StoreConf *conf,
                          bool **held, Err *err);
void store_checkpoint_close(StoreCheckpoint *s);

const Ops *store_checkpoint_ops(const StoreCheckpoint *s);
uint64_t store_checkpoint_bytes(const StoreCheckpoint *s);

/* As store_compute. */
StoreWork store_checkpoint_compute(StoreCheckpoint *s, int layer, int n, int k, const float *x,
                                   const int32_t *id, const float *weight, float *y);
