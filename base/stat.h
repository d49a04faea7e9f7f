/* Metrics in the Prometheus text format.
 *
 * Series are created at start-up and live until exit; updates are atomic and may come from any
 * thread. Names follow Prometheus: a unit suffix, _total for counters. labels is "" or
 * 'peer="a",kind="b"'. */
#pragma once

#include "base/buf.h"

#include <stdint.h>

typedef struct StatCounter StatCounter; /* only grows */
typedef struct StatGauge StatGauge;
typedef struct StatHist StatHist; /* fixed buckets */

StatCounter *stat_counter(const char *name, const char *labels, const char *help);
StatGauge *stat_gauge(const char *name, const char *labels, const char *help);
/* bounds: ascending upper bounds, n of them; the +Inf bucket is added. */
StatHist *stat_hist(const char *name, const char *labels, const char *help, const double *bounds,
                    int n);
/* Buckets for durations in seconds: 1 ms .. 60 s. */
StatHist *stat_hist_seconds(const char *name, const char *labels, const char *help);

void stat_add(StatCounter *c, double v);
double stat_counter_value(const StatCounter *c);
void stat_set(StatGauge *g, double v);
double stat_gauge_value(const StatGauge *g);
void stat_observe(StatHist *h, double v);

/* Appends all series, grouped by name with HELP and TYPE. */
void stat_render(Buf *out);
