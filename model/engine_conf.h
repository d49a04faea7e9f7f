/* Options of every daemon that runs the model: sections [model], [engine] and [experts] of its
 * configuration, as rows for its one option table. */
#pragma once

#include "base/conf.h"
#include "model/place.h"

#include <stddef.h>
#include <stdint.h>

typedef struct EngineOpts {
    char *dir, *name;
    char *backend;
    int64_t tp, threads;
    int kv_dtype; /* index into ENGINE_CONF_KV_DTYPES */
    int64_t max_context, pages, pool_bytes;
    int strategy; /* PlaceStrategy */
    char *resident, *counts, *placement, *record, *expert_endpoints;
    int64_t update_ms;
    int64_t expert_timeout_ms, expert_start_ms;
    int expert_transport; /* index into ENGINE_CONF_TRANSPORTS */
    int64_t expert_spin_us;
} EngineOpts;

#define ENGINE_CONF_KV_DTYPES  "f32|bf16|fp8"
#define ENGINE_CONF_TRANSPORTS "auto|shm|zmq"

/* Rows for a ConfOpt array; the daemon's struct T holds an EngineOpts named `field`. */
#define ENGINE_CONF_ROWS(T, field)                                                                 \
    {.section = "model",                                                                           \
     .key = "dir",                                                                                 \
     .type = CONF_STR,                                                                             \
     .help = "Directory of the checkpoint: config.json, tokenizer.json, safetensors files.",       \
     .offset = offsetof(T, field.dir)},                                                            \
        {.section = "model",                                                                       \
         .key = "name",                                                                            \
         .type = CONF_STR,                                                                         \
         .def = "glm-5.2",                                                                         \
         .help = "The name that clients use.",                                                     \
         .offset = offsetof(T, field.name)},                                                       \
        {.section = "engine",                                                                      \
         .key = "backend",                                                                         \
         .type = CONF_STR,                                                                         \
         .def = "cpu",                                                                             \
         .help = "Where the model runs: cuda, cpu (the fastest that the processor offers), "       \
                 "cpu-avx512, cpu-avx2 or ref.",                                                   \
         .offset = offsetof(T, field.backend)},                                                    \
        {.section = "engine",                                                                      \
         .key = "tp",                                                                              \
         .type = CONF_INT,                                                                         \
         .def = "1",                                                                               \
         .min = 1,                                                                                 \
         .max = 8,                                                                                 \
         .help = "Ranks that share the model. Prefill and decode must have the same.",             \
         .offset = offsetof(T, field.tp)},                                                         \
        {.section = "engine",                                                                      \
         .key = "threads",                                                                         \
         .type = CONF_INT,                                                                         \
         .def = "0",                                                                               \
         .max = 1024,                                                                              \
         .help = "Threads of each rank on a host backend; 0: physical cores divided by ranks.",    \
         .offset = offsetof(T, field.threads)},                                                    \
        {.section = "engine",                                                                      \
         .key = "kv_dtype",                                                                        \
         .type = CONF_ENUM,                                                                        \
         .def = "bf16",                                                                            \
         .choices = ENGINE_CONF_KV_DTYPES,                                                         \
         .help = "How the KV cache is stored. Prefill and decode must have the same.",             \
         .offset = offsetof(T, field.kv_dtype)},                                                   \
        {.section = "engine",                                                                      \
         .key = "max_context",                                                                     \
         .type = CONF_INT,                                                                         \
         .def = "0",                                                                               \
         .max = 1 << 24,                                                                           \
         .help = "Most tokens of one request, prompt and answer together; 0: as many as the "      \
                 "model has "                                                                      \
                 "positions.",                                                                     \
         .offset = offsetof(T, field.max_context)},                                                \
        {.section = "engine",                                                                      \
         .key = "pages",                                                                           \
         .type = CONF_INT,                                                                         \
         .def = "0",                                                                               \
         .max = 1 << 24,                                                                           \
         .help = "Pages of the KV pool, 64 tokens each; 0: as many as pool_bytes hold.",           \
         .offset = offsetof(T, field.pages)},                                                      \
        {.section = "engine",                                                                      \
         .key = "pool_bytes",                                                                      \
         .type = CONF_SIZE,                                                                        \
         .def = "1G",                                                                              \
         .min = 1 << 16,                                                                           \
         .max = (double)(1ull << 50),                                                              \
         .help = "Memory of the KV pool when pages is 0.",                                         \
         .offset = offsetof(T, field.pool_bytes)},                                                 \
        {.section = "experts",                                                                     \
         .key = "strategy",                                                                        \
         .type = CONF_ENUM,                                                                        \
         .def = "uniform",                                                                         \
         .choices = PLACE_STRATEGIES,                                                              \
         .help =                                                                                   \
             "Which routed experts this service computes itself; expertd computes the others. "    \
             "uniform: the first of every layer; frequency: those with the largest counts; "       \
             "front: whole layers from the first on; file: as the file placement says.",           \
         .offset = offsetof(T, field.strategy)},                                                   \
        {.section = "experts",                                                                     \
         .key = "resident",                                                                        \
         .type = CONF_STR,                                                                         \
         .def = "all",                                                                             \
         .help = "How many experts of each layer that is: all, none or N. With frequency and "     \
                 "front, as many in all. Strategy file does not use it.",                          \
         .offset = offsetof(T, field.resident)},                                                   \
        {.section = "experts",                                                                     \
         .key = "counts",                                                                          \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help = "File of recorded counts, for strategy frequency.",                               \
         .offset = offsetof(T, field.counts)},                                                     \
        {.section = "experts",                                                                     \
         .key = "placement",                                                                       \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help = "File for strategy file: lines such as \"3: 0-15, 40\", layer and experts.",      \
         .offset = offsetof(T, field.placement)},                                                  \
        {.section = "experts",                                                                     \
         .key = "record",                                                                          \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help = "File that gets the counts of routed experts, every minute and at the end; goes " \
                 "on from what it has. Each service needs its own. Empty: none.",                  \
         .offset = offsetof(T, field.record)},                                                     \
        {.section = "experts",                                                                     \
         .key = "update_ms",                                                                       \
         .type = CONF_MS,                                                                          \
         .def = "0",                                                                               \
         .max = 86400000,                                                                          \
         .help = "How often the resident experts of each layer are changed to the most used "      \
                 "ones, as many as before. Every expertd must hold all experts then. 0: never.",   \
         .offset = offsetof(T, field.update_ms)},                                                  \
        {.section = "experts",                                                                     \
         .key = "endpoints",                                                                       \
         .type = CONF_STR,                                                                         \
         .def = "",                                                                                \
         .help = "Endpoints of all expertd shards, separated by commas; empty when every expert "  \
                 "is resident.",                                                                   \
         .offset = offsetof(T, field.expert_endpoints)},                                           \
        {.section = "experts",                                                                     \
         .key = "transport",                                                                       \
         .type = CONF_ENUM,                                                                        \
         .def = "auto",                                                                            \
         .choices = ENGINE_CONF_TRANSPORTS,                                                        \
         .help = "How calls reach expertd: shm (shared memory; anything else is an error), zmq "   \
                 "(messages), or auto: shared memory where it can be had.",                        \
         .offset = offsetof(T, field.expert_transport)},                                           \
        {.section = "experts",                                                                     \
         .key = "spin_us",                                                                         \
         .type = CONF_INT,                                                                         \
         .def = "2000",                                                                            \
         .max = 100000,                                                                            \
         .help = "Answers that usually take at most so many microseconds are waited for awake, "   \
                 "which keeps a core busy and saves the time to wake up.",                         \
         .offset = offsetof(T, field.expert_spin_us)},                                             \
        {.section = "experts",                                                                     \
         .key = "timeout_ms",                                                                      \
         .type = CONF_MS,                                                                          \
         .def = "2s",                                                                              \
         .min = 1,                                                                                 \
         .max = 600000,                                                                            \
         .help = "How long a step waits for the experts of one layer before its requests fail.",   \
         .offset = offsetof(T, field.expert_timeout_ms)},                                          \
    {                                                                                              \
        .section = "experts", .key = "start_ms", .type = CONF_MS, .def = "60s", .max = 3600000,    \
        .help = "How long the start waits for expertd to come up.",                                \
        .offset = offsetof(T, field.expert_start_ms)                                               \
    }
