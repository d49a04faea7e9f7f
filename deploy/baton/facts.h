/* What is known about a host: memory nodes, processors, GPUs and their links, limits. Plain data;
 * any thread.
 *
 * Facts come as texts in the formats of the tools that print them, from a directory (facts_read) or
 * from the running system (host.h), so that both are understood by the same code:
 *
 *   numactl.txt  numactl -H
 *   lscpu.txt    lscpu
 *   gpus.csv     nvidia-smi --query-gpu=... --format=csv; a column numa_node may be added
 *   topo.txt     nvidia-smi topo -m
 *   ucx.txt      ucx_info -d
 *   host.txt     lines "name: value" that `baton doctor --capture` writes (facts_host.c has them)
 *
 * Any of them may be missing. All of it is outside input: what cannot be right is refused with file
 * and line, and what is not known stays at the value that its comment names. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    FACTS_NODES = 64,
    FACTS_CPUS = 4096,
    FACTS_GPUS = 32,
    FACTS_UCX = 64,
    FACTS_FILE_MAX = 1 << 20,
};

typedef struct FactsCpus {
    uint64_t bits[FACTS_CPUS / 64];
} FactsCpus;

bool facts_cpus_has(const FactsCpus *s, int cpu);
int facts_cpus_count(const FactsCpus *s);
bool facts_cpus_meet(const FactsCpus *a, const FactsCpus *b);

typedef struct FactsNode {
    bool present;
    FactsCpus cpus;
    int n_cores;              /* physical, that may be used; by facts_derive */
    int socket;               /* from 0; by facts_derive */
    int64_t size_mb, free_mb; /* -1: unknown */
    double gb_per_s;          /* measured read bandwidth; 0: not measured */
} FactsNode;

/* How two GPUs reach each other, the nearest first. */
typedef enum FactsLink {
    FACTS_LINK_NONE, /* unknown */
    FACTS_LINK_SELF,
    FACTS_LINK_NV, /* NVLink */
    FACTS_LINK_PIX,
    FACTS_LINK_PXB,
    FACTS_LINK_PHB,
    FACTS_LINK_NODE,
    FACTS_LINK_SYS, /* across the socket's or node's border */
} FactsLink;

typedef struct FactsGpu {
    bool present;
    char name[96], bus_id[32];
    int gen_max, gen_now, width_max, width_now; /* PCIe; 0: unknown */
    int node;                                   /* -1: unknown */
    int64_t memory_mb;                          /* 0: unknown */
    double h2d_gb_per_s, d2h_gb_per_s;          /* measured; 0: not */
    FactsLink link[FACTS_GPUS];                 /* to the GPU of that index */
    int n_nvlink[FACTS_GPUS];                   /* links of it */
} FactsGpu;

typedef struct FactsUcx {
    char transport[32], device[32];
} FactsUcx;

typedef struct Facts {
    /* numactl.txt */
    int n_nodes; /* highest number + 1 */
    FactsNode node[FACTS_NODES];
    int distance[FACTS_NODES][FACTS_NODES]; /* 0: unknown */

    /* lscpu.txt; 0 or "": unknown */
    char cpu_name[128];
    int family, model, lscpu_sockets, threads_per_core;
    bool flags_known, has_amx, has_vnni, has_avx2, hypervisor;

    /* gpus.csv, topo.txt */
    int n_gpus; /* highest index + 1 */
    FactsGpu gpu[FACTS_GPUS];
    bool links_known;

    /* ucx.txt */
    int n_ucx;
    FactsUcx ucx[FACTS_UCX];

    /* host.txt; negative or "": unknown */
    int64_t memlock_bytes; /* INT64_MAX: unlimited */
    int64_t shm_bytes, cgroup_memory_bytes;
    int64_t huge_2m_free; /* reserved 2 MiB pages that are free */
    double cgroup_cpus;   /* quota in processors */
    char thp[16], isa[16], amx[160], kv_transport[32];
    int numa_balancing, ptrace_scope;
    double kv_gb_per_s;
    bool cpuset_known, mems_known;
    FactsCpus cpuset, mems;         /* mems: bits are nodes */
    int cores_allowed[FACTS_NODES]; /* -1: unknown */
    int socket_stated[FACTS_NODES]; /* -1: unknown */

    /* by facts_derive */
    int n_sockets;
    char sockets_how[160];
    bool smt_inferred; /* threads_per_core is a conclusion from the numbering of processors */
} Facts;

void facts_init(Facts *f);

/* Reads one text (numactl.txt, ...) into *f; `name` goes into errors and its last part chooses the
 * parser. text is cut up. E_FORMAT or E_LIMIT with "NAME:LINE: what is wrong". */
int facts_parse(Facts *f, const char *name, char *text, Err *err);
/* Whether a file of this name holds facts. */
bool facts_knows(const char *name);

/* Reads what there is in a directory and derives. E_NOTFOUND when nothing is. */
int facts_read(Facts *f, const char *dir, Err *err);

/* Concludes sockets, physical cores and threads per core from all texts. sockets > 0 states their
 * number. E_MISMATCH when texts contradict each other, E_INVAL when so many sockets do not divide
 * the nodes. */
int facts_derive(Facts *f, int sockets, Err *err);

/* Nodes with memory and processors that may be used, in order, into list[FACTS_NODES]. */
int facts_usable_nodes(const Facts *f, int *list);
int facts_n_gpus(const Facts *f); /* present ones */
