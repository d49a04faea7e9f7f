/* See service.h. */
#include "proto/service.h"

#include "base/clock.h"
#include "base/log.h"
#include "proto/hello.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MEASURE_BYTES = 8 << 20, EXPERTS_AGAIN_MS = 500 };

void service_log(const ServiceOpts *o, const char *program) {
    static const LogLevel level[] = {LOG_LV_ERR, LOG_LV_WARN, LOG_LV_INFO, LOG_LV_DEBUG};
    log_init(program, level[o->log_level]);
}

int service_check(const ServiceOpts *o, Err *err) {
    size_t n = strlen(o->name);
    bool printable = true;
    for (size_t i = 0; i < n; i++)
        printable = printable && isprint((unsigned char)o->name[i]);
    if (n >= 1 && n <= HELLO_NAME_MAX && printable)
        return 0;
    return err_set(err, E_INVAL, "[service] name: expected 1 to %d printable characters",
                   HELLO_NAME_MAX);
}

void service_log_event(const BusPeer *peer, BusEvent event, const char *reason) {
    const char *name = peer ? bus_peer_hello(peer)->name : "a caller";
    switch (event) {
    case BUS_UP:
        LOG_INFO("%s connected", name);
        break;
    case BUS_BACK:
        LOG_INFO("%s heard again", name);
        break;
    case BUS_GONE:
        LOG_INFO("%s gone: %s", name, reason);
        break;
    case BUS_REFUSED:
        LOG_WARN("refused: %s", reason);
        break;
    default:
        LOG_WARN("%s silent: %s", name, reason);
    }
}

int service_open_link(KvLink **out, const ServiceOpts *o, Loop *loop, uint64_t pool_bytes,
                      const KvMemory *memory, KvNoticeFn on_notice, void *arg, double *gb_per_s,
                      Err *err) {
    KvLinkConf conf = {.loop = loop,
                       .pool_bytes = pool_bytes,
                       .memory = *memory,
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
