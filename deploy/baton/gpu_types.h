/* GPUs by name: memory, its bandwidth, compute capability. Data-sheet numbers; pure. */
#pragma once

typedef struct GpuType {
    const char *match; /* part of the name that nvidia-smi prints */
    double memory_gb;  /* 10^9 bytes */
    double gb_per_s;
    int capability; /* major */
} GpuType;

/* NULL: of no known type. */
const GpuType *gpu_type_find(const char *name);
