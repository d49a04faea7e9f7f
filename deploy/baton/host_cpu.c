/* Nodes and processors from /sys and /proc, in the words of numactl and lscpu. */
#include "deploy/baton/facts_text.h"
#include "deploy/baton/host_int.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

/* "MemTotal:       16310680 kB" of one node or the whole system, in MB; -1: not told. */
static int64_t megabytes(const char *text, const char *key) {
    const char *at = text ? strstr(text, key) : NULL;
    int64_t kb;
    return at && sscanf(at + strlen(key), ":%" SCNd64, &kb) == 1 ? kb / 1024 : -1;
}

static void put_node(int node, const char *cpus, const char *meminfo, Buf *out) {
    int64_t size = megabytes(meminfo, "MemTotal"), left = megabytes(meminfo, "MemFree");
    buf_printf(out, "node %d cpus: %s\n", node, cpus);
    if (size >= 0)
        buf_printf(out, "node %d size: %" PRId64 " MB\n", node, size);
    if (left >= 0)
        buf_printf(out, "node %d free: %" PRId64 " MB\n", node, left);
}

/* A system without nodes has one. */
static void put_one_node(const char *root, Buf *out) {
    char *cpus = host_read_line(root, "/sys/devices/system/cpu/online"),
         *meminfo = host_read_file(root, "/proc/meminfo");
    if (cpus)
        put_node(0, cpus, meminfo, out);
    free(cpus);
    free(meminfo);
}

void host_put_numa(const char *root, Buf *out) {
    int node[FACTS_NODES], n = 0;
    for (int i = 0; i < FACTS_NODES; i++) {
        char *cpus = host_read_line(root, "/sys/devices/system/node/node%d/cpulist", i),
             *path = xasprintf("/sys/devices/system/node/node%d/meminfo", i),
             *meminfo = cpus ? host_read_file(root, path) : NULL;
        if (cpus) {
            put_node(i, cpus, meminfo, out);
            node[n++] = i;
        }
        free(cpus);
        free(path);
        free(meminfo);
    }
    if (n == 0) {
        put_one_node(root, out);
        return;
    }
    buf_puts(out, "node distances:\nnode");
    for (int i = 0; i < n; i++)
        buf_printf(out, " %d", node[i]);
    buf_puts(out, "\n");
    for (int i = 0; i < n; i++) {
        char *row = host_read_line(root, "/sys/devices/system/node/node%d/distance", node[i]);
        if (row)
            buf_printf(out, "%d: %s\n", node[i], row);
        free(row);
    }
}

/* ---- lscpu ---- */

/* The value behind "key  : " in /proc/cpuinfo's first block. */
static char *cpuinfo(const char *text, const char *key) {
    size_t n = strlen(key);
    for (const char *at = text; at && *at; at = strchr(at, '\n'), at += at != NULL) {
        if (strncmp(at, key, n) != 0 || (at[n] != '\t' && at[n] != ' ' && at[n] != ':'))
            continue;
        const char *colon = strchr(at, ':'), *end = strchr(at, '\n');
        if (!colon || (end && colon > end))
            continue;
        colon += colon[1] == ' ' ? 2 : 1;
        return xasprintf("%.*s", (int)(end ? end - colon : (long)strlen(colon)), colon);
    }
    return NULL;
}

static void put_sockets(const char *root, Buf *out) {
    int64_t id;
    bool seen[FACTS_CPUS] = {false};
    int n = 0;
    FactsCpus online, siblings;
    char *list = host_read_line(root, "/sys/devices/system/cpu/online");
    if (list && facts_text_list(list, FACTS_CPUS, &online))
        for (int cpu = 0; cpu < FACTS_CPUS; cpu++) {
            char *s =
                facts_cpus_has(&online, cpu)
                    ? host_read_line(
                          root, "/sys/devices/system/cpu/cpu%d/topology/physical_package_id", cpu)
                    : NULL;
            if (s && facts_text_int(s, 0, FACTS_CPUS - 1, &id) && !seen[id]) {
                seen[id] = true;
                n++;
            }
            free(s);
        }
    if (n > 0)
        buf_printf(out, "Socket(s): %d\n", n);
    free(list);
    list = host_read_line(root, "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    if (list && facts_text_list(list, FACTS_CPUS, &siblings) && facts_cpus_count(&siblings) > 0)
        buf_printf(out, "Thread(s) per core: %d\n", facts_cpus_count(&siblings));
    free(list);
}

void host_put_cpu(const char *root, Buf *out) {
    static const char *const keys[][2] = {{"model name", "Model name"},
                                          {"cpu family", "CPU family"},
                                          {"model\t", "Model"},
                                          {"flags", "Flags"}};
    char *text = host_read_file(root, "/proc/cpuinfo");
    for (size_t i = 0; i < sizeof keys / sizeof *keys && text; i++) {
        char *value = cpuinfo(text, keys[i][0]);
        if (value)
            buf_printf(out, "%s: %s\n", keys[i][1], value);
        if (value && strcmp(keys[i][0], "flags") == 0 && strstr(value, " hypervisor"))
            buf_puts(out, "Hypervisor vendor: unknown\n");
        free(value);
    }
    free(text);
    put_sockets(root, out);
}
