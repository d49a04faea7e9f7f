/* Stands for the CUDA backend in builds without it. */
#include "kernels/ops.h"

const Ops *ops_cuda(Err *err) {
    err_set(err, E_UNSUPPORTED, "backend cuda: this build has none (BATON_CUDA is off)");
    return NULL;
}
