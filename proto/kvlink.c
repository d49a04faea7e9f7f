/* The UCX link: connections, writes and notices, on a thread of its own.
 *
 * Callers on any thread put commands into a list (`lock`) and wake the link's thread by an eventfd;
 * only that thread touches UCX. What ends is put into a second list and handed to the loop by
 * another eventfd, so that no callback can come after kvlink_close. */
#include "proto/kvlink.h"

#include "base/clock.h"
#include "proto/kvlink_seal.h"
#include "proto/kvlink_ucx.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    MAX_COMMANDS = 16384,
    MAX_SEGS = 1 << 20, /* of one peer, accepted and not ended */
    IDLE_TICK_MS = 10,
    ACTIVE_TICK_MS = 1,
    WIRE_MS = 1000,
    PROGRESS_MAX = 1000
};

typedef enum Kind { CONNECT, PUT, FLUSH, NOTIFY, DISCONNECT, SELFTEST } Kind;

/* One call on its way to the link's thread. */
typedef struct Command {
    struct Command *next;
    Kind kind;
    KvPeer *peer;
    KvDoneFn done;
    void *arg;
    void *bytes; /* PUT: KvSeg[n]; NOTIFY: the notice; owned */
    size_t len;  /* of bytes */
} Command;

/* One callback on its way to the loop. */
typedef struct Event {
    struct Event *next;
    KvDoneFn done; /* NULL: a notice came in */
    void *arg;
    int status;
    size_t len;
    char bytes[];
} Event;

typedef struct Link {
    KvLink base;
    KvLinkConf conf;
    Ucx ucx;
    void *address, *key; /* sealed, for others; fixed once open */
    size_t address_len, key_len;
    pthread_t thread;
    bool running;
    int wake_fd, event_fd;
    LoopFd *watch;

    pthread_mutex_t lock; /* guards the next six */
    Command *first, **last;
    int n_commands;
    Event *event, **last_event;
    bool stop;

    KvPeer *peers;       /* link's thread */
    uint64_t test_bytes; /* self-test: request and result, under lock with `tested` */
    double test_gb_per_s;
    int test_status;
    bool tested;
    pthread_cond_t test_done;
} Link;

static Link *link_of(KvLink *l) {
    return (Link *)l;
}

static void signal_fd(int fd) {
    uint64_t one = 1;
    CHECK(write(fd, &one, sizeof one) == sizeof one || errno == EAGAIN);
}

static void clear_fd(int fd) {
    uint64_t n;
    while (read(fd, &n, sizeof n) > 0)
        ;
}

/* ---- link's thread -> loop ---- */

static void push_event(Link *l, Event *e) {
    pthread_mutex_lock(&l->lock);
    *l->last_event = e;
    l->last_event = &e->next;
    pthread_mutex_unlock(&l->lock);
    signal_fd(l->event_fd);
}

static void push_done(Link *l, KvDoneFn done, void *arg, int status) {
    if (!done)
        return;
    Event *e = xcalloc(1, sizeof *e);
    e->done = done;
    e->arg = arg;
    e->status = status;
    push_event(l, e);
}

static void on_ucx_notice(void *arg, const void *bytes, size_t len) {
    Link *l = arg;
    Event *e = xcalloc(1, sizeof *e + len);
    e->len = len;
    memcpy(e->bytes, bytes, len);
    push_event(l, e);
}

static Event *take_events(Link *l) {
    pthread_mutex_lock(&l->lock);
    Event *e = l->event;
    l->event = NULL;
    l->last_event = &l->event;
    pthread_mutex_unlock(&l->lock);
    return e;
}

static void on_events(void *arg, int events) {
    Link *l = arg;
    (void)events;
    clear_fd(l->event_fd);
    for (Event *e = take_events(l), *next; e; e = next) {
        next = e->next;
        if (e->done)
            e->done(e->arg, e->status);
        else
            l->conf.on_notice(l->conf.arg, e->bytes, e->len);
        free(e);
    }
}

