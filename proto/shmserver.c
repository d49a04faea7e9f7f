/* The daemon's side of shmring.h. A thread of its own takes in rings and watches their sockets; the
 * worker takes calls from them. `lock` guards the table of rings; a ring's memory belongs to the
 * worker, which lets go of it once its socket has ended and no call of it is under way. */
#include "proto/shm_int.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    MAX_PEERS = 64,
    GREET_MS = 500,
    ACCEPT_AGAIN_US = 10000,
    SPINS_PER_LOOK = 64,
    WORKER_SPIN_US = SHM_SPIN_US * 10,
};

struct ShmPeer {
    ShmGeom geom;
    int sock;
    void *base;
    size_t bytes;
    bool gone;                 /* under lock, by the thread: its socket has ended */
    int n_taken;               /* worker: calls taken and not answered */
    bool taken[SHM_MAX_SLOTS]; /* worker */
};

struct ShmServer {
    ShmGeom most;
    int listener, stop, bell_fd; /* stop: an eventfd that ends the thread */
    BellShared *bell;
    pthread_t thread;
    pthread_mutex_t lock;
    ShmPeer *peer[MAX_PEERS]; /* under lock */
    int next;                 /* worker: where looking goes on, so that all get their turn */
};

/* ---- the thread that takes rings in ---- */

/* What is wrong with a ring, or NULL. */
static const char *check_ring(const ShmServer *s, int sock, const ShmHello *h, int memory) {
    const ShmGeom *g = &h->geom;
    if (h->magic != SHM_MAGIC)
        return "not a ring of this version";
    if (g->generation != s->most.generation)
        return "generation of another process";
    if (g->n_slots < 1 || g->n_slots > SHM_MAX_SLOTS || g->in_bytes > s->most.in_bytes ||
        g->out_bytes > s->most.out_bytes || g->in_bytes % 64 || g->out_bytes % 64)
        return "slots of a size that does not fit";
    return shm_check(sock, memory, shm_ring_bytes(g));
}

static bool enter(ShmServer *s, ShmPeer *p) {
    bool found = false;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < MAX_PEERS && !found; i++)
        if (!s->peer[i]) {
            s->peer[i] = p;
            found = true;
        }
    pthread_mutex_unlock(&s->lock);
    return found;
}

/* Takes a ring in, or says why not. The socket is closed on failure. */
static void greet(ShmServer *s, int sock) {
    struct timeval t = {0, GREET_MS * 1000};
    ShmHello h;
    ShmWelcome w = {.magic = SHM_MAGIC};
    int memory = -1;
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
    setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
    if (shm_receive(sock, &h, sizeof h, &memory)) {
        close(sock);
        return;
    }
    const char *wrong = check_ring(s, sock, &h, memory);
    ShmPeer *p = xcalloc(1, sizeof *p);
    if (!wrong) {
        *p = (ShmPeer){.geom = h.geom, .sock = sock, .bytes = shm_ring_bytes(&h.geom)};
        p->base = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
        if (p->base == MAP_FAILED)
            wrong = "memory that cannot be mapped";
        else if (!enter(s, p)) {
            munmap(p->base, p->bytes);
            wrong = "too many rings";
        }
    }
    if (memory >= 0)
        close(memory);
    if (wrong)
        snprintf(w.refused, sizeof w.refused, "%s", wrong);
    /* A caller that does not get this shows by the end of its socket. */
    shm_send(sock, &w, sizeof w, wrong ? -1 : s->bell_fd);
    if (wrong) {
        free(p);
        close(sock);
    }
}

/* Fills the table of what to watch: stop, listener, then the sockets of live rings. */
static int watched(ShmServer *s, struct pollfd *fd, ShmPeer **of) {
    int n = 2;
    fd[0] = (struct pollfd){s->stop, POLLIN, 0};
    fd[1] = (struct pollfd){s->listener, POLLIN, 0};
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < MAX_PEERS; i++)
        if (s->peer[i] && !s->peer[i]->gone) {
            of[n] = s->peer[i];
            fd[n++] = (struct pollfd){s->peer[i]->sock, POLLIN, 0};
        }
    pthread_mutex_unlock(&s->lock);
    return n;
}

static void *thread_main(void *arg) {
    ShmServer *s = arg;
    for (;;) {
        struct pollfd fd[MAX_PEERS + 2];
        ShmPeer *of[MAX_PEERS + 2];
        int n = watched(s, fd, of);
        if (poll(fd, (nfds_t)n, -1) < 0) {
            CHECK(errno == EINTR);
            continue;
        }
        if (fd[0].revents)
            return NULL;
        bool any = false;
        pthread_mutex_lock(&s->lock);
        for (int i = 2; i < n; i++)
            if (fd[i].revents) /* nothing more is said on it but that it ends */
                of[i]->gone = any = true;
        pthread_mutex_unlock(&s->lock);
        if (any)
            shmserver_ring(s); /* the worker lets go of them */
        if (fd[1].revents) {
            int sock = accept4(s->listener, NULL, NULL, SOCK_CLOEXEC);
            if (sock >= 0)
                greet(s, sock);
            else
                usleep(ACCEPT_AGAIN_US); /* no descriptors left: the caller still waits there */
        }
    }
}

/* ---- the worker ---- */

static void peer_free(ShmPeer *p) {
    munmap(p->base, p->bytes);
    close(p->sock);
    free(p);
}

