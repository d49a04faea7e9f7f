/* See node_mem.h. */
#include "expertd/node_mem.h"

#include <errno.h>
#include <inttypes.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    HUGE = 2 << 20,
    MAX_NODES = 1024,
    FILLERS = 8,       /* threads that touch reserved pages, */
    FILL_MIN = 1 << 30 /* each at least so many bytes */
};

/* ---- taking it ---- */

static size_t round_up(size_t bytes) {
    return (bytes + HUGE - 1) / HUGE * HUGE;
}

/* Aligned by asking for more and giving the ends back. */
static void *map_aligned(size_t bytes) {
    char *p = mmap(NULL, bytes + HUGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t before = -(uintptr_t)p % HUGE;
    if (before)
        munmap(p, before);
    munmap(p + before + bytes, HUGE - before);
    madvise(p + before, bytes, MADV_HUGEPAGE);
    return p + before;
}

static void bind_to(NodeMem *m, int node) {
    unsigned long mask[MAX_NODES / 64] = {0};
    if (node >= MAX_NODES) {
        snprintf(m->unbound, sizeof m->unbound, "node %d is out of range", node);
        return;
    }
    mask[node / 64] = 1ul << (node % 64);
    m->bound =
        syscall(SYS_mbind, m->at, m->bytes, MPOL_BIND, mask, (unsigned long)MAX_NODES, 0) == 0;
    if (!m->bound)
        snprintf(m->unbound, sizeof m->unbound, "%s", strerror(errno));
}

typedef struct Fill {
    void *at;
    size_t bytes;
    bool done;
} Fill;

static void *fill(void *arg) {
    Fill *f = arg;
    f->done = madvise(f->at, f->bytes, MADV_POPULATE_WRITE) == 0;
    return NULL;
}

/* Takes all pages now, where a lack of them is an answer and not a signal. */
static bool fill_all(const NodeMem *m) {
    size_t n = m->bytes / FILL_MIN < FILLERS ? m->bytes / FILL_MIN + 1 : FILLERS,
           each = m->bytes / n / HUGE * HUGE;
    Fill f[FILLERS];
    pthread_t id[FILLERS];
    bool started[FILLERS] = {false}, done = true;
    for (size_t i = 0; i < n; i++) {
        f[i] = (Fill){(char *)m->at + i * each, i + 1 < n ? each : m->bytes - i * each, false};
        started[i] = i > 0 && pthread_create(&id[i], NULL, fill, &f[i]) == 0;
    }
    for (size_t i = 0; i < n; i++) {
        if (started[i])
            pthread_join(id[i], NULL);
        else
            fill(&f[i]);
        done &= f[i].done;
    }
    return done;
}

static bool read_key(const char *root, const char *path, const char *key, uint64_t *out);

/* Reserved pages of the node, all of them or none. What the kernel sets aside when they are mapped
 * is of any node, and a group may be refused what the system has: so the node is asked first, and
 * the pages are taken before they count. */
static bool take_reserved(NodeMem *m, int node) {
    uint64_t left;
    char *path = xasprintf("/sys/devices/system/node/node%d/hugepages/hugepages-2048kB/"
                           "free_hugepages",
                           node);
    bool may = node < 0 || (read_key("", path, "", &left) && left >= m->bytes / HUGE);
    free(path);
    if (!may)
        return false;
    m->at = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | 21 << MAP_HUGE_SHIFT, -1, 0);
    if (m->at == MAP_FAILED)
        return false;
    if (node >= 0)
        bind_to(m, node);
    m->reserved = (node < 0 || m->bound) && fill_all(m);
    if (!m->reserved)
        munmap(m->at, m->bytes);
    return m->reserved;
}

int node_mem_new(NodeMem *out, size_t bytes, int node, Err *err) {
    NodeMem m = {.bytes = round_up(bytes)};
    if (take_reserved(&m, node)) {
        *out = m;
        return 0;
    }
    m = (NodeMem){.bytes = m.bytes, .at = map_aligned(m.bytes)};
    if (!m.at)
        return err_set(err, E_NOMEM, "no address space for %zu bytes: %s", m.bytes,
                       strerror(errno));
    if (node >= 0)
        bind_to(&m, node);
    *out = m;
    return 0;
}

void node_mem_free(NodeMem *m) {
    if (m->at)
        munmap(m->at, m->bytes);
    *m = (NodeMem){0};
}

int node_mem_lock(const NodeMem *m, Err *err) {
    struct rlimit r;
    if (mlock(m->at, m->bytes) == 0)
        return 0;
    int why = errno;
    if (getrlimit(RLIMIT_MEMLOCK, &r) == 0 && r.rlim_cur < m->bytes)
        return err_set(err, E_LIMIT,
                       "cannot lock %zu bytes: RLIMIT_MEMLOCK is %llu (LimitMEMLOCK= of the unit)",
                       m->bytes, (unsigned long long)r.rlim_cur);
    return err_set(err, E_LIMIT, "cannot lock %zu bytes: %s", m->bytes, strerror(why));
}

/* ---- what it is made of ---- */

