/* What the doctor assumes where facts do not tell: numbers with names, printed beside what rests on
 * them and changed by --set NAME=VALUE. Pure. */
#pragma once

#include "base/err.h"
#include "deploy/baton/facts.h"

#include <stdbool.h>

typedef struct Assume {
    double sockets;
    double socket_gb_per_s, core_gb_per_s, unbound_fraction;
    double expert_bits, expert_group, gpu_expert_bits, gpu_rest_bits, host_rest_bits;
    double gpu_gb_per_s, gpu_memory_gb, gpu_fraction, gpu_reserve_gb;
    double nvlink_us, pcie_us, handover_us;
    double context, draft_overlap, huge_page_gain, placement_gain;
} Assume;

typedef struct AssumeRow {
    const char *name, *help;
    double def, min, max;
    size_t offset; /* in Assume */
} AssumeRow;

extern const AssumeRow ASSUME_TABLE[]; /* ends with a row without name */

void assume_init(Assume *a);
double assume_get(const Assume *a, const AssumeRow *r);
/* "NAME=VALUE". E_INVAL names what is wrong, with the nearest name. */
int assume_set(Assume *a, const char *text, Err *err);

/* Read bandwidth of all memory of one socket, by the processor's family and model where they are
 * known; *how (static) says on what it rests. */
double assume_socket_gb_per_s(const Assume *a, const Facts *f, const char **how);
