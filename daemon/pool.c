/* See pool.h. enter and copy run on any thread. */
#include "daemon/pool.h"

static void enter(void *arg) {
    engine_pool_enter(arg);
}

static void copy(void *arg, void *to, const void *from, uint64_t bytes) {
    engine_pool_copy(arg, to, from, bytes);
}

int pool_memory(KvMemory *out, Runtime *r, Err *err) {
    *out = (KvMemory){0};
    if (!engine_pool_on_device(r->engine))
        return 0;
    int rc = engine_pool_new(r->engine, kv_pool_bytes(&r->layout), &r->pool, err);
    if (rc)
        return err_wrap(err, "the KV pool");
    *out = (KvMemory){.at = r->pool, .enter = enter, .copy = copy, .arg = r->engine};
    return 0;
}
