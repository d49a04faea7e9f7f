/* Limits, control groups, pages, AMX: what no tool prints. */
#include "deploy/baton/facts_text.h"
#include "deploy/baton/host_int.h"

#include "base/topo.h"
#include "expertd/node_mem.h"
#include "kernels/cpu/iq_run.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

static void put_memlock(Buf *out) {
    struct rlimit r;
    if (getrlimit(RLIMIT_MEMLOCK, &r))
        return;
    if (r.rlim_cur == RLIM_INFINITY)
        buf_puts(out, "memlock: unlimited\n");
    else
        buf_printf(out, "memlock: %llu\n", (unsigned long long)r.rlim_cur);
}

static void put_shm(const char *root, Buf *out) {
    struct statvfs v;
    char *path = xasprintf("%s/dev/shm", root);
    if (statvfs(path, &v) == 0)
        buf_printf(out, "shm: %" PRIu64 "\n", (uint64_t)v.f_blocks * v.f_frsize);
    free(path);
}

/* "always [madvise] never": the word in brackets. */
static void put_pages(const char *root, Buf *out) {
    char *thp = host_read_line(root, "/sys/kernel/mm/transparent_hugepage/enabled"),
         *left = host_read_line(root, "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    char *begin = thp ? strchr(thp, '[') : NULL, *end = begin ? strchr(begin, ']') : NULL;
    int64_t n;
    if (end)
        buf_printf(out, "transparent_hugepage: %.*s\n", (int)(end - begin - 1), begin + 1);
    if (left && facts_text_int(left, 0, INT64_MAX >> 21, &n))
        buf_printf(out, "huge_2m_free: %" PRId64 "\n", n);
    free(thp);
    free(left);
}

static void put_number(const char *root, const char *path, const char *name, Buf *out) {
    char *s = host_read_line(root, "%s", path);
    int64_t v;
    if (s && facts_text_int(s, 0, 1000000, &v))
        buf_printf(out, "%s: %" PRId64 "\n", name, v);
    free(s);
}

/* ---- control groups ---- */

/* Processors' time of one group; -1: unlimited or unknown. */
static double quota_of(const char *root, bool v2, const char *group) {
    const char *tree = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu";
    char *quota = host_read_line(root, "%s%s/%s", tree, group, v2 ? "cpu.max" : "cpu.cfs_quota_us"),
         *period = v2 ? NULL : host_read_line(root, "%s%s/cpu.cfs_period_us", tree, group);
    double q = -1, p = 100000;
    if (quota && v2 && sscanf(quota, "%lf %lf", &q, &p) < 1)
        q = -1;
    if (quota && !v2 &&
        (sscanf(quota, "%lf", &q) != 1 || !period || sscanf(period, "%lf", &p) != 1))
        q = -1;
    free(quota);
    free(period);
    return q > 0 && p > 0 ? q / p : -1;
}

static void least_quota(double v, double *best) {
    if (v >= 0 && (*best < 0 || v < *best))
        *best = v;
}

/* The process's group and all above it, of version 2 or of the hierarchy that has cpu. */
static void put_quota(const char *root, Buf *out) {
    char *text = host_read_file(root, "/proc/self/cgroup"), *rest = text;
    double best = -1;
    for (char *line; rest && (line = strsep(&rest, "\n"));) {
        char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
        if (!group || group[1] != '/')
            continue;
        *group++ = 0;
        bool v2 = list[1] == 0;
        if (!v2 && strcmp(list + 1, "cpu") != 0 && strcmp(list + 1, "cpu,cpuacct") != 0)
            continue;
        for (char *slash; (slash = strrchr(group, '/')); *slash = 0)
            least_quota(quota_of(root, v2, slash[1] ? group : ""), &best);
    }
    if (best > 0)
        buf_printf(out, "cgroup_cpus: %.3f\n", best);
    free(text);
}

static void put_memory(const char *root, Buf *out) {
    char what[256];
    uint64_t left = node_mem_available(root, -1, what, sizeof what);
    if (strncmp(what, "control group", 13) == 0 && left < INT64_MAX)
        buf_printf(out, "cgroup_memory: %" PRIu64 "\n", left);
    else
        buf_puts(out, "cgroup_memory: unlimited\n");
}

/* "Cpus_allowed_list:\t0-3" */
static void put_allowed(const char *root, Buf *out) {
    static const char *const keys[][2] = {{"Cpus_allowed_list:", "cpuset"},
                                          {"Mems_allowed_list:", "mems"}};
    char *text = host_read_file(root, "/proc/self/status");
    for (int i = 0; i < 2 && text; i++) {
        char *at = strstr(text, keys[i][0]);
        if (!at)
            continue;
        at += strlen(keys[i][0]);
        at += strspn(at, " \t");
        if (strcspn(at, "\n") > 0)
            buf_printf(out, "%s: %.*s\n", keys[i][1], (int)strcspn(at, "\n"), at);
    }
    free(text);
}

/* ---- the processor ---- */

static void put_instructions(Buf *out) {
    const char *why = "";
    IqIsa best = IQ_AMX;
    while (!iq_isa_usable(best, NULL))
        best++;
    buf_printf(out, "isa: %s\n", iq_isa_name(best));
    if (iq_isa_usable(IQ_AMX, &why))
        buf_puts(out, "amx: granted\n");
    else
        buf_printf(out, "amx: %s: %s\n",
                   strstr(why, "system") || strstr(why, "configured") ? "refused" : "absent", why);
}

/* Physical cores that this process may use, node by node. */
static void put_cores(Buf *out) {
    Topo *t;
    if (topo_open(&t, NULL))
        return;
    for (int i = 0; i < FACTS_NODES; i++) {
        Err err = {0};
        int n = topo_n_cores(t, i);
        if (n > 0 || topo_check_node(t, i, &err) == 0)
            buf_printf(out, "node%d.cores: %d\n", i, n);
    }
    topo_close(t);
}

void host_put_limits(const char *root, Buf *out) {
    put_memlock(out);
    put_shm(root, out);
    put_pages(root, out);
    put_number(root, "/proc/sys/kernel/numa_balancing", "numa_balancing", out);
    put_number(root, "/proc/sys/kernel/yama/ptrace_scope", "ptrace_scope", out);
    put_allowed(root, out);
    put_quota(root, out);
    put_memory(root, out);
    if (*root)
        return; /* the rest asks the processor that is here */
    put_instructions(out);
    put_cores(out);
}

void host_put_measured(const Facts *f, Buf *out) {
    for (int i = 0; i < f->n_nodes; i++)
        if (f->node[i].gb_per_s > 0)
            buf_printf(out, "node%d.gb_per_s: %.1f\n", i, f->node[i].gb_per_s);
    for (int i = 0; i < f->n_gpus; i++) {
        if (f->gpu[i].h2d_gb_per_s > 0)
            buf_printf(out, "gpu%d.h2d_gb_per_s: %.1f\n", i, f->gpu[i].h2d_gb_per_s);
        if (f->gpu[i].d2h_gb_per_s > 0)
            buf_printf(out, "gpu%d.d2h_gb_per_s: %.1f\n", i, f->gpu[i].d2h_gb_per_s);
    }
}
