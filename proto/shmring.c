/* The caller's side of shmring.h. */
#include "proto/shm_int.h"

#include "base/clock.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    SPINS_PER_LOOK = 64,
    CROWDED_US = 500,         /* without this thread: another one has its core */
    CROWDED_FOR_US = 1000000, /* then it is not tried again */
};

struct ShmRing {
    ShmGeom geom;
    int sock; /* open as long as the ring: its end tells the daemon */
    void *base;
    size_t bytes;
    BellShared *bell;
    int64_t crowded_until_us;
};

/* ---- handshake ---- */

static int connect_to(const char *name, int64_t timeout_ms, Err *err) {
    struct sockaddr_un at;
    struct timeval t = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s >= 0 && setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t) == 0 &&
        setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t) == 0 &&
        connect(s, (struct sockaddr *)&at, shm_address(&at, name)) == 0)
        return s;
    err_set(err, E_PEER, "no shared memory: cannot connect to @%s: %s", name, strerror(errno));
    if (s >= 0)
        close(s);
    return -1;
}

static int greet(ShmRing *r, int memory, Err *err) {
    ShmHello hello = {SHM_MAGIC, r->geom};
    ShmWelcome w;
    int bell = -1;
    if (shm_send(r->sock, &hello, sizeof hello, memory) ||
        shm_receive(r->sock, &w, sizeof w, &bell))
        return err_set(err, errno == EAGAIN ? E_DEADLINE : E_PEER,
                       "no shared memory: the daemon does not answer: %s", strerror(errno));
    w.refused[SHM_REASON_MAX] = 0;
    if (w.magic != SHM_MAGIC || *w.refused || bell < 0) {
        if (bell >= 0)
            close(bell);
        return err_set(err, E_PEER, "no shared memory: refused: %s",
                       *w.refused ? w.refused : "not understood");
    }
    const char *wrong = shm_check(r->sock, bell, sizeof *r->bell);
    if (wrong) {
        close(bell);
        return err_set(err, E_PEER, "no shared memory: the daemon's bell is %s", wrong);
    }
    r->bell = mmap(NULL, sizeof *r->bell, PROT_READ | PROT_WRITE, MAP_SHARED, bell, 0);
    int why = errno;
    close(bell);
    if (r->bell != MAP_FAILED)
        return 0;
    r->bell = NULL;
    return err_set(err, E_PEER, "no shared memory: the bell cannot be mapped: %s", strerror(why));
}

int shmring_open(ShmRing **out, const char *name, const ShmGeom *geom, int64_t timeout_ms,
                 Err *err) {
    CHECK(geom->n_slots >= 1 && geom->n_slots <= SHM_MAX_SLOTS);
    ShmRing *r = xcalloc(1, sizeof *r);
    *r = (ShmRing){.geom = *geom, .sock = -1, .bytes = shm_ring_bytes(geom)};
    int memory = shm_memory("baton-ring", r->bytes, &r->base), rc = 0;
    if (memory < 0) {
        r->base = NULL;
        rc = err_set(err, E_NOMEM, "no shared memory of %zu bytes: %s", r->bytes, strerror(errno));
    } else if ((r->sock = connect_to(name, timeout_ms, err)) < 0) {
        rc = E_PEER;
    } else {
        rc = greet(r, memory, err);
    }
    if (memory >= 0)
        close(memory);
    if (rc) {
        shmring_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

void shmring_close(ShmRing *r) {
    if (!r)
        return;
    if (r->sock >= 0)
        close(r->sock);
    if (r->base)
        munmap(r->base, r->bytes);
    if (r->bell)
        munmap(r->bell, sizeof *r->bell);
    free(r);
}

void *shmring_memory(const ShmRing *r, size_t *bytes) {
    *bytes = r->bytes;
    return r->base;
}

/* ---- calls ---- */

static SlotShared *slot_of(const ShmRing *r, int slot) {
    CHECK(slot >= 0 && slot < (int)r->geom.n_slots);
    return shm_slot(r->base, &r->geom, slot);
}

void *shmring_in(const ShmRing *r, int slot) {
    return (char *)slot_of(r, slot) + SHM_SLOT_HEAD_BYTES;
}

void *shmring_out(const ShmRing *r, int slot) {
    return (char *)shmring_in(r, slot) + r->geom.in_bytes;
}

void shmring_post(ShmRing *r, int slot, const ShmHead *head) {
    SlotShared *s = slot_of(r, slot);
    s->head = *head;
    atomic_store_explicit(&s->waits, 0, memory_order_relaxed);
    atomic_store_explicit(&s->state, SLOT_POSTED, memory_order_release);
    atomic_fetch_add(&r->bell->word, 1);
    if (atomic_load(&r->bell->sleepers) > 0)
        shm_wake(&r->bell->word);
}

static bool is_done(SlotShared *s) {
    return atomic_load_explicit(&s->state, memory_order_acquire) == SLOT_DONE;
}

bool shmring_done(const ShmRing *r, int slot) {
    return is_done(slot_of(r, slot));
}

/* Spins until the slot is done or spin_us are over. Once another thread has had this core for long,
 * spinning only takes time from whoever computes: none for a while. */
static void spin(ShmRing *r, SlotShared *s, int64_t spin_us) {
    int64_t begin = clock_now_us(), now = begin, last;
    if (begin < r->crowded_until_us && spin_us > SHM_SPIN_US)
        spin_us = SHM_SPIN_US;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (is_done(s))
                return;
            __builtin_ia32_pause();
        }
        if (now - begin > SHM_SPIN_US)
            sched_yield();
        last = now;
        now = clock_now_us();
        if (now - last > CROWDED_US) {
            r->crowded_until_us = now + CROWDED_FOR_US;
            return;
        }
    } while (now - begin < spin_us);
}

bool shmring_wait(ShmRing *r, int slot, int64_t timeout_us, int64_t spin_us) {
    SlotShared *s = slot_of(r, slot);
    int64_t begin = clock_now_us();
    spin(r, s, timeout_us < spin_us ? timeout_us : spin_us);
    int64_t left = begin + timeout_us - clock_now_us();
    if (left > 0 && !is_done(s)) {
        atomic_store(&s->waits, 1);
        if (!is_done(s))
            shm_wait(&s->state, SLOT_POSTED, left);
        atomic_store(&s->waits, 0);
    }
    return is_done(s);
}

void shmring_release(ShmRing *r, int slot, ShmHead *head) {
    SlotShared *s = slot_of(r, slot);
    *head = s->head;
    head->reason[SHM_REASON_MAX] = 0;
    atomic_store_explicit(&s->state, SLOT_FREE, memory_order_relaxed);
}
