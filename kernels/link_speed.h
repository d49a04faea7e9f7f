/* The speed of copies between host memory and a GPU. */
#pragma once

#include "base/err.h"

/* GB/s of large copies of pinned memory to GPU `gpu`, as the driver numbers them, and from it: the
 * best of several. E_UNSUPPORTED in builds without CUDA, and where no driver is. Any thread. */
int link_speed(int gpu, double *to_gb_per_s, double *from_gb_per_s, Err *err);
