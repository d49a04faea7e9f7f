/* See kvlink_fault.h. Calls that the proxy answers itself are Held, on the loop thread; `lock`
 * guards what put, on its thread, shares with them. */
#include "proto/kvlink_fault.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum RuleId { DROP, DUPLICATE, DELAY, CORRUPT, FAIL, RESET, SILENCE, N_RULES } RuleId;

static const char *const NAMES[N_RULES] = {"drop-notice",  "duplicate-notice", "delay-notice",
                                           "corrupt-page", "fail-after",       "reset",
                                           "silence"};

typedef struct Rule {
    long n;       /* of NAME=N; 0: none */
    long percent; /* of NAME%P; 0: none */
} Rule;

typedef struct FaultPeer {
    struct FaultPeer *next;
    struct Fault *link;
    KvPeer *inner; /* NULL once closed */
    bool silent;
    bool failed;  /* puts and notices are refused */
    bool closing; /* by reset: the inner peer may still write, on_quiet will come */
    bool leaving; /* disconnect was called while closing */
} FaultPeer;

/* A notice or flush that this proxy ends. */
typedef struct Held {
    struct Held *next;
    struct Fault *link;
    FaultPeer *peer; /* NULL once disconnected */
    KvDoneFn done;
    void *arg;
    int status; /* what it ends with; 0: the notice is sent instead */
    LoopTimer *timer;
    bool waiting; /* for on_delay_begins, which comes in any case */
    size_t len;   /* of the notice */
    unsigned char notice[];
} Held;

typedef struct Fault {
    KvLink base;
    KvLink *inner;
    KvFaultConf conf;
    pthread_mutex_t lock; /* guards rules, counts, random, and the fields of peers */
    Rule rule[N_RULES];
    long n_puts;
    uint64_t random;
    FaultPeer *peers; /* loop thread */
    Held *held;       /* loop thread */
} Fault;

static Fault *fault_of(KvLink *l) {
    return (Fault *)l;
}

static FaultPeer *peer_of(KvPeer *p) {
    return (FaultPeer *)p;
}

/* ---- rules ---- */

