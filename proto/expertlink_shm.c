/* The part of expertlink that goes through shared memory. */
#include "proto/expertlink_int.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>

enum { GREET_MS = 1000 };

static int power_above(int n) {
    int p = 1;
    while (p < n)
        p *= 2;
    return p;
}

static size_t lines(size_t bytes) {
    return (bytes + 63) / 64 * 64;
}

void expertlink_ring_drop(Daemon *d) {
    shmring_close(d->ring);
    d->ring = NULL;
    d->ring_slots = d->ring_rows = 0;
}

static void no_ring(Daemon *d, const char *why) {
    d->ring_tried = true;
    snprintf(d->path, sizeof d->path, "zmq: %.300s", why);
}

/* Room grows in powers of two, so that few sizes are ever asked for. */
static void open_ring(ExpertLink *l, Daemon *d, int rows, int n_calls) {
    int most = (int)d->hello->max_rows, slot_rows = power_above(rows);
    Err why = {0};
    slot_rows = slot_rows > most ? most : slot_rows;
    size_t row = (size_t)l->hidden * sizeof(float), n = (size_t)slot_rows;
    ShmGeom g = {.generation = d->hello->generation,
                 .in_bytes =
                     lines(n * (row + EXPERTLINK_K_MAX * (sizeof(int32_t) + sizeof(float)))),
                 .out_bytes = lines(n * row),
                 .n_slots = (uint32_t)power_above(n_calls)};
    expertlink_ring_drop(d);
    if (shmring_open(&d->ring, d->hello->shm, &g, GREET_MS, &why)) {
        d->ring = NULL;
        no_ring(d, why.text);
        return;
    }
    d->ring_slots = (int)g.n_slots;
    d->ring_rows = slot_rows;
    snprintf(d->path, sizeof d->path, "shm");
}

int expertlink_ring_ready(ExpertLink *l, Daemon *d, int n_rows, Err *err) {
    int most = (int)d->hello->max_rows, limit = most * EXPERTLINK_CALLS_MAX;
    if (n_rows < l->reserve_rows)
        n_rows = l->reserve_rows < limit ? l->reserve_rows : limit;
    int rows = n_rows < most ? n_rows : most, n_calls = (n_rows + most - 1) / most;
    if (d->ring && rows <= d->ring_rows && n_calls <= d->ring_slots)
        return 0;
    if (l->transport == EXPERTLINK_ZMQ)
        no_ring(d, "as configured");
    else if (!*d->hello->shm)
        no_ring(d, "the daemon offers no shared memory");
    else if (!d->ring_tried)
        open_ring(l, d, rows, n_calls);
    if (d->ring || l->transport != EXPERTLINK_SHM)
        return 0;
    return err_set(err, E_PEER, "expertd at %s: transport = shm, but %.300s", d->endpoint, d->path);
}

void expertlink_ring_post(ExpertLink *l, Daemon *d, int i, const ExpertRows *r, int first, int n) {
    ShmHead head = {(uint32_t)r->layer, (uint32_t)n, (uint32_t)r->k, 0, ""};
    expertlink_payload(l, r, first, n, shmring_in(d->ring, i));
    shmring_post(d->ring, i, &head);
}

static int64_t *usual_us(const ExpertLink *l, Daemon *d) {
    int c = 0;
    while (c < SIZE_CLASSES - 1 && l->n_rows >> (c + 1))
        c++;
    return &d->took_us[c];
}

int expertlink_ring_take(const ExpertLink *l, Daemon *d, Err *err) {
    int n_open = d->n_open;
    for (int i = 0; i < d->n_calls; i++) {
        ShmHead head;
        if (d->answered[i] || !shmring_done(d->ring, i))
            continue;
        shmring_release(d->ring, i, &head);
        d->answered[i] = true;
        d->n_open--;
        if (head.code)
            return err_set(err, E_PEER, "expertd at %s: refuses the call: %s", d->endpoint,
                           head.reason);
    }
    if (n_open > 0 && d->n_open == 0) {
        int64_t *usual = usual_us(l, d), took = clock_now_us() - d->posted_us;
        int64_t step = *usual / 16 + 1; /* towards the median: now and then one takes far longer */
        *usual = *usual == 0 ? took : took > *usual ? *usual + step : *usual - step;
    }
    return 0;
}

/* How long to be awake from now on: until half as long again as usual, and a moment. */
static int64_t spin_us(const ExpertLink *l, Daemon *d) {
    int64_t usual = *usual_us(l, d), spent = clock_now_us() - d->posted_us;
    int64_t until = usual > l->spin_us ? SHM_SPIN_US : usual + usual / 2 + SHM_SPIN_US;
    return until > spent ? until - spent : 0;
}

void expertlink_ring_wait(const ExpertLink *l, Daemon *d, int64_t timeout_us) {
    for (int i = 0; i < d->n_calls; i++)
        if (!d->answered[i]) {
            shmring_wait(d->ring, i, timeout_us, spin_us(l, d));
            return;
        }
}

const float *expertlink_ring_answer(const Daemon *d, int i) {
    return shmring_out(d->ring, i);
}
