/* See doctor_assume.h. */
#include "deploy/baton/doctor_assume.h"

#include "base/conf.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#define ROW(name, def, min, max, help)                                                             \
    { #name, help, def, min, max, offsetof(Assume, name) }

const AssumeRow ASSUME_TABLE[] = {
    ROW(sockets, 0, 0, 64, "sockets of the host; 0: as the facts tell"),
    ROW(socket_gb_per_s, 0, 0, 1e5,
        "read bandwidth of one socket's memory; 0: channels of the processor's kind x 80 %"),
    ROW(core_gb_per_s, 12, 0.1, 1e4, "that one core can read from memory"),
    ROW(unbound_fraction, 0.5, 0.01, 1,
        "of all memory's bandwidth that a daemon reaches that is bound to no node"),
    ROW(expert_bits, 4, 1, 32, "bits of a weight of experts in host memory, scales apart"),
    ROW(expert_group, 128, 1, 65536, "weights that share a scale of 16 bits in host memory"),
    ROW(gpu_expert_bits, 8, 1, 32, "bits of a weight of experts on a GPU, scales included"),
    ROW(gpu_rest_bits, 8, 1, 32, "bits of all other matrices on a GPU; head and router have 16"),
    ROW(host_rest_bits, 8, 1, 32, "the same on a host backend"),
    ROW(gpu_gb_per_s, 0, 0, 1e5, "memory bandwidth of a GPU; 0: of its type's data sheet"),
    ROW(gpu_memory_gb, 0, 0, 1e4, "memory of a GPU; 0: as stated, or of its type's data sheet"),
    ROW(gpu_fraction, 0.85, 0.01, 1, "of a GPU's memory bandwidth that a step reaches"),
    ROW(gpu_reserve_gb, 4, 0, 1e3, "memory of a GPU for workspace, activations and the driver"),
    ROW(nvlink_us, 4, 0, 1e4, "one all-reduce of a token's row over NVLink"),
    ROW(pcie_us, 24, 0, 1e4, "one all-reduce of a token's row over PCIe"),
    ROW(handover_us, 20, 0, 1e5, "calling all expertd for one layer, their computation apart"),
    ROW(context, 32768, 1, 1 << 24, "tokens that the token being made looks back on"),
    ROW(draft_overlap, 0.2, 0, 1, "of the experts that a drafted token would add but shares"),
    ROW(huge_page_gain, 0.15, 0, 10, "speed that huge pages add to reading experts"),
    ROW(placement_gain, 0.1, 0, 10, "speed that placing the most used experts adds"),
    {0},
};

static double *field(Assume *a, const AssumeRow *r) {
    return (double *)(void *)((char *)a + r->offset);
}

double assume_get(const Assume *a, const AssumeRow *r) {
    return *(const double *)(const void *)((const char *)a + r->offset);
}

void assume_init(Assume *a) {
    for (const AssumeRow *r = ASSUME_TABLE; r->name; r++)
        *field(a, r) = r->def;
}

int assume_set(Assume *a, const char *text, Err *err) {
    enum { N = sizeof ASSUME_TABLE / sizeof *ASSUME_TABLE };
    const char *names[N] = {NULL}, *equals = strchr(text, '=');
    char name[64];
    if (!equals || (size_t)(equals - text) >= sizeof name)
        return err_set(err, E_INVAL, "--set %.60s: expected NAME=VALUE", text);
    memcpy(name, text, (size_t)(equals - text));
    name[equals - text] = 0;
    for (int i = 0; i < N - 1; i++)
        names[i] = ASSUME_TABLE[i].name;
    for (const AssumeRow *r = ASSUME_TABLE; r->name; r++) {
        char *end;
        if (strcmp(r->name, name) != 0)
            continue;
        double v = strtod(equals + 1, &end);
        if (end == equals + 1 || *end || !isfinite(v) || v < r->min || v > r->max)
            return err_set(err, E_INVAL,
                           "--set %s: expected a number from %g to %g, found \"%.60s\"", name,
                           r->min, r->max, equals + 1);
        *field(a, r) = v;
        return 0;
    }
    const char *near = conf_nearest(name, names);
    return err_set(err, E_INVAL, "--set %.60s: no such assumption%s%s%s", name,
                   near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
}

/* Channels and transfers per second (millions) by CPUID family and model; 0: any. */
static const struct {
    int family, model, channels, mt_per_s;
    const char *how;
} PROCESSORS[] = {
    {6, 85, 6, 2933, "6 channels of DDR4-2933 x 80 %"},    /* Skylake, Cascade Lake */
    {6, 106, 8, 3200, "8 channels of DDR4-3200 x 80 %"},   /* Ice Lake */
    {6, 143, 8, 4800, "8 channels of DDR5-4800 x 80 %"},   /* Sapphire Rapids */
    {6, 207, 8, 5600, "8 channels of DDR5-5600 x 80 %"},   /* Emerald Rapids */
    {6, 173, 12, 6400, "12 channels of DDR5-6400 x 80 %"}, /* Granite Rapids */
    {23, 49, 8, 3200, "8 channels of DDR4-3200 x 80 %"},   /* Rome */
    {25, 1, 8, 3200, "8 channels of DDR4-3200 x 80 %"},    /* Milan */
    {25, 17, 12, 4800, "12 channels of DDR5-4800 x 80 %"}, /* Genoa */
    {25, 160, 12, 4800, "12 channels of DDR5-4800 x 80 %"},
    {26, 2, 12, 6000, "12 channels of DDR5-6000 x 80 %"}, /* Turin */
    {26, 17, 12, 6000, "12 channels of DDR5-6000 x 80 %"},
};

double assume_socket_gb_per_s(const Assume *a, const Facts *f, const char **how) {
    if (a->socket_gb_per_s > 0) {
        *how = "as set";
        return a->socket_gb_per_s;
    }
    for (size_t i = 0; i < sizeof PROCESSORS / sizeof *PROCESSORS && !f->hypervisor; i++)
        if (f->family == PROCESSORS[i].family && f->model == PROCESSORS[i].model) {
            *how = PROCESSORS[i].how;
            return PROCESSORS[i].channels * PROCESSORS[i].mt_per_s * 8e-3 * 0.8;
        }
    *how = "8 channels of DDR5-4800 x 80 %, the processor's kind not being known";
    return 8 * 4800 * 8e-3 * 0.8;
}
