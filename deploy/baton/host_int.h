/* The parts of host: each appends one text of facts.h. root is "" but in tests, which put a tree of
 * their own before /proc and /sys. */
#pragma once

#include "base/buf.h"
#include "deploy/baton/host.h"

/* numactl.txt; nothing when the system has no nodes and no processors to tell of. */
void host_put_numa(const char *root, Buf *out);
/* lscpu.txt, from /proc/cpuinfo and /sys. */
void host_put_cpu(const char *root, Buf *out);
/* host.txt, but for what is measured. */
void host_put_limits(const char *root, Buf *out);
/* gpus.csv and topo.txt, by nvidia-smi; nothing without it. */
void host_put_gpus(const char *root, Buf *csv, Buf *topo);
/* ucx.txt, by UCX itself. */
void host_put_ucx(Buf *out);
/* Lines of host.txt: the transport that UCX takes to this host itself, and its speed. */
void host_put_kv_link(Buf *out);
/* Lines of host.txt: what facts have of measured numbers. */
void host_put_measured(const Facts *f, Buf *out);

/* One line of a file without its end, or the whole of it; NULL: it cannot be read. The caller's to
 * free. */
char *host_read_line(const char *root, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
char *host_read_file(const char *root, const char *path);
