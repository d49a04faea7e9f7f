/* Rings whose two ends see their memory at one address: under ThreadSanitizer every payload, head
 * and answer that is read before it was handed over is a report. Without it, a test of the data. */
#include "proto/shmring.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { SLOTS = 4, WORDS = 64, CALLERS = 3, ROUNDS = 1500, GENERATION = 7, SOON_US = 5000000 };

static char name[SHM_NAME_MAX + 1];
static const ShmGeom GEOM = {GENERATION, WORDS * 4, WORDS * 4, SLOTS};

typedef struct Daemon {
    ShmServer *server;
    pthread_t worker;
    atomic_bool stop;
} Daemon;

/* Answers with the payload plus one; refuses what it is asked to. */
static void answer(ShmServer *s, const ShmCall *c) {
    const uint32_t *in = c->in;
    uint32_t *out = c->out;
    for (int i = 0; i < WORDS; i++)
        out[i] = in[i] + 1;
    shmserver_answer(s, c, c->head.c, c->head.c ? "as asked" : NULL);
}

static void *worker_main(void *arg) {
    Daemon *d = arg;
    while (!atomic_load(&d->stop)) {
        uint32_t bell = shmserver_bell(d->server);
        ShmCall held[SLOTS];
        int n = 0;
        while (n < SLOTS && shmserver_take(d->server, &held[n]))
            n++;
        for (int i = n - 1; i >= 0; i--) /* not in the order in which they came */
            answer(d->server, &held[i]);
        if (n == 0)
            shmserver_sleep(d->server, bell, 1000);
    }
    return NULL;
}

static void post(ShmRing *r, int slot, uint32_t a, bool refused) {
    ShmHead h = {a, 1, refused, 0, ""};
    uint32_t *in = shmring_in(r, slot);
    for (int i = 0; i < WORDS; i++)
        in[i] = a + (uint32_t)i;
    shmring_post(r, slot, &h);
}

static bool check(ShmRing *r, int slot, uint32_t a, bool refused) {
    ShmHead h;
    const uint32_t *out = shmring_out(r, slot);
    int64_t end = clock_now_us() + SOON_US;
    while (!shmring_wait(r, slot, 2000, SHM_SPIN_US))
        if (clock_now_us() > end)
            return false;
    shmring_release(r, slot, &h);
    for (int i = 0; i < WORDS; i++)
        if (out[i] != a + (uint32_t)i + 1)
            return false;
    return h.code == refused && strcmp(h.reason, refused ? "as asked" : "") == 0;
}

/* Calls in all slots, with pauses after which both ends sleep; leaves calls under way behind. */
static void *caller_main(void *arg) {
    uint32_t seed = (uint32_t)(uintptr_t)arg * 100000;
    ShmRing *r = NULL;
    bool ok = true;
    for (int round = 0; round < ROUNDS && ok; round++) {
        if (!r)
            ok = shmring_open(&r, name, &GEOM, 5000, NULL) == 0;
        for (int s = 0; s < SLOTS && ok; s++)
            post(r, s, seed + (uint32_t)(round * SLOTS + s), (round + s) % 5 == 0);
        if (round % 300 == 299) {
            shmring_close(r);
            r = NULL;
            continue;
        }
        for (int s = 0; s < SLOTS && ok; s++)
            ok = check(r, s, seed + (uint32_t)(round * SLOTS + s), (round + s) % 5 == 0);
        if (round % 100 == 99)
            usleep(3000);
    }
    shmring_close(r);
    return ok ? arg : NULL;
}

static void test_no_race(void **state) {
    (void)state;
    Daemon d = {0};
    pthread_t caller[CALLERS];
    snprintf(name, sizeof name, "baton-test-%016llx", (unsigned long long)clock_unique());
    assert_int_equal(shmserver_open(&d.server, name, &GEOM, NULL), 0);
    assert_int_equal(pthread_create(&d.worker, NULL, worker_main, &d), 0);
    for (intptr_t i = 0; i < CALLERS; i++)
        assert_int_equal(pthread_create(&caller[i], NULL, caller_main, (void *)(i + 1)), 0);
    for (int i = 0; i < CALLERS; i++) {
        void *ok;
        pthread_join(caller[i], &ok);
        assert_non_null(ok);
    }
    atomic_store(&d.stop, true);
    shmserver_ring(d.server);
    pthread_join(d.worker, NULL);
    shmserver_close(d.server);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_race)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