/* ---- operations of a peer: link's thread ---- */

/* A flush, or a notice whose flush comes first. Lives until its last UCX callback. */
typedef struct Op {
    struct Op *next;
    KvPeer *peer;
    KvDoneFn done;
    void *arg;
    void *notice; /* NULL: flush only */
    size_t len;
    int64_t deadline_ms;
    bool held; /* never given to UCX: the peer had failed */
} Op;

struct KvPeer {
    KvPeer *next;
    Link *link;
    UcxEp ep;
    void *address, *rkey; /* until connected */
    KvRemote remote;
    _Atomic int failed;      /* 0 or an E_ code; written by the link's thread, read by callers */
    _Atomic int n_segs;      /* accepted and not ended: callers add, the link's thread takes off */
    bool wired;              /* the other side has answered */
    bool leaving;            /* disconnect was called */
    bool closed;             /* the endpoint is gone */
    int n_puts;              /* writes in flight */
    int64_t put_deadline_ms; /* while n_puts > 0: moves on with each that ends */
    Op *ops;
};

static int64_t deadline_of(const Link *l) {
    return clock_now_ms() + l->conf.timeout_ms;
}

static void op_end(Op *op, int status) {
    KvPeer *p = op->peer;
    for (Op **at = &p->ops; *at; at = &(*at)->next)
        if (*at == op) {
            *at = op->next;
            break;
        }
    int why = p->leaving ? E_CANCELED : atomic_load(&p->failed) ? atomic_load(&p->failed) : status;
    push_done(p->link, op->done, op->arg, status ? why : 0);
    free(op->notice);
    free(op);
}

/* From here on nothing new starts. look_after_peers closes the endpoint, and then what is in flight
 * ends with an error: UCX does not bear being told so from within its own callbacks. */
static void peer_fail(KvPeer *p, int why) {
    int none = 0;
    atomic_compare_exchange_strong(&p->failed, &none, why);
}

static void on_put(void *arg, int status) {
    KvPeer *p = arg;
    p->n_puts--;
    atomic_fetch_sub(&p->n_segs, 1);
    p->put_deadline_ms = deadline_of(p->link);
    if (status)
        peer_fail(p, E_PEER);
}

static void on_sent(void *arg, int status) {
    Op *op = arg;
    KvPeer *p = op->peer;
    if (status)
        peer_fail(p, E_PEER);
    op_end(op, status);
}

static void on_flushed(void *arg, int status) {
    Op *op = arg;
    if (status)
        peer_fail(op->peer, E_PEER);
    if (!status && atomic_load(&op->peer->failed))
        status = atomic_load(&op->peer->failed); /* a write before the flush ended badly */
    if (status || !op->notice)
        op_end(op, status);
    else
        ucx_notice(&op->peer->ep, op->notice, op->len, on_sent, op);
}

static void on_ep_error(void *arg) {
    peer_fail(arg, E_PEER);
}

static void on_wired(void *arg, int status) {
    Op *op = arg;
    op->peer->wired = !status;
    on_flushed(arg, status);
}

static Op *op_new(KvPeer *p, KvDoneFn done, void *arg) {
    Op *op = xcalloc(1, sizeof *op);
    *op = (Op){
        .peer = p, .done = done, .arg = arg, .deadline_ms = deadline_of(p->link), .next = p->ops};
    p->ops = op;
    return op;
}

static void do_connect(Link *l, KvPeer *p) {
    int rc = ucx_ep_open(&l->ucx, &p->ep, p->address, p->rkey, on_ep_error, p);
    free(p->address);
    free(p->rkey);
    p->address = p->rkey = NULL;
    p->next = l->peers;
    l->peers = p;
    if (rc) {
        p->closed = !p->ep.ep;
        peer_fail(p, rc);
    } else {
        ucx_flush(&p->ep, on_wired, op_new(p, NULL, NULL));
    }
}