/* splitmix64: every seed gives a good sequence. */
static uint64_t next_random(Fault *f) {
    uint64_t x = f->random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static bool by_chance(Fault *f, RuleId id) {
    return f->rule[id].percent > 0 && (long)(next_random(f) % 100) < f->rule[id].percent;
}

/* For rules that hold for the next N. */
static bool takes_next(Fault *f, RuleId id) {
    if (f->rule[id].n <= 0)
        return by_chance(f, id);
    f->rule[id].n--;
    return true;
}

static bool delays(Fault *f) {
    const Rule *r = &f->rule[DELAY];
    return r->n > 0 && (r->percent == 0 || by_chance(f, DELAY));
}

/* For rules that hold for the Nth put. */
static bool takes_put(Fault *f, RuleId id) {
    return f->rule[id].n == f->n_puts || by_chance(f, id);
}

static int parse_number(const char **at, long max, long *out) {
    char *end;
    if (**at < '0' || **at > '9')
        return E_INVAL;
    *out = strtol(*at, &end, 10);
    *at = end;
    return *out >= 1 && *out <= max ? 0 : E_INVAL;
}

static int parse_rule(Fault *f, const char *text, size_t len, Err *err) {
    char one[64];
    if (len >= sizeof one)
        return err_set(err, E_INVAL, "fault rule \"%.*s\" is too long", 64, text);
    snprintf(one, sizeof one, "%.*s", (int)len, text);
    size_t name = strcspn(one, "=%");
    int id = 0;
    while (id < N_RULES && (strlen(NAMES[id]) != name || strncmp(NAMES[id], one, name) != 0))
        id++;
    if (id == N_RULES)
        return err_set(err, E_INVAL, "there is no fault rule \"%.*s\"", (int)name, one);
    Rule r = {0};
    const char *at = one + name;
    int rc = *at ? 0 : E_INVAL;
    if (rc == 0 && *at == '=')
        rc = (at++, parse_number(&at, 1000000000, &r.n));
    if (rc == 0 && *at == '%')
        rc = (at++, parse_number(&at, 100, &r.percent));
    bool fits = id == DELAY ? r.n > 0 : (r.n > 0) != (r.percent > 0);
    if (rc || *at || !fits)
        return err_set(err, E_INVAL, "fault rule \"%s\": expected %s%s", one, NAMES[id],
                       id == DELAY ? "=MS or =MS%P" : "=N or %P, P from 1 to 100");
    f->rule[id] = r;
    return 0;
}

static int parse_rules(Fault *f, const char *text, Err *err) {
    for (;;) {
        text += strspn(text, ", ");
        size_t len = strcspn(text, ", ");
        if (len == 0)
            return 0;
        int rc = parse_rule(f, text, len, err);
        if (rc)
            return rc;
        text += len;
    }
}

/* ---- held calls: loop thread ---- */

static void held_free(Held *h) {
    for (Held **at = &h->link->held; *at; at = &(*at)->next)
        if (*at == h) {
            *at = h->next;
            break;
        }
    loop_timer_free(h->timer);
    free(h);
}

static void held_end(Held *h, int status) {
    KvDoneFn done = h->done;
    void *arg = h->arg;
    held_free(h);
    if (done)
        done(arg, status);
}

static void on_held(void *arg) {
    Held *h = arg;
    Fault *f = h->link;
    int rc = h->status;
    if (rc == 0) {
        pthread_mutex_lock(&f->lock);
        KvPeer *to = h->peer->inner;
        pthread_mutex_unlock(&f->lock);
        rc = to ? kvlink_notify(f->inner, to, h->notice, h->len, h->done, h->arg, NULL) : E_PEER;
        if (rc == 0) {
            held_free(h);
            return;
        }
    }
    if (h->status == E_DEADLINE) {
        pthread_mutex_lock(&f->lock);
        h->peer->failed = true;
        pthread_mutex_unlock(&f->lock);
    }
    held_end(h, rc);
}

static void held_start(Held *h, int status, int64_t ms) {
    h->status = status;
    loop_timer_free(h->timer);
    h->timer = loop_timer_new(h->link->conf.loop, ms, 0, on_held, h);
}

static Held *hold(Fault *f, FaultPeer *p, const void *notice, size_t len, KvDoneFn done,
                  void *arg) {
    Held *h = xcalloc(1, sizeof *h + len);
    h->link = f;
    h->peer = p;
    h->done = done;
    h->arg = arg;
    h->len = len;
    if (len)
        memcpy(h->notice, notice, len);
    h->next = f->held;
    f->held = h;
    return h;
}

/* ---- peers ---- */

static void peer_free(FaultPeer *p) {
    for (FaultPeer **at = &p->link->peers; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            break;
        }
    free(p);
}

static int fault_connect(KvLink *base, const KvRemote *remote, KvPeer **out, Err *err) {
    Fault *f = fault_of(base);
    KvPeer *inner;
    int rc = kvlink_connect(f->inner, remote, &inner, err);
    if (rc)
        return rc;
    FaultPeer *p = xcalloc(1, sizeof *p);
    p->link = f;
    p->inner = inner;
    p->next = f->peers;
    f->peers = p;
    pthread_mutex_lock(&f->lock);
    p->silent = takes_next(f, SILENCE);
    pthread_mutex_unlock(&f->lock);
    *out = (KvPeer *)p;
    return 0;
}

/* Held calls of p end soon: with E_CANCELED when it is left, else as those of a broken peer. */
static void end_held(Fault *f, FaultPeer *p, bool left) {
    for (Held *h = f->held; h; h = h->next) {
        if (h->peer != p)
            continue;
        if (left)
            h->peer = NULL;
        if (!h->waiting)
            held_start(h, left ? E_CANCELED : E_PEER, 0);
    }
}

/* The inner peer of a reset connection writes no more. */
static void on_quiet(void *arg, int status) {
    FaultPeer *p = arg;
    (void)status;
    pthread_mutex_lock(&p->link->lock);
    p->closing = false;
    pthread_mutex_unlock(&p->link->lock);
    end_held(p->link, p, p->leaving);
    if (p->leaving)
        peer_free(p);
}

static void fault_disconnect(KvLink *base, KvPeer *peer) {
    Fault *f = fault_of(base);
    FaultPeer *p = peer_of(peer);
    pthread_mutex_lock(&f->lock);
    KvPeer *inner = p->inner;
    p->inner = NULL;
    p->leaving = true;
    bool closing = p->closing;
    pthread_mutex_unlock(&f->lock);
    if (inner)
        kvlink_disconnect(f->inner, inner);
    if (closing)
        return;
    end_held(f, p, true);
    peer_free(p);
}

/* ---- puts ---- */

/* A byte of a put: its value, and where it stands. */
typedef struct Place {
    unsigned char value;
    int seg;
    uint64_t within; /* the segment */
} Place;

static Place place_of(const Fault *f, const KvSeg *seg, uint64_t i) {
    uint64_t bytes;
    int k = 0;
    const unsigned char *pool = kvlink_pool(f->inner, &bytes);
    while (i >= seg[k].bytes)
        i -= seg[k++].bytes;
    return (Place){pool[seg[k].local + i], k, i};
}

/* Chooses a byte to damage, and another of the same put that has a different value. False when all
 * are equal. */
static bool find_two(Fault *f, const KvSeg *seg, int n, Place *victim, Place *other) {
    uint64_t total = 0;
    for (int i = 0; i < n; i++)
        total += seg[i].bytes;
    if (total == 0)
        return false;
    uint64_t first = next_random(f) % total;
    *victim = place_of(f, seg, first);
    for (uint64_t i = 1; i < total; i++) {
        *other = place_of(f, seg, (first + i) % total);
        if (other->value != victim->value)
            return true;
    }
    return false;
}

/* Puts all of seg, but the victim's bytes come from the other's place. No byte is written twice, so
 * order does not matter. */
static int put_corrupt(Fault *f, KvPeer *to, const KvSeg *seg, int n, const Place *victim,
                       const Place *other, Err *err) {
    KvSeg *all = xcalloc((size_t)n + 2, sizeof *all), s = seg[victim->seg];
    uint64_t at = victim->within, wrong = seg[other->seg].local + other->within;
    int m = 0;
    for (int i = 0; i < n; i++)
        if (i != victim->seg)
            all[m++] = seg[i];
    if (at > 0)
        all[m++] = (KvSeg){s.local, s.remote, at};
    all[m++] = (KvSeg){wrong, s.remote + at, 1};
    if (at + 1 < s.bytes)
        all[m++] = (KvSeg){s.local + at + 1, s.remote + at + 1, s.bytes - at - 1};
    int rc = kvlink_put(f->inner, to, all, m, err);
    free(all);
    return rc;
}

/* Breaks the connection. The flush tells when the inner peer is quiet. */
static int reset_peer(Fault *f, FaultPeer *p, Err *err) {
    int rc = kvlink_flush(f->inner, p->inner, on_quiet, p, err);
    if (rc)
        return rc;
    p->failed = p->closing = true;
    kvlink_disconnect(f->inner, p->inner);
    p->inner = NULL;
    return 0;
}

static int put_locked(Fault *f, FaultPeer *p, const KvSeg *seg, int n, Err *err) {
    if (p->failed)
        return err_set(err, E_PEER, "kvlink: the peer has failed (by a fault rule)");
    f->n_puts++;
    if (p->silent)
        return 0;
    if (takes_put(f, FAIL)) {
        p->failed = true;
        return err_set(err, E_PEER, "kvlink: put %ld fails (by a fault rule)", f->n_puts);
    }
    Place victim, other;
    bool corrupt = takes_put(f, CORRUPT), differ = false;
    int rc;
    if (corrupt)
        differ = find_two(f, seg, n, &victim, &other);
    if (takes_put(f, RESET))
        rc = reset_peer(f, p, err);
    else if (differ)
        rc = put_corrupt(f, p->inner, seg, n, &victim, &other, err);
    else
        rc = kvlink_put(f->inner, p->inner, seg, n, err);
    if (rc)
        f->n_puts--; /* refused: when it comes again it is the same put */
    else if (corrupt && !differ && f->rule[CORRUPT].n == f->n_puts)
        f->rule[CORRUPT].n++;
    return rc;
}

static int fault_put(KvLink *base, KvPeer *peer, const KvSeg *seg, int n, Err *err) {
    Fault *f = fault_of(base);
    pthread_mutex_lock(&f->lock);
    int rc = put_locked(f, peer_of(peer), seg, n, err);
    pthread_mutex_unlock(&f->lock);
    return rc;
}

/* ---- notices and flushes ---- */

/* The puts before a delayed notice have ended. */
static void on_delay_begins(void *arg, int status) {
    Held *h = arg;
    h->waiting = false;
    if (!h->peer)
        status = E_CANCELED;
    if (status)
        held_end(h, status);
    else
        held_start(h, 0, h->link->rule[DELAY].n);
}

static void on_twin(void *arg, int status) {
    (void)arg, (void)status;
}

static int delay_notice(Fault *f, FaultPeer *p, const void *bytes, size_t len, KvDoneFn done,
                        void *arg, Err *err) {
    Held *h = hold(f, p, bytes, len, done, arg);
    int rc = kvlink_flush(f->inner, p->inner, on_delay_begins, h, err);
    h->waiting = rc == 0;
    if (rc)
        held_free(h);
    return rc;
}

static int fault_notify(KvLink *base, KvPeer *peer, const void *bytes, size_t len, KvDoneFn done,
                        void *arg, Err *err) {
    Fault *f = fault_of(base);
    FaultPeer *p = peer_of(peer);
    if (len > KVLINK_NOTICE_MAX)
        return err_set(err, E_LIMIT, "kvlink: notice of %zu bytes, at most %d", len,
                       KVLINK_NOTICE_MAX);
    pthread_mutex_lock(&f->lock);
    bool failed = p->failed, live = !failed && !p->silent;
    bool drop = live && takes_next(f, DROP);
    bool twice = live && !drop && takes_next(f, DUPLICATE);
    bool delay = live && !drop && !twice && delays(f);
    pthread_mutex_unlock(&f->lock);
    if (failed)
        return err_set(err, E_PEER, "kvlink: the peer has failed (by a fault rule)");
    if (p->silent) {
        held_start(hold(f, p, NULL, 0, done, arg), E_DEADLINE, f->conf.timeout_ms);
        return 0;
    }
    if (drop)
        return kvlink_flush(f->inner, p->inner, done, arg, err);
    if (delay)
        return delay_notice(f, p, bytes, len, done, arg, err);
    int rc = twice ? kvlink_notify(f->inner, p->inner, bytes, len, on_twin, NULL, err) : 0;
    return rc ? rc : kvlink_notify(f->inner, p->inner, bytes, len, done, arg, err);
}

static int fault_flush(KvLink *base, KvPeer *peer, KvDoneFn done, void *arg, Err *err) {
    Fault *f = fault_of(base);
    FaultPeer *p = peer_of(peer);
    pthread_mutex_lock(&f->lock);
    KvPeer *inner = p->silent ? NULL : p->inner;
    bool failed = p->failed, closing = p->closing;
    pthread_mutex_unlock(&f->lock);
    if (inner)
        return kvlink_flush(f->inner, inner, done, arg, err);
    Held *h = hold(f, p, NULL, 0, done, arg);
    if (closing) /* on_quiet ends it */
        return 0;
    if (failed)
        held_start(h, E_PEER, 0);
    else
        held_start(h, E_DEADLINE, f->conf.timeout_ms);
    return 0;
}

/* ---- life ---- */

static void *fault_pool(KvLink *base, uint64_t *bytes) {
    return kvlink_pool(fault_of(base)->inner, bytes);
}

static void fault_describe(KvLink *base, KvRemote *out) {
    kvlink_describe(fault_of(base)->inner, out);
}

static void fault_close(KvLink *base) {
    Fault *f = fault_of(base);
    kvlink_close(f->inner);
    while (f->held)
        held_free(f->held);
    while (f->peers)
        peer_free(f->peers);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

static const KvLinkOps OPS = {fault_pool, fault_describe, fault_connect, fault_disconnect,
                              fault_put,  fault_notify,   fault_flush,   fault_close};

int kvlink_fault_new(KvLink **out, KvLink **inner, const KvFaultConf *conf, Err *err) {
    Fault *f = xcalloc(1, sizeof *f);
    f->base.ops = &OPS;
    f->conf = *conf;
    f->random = conf->seed;
    int rc = parse_rules(f, conf->rules, err);
    if (rc) {
        free(f);
        return rc;
    }
    f->conf.rules = NULL; /* borrowed for the call */
    pthread_mutex_init(&f->lock, NULL);
    f->inner = *inner;
    *inner = NULL;
    *out = &f->base;
    return 0;
}
