/* host.txt: what no tool prints, as `baton doctor --capture` writes it. Pure functions. */
#include "deploy/baton/facts_text.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef enum Kind {
    BYTES, /* or "unlimited" */
    COUNT,
    REAL,
    WORD, /* text of `size` bytes */
    CPUS,
    NODES,
} Kind;

#define AT(field) offsetof(Facts, field)

static const struct {
    const char *name;
    Kind kind;
    size_t offset, size;
} NAMES[] = {
    {"memlock", BYTES, AT(memlock_bytes), 0},
    {"shm", BYTES, AT(shm_bytes), 0},
    {"cgroup_memory", BYTES, AT(cgroup_memory_bytes), 0},
    {"huge_2m_free", BYTES, AT(huge_2m_free), 0},
    {"cgroup_cpus", REAL, AT(cgroup_cpus), 0},
    {"transparent_hugepage", WORD, AT(thp), sizeof((Facts *)0)->thp},
    {"isa", WORD, AT(isa), sizeof((Facts *)0)->isa},
    {"amx", WORD, AT(amx), sizeof((Facts *)0)->amx},
    {"kv_transport", WORD, AT(kv_transport), sizeof((Facts *)0)->kv_transport},
    {"kv_gb_per_s", REAL, AT(kv_gb_per_s), 0},
    {"numa_balancing", COUNT, AT(numa_balancing), 0},
    {"ptrace_scope", COUNT, AT(ptrace_scope), 0},
    {"cpuset", CPUS, AT(cpuset), 0},
    {"mems", NODES, AT(mems), 0},
};

static bool take_value(Facts *f, Kind kind, size_t offset, size_t size, const char *value) {
    void *at = (char *)f + offset;
    int64_t v;
    switch (kind) {
    case BYTES:
        if (strcmp(value, "unlimited") == 0) {
            *(int64_t *)at = INT64_MAX;
            return true;
        }
        return facts_text_int(value, 0, INT64_MAX, at);
    case COUNT:
        if (!facts_text_int(value, 0, 1000000, &v))
            return false;
        *(int *)at = (int)v;
        return true;
    case REAL:
        return facts_text_real(value, 0, 1e9, at);
    case WORD:
        facts_text_copy(at, size, value);
        return *value != 0;
    case CPUS:
        f->cpuset_known = true;
        return *value && facts_text_list(value, FACTS_CPUS, at);
    case NODES:
        f->mems_known = true;
        return *value && facts_text_list(value, FACTS_NODES, at);
    }
    return false;
}

/* "node3.gb_per_s", "node3.cores", "node3.socket", "gpu0.h2d_gb_per_s", "gpu0.d2h_gb_per_s". False:
 * no such name; *good says whether its value was. */
static bool take_numbered(Facts *f, const char *name, const char *value, bool *good) {
    int i = -1, end = 0;
    int64_t v;
    if (sscanf(name, "node%2d.%n", &i, &end) == 1 && end > 0 && i >= 0 && i < FACTS_NODES) {
        if (strcmp(name + end, "gb_per_s") == 0)
            *good = facts_text_real(value, 0, 1e5, &f->node[i].gb_per_s);
        else if (strcmp(name + end, "cores") == 0 &&
                 (*good = facts_text_int(value, 0, FACTS_CPUS, &v)))
            f->cores_allowed[i] = (int)v;
        else if (strcmp(name + end, "socket") == 0 &&
                 (*good = facts_text_int(value, 0, FACTS_NODES - 1, &v)))
            f->socket_stated[i] = (int)v;
        else
            return strcmp(name + end, "cores") == 0 || strcmp(name + end, "socket") == 0;
        return true;
    }
    if (sscanf(name, "gpu%2d.%n", &i, &end) == 1 && end > 0 && i >= 0 && i < FACTS_GPUS) {
        if (strcmp(name + end, "h2d_gb_per_s") == 0)
            *good = facts_text_real(value, 0, 1e5, &f->gpu[i].h2d_gb_per_s);
        else if (strcmp(name + end, "d2h_gb_per_s") == 0)
            *good = facts_text_real(value, 0, 1e5, &f->gpu[i].d2h_gb_per_s);
        else
            return false;
        return true;
    }
    return false;
}

static int take_line(Facts *f, FactsText *t, char *line, Err *err) {
    char *colon = strchr(line, ':');
    if (!colon)
        return facts_text_fail(t, err, "expected \"name: value\", found \"%.60s\"", line);
    *colon = 0;
    char *name = facts_text_trim(line), *value = facts_text_trim(colon + 1);
    bool good = false, known = take_numbered(f, name, value, &good);
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES && !known; i++)
        if (strcmp(NAMES[i].name, name) == 0) {
            known = true;
            good = take_value(f, NAMES[i].kind, NAMES[i].offset, NAMES[i].size, value);
        }
    if (!known)
        return facts_text_fail(t, err, "unknown name \"%.60s\"", name);
    return good ? 0
                : facts_text_fail(t, err, "%.40s: \"%.60s\" is not what is expected", name, value);
}

int facts_host_parse(Facts *f, FactsText *t, Err *err) {
    int rc = 0;
    for (char *line; rc == 0 && (line = facts_text_line(t));) {
        line += strspn(line, " \t");
        if (*line && *line != '#')
            rc = take_line(f, t, line, err);
    }
    return rc;
}