static void do_put(Link *l, KvPeer *p, const KvSeg *seg, size_t n) {
    if (p->n_puts == 0)
        p->put_deadline_ms = deadline_of(l);
    for (size_t i = 0; i < n; i++) {
        if (atomic_load(&p->failed)) {
            atomic_fetch_sub(&p->n_segs, (int)(n - i));
            break;
        }
        p->n_puts++;
        ucx_put(&p->ep, (const char *)l->ucx.pool + seg[i].local, p->remote.base + seg[i].remote,
                seg[i].bytes, on_put, p);
    }
}

static void do_op(Command *c) {
    KvPeer *p = c->peer;
    Op *op = op_new(p, c->done, c->arg);
    op->notice = c->bytes;
    op->len = c->len;
    c->bytes = NULL;
    op->held = atomic_load(&p->failed) != 0;
    if (!op->held)
        ucx_flush(&p->ep, on_flushed, op);
}

/* Ends what was asked of a peer that had failed already. Only now is it true that nothing of this
 * process is being written there: the endpoint is closed and every put has ended. */
static void end_held(KvPeer *p) {
    for (Op *op = p->ops, *next; op; op = next) {
        next = op->next;
        if (op->held)
            op_end(op, atomic_load(&p->failed));
    }
}

static void do_disconnect(KvPeer *p) {
    p->leaving = true;
    peer_fail(p, E_CANCELED);
}

/* Writes half of the pool onto the other half through an endpoint to ourselves. Nothing is in the
 * pool yet. */
static void do_selftest(Link *l) {
    double rate = 0;
    int rc = ucx_selftest(&l->ucx, l->test_bytes, &rate);
    pthread_mutex_lock(&l->lock);
    l->test_status = rc;
    l->test_gb_per_s = rate;
    l->tested = true;
    pthread_cond_signal(&l->test_done);
    pthread_mutex_unlock(&l->lock);
}

static void run_command(Link *l, Command *c) {
    switch (c->kind) {
    case CONNECT:
        do_connect(l, c->peer);
        break;
    case PUT:
        do_put(l, c->peer, c->bytes, c->len / sizeof(KvSeg));
        break;
    case FLUSH:
    case NOTIFY:
        do_op(c);
        break;
    case DISCONNECT:
        do_disconnect(c->peer);
        break;
    case SELFTEST:
        do_selftest(l);
        break;
    }
    free(c->bytes);
    free(c);
}

static Command *take_commands(Link *l, bool *stop) {
    pthread_mutex_lock(&l->lock);
    Command *c = l->first;
    l->first = NULL;
    l->last = &l->first;
    l->n_commands = 0;
    *stop = l->stop;
    pthread_mutex_unlock(&l->lock);
    return c;
}

/* ---- the thread ---- */

static void peer_free(KvPeer *p) {
    ucx_ep_done(&p->ep);
    free(p->address);
    free(p->rkey);
    free(p);
}

static void on_closed(void *arg) {
    KvPeer *p = arg;
    p->closed = true;
}

/* Fails peers whose work is late; frees those that have left and have nothing in flight. Returns
 * how long the thread may sleep. Not long while anything is in flight, since a full queue in shared
 * memory becomes free without an event; nor ever very long, since UCX 1.13 at times leaves out the
 * event of the first message in such a queue. */
static int look_after_peers(Link *l) {
    int64_t now = clock_now_ms();
    bool active = false;
    for (KvPeer **at = &l->peers, *p; (p = *at);) {
        bool late = p->n_puts > 0 && p->put_deadline_ms <= now;
        for (Op *op = p->ops; op; op = op->next)
            late |= op->deadline_ms <= now;
        if (late && !atomic_load(&p->failed))
            peer_fail(p, E_DEADLINE);
        if (atomic_load(&p->failed))
            ucx_ep_close(&p->ep, on_closed, p);
        if (p->closed && p->n_puts == 0)
            end_held(p);
        if (p->leaving && p->closed && p->n_puts == 0 && !p->ops) {
            *at = p->next;
            peer_free(p);
        } else {
            active |= p->n_puts > 0 || p->ops || p->leaving;
            at = &p->next;
        }
    }
    return active ? ACTIVE_TICK_MS : IDLE_TICK_MS;
}