/* The next posted slot of a ring that is not under way. */
static int posted_slot(ShmPeer *p) {
    for (int i = 0; i < (int)p->geom.n_slots; i++)
        if (!p->taken[i] && atomic_load_explicit(&shm_slot(p->base, &p->geom, i)->state,
                                                 memory_order_acquire) == SLOT_POSTED)
            return i;
    return -1;
}

static void hand_out(ShmPeer *p, int slot, ShmCall *out) {
    SlotShared *shared = shm_slot(p->base, &p->geom, slot);
    *out = (ShmCall){.peer = p,
                     .slot = slot,
                     .head = shared->head,
                     .in = (char *)shared + SHM_SLOT_HEAD_BYTES,
                     .out = (char *)shared + SHM_SLOT_HEAD_BYTES + p->geom.in_bytes,
                     .in_bytes = p->geom.in_bytes,
                     .out_bytes = p->geom.out_bytes};
    p->taken[slot] = true;
    p->n_taken++;
}

bool shmserver_take(ShmServer *s, ShmCall *out) {
    bool found = false;
    pthread_mutex_lock(&s->lock);
    for (int k = 0; k < MAX_PEERS && !found; k++) {
        int i = (s->next + k) % MAX_PEERS, slot = -1;
        ShmPeer *p = s->peer[i];
        if (p && p->gone && p->n_taken == 0) {
            s->peer[i] = NULL;
            peer_free(p);
        } else if (p && !p->gone && (slot = posted_slot(p)) >= 0) {
            hand_out(p, slot, out);
            s->next = (i + 1) % MAX_PEERS;
            found = true;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

bool shmserver_gone(ShmServer *s, const ShmCall *c) {
    pthread_mutex_lock(&s->lock);
    bool gone = c->peer->gone;
    pthread_mutex_unlock(&s->lock);
    return gone;
}

void shmserver_answer(ShmServer *s, const ShmCall *c, uint32_t code, const char *reason) {
    ShmPeer *p = c->peer;
    SlotShared *shared = shm_slot(p->base, &p->geom, c->slot);
    (void)s;
    shared->head.code = code;
    snprintf(shared->head.reason, sizeof shared->head.reason, "%s", reason ? reason : "");
    p->taken[c->slot] = false;
    p->n_taken--;
    atomic_store(&shared->state, SLOT_DONE);
    if (atomic_load(&shared->waits))
        shm_wake(&shared->state);
}

/* ---- the bell ---- */

void shmserver_ring(ShmServer *s) {
    atomic_fetch_add(&s->bell->word, 1);
    if (atomic_load(&s->bell->sleepers) > 0)
        shm_wake(&s->bell->word);
}

uint32_t shmserver_bell(const ShmServer *s) {
    return atomic_load(&s->bell->word);
}

void shmserver_sleep(ShmServer *s, uint32_t seen, int64_t timeout_ms) {
    int64_t end = clock_now_us() + WORKER_SPIN_US;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (shmserver_bell(s) != seen)
                return;
            __builtin_ia32_pause();
        }
    } while (clock_now_us() < end);
    atomic_fetch_add(&s->bell->sleepers, 1);
    shm_wait(&s->bell->word, seen, timeout_ms * 1000);
    atomic_fetch_sub(&s->bell->sleepers, 1);
}

/* ---- life ---- */

int shmserver_n_rings(ShmServer *s) {
    int n = 0;
    pthread_mutex_lock(&s->lock);
    for (int i = 0; i < MAX_PEERS; i++)
        n += s->peer[i] && !s->peer[i]->gone;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static int listen_on(const char *name) {
    struct sockaddr_un at;
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s >= 0 && bind(s, (struct sockaddr *)&at, shm_address(&at, name)) == 0 &&
        listen(s, 16) == 0)
        return s;
    int why = errno;
    if (s >= 0)
        close(s);
    errno = why;
    return -1;
}

static void release(ShmServer *s) {
    if (s->listener >= 0)
        close(s->listener);
    if (s->stop >= 0)
        close(s->stop);
    if (s->bell)
        munmap(s->bell, sizeof *s->bell);
    if (s->bell_fd >= 0)
        close(s->bell_fd);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int shmserver_open(ShmServer **out, const char *name, const ShmGeom *most, Err *err) {
    ShmServer *s = xcalloc(1, sizeof *s);
    void *bell = NULL;
    *s = (ShmServer){.most = *most, .listener = -1, .stop = -1, .bell_fd = -1};
    pthread_mutex_init(&s->lock, NULL);
    s->bell_fd = shm_memory("baton-bell", sizeof *s->bell, &bell);
    s->bell = s->bell_fd >= 0 ? bell : NULL;
    if (s->bell && (s->stop = eventfd(0, EFD_CLOEXEC)) >= 0)
        s->listener = listen_on(name);
    int why = s->listener < 0 ? errno : pthread_create(&s->thread, NULL, thread_main, s);
    if (why) {
        release(s);
        return err_set(err, E_IO, "cannot offer shared memory as @%s: %s", name, strerror(why));
    }
    *out = s;
    return 0;
}

void shmserver_close(ShmServer *s) {
    if (!s)
        return;
    uint64_t one = 1;
    CHECK(write(s->stop, &one, sizeof one) == sizeof one);
    pthread_join(s->thread, NULL);
    for (int i = 0; i < MAX_PEERS; i++)
        if (s->peer[i])
            peer_free(s->peer[i]);
    release(s);
}
