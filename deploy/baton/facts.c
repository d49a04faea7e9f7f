/* See facts.h. Reading of a directory, and what follows from all texts together. Start-up of a
 * tool; one thread. */
#include "deploy/baton/facts.h"

#include "deploy/baton/facts_text.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- sets ---- */

bool facts_cpus_has(const FactsCpus *s, int cpu) {
    return cpu >= 0 && cpu < FACTS_CPUS && (s->bits[cpu / 64] >> (cpu % 64) & 1);
}

int facts_cpus_count(const FactsCpus *s) {
    int n = 0;
    for (size_t i = 0; i < FACTS_CPUS / 64; i++)
        n += __builtin_popcountll(s->bits[i]);
    return n;
}

bool facts_cpus_meet(const FactsCpus *a, const FactsCpus *b) {
    for (size_t i = 0; i < FACTS_CPUS / 64; i++)
        if (a->bits[i] & b->bits[i])
            return true;
    return false;
}

/* ---- reading ---- */

void facts_init(Facts *f) {
    *f = (Facts){.memlock_bytes = -1,
                 .shm_bytes = -1,
                 .cgroup_memory_bytes = -1,
                 .huge_2m_free = -1,
                 .cgroup_cpus = -1,
                 .numa_balancing = -1,
                 .ptrace_scope = -1,
                 .kv_gb_per_s = -1};
    for (int i = 0; i < FACTS_NODES; i++) {
        f->node[i].size_mb = f->node[i].free_mb = -1;
        f->cores_allowed[i] = f->socket_stated[i] = -1;
    }
    for (int i = 0; i < FACTS_GPUS; i++)
        f->gpu[i].node = -1;
}

/* In the order in which they are read. */
static const struct {
    const char *name;
    int (*parse)(Facts *f, FactsText *t, Err *err);
} TEXTS[] = {
    {"numactl.txt", facts_numa_parse}, {"lscpu.txt", facts_cpu_parse},
    {"gpus.csv", facts_gpu_parse_csv}, {"topo.txt", facts_gpu_parse_topo},
    {"ucx.txt", facts_ucx_parse},      {"host.txt", facts_host_parse},
};
enum { N_TEXTS = sizeof TEXTS / sizeof *TEXTS };

static int text_of(const char *name) {
    const char *slash = strrchr(name, '/');
    for (int i = 0; i < N_TEXTS; i++)
        if (strcmp(TEXTS[i].name, slash ? slash + 1 : name) == 0)
            return i;
    return -1;
}

bool facts_knows(const char *name) {
    return text_of(name) >= 0;
}

int facts_parse(Facts *f, const char *name, char *text, Err *err) {
    int i = text_of(name);
    FactsText t = {.name = name, .rest = text};
    if (i < 0)
        return err_set(err, E_INVAL, "%s: no file of facts has this name", name);
    return TEXTS[i].parse(f, &t, err);
}

/* The whole file with a NUL behind it; a file with NULs inside is none of ours. */
static int read_text(const char *path, char **out, Err *err) {
    FILE *file = fopen(path, "re");
    if (!file)
        return errno == ENOENT ? E_NOTFOUND : err_set(err, E_IO, "%s: %s", path, strerror(errno));
    char *text = xcalloc(FACTS_FILE_MAX + 2, 1);
    size_t n = fread(text, 1, FACTS_FILE_MAX + 1, file);
    int rc = 0;
    if (ferror(file))
        rc = err_set(err, E_IO, "%s: %s", path, strerror(errno));
    else if (n > FACTS_FILE_MAX)
        rc = err_set(err, E_LIMIT, "%s: larger than %d bytes", path, FACTS_FILE_MAX);
    else if (memchr(text, 0, n))
        rc = err_set(err, E_FORMAT, "%s: zero byte in a text file", path);
    fclose(file);
    if (rc)
        free(text);
    else
        *out = text;
    return rc;
}

int facts_read(Facts *f, const char *dir, Err *err) {
    int found = 0;
    facts_init(f);
    if (access(dir, R_OK | X_OK) != 0)
        return err_set(err, E_IO, "%s: %s", dir, strerror(errno));
    for (int i = 0; i < N_TEXTS; i++) {
        char *path = xasprintf("%s/%s", dir, TEXTS[i].name), *text = NULL;
        int rc = read_text(path, &text, err);
        if (rc == 0)
            rc = facts_parse(f, path, text, err);
        found += rc == 0;
        free(text);
        free(path);
        if (rc && rc != E_NOTFOUND)
            return rc;
    }
    if (found == 0)
        return err_set(err, E_NOTFOUND,
                       "%s: none of numactl.txt, lscpu.txt, gpus.csv, topo.txt, ucx.txt and "
                       "host.txt is there",
                       dir);
    return 0;
}

/* ---- conclusions ---- */

/* Runs of consecutive processors of equal length; 0 when the lengths differ. */
static int equal_runs(const FactsCpus *s) {
    int runs = 0, length = 0, first = 0;
    for (int i = 0; i <= FACTS_CPUS; i++) {
        if (facts_cpus_has(s, i)) {
            length++;
        } else if (length > 0) {
            if (runs > 0 && length != first)
                return 0;
            first = length;
            runs++;
            length = 0;
        }
    }
    return runs;
}

/* Linux numbers the second threads of all cores after all first ones: two equal runs in every node
 * are two threads per core. */
static void conclude_threads(Facts *f) {
    int runs = 0;
    if (f->threads_per_core > 0)
        return;
    for (int i = 0; i < f->n_nodes; i++) {
        if (facts_cpus_count(&f->node[i].cpus) == 0)
            continue;
        int n = equal_runs(&f->node[i].cpus);
        if (runs > 0 && n != runs)
            return;
        runs = n;
    }
    if (runs == 2) {
        f->threads_per_core = 2;
        f->smt_inferred = true;
    }
}

