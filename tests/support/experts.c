/* See experts.h. */
#include "tests/support/experts.h"

#include "model/place.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_ROWS = 512 };

static int post(void *arg, int layer, int n, int k, const float *x, const int32_t *id,
                const float *weight, Err *err) {
    LocalExperts *e = arg;
    size_t bytes = (size_t)n * (size_t)e->hidden * sizeof *e->sum;
    (void)err;
    if (e->bytes < bytes) {
        e->sum = xrealloc(e->sum, bytes);
        e->bytes = bytes;
    }
    e->n = n;
    for (int at = 0; at < n; at += MAX_ROWS) {
        int rows = n - at < MAX_ROWS ? n - at : MAX_ROWS;
        store_compute(e->store, layer, rows, k, x + (size_t)at * (size_t)e->hidden, id + at * k,
                      weight + at * k, e->sum + (size_t)at * (size_t)e->hidden, NULL, NULL);
    }
    return 0;
}

static int wait_sum(void *arg, float *y, Err *err) {
    LocalExperts *e = arg;
    (void)err;
    for (size_t i = 0; i < (size_t)e->n * (size_t)e->hidden; i++)
        y[i] += e->sum[i];
    return 0;
}

int local_experts_open(LocalExperts *out, const char *dir, const Shape *shape, Err *err) {
    LocalExperts e = {.hidden = shape->hidden, .port = {.post = post, .wait = wait_sum}};
    StoreConf conf = {.files = dir,
                      .device = "none",
                      .n_shards = 1,
                      .threads = 1,
                      .node = -1,
                      .max_rows = MAX_ROWS};
    int rc = place_parse("none", shape, &e.resident, err);
    if (rc == 0)
        rc = store_open(&e.store, NULL, &conf, err);
    if (rc) {
        free(e.resident);
        return rc;
    }
    *out = e;
    out->port.arg = out;
    return 0;
}

void local_experts_close(LocalExperts *e) {
    store_close(e->store);
    free(e->resident);
    free(e->sum);
    *e = (LocalExperts){0};
}
