/* Stands for the CUDA backend in builds without it. */
#include "kernels/link_speed.h"
#include "kernels/ops.h"

const Ops *ops_cuda(Err *err) {
    err_set(err, E_UNSUPPORTED, "backend cuda: this build has none (BATON_CUDA is off)");
    return NULL;
}

int link_speed(int gpu, double *to_gb_per_s, double *from_gb_per_s, Err *err) {
    (void)gpu;
    (void)to_gb_per_s;
    (void)from_gb_per_s;
    return err_set(err, E_UNSUPPORTED, "this build has no CUDA (BATON_CUDA is off)");
}