/* Bytes of huge pages in the mappings that lie within m. */
static uint64_t count_huge(const NodeMem *m) {
    char line[512];
    uint64_t huge = 0;
    bool within = false;
    FILE *f = fopen("/proc/self/smaps", "re");
    while (f && fgets(line, sizeof line, f)) {
        uintptr_t begin, end;
        uint64_t kb;
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2)
            within = begin >= (uintptr_t)m->at && end <= (uintptr_t)m->at + m->bytes;
        else if (within && (sscanf(line, "AnonHugePages: %" SCNu64, &kb) == 1 ||
                            sscanf(line, "Private_Hugetlb: %" SCNu64, &kb) == 1))
            huge += kb * 1024;
    }
    if (f)
        fclose(f);
    return huge;
}

/* One page of every 2 MiB is asked for. False when the system does not tell. */
static bool count_nodes(const NodeMem *m, uint64_t bytes[MAX_NODES]) {
    enum { BATCH = 512 };
    void *page[BATCH];
    int status[BATCH];
    size_t n = m->bytes / HUGE;
    for (size_t i = 0; i < n;) {
        size_t k = 0;
        for (; k < BATCH && i + k < n; k++)
            page[k] = (char *)m->at + (i + k) * HUGE;
        if (syscall(SYS_move_pages, 0, k, page, NULL, status, 0) != 0)
            return false;
        for (size_t j = 0; j < k; j++)
            if (status[j] >= 0 && status[j] < MAX_NODES)
                bytes[status[j]] += HUGE;
        i += k;
    }
    return true;
}

NodeMemReport node_mem_report(const NodeMem *m, int node) {
    uint64_t bytes[MAX_NODES] = {0};
    NodeMemReport r = {.huge_bytes = count_huge(m), .node = -1};
    if (!count_nodes(m, bytes))
        return r;
    for (int i = 0; i < MAX_NODES; i++)
        if (node >= 0 ? i == node : bytes[i] > r.local_bytes) {
            r.local_bytes = bytes[i];
            r.node = i;
        }
    return r;
}

/* ---- what is left ---- */

/* The number after key in a file of lines; false when there is none. */
static bool read_key(const char *root, const char *path, const char *key, uint64_t *out) {
    char line[256], *name = xasprintf("%s%s", root, path);
    bool found = false;
    FILE *f = fopen(name, "re");
    while (f && !found && fgets(line, sizeof line, f)) {
        const char *at = strstr(line, key);
        found = at && sscanf(at + strlen(key), "%" SCNu64, out) == 1;
    }
    if (f)
        fclose(f);
    free(name);
    return found;
}

static void least(uint64_t value, const char *name, uint64_t *best, char *what, size_t n) {
    if (value < *best) {
        *best = value;
        snprintf(what, n, "%s", name);
    }
}

static uint64_t minus(uint64_t a, uint64_t b) {
    return a > b ? a - b : 0;
}

/* One control group, of version 2 or 1: its limit less what it holds, page cache given back. */
static void look_at_group(const char *root, bool v2, const char *group, uint64_t *best, char *what,
                          size_t n) {
    uint64_t max, now, cache = 0;
    const char *tree = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    char *limit = xasprintf("%s%s/%s", tree, group, v2 ? "memory.max" : "memory.limit_in_bytes"),
         *current =
             xasprintf("%s%s/%s", tree, group, v2 ? "memory.current" : "memory.usage_in_bytes"),
         *stat = xasprintf("%s%s/memory.stat", tree, group);
    if (read_key(root, limit, "", &max) && read_key(root, current, "", &now)) {
        read_key(root, stat, "inactive_file ", &cache);
        char *name = xasprintf("control group %s", *group ? group : "/");
        least(minus(max, minus(now, cache)), name, best, what, n);
        free(name);
    }
    free(limit);
    free(current);
    free(stat);
}

/* The process's group and all above it. */
static void look_at_groups(const char *root, uint64_t *best, char *what, size_t n) {
    char line[512], *name = xasprintf("%s/proc/self/cgroup", root);
    FILE *f = fopen(name, "re");
    while (f && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *memory = strstr(line, ":memory:/");
        bool v2 = strncmp(line, "0::/", 4) == 0;
        if (!v2 && !memory)
            continue;
        char *group = v2 ? line + 3 : memory + strlen(":memory:");
        for (char *slash; (slash = strrchr(group, '/')); *slash = 0)
            if (slash[1])
                look_at_group(root, v2, group, best, what, n);
        look_at_group(root, v2, "", best, what, n);
    }
    if (f)
        fclose(f);
    free(name);
}

uint64_t node_mem_available(const char *root, int node, char *what, size_t n) {
    uint64_t best = UINT64_MAX, kb, cache;
    snprintf(what, n, "nothing");
    if (node >= 0) {
        char *path = xasprintf("/sys/devices/system/node/node%d/meminfo", node),
             *name = xasprintf("NUMA node %d", node);
        if (read_key(root, path, "MemFree:", &kb)) {
            cache = 0;
            read_key(root, path, "Inactive(file):", &cache);
            least((kb + cache) * 1024, name, &best, what, n);
        }
        free(path);
        free(name);
    }
    if (read_key(root, "/proc/meminfo", "MemAvailable:", &kb))
        least(kb * 1024, "the system", &best, what, n);
    look_at_groups(root, &best, what, n);
    return best;
}
