/* Rules about limits, control groups, AMX and the KV link. Pure. */
#include "deploy/baton/doctor_rules.h"

#include <stdio.h>
#include <string.h>

static double pool_bytes(const RuleCase *c, int64_t tokens) {
    return (double)tokens * model_kv_token_bytes(c->shape, c->view->kv);
}

/* ---- limits ---- */

static bool has_transport(const Facts *f, const char *name) {
    for (int i = 0; i < f->n_ucx; i++)
        if (strncmp(f->ucx[i].transport, name, strlen(name)) == 0)
            return true;
    return false;
}

/* Network cards that write into memory register it. */
static bool has_rdma(const Facts *f) {
    return has_transport(f, "rc_") || has_transport(f, "dc_") || has_transport(f, "ud_");
}

void rule_memlock(const RuleCase *c, Findings *out) {
    double slice = 0, limit = (double)c->facts->memlock_bytes;
    bool lock = false;
    for (int i = 0; i < c->view->n_expertd; i++)
        lock |= services_get(c->services, SERVICE_EXPERTD, i)->expertd.lock;
    if (c->facts->memlock_bytes < 0) {
        finding_add(out, "memlock", FINDING_UNKNOWN, 0, "locked memory");
        return;
    }
    if (c->view->n_shards > 0)
        slice = view_expert_bytes(c->view, c->services, c->shape) / c->view->n_shards;
    double pools = has_rdma(c->facts) ? pool_bytes(c, c->view->pool) : 0;
    bool fails = lock && limit < slice;
    if (c->facts->memlock_bytes == INT64_MAX || (!fails && limit >= pools)) {
        finding_add(out, "memlock", FINDING_OK, 0, "locked memory");
        return;
    }
    Finding *f = finding_add(out, "memlock", fails ? FINDING_FAIL : FINDING_WARN, 0, "%s",
                             fails ? "experts cannot be locked into memory: expertd does not start"
                                   : "a network card cannot register the KV pool");
    finding_basis(f, "RLIMIT_MEMLOCK is %.3g GB, %.1f GB are to be %s", limit / 1e9,
                  (fails ? slice : pools) / 1e9, fails ? "locked" : "registered");
    finding_change(f, "LimitMEMLOCK=infinity in the unit, or memlock in limits.conf");
}

/* UCX keeps a pool that neighbours write into in /dev/shm. */
void rule_shared_memory(const RuleCase *c, Findings *out) {
    const View *v = c->view;
    double need =
        v->n_decode * pool_bytes(c, v->pool) + v->n_prefill * pool_bytes(c, v->prefill_pool);
    if (v->n_decode + v->n_prefill == 0)
        return;
    if (c->facts->shm_bytes < 0) {
        finding_add(out, "dev-shm", FINDING_UNKNOWN, 0, "/dev/shm");
    } else if (!v->cuda && (double)c->facts->shm_bytes < need) {
        Finding *f = finding_add(out, "dev-shm", FINDING_WARN, 0,
                                 "KV pools do not fit /dev/shm: between processes of a host KV "
                                 "then goes over TCP");
        finding_basis(f, "%.2f GB of pools, /dev/shm has %.2f GB", need / 1e9,
                      (double)c->facts->shm_bytes / 1e9);
        finding_change(f, "mount -o remount,size=%.0fG /dev/shm, or --shm-size of the container",
                       need / 1e9 + 1);
    } else if (v->cuda && v->tp > 1 && c->facts->shm_bytes < (int64_t)1 << 30) {
        Finding *f = finding_add(out, "dev-shm", FINDING_WARN, 0,
                                 "/dev/shm is small for the GPUs' collective operations");
        finding_basis(f, "%.0f MB; containers have 64 MB unless told",
                      (double)c->facts->shm_bytes / 1e6);
        finding_change(f, "--shm-size=8g of the container");
    } else {
        finding_add(out, "dev-shm", FINDING_OK, 0, "/dev/shm");
    }
}

/* ---- the processor ---- */

