/* The KV pool's memory, between the engine that computes in it and the link that others write
 * through. Start-up only. */
#pragma once

#include "model/runtime.h"
#include "proto/kvlink.h"

/* GPU memory of the engine for the pool that r->layout describes, which lasts until the runtime is
 * closed; {0}, so that the link allocates, when the engine works in host memory. E_NOMEM with what
 * is needed and available. */
int pool_memory(KvMemory *out, Runtime *r, Err *err);
