/* What the processor and the system allow. Internal to kernels/cpu and its tests. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* The questions that decide about AMX, so that tests can answer them. */
typedef struct IqAmxProbe {
    /* r = eax, ebx, ecx, edx; false when the processor has no such leaf */
    bool (*cpuid)(uint32_t leaf, uint32_t subleaf, uint32_t r[4]);
    uint64_t (*xcr0)(void);                /* only asked when cpuid says that it exists */
    int (*arch_prctl)(int code, void *at); /* 0, or an errno */
    bool (*try_tiles)(void);               /* whether configuring tiles works */
} IqAmxProbe;

/* Asks in order: processor, operating system, permission of this process, and really does it. Why
 * not goes to *why (static text). */
bool iq_amx_probe(const IqAmxProbe *p, const char **why);
