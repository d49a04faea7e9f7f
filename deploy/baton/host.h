/* Facts of the host that this runs on, as the texts of facts.h. */
#pragma once

#include "deploy/baton/facts.h"

/* Gathers and parses. What cannot be found out is left unknown; what a tool prints in a way that is
 * not understood is left out, with a line to standard error. */
void host_facts(Facts *f);
/* Writes the texts into a directory, which is made; measured numbers with `measure`. Files that are
 * there already are refused. */
int host_capture(const char *dir, bool measure, Err *err);
/* Measures into *f: memory bandwidth of each node that may be used, and copies from and to each GPU
 * where this build has CUDA. Takes a second per node. */
int host_measure(Facts *f, Err *err);
