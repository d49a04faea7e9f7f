/* Stands for the CUDA backend in builds without it. */
#include "kernels/ops.h"

const Ops *ops_cuda(Err *err) {
    err_set(err, E_UNSUPPORTED, "this build has no CUDA backend (BATON_CUDA is off)");
    return NULL;
}
