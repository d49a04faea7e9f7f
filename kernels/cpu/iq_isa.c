/* Which tables of iq_kern.h this process can run. Answers are found once, by the first caller. */
#include "kernels/cpu/iq_isa.h"

#include "kernels/cpu/iq_run.h"

#include <cpuid.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    ARCH_GET_XCOMP_PERM = 0x1022,
    ARCH_REQ_XCOMP_PERM = 0x1023,
    XFEATURE_TILECFG = 17,
    XFEATURE_TILEDATA = 18,
    BIT_OSXSAVE = 1 << 27, /* leaf 1, ecx */
    BIT_F16C = 1 << 29,
    BIT_AMX_TILE = 1 << 24, /* leaf 7, edx */
    BIT_AMX_INT8 = 1 << 25,
};

/* ---- AMX ---- */

static bool amx_processor(const IqAmxProbe *p, const char **why) {
    uint32_t r[4];
    if (!p->cpuid(7, 0, r) || !(r[3] & BIT_AMX_TILE) || !(r[3] & BIT_AMX_INT8)) {
        *why = "the processor does not offer AMX int8";
        return false;
    }
    /* A virtual machine may show the feature and hide its palette. */
    if (!p->cpuid(0x1d, 0, r) || r[0] < 1 || !p->cpuid(0x1d, 1, r) || r[1] >> 16 < 8 ||
        (r[1] & 0xffff) < 64 || (r[2] & 0xffff) < 16) {
        *why = "the processor has no tile palette 1 of 8 tiles of 16 x 64 bytes";
        return false;
    }
    return true;
}

static bool amx_system(const IqAmxProbe *p, const char **why) {
    const uint64_t tiles = 1ull << XFEATURE_TILECFG | 1ull << XFEATURE_TILEDATA;
    uint32_t r[4];
    if (!p->cpuid(1, 0, r) || !(r[2] & BIT_OSXSAVE) || (p->xcr0() & tiles) != tiles) {
        *why = "the operating system does not save tiles";
        return false;
    }
    uint64_t granted = 0;
    if (p->arch_prctl(ARCH_REQ_XCOMP_PERM, (void *)XFEATURE_TILEDATA) != 0 ||
        p->arch_prctl(ARCH_GET_XCOMP_PERM, &granted) != 0 || (granted & tiles) != tiles) {
        *why = "the system refuses this process the use of tiles (arch_prctl)";
        return false;
    }
    return true;
}

bool iq_amx_probe(const IqAmxProbe *p, const char **why) {
    if (!amx_processor(p, why) || !amx_system(p, why))
        return false;
    if (!p->try_tiles()) {
        *why = "tiles cannot be configured, against what the processor says of itself";
        return false;
    }
    return true;
}

static bool real_cpuid(uint32_t leaf, uint32_t subleaf, uint32_t r[4]) {
    return __get_cpuid_count(leaf, subleaf, &r[0], &r[1], &r[2], &r[3]);
}

static uint64_t real_xcr0(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static int real_arch_prctl(int code, void *at) {
    return syscall(SYS_arch_prctl, code, at) == 0 ? 0 : errno;
}

static sigjmp_buf no_tiles;

static void on_illegal(int sig) {
    (void)sig;
    siglongjmp(no_tiles, 1);
}

/* The instruction is the last witness. Only this thread runs at the time. */
static bool real_try_tiles(void) {
    static const _Alignas(64) uint8_t config[64] = {[0] = 1, [16] = 64, [48] = 16};
    struct sigaction act = {.sa_handler = on_illegal}, old;
    if (sigaction(SIGILL, &act, &old))
        return false;
    volatile bool works = false;
    if (sigsetjmp(no_tiles, 1) == 0) {
        __asm__ volatile("ldtilecfg %0\n\ttilezero %%tmm0\n\ttilerelease"
                         :
                         : "m"(config)
                         : "memory");
        works = true;
    }
    sigaction(SIGILL, &old, NULL);
    return works;
}

/* ---- all sets ---- */

static struct {
    bool usable;
    const char *why;
} found[IQ_N_ISA];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void find(void) {
    static const IqAmxProbe real = {real_cpuid, real_xcr0, real_arch_prctl, real_try_tiles};
    uint32_t r[4];
    bool f16c = real_cpuid(1, 0, r) && (r[2] & BIT_F16C);
    __builtin_cpu_init();
    found[IQ_SCALAR].usable = true;
    found[IQ_AVX2].usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
    found[IQ_AVX2].why = "the processor does not offer AVX2 with FMA and F16C";
    found[IQ_VNNI].usable =
        found[IQ_AVX2].usable && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    found[IQ_VNNI].why = "the processor does not offer AVX-512 VNNI";
    found[IQ_AMX].usable = iq_amx_probe(&real, &found[IQ_AMX].why);
    if (found[IQ_AMX].usable && !found[IQ_VNNI].usable) {
        found[IQ_AMX].usable = false;
        found[IQ_AMX].why = found[IQ_VNNI].why;
    }
}

const char *iq_isa_name(IqIsa isa) {
    static const char *const name[] = {"amx", "avx512-vnni", "avx2", "scalar"};
    return name[isa];
}

bool iq_isa_usable(IqIsa isa, const char **why) {
    pthread_once(&once, find);
    if (why)
        *why = found[isa].usable ? "" : found[isa].why;
    return found[isa].usable;
}
