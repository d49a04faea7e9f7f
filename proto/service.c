/* See service.h. */
#include "proto/service.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MEASURE_BYTES = 64 << 20, EXPERTS_AGAIN_MS = 500 };

void service_log(const ServiceOpts *o, const char *program) {
    static const LogLevel level[] = {LOG_LV_ERR, LOG_LV_WARN, LOG_LV_INFO, LOG_LV_DEBUG};
    log_init(program, level[o->log_level]);
}

int service_open_link(KvLink **out, const ServiceOpts *o, Loop *loop, uint64_t pool_bytes,
                      KvNoticeFn on_notice, void *arg, double *gb_per_s, Err *err) {
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = pool_bytes,
                       .transports = o->transports,
                       .devices = o->devices,
                       .timeout_ms = o->kv_timeout_ms,
                       .on_notice = on_notice,
                       .arg = arg};
    KvLink *link = NULL;
    int rc = kvlink_open(&link, &conf, err);
    if (rc)
        return rc;
    rc = kvlink_selftest(link, pool_bytes < MEASURE_BYTES ? pool_bytes : MEASURE_BYTES, gb_per_s,
                         err);
    if (rc == 0 && *gb_per_s < o->min_gb_per_s)
        rc = err_set(err, E_LIMIT,
                     "the KV link measures %.2f GB/s, [kvlink] min_gb_per_s asks for %.2f",
                     *gb_per_s, o->min_gb_per_s);
    if (rc) {
        kvlink_close(link);
        return rc;
    }
    *out = link;
    return 0;
}

/* Splits list in place; returns how many, or -1 when there are more than max. */
static int split(char *list, const char **out, int max) {
    int n = 0;
    char *rest = NULL;
    for (char *s = strtok_r(list, ", \t", &rest); s; s = strtok_r(NULL, ", \t", &rest)) {
        if (n == max)
            return -1;
        out[n++] = s;
    }
    return n;
}

int service_open_experts(ExpertLink **out, const char *endpoints, const Baton__Hello *self,
                         int64_t timeout_ms, int64_t wait_ms, Err *err) {
    const char *at[EXPERTLINK_MAX];
    char *list = xstrdup(endpoints);
    int n = split(list, at, EXPERTLINK_MAX), rc;
    if (n < 1) {
        free(list);
        return err_set(err, E_INVAL, "expected 1 to %d expert endpoints, got \"%s\"",
                       EXPERTLINK_MAX, endpoints);
    }
    for (int64_t end = clock_now_ms() + wait_ms;;) {
        rc = expertlink_open(out, at, n, self, timeout_ms, err);
        bool again = rc == E_PEER || rc == E_DEADLINE;
        if (!again || clock_now_ms() + EXPERTS_AGAIN_MS > end)
            break;
        nanosleep(&(struct timespec){.tv_nsec = EXPERTS_AGAIN_MS * 1000000L}, NULL);
    }
    free(list);
    return rc;
}