static void conclude_cores(Facts *f) {
    int per_core = f->threads_per_core > 0 ? f->threads_per_core : 1;
    for (int i = 0; i < f->n_nodes; i++) {
        FactsCpus mine = f->node[i].cpus;
        for (size_t w = 0; f->cpuset_known && w < FACTS_CPUS / 64; w++)
            mine.bits[w] &= f->cpuset.bits[w];
        f->node[i].n_cores = f->cores_allowed[i] >= 0
                                 ? f->cores_allowed[i]
                                 : (facts_cpus_count(&mine) + per_core - 1) / per_core;
    }
}

static int n_present(const Facts *f) {
    int n = 0;
    for (int i = 0; i < f->n_nodes; i++)
        n += f->node[i].present;
    return n;
}

/* The nodes, in order, into n_sockets equal parts. */
static int spread(Facts *f, int n_sockets, Err *err) {
    int n = n_present(f), at = 0;
    if (n_sockets > n || n % n_sockets != 0)
        return err_set(err, E_INVAL, "%d sockets do not divide %d NUMA nodes", n_sockets, n);
    for (int i = 0; i < f->n_nodes; i++)
        if (f->node[i].present)
            f->node[i].socket = at++ / (n / n_sockets);
    f->n_sockets = n_sockets;
    return 0;
}

static bool sockets_stated(Facts *f) {
    int n = 0;
    for (int i = 0; i < f->n_nodes; i++) {
        if (f->node[i].present && f->socket_stated[i] < 0)
            return false;
        n = f->socket_stated[i] >= n ? f->socket_stated[i] + 1 : n;
    }
    for (int i = 0; i < f->n_nodes; i++)
        f->node[i].socket = f->socket_stated[i];
    f->n_sockets = n;
    return n > 0;
}

/* Nodes of one socket are at 10 to 15, other sockets' at 17 and more. */
static bool sockets_by_distance(Facts *f) {
    int n = 0;
    for (int i = 0; i < f->n_nodes; i++) {
        if (!f->node[i].present)
            continue;
        f->node[i].socket = -1;
        for (int j = 0; j < f->n_nodes; j++) {
            if (f->node[j].present && (f->distance[i][j] == 0 || f->distance[j][i] == 0))
                return false;
            if (j < i && f->node[j].present && f->distance[i][j] <= 15)
                f->node[i].socket = f->node[j].socket;
        }
        if (f->node[i].socket < 0)
            f->node[i].socket = n++;
    }
    f->n_sockets = n;
    return n > 0;
}

static int divisor(int a, int b) {
    return b == 0 ? a : divisor(b, a % b);
}

/* The PCIe devices of a socket that is cut into nodes belong to its first node: GPUs at nodes 0 and
 * 2 of four only mean two nodes per socket. 0 when nothing follows. */
static int sockets_by_gpus(const Facts *f) {
    int step = n_present(f), first = -1;
    bool several = false;
    for (int i = 0; i < f->n_gpus; i++) {
        int node = f->gpu[i].node;
        if (!f->gpu[i].present || node < 0)
            continue;
        several |= first >= 0 && node != first;
        first = first < 0 ? node : first;
        step = divisor(step, node);
    }
    return several && step > 1 && f->n_nodes == n_present(f) ? f->n_nodes / step : 0;
}

static int conclude_sockets(Facts *f, int stated, Err *err) {
    int by_gpus = sockets_by_gpus(f), rc = 0;
    const char *how = "as stated";
    if (stated > 0) {
        rc = spread(f, stated, err);
    } else if (sockets_stated(f)) {
        how = "the system says so";
    } else if (sockets_by_distance(f)) {
        how = "by the distances of numactl";
    } else if (f->lscpu_sockets > 0 && f->lscpu_sockets <= n_present(f) &&
               n_present(f) % f->lscpu_sockets == 0) {
        how = "lscpu says so";
        rc = spread(f, f->lscpu_sockets, err);
    } else if (by_gpus > 0) {
        how = "concluded: all GPUs are at the first of every few nodes, as the devices of a socket "
              "are that is cut into nodes";
        rc = spread(f, by_gpus, err);
    } else {
        how = "assumed: one per node; --set sockets=N states it";
        rc = spread(f, n_present(f), err);
    }
    snprintf(f->sockets_how, sizeof f->sockets_how, "%s", how);
    return rc;
}

int facts_derive(Facts *f, int sockets, Err *err) {
    for (int i = 0; i < f->n_gpus; i++)
        if (f->gpu[i].present && n_present(f) > 0 && f->gpu[i].node >= 0 &&
            (f->gpu[i].node >= f->n_nodes || !f->node[f->gpu[i].node].present))
            return err_set(err, E_MISMATCH,
                           "GPU %d is at NUMA node %d, which the host does not have", i,
                           f->gpu[i].node);
    conclude_threads(f);
    conclude_cores(f);
    return n_present(f) > 0 ? conclude_sockets(f, sockets, err) : 0;
}

int facts_usable_nodes(const Facts *f, int *list) {
    int n = 0;
    for (int i = 0; i < f->n_nodes; i++)
        if (f->node[i].present && f->node[i].n_cores > 0 && f->node[i].size_mb != 0 &&
            (!f->mems_known || facts_cpus_has(&f->mems, i)))
            list[n++] = i;
    return n;
}

int facts_n_gpus(const Facts *f) {
    int n = 0;
    for (int i = 0; i < f->n_gpus; i++)
        n += f->gpu[i].present;
    return n;
}