/* Runs what waits, then sleeps until UCX, a command or a deadline wants attention. */
static bool turn(Link *l) {
    bool stop;
    for (Command *c = take_commands(l, &stop), *next; c; c = next) {
        next = c->next;
        run_command(l, c);
    }
    for (int i = 0; i < PROGRESS_MAX && ucx_progress(&l->ucx); i++)
        ;
    int wait_ms = look_after_peers(l);
    if (!ucx_arm(&l->ucx) || stop)
        return !stop;
    struct pollfd fds[2] = {{.fd = l->ucx.event_fd, .events = POLLIN},
                            {.fd = l->wake_fd, .events = POLLIN}};
    poll(fds, 2, wait_ms);
    clear_fd(l->wake_fd);
    return true;
}

static bool all_wired(const Link *l) {
    for (const KvPeer *p = l->peers; p; p = p->next)
        if (!p->wired && !atomic_load(&p->failed))
            return false;
    return true;
}

/* Closes every endpoint by force and waits for their callbacks, at most as long as an operation may
 * take. Connections in the making are given a moment first: UCX 1.13 aborts a receiver that cannot
 * answer the first message over TCP because the sender is gone. */
static void leave(Link *l) {
    int64_t now = clock_now_ms(), end = now + l->conf.timeout_ms;
    while (!all_wired(l) && clock_now_ms() < now + WIRE_MS)
        ucx_progress(&l->ucx);
    for (KvPeer *p = l->peers; p; p = p->next)
        do_disconnect(p);
    while (l->peers && clock_now_ms() < end) {
        ucx_progress(&l->ucx);
        look_after_peers(l);
    }
}

static void *link_main(void *arg) {
    Link *l = arg;
    if (l->conf.memory.at)
        l->conf.memory.enter(l->conf.memory.arg);
    while (turn(l))
        ;
    leave(l);
    return NULL;
}

/* ---- callers ---- */

static int send_command(Link *l, Command c, Err *err) {
    Command *copy = xmalloc(sizeof *copy);
    *copy = c;
    copy->next = NULL;
    pthread_mutex_lock(&l->lock);
    bool full = l->n_commands >= MAX_COMMANDS && c.kind != DISCONNECT;
    if (!full) {
        *l->last = copy;
        l->last = &copy->next;
        l->n_commands++;
    }
    pthread_mutex_unlock(&l->lock);
    if (full) {
        free(copy->bytes);
        free(copy);
        return err_set(err, E_BUSY, "kvlink: %d calls wait already", MAX_COMMANDS);
    }
    signal_fd(l->wake_fd);
    return 0;
}

static void *link_pool(KvLink *base, uint64_t *bytes) {
    Link *l = link_of(base);
    *bytes = l->conf.pool_bytes;
    return l->ucx.pool;
}

static uint64_t pool_base(const Link *l) {
    return (uint64_t)(uintptr_t)l->ucx.pool;
}

static void seal(Link *l) {
    uint64_t base = pool_base(l), bytes = l->conf.pool_bytes;
    l->address = kvlink_seal_pack(KV_SEAL_ADDRESS, base, bytes, l->ucx.address, l->ucx.address_len,
                                  &l->address_len);
    l->key = kvlink_seal_pack(KV_SEAL_KEY, base, bytes, l->ucx.rkey, l->ucx.rkey_len, &l->key_len);
}