void rule_amx(const RuleCase *c, Findings *out) {
    const Facts *f = c->facts;
    if (c->view->n_expertd == 0)
        return;
    if (strncmp(f->amx, "refused", 7) == 0) {
        Finding *one = finding_add(out, "amx", FINDING_WARN, 0,
                                   "the processor has AMX and may not use it: prompts' experts are "
                                   "computed with AVX-512");
        finding_basis(one, "%s", f->amx);
        finding_change(one, "Linux 5.16 or later, and a seccomp profile that allows arch_prctl; in "
                            "a virtual machine the host must grant it before the first processor "
                            "starts");
    } else if (strcmp(f->amx, "granted") == 0) {
        finding_add(out, "amx", FINDING_OK, 0, "AMX may be used");
    } else if (f->flags_known && !f->has_amx && !f->has_vnni) {
        Finding *one = finding_add(out, "amx", FINDING_WARN, 0,
                                   "the processor has neither AMX nor AVX-512 VNNI: experts are "
                                   "computed with %s",
                                   f->has_avx2 ? "AVX2" : "plain C");
        finding_change(one, "at one stream AVX2 on enough cores still reaches the memory's speed; "
                            "prompts are slower");
    } else if (f->flags_known) {
        finding_add(out, "amx", FINDING_OK, 0, "instructions for integers: %s",
                    f->has_amx ? "AMX" : "AVX-512 VNNI");
    } else {
        finding_add(out, "amx", FINDING_UNKNOWN, 0, "AMX and its permission");
    }
}

static int cores_wanted(const RuleCase *c) {
    int n = 0;
    for (int i = 0; i < c->view->n_expertd; i++)
        n += c->view->expertd[i].threads;
    for (int i = 0; i < c->services->n; i++) {
        const EngineOpts *e = service_engine(&c->services->at[i]);
        if (e && strcmp(e->backend, "cuda") != 0)
            n += (int)(e->tp * (e->threads > 0 ? e->threads : 1));
    }
    return n;
}

void rule_cgroup(const RuleCase *c, Findings *out) {
    double quota = c->facts->cgroup_cpus, memory = (double)c->facts->cgroup_memory_bytes,
           experts = view_expert_bytes(c->view, c->services, c->shape);
    int wanted = cores_wanted(c);
    if (quota < 0 && memory < 0) {
        finding_add(out, "cgroup", FINDING_UNKNOWN, 0, "control groups");
        return;
    }
    if (c->facts->cgroup_memory_bytes >= 0 && c->facts->cgroup_memory_bytes != INT64_MAX &&
        experts > memory) {
        Finding *f = finding_add(out, "cgroup", FINDING_FAIL, 0,
                                 "the control group's memory does not hold the experts");
        finding_basis(f, "%.1f GB of experts, the limit is %.1f GB", experts / 1e9, memory / 1e9);
        finding_change(f, "a larger memory.max (v1: memory.limit_in_bytes)");
    } else if (quota > 0 && wanted > quota + 0.5) {
        Finding *f =
            finding_add(out, "cgroup", FINDING_WARN, wanted / quota - 1,
                        "the control group's quota is smaller than the configured threads");
        finding_basis(f, "%.1f processors' time for %d threads", quota, wanted);
        finding_change(f, "no cpu.max (v1: cfs_quota_us), but a cpuset");
    } else {
        finding_add(out, "cgroup", FINDING_OK, 0, "control groups leave enough");
    }
}

/* ---- the KV link ---- */

static bool listed(const char *list, const char *name) {
    size_t n = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += n)
        if ((at == list || at[-1] == ',') && (at[n] == ',' || !at[n]))
            return true;
    return false;
}

static const char *network_transport(const Facts *f) {
    static const char *const best[] = {"rc_mlx5", "dc_mlx5",  "rc_verbs",
                                       "ud_mlx5", "ud_verbs", "tcp"};
    for (size_t i = 0; i < sizeof best / sizeof *best; i++)
        if (has_transport(f, best[i]))
            return best[i];
    return "none";
}

