/* A numeric self-test of the dispatched kernels, for the engine's start. */
#pragma once

#include "kernels/ops.h"
#include "model/shape.h"

/* Compares ops with the reference on random data of the model's shapes and the KV format;
 * E_MISMATCH names the operation and the difference. */
int selftest_run(const Ops *ops, const Shape *shape, Dtype kv_dtype, Err *err);