static void link_describe(KvLink *base, KvRemote *out) {
    Link *l = link_of(base);
    *out = (KvRemote){l->address, l->address_len, l->key,
                      l->key_len, pool_base(l),   l->conf.pool_bytes};
}

static void *copy_of(const void *bytes, size_t len) {
    void *p = xmalloc(len + 1);
    memcpy(p, bytes, len);
    return p;
}

static int link_connect(KvLink *base, const KvRemote *r, KvPeer **out, Err *err) {
    Link *l = link_of(base);
    const void *address, *key;
    size_t address_len, key_len;
    int bad = kvlink_seal_unpack(KV_SEAL_ADDRESS, r->base, r->bytes, r->address, r->address_len,
                                 &address, &address_len);
    if (bad == 0)
        bad = kvlink_seal_unpack(KV_SEAL_KEY, r->base, r->bytes, r->rkey, r->rkey_len, &key,
                                 &key_len);
    if (bad)
        return err_set(err, bad, "kvlink: address or key of the peer is damaged (%s)",
                       err_name(bad));
    KvPeer *p = xcalloc(1, sizeof *p);
    p->link = l;
    p->address = copy_of(address, address_len);
    p->rkey = copy_of(key, key_len);
    p->remote = *r;
    int rc = send_command(l, (Command){.kind = CONNECT, .peer = p}, err);
    if (rc)
        peer_free(p);
    else
        *out = p;
    return rc;
}

static void link_disconnect(KvLink *base, KvPeer *peer) {
    send_command(link_of(base), (Command){.kind = DISCONNECT, .peer = peer}, NULL);
}

static int check_peer(const KvPeer *p, Err *err) {
    int why = atomic_load(&p->failed);
    if (why == E_UNSUPPORTED)
        return err_set(
            err, E_PEER,
            "kvlink: UCX has no way from this GPU's memory to the peer's, and none through "
            "host memory is configured ([kvlink] transports with tcp)");
    return why ? err_set(err, E_PEER, "kvlink: the peer has failed (%s)", err_name(why)) : 0;
}

static bool inside(uint64_t at, uint64_t bytes, uint64_t limit) {
    return bytes <= limit && at <= limit - bytes;
}

static int link_put(KvLink *base, KvPeer *p, const KvSeg *seg, int n, Err *err) {
    Link *l = link_of(base);
    for (int i = 0; i < n; i++)
        if (!inside(seg[i].local, seg[i].bytes, l->conf.pool_bytes) ||
            !inside(seg[i].remote, seg[i].bytes, p->remote.bytes))
            return err_set(err, E_LIMIT, "kvlink: segment %d leaves a pool", i);
    int rc = check_peer(p, err);
    if (rc)
        return rc;
    if (atomic_fetch_add(&p->n_segs, n) > MAX_SEGS - n)
        rc = err_set(err, E_BUSY, "kvlink: more than %d segments in flight to a peer", MAX_SEGS);
    size_t len = (size_t)n * sizeof *seg;
    if (rc == 0)
        rc = send_command(
            l, (Command){.kind = PUT, .peer = p, .bytes = copy_of(seg, len), .len = len}, err);
    if (rc)
        atomic_fetch_sub(&p->n_segs, n);
    return rc;
}

static int link_flush(KvLink *base, KvPeer *p, KvDoneFn done, void *arg, Err *err) {
    return send_command(link_of(base),
                        (Command){.kind = FLUSH, .peer = p, .done = done, .arg = arg}, err);
}

static int link_notify(KvLink *base, KvPeer *p, const void *bytes, size_t len, KvDoneFn done,
                       void *arg, Err *err) {
    if (len > KVLINK_NOTICE_MAX)
        return err_set(err, E_LIMIT, "kvlink: notice of %zu bytes, at most %d", len,
                       KVLINK_NOTICE_MAX);
    int rc = check_peer(p, err);
    return rc ? rc
              : send_command(link_of(base),
                             (Command){.kind = NOTIFY,
                                       .peer = p,
                                       .done = done,
                                       .arg = arg,
                                       .bytes = copy_of(bytes, len),
                                       .len = len},
                             err);
}