static bool names_tcp(const RuleCase *c) {
    for (int i = 0; i < c->services->n; i++) {
        const ServiceOpts *o = service_opts(&c->services->at[i]);
        if (o && listed(o->transports, "tcp"))
            return true;
    }
    return false;
}

/* What UCX takes within one host. A GPU's memory is written by cuda_ipc or by a network card, and
 * through host memory only when a config names tcp; a pool in host memory lies in POSIX segments,
 * and goes over TCP where there are none. NULL: nothing. */
static const char *local_transport(const RuleCase *c) {
    const Facts *f = c->facts;
    if (!c->view->cuda)
        return has_transport(f, "posix") ? "posix" : has_transport(f, "tcp") ? "tcp" : NULL;
    if (has_transport(f, "cuda_ipc"))
        return "cuda_ipc";
    if (has_transport(f, "rc_") || has_transport(f, "dc_"))
        return network_transport(f);
    return names_tcp(c) ? "tcp" : NULL;
}

/* A transport that a config names and UCX lacks; groups and aliases are left to UCX. */
static bool lacks_named(const RuleCase *c, const char *list) {
    static const char *const known[] = {"posix",   "sysv",     "cma",     "tcp",      "rc_verbs",
                                        "rc_mlx5", "ud_verbs", "dc_mlx5", "cuda_ipc", "cuda_copy"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (listed(list, known[i]) && !has_transport(c->facts, known[i]))
            return true;
    return false;
}

static void say_measured(const RuleCase *c, Findings *out) {
    const Facts *f = c->facts;
    bool slow = strncmp(f->kv_transport, "tcp", 3) == 0;
    Finding *one = finding_add(out, "kv-transport", slow ? FINDING_WARN : FINDING_OK, 0,
                               "KV goes over %s within this host", f->kv_transport);
    if (f->kv_gb_per_s > 0)
        finding_basis(one, "%.2f GB/s by a link to itself; a prompt of 32768 tokens is %.2f GB",
                      f->kv_gb_per_s, pool_bytes(c, 32768) / 1e9);
    if (slow)
        finding_change(one, "room in /dev/shm for the pools; no [kvlink] transports that leaves "
                            "out posix");
}

void rule_transport(const RuleCase *c, Findings *out) {
    const Facts *f = c->facts;
    if (c->view->n_decode + c->view->n_prefill == 0)
        return;
    for (int i = 0; i < c->services->n; i++) {
        const ServiceOpts *o = service_opts(&c->services->at[i]);
        if (o && f->n_ucx > 0 && lacks_named(c, o->transports)) {
            Finding *one = finding_add(out, "kv-transport", FINDING_FAIL, 0,
                                       "%s asks for transports that UCX does not have here",
                                       c->services->at[i].from);
            finding_basis(one, "[kvlink] transports = %s", o->transports);
            finding_change(one, "leave it empty: UCX chooses");
            return;
        }
    }
    if (!c->view->cuda && *f->kv_transport) {
        say_measured(c, out);
        return;
    }
    if (f->n_ucx == 0) {
        finding_add(out, "kv-transport", FINDING_UNKNOWN, 0, "UCX transports");
        return;
    }
    const char *local = local_transport(c);
    if (!local || strcmp(local, "tcp") == 0) {
        /* Other systems bring a link of their own. */
        FindingLevel level = c->view->foreign ? FINDING_NOTE : local ? FINDING_WARN : FINDING_FAIL;
        Finding *one =
            finding_add(out, "kv-transport", level, 0, "UCX has no %s: within this host KV %s",
                        c->view->cuda ? "cuda_ipc" : "shared memory (posix)",
                        local ? "goes over TCP" : "cannot be moved");
        finding_change(one, "%s",
                       c->view->cuda ? "a UCX built with CUDA"
                                     : "a UCX with shared memory; in a container, /dev/shm");
        return;
    }
    finding_add(out, "kv-transport", FINDING_OK, 0,
                "KV goes over %s within this host, over %s between hosts", local,
                network_transport(f));
}
