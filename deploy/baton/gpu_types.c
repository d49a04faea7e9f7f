/* See gpu_types.h. */
#include "deploy/baton/gpu_types.h"

#include <stddef.h>
#include <string.h>

/* The first that matches: narrower names come before wider ones. */
static const GpuType TYPES[] = {
    {"GB300", 279, 8000, 10},
    {"B300", 270, 8000, 10},
    {"GB200", 186, 8000, 10},
    {"B200", 180, 8000, 10},
    {"GH200 480GB", 96, 4000, 9},
    {"GH200", 144, 4900, 9},
    {"H200", 141, 4800, 9},
    {"H100 NVL", 94, 3938, 9},
    {"H100 PCIe", 80, 2039, 9},
    {"H100", 80, 3350, 9},
    {"H800 PCIe", 80, 2039, 9},
    {"H800", 80, 3350, 9},
    {"H20", 96, 4000, 9},
    {"RTX PRO 6000", 96, 1792, 12},
    {"RTX 5090", 32, 1792, 12},
    {"L40S", 48, 864, 8},
    {"L40", 48, 864, 8},
    {"L20", 48, 864, 8},
    {"RTX 6000 Ada", 48, 960, 8},
    {"RTX 4090", 24, 1008, 8},
    {"A100-SXM4-80GB", 80, 2039, 8},
    {"A100 80GB", 80, 1935, 8},
    {"A100", 40, 1555, 8},
    {"RTX 3090", 24, 936, 8},
};

const GpuType *gpu_type_find(const char *name) {
    for (size_t i = 0; i < sizeof TYPES / sizeof *TYPES; i++)
        if (strstr(name, TYPES[i].match))
            return &TYPES[i];
    return NULL;
}