/* ---- life ---- */

static void free_lists(Link *l) {
    bool stop;
    for (Command *c = take_commands(l, &stop), *next; c; c = next) {
        next = c->next;
        if (c->kind == CONNECT)
            peer_free(c->peer);
        free(c->bytes);
        free(c);
    }
    for (Event *e = take_events(l), *next; e; e = next) {
        next = e->next;
        free(e);
    }
}

static void link_close(KvLink *base) {
    Link *l = link_of(base);
    if (l->running) {
        pthread_mutex_lock(&l->lock);
        l->stop = true;
        pthread_mutex_unlock(&l->lock);
        signal_fd(l->wake_fd);
        pthread_join(l->thread, NULL);
    }
    loop_fd_free(l->watch);
    free_lists(l);
    ucx_close(&l->ucx);
    if (l->wake_fd >= 0)
        close(l->wake_fd);
    if (l->event_fd >= 0)
        close(l->event_fd);
    pthread_cond_destroy(&l->test_done);
    pthread_mutex_destroy(&l->lock);
    free(l->address);
    free(l->key);
    free(l);
}

static const KvLinkOps OPS = {link_pool, link_describe, link_connect, link_disconnect,
                              link_put,  link_notify,   link_flush,   link_close};

int kvlink_open(KvLink **out, const KvLinkConf *conf, Err *err) {
    Link *l = xcalloc(1, sizeof *l);
    l->base.ops = &OPS;
    l->conf = *conf;
    l->last = &l->first;
    l->last_event = &l->event;
    l->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    l->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->test_done, NULL);
    int rc = l->wake_fd < 0 || l->event_fd < 0
                 ? err_set(err, E_IO, "kvlink: eventfd: %s", strerror(errno))
                 : 0;
    if (rc == 0)
        rc = ucx_open(&l->ucx, conf, on_ucx_notice, l, err);
    if (rc == 0) {
        seal(l);
        l->watch = loop_fd_new(conf->loop, l->event_fd, UV_READABLE, on_events, l);
        rc = l->watch ? 0 : err_set(err, E_IO, "kvlink: cannot watch its events");
    }
    if (rc == 0) {
        int bad = pthread_create(&l->thread, NULL, link_main, l);
        rc = bad ? err_set(err, E_IO, "kvlink: cannot start its thread: %s", strerror(bad)) : 0;
        l->running = rc == 0;
    }
    if (rc)
        link_close(&l->base);
    else
        *out = &l->base;
    return rc;
}

int kvlink_selftest(KvLink *base, uint64_t bytes, double *gb_per_s, Err *err) {
    Link *l = link_of(base);
    if (base->ops != &OPS)
        return err_set(err, E_UNSUPPORTED, "kvlink: only a UCX link tests itself");
    l->test_bytes = bytes < l->conf.pool_bytes / 2 ? bytes : l->conf.pool_bytes / 2;
    int rc = send_command(l, (Command){.kind = SELFTEST}, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&l->lock);
    while (!l->tested) /* bounded: ucx_selftest has a deadline */
        pthread_cond_wait(&l->test_done, &l->lock);
    rc = l->test_status;
    *gb_per_s = l->test_gb_per_s;
    l->tested = false;
    pthread_mutex_unlock(&l->lock);
    return rc ? err_set(err, rc, "kvlink: self-transfer of %llu bytes: %s",
                        (unsigned long long)l->test_bytes,
                        rc == E_DEADLINE   ? "not done within 5 s"
                        : rc == E_MISMATCH ? "other bytes arrived"
                                           : "failed")
              : 0;
}

const char *kvlink_selftest_transport(KvLink *base) {
    return base->ops == &OPS ? link_of(base)->ucx.transport : "";
}
