/* See serve.h. The loop thread owns Serve and the list of calls that came as messages; such a Call
 * belongs to the worker between order_push and loop_post. Calls through shared memory are the
 * worker's from begin to end. */
#include "expertd/serve.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/stat.h"
#include "expertd/order.h"
#include "proto/shmring.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    INSIDE = 8,        /* small calls in one opening of a large one */
    TAKES = 4096,      /* from rings before other work: a caller may post without end */
    SLEEP_MS = 1000,   /* the worker looks for work again, in case a bell was lost */
    RATE_WINDOW_S = 5, /* over which the rate of reading weights is an average */
};

typedef struct Call {
    Serve *serve;
    BusPeer *peer; /* loop thread only; NULL when the caller is gone */
    uint64_t id;
    int layer, n, k;
    float *x, *weight, *y;
    int32_t *expert;
    int64_t arrived_us, done_us;
    int64_t compute_us;       /* without that of calls inside of it */
    struct Call *next, *prev; /* in the list of its kind, not yet answered */
    bool in_ring;             /* x and y lie in shared memory */
    ShmCall ring;
} Call;

struct Serve {
    Loop *loop;
    Store *store;
    const Shape *shape;
    int max_rows;
    uint64_t generation;
    Order *order;
    ShmServer *shm; /* NULL: not offered */
    _Atomic bool stop;
    _Atomic bool draining; /* written by the loop thread */
    pthread_t worker;
    Call *open;                    /* loop thread: calls by message not yet answered */
    Call *ring_open;               /* worker: calls in rings not yet answered */
    _Atomic int n_waiting;         /* calls of both kinds not yet answered */
    _Atomic int64_t busy_since_ms; /* worker: begin of the call being computed, 0 between calls */
    int64_t inside_us;             /* worker: of small calls inside of the current large one */
    double rate_bytes, rate_s;     /* worker: read and computed lately, older parts count less */
    int64_t rate_us;               /* worker: when they were brought up to date */
    StatCounter *calls, *refused, *rows, *bytes, *inside;
    StatCounter *by_message, *by_ring;
    StatGauge *rate, *depth;
    StatHist *wait_s, *compute_s, *reply_s, *call_rows, *call_experts;
};

/* ---- calls not yet answered ---- */

/* Each list belongs to one thread; their common number may be asked by any. */
static void list_add(Call **list, Call *c) {
    c->next = *list;
    if (*list)
        (*list)->prev = c;
    *list = c;
    stat_set(c->serve->depth, atomic_fetch_add(&c->serve->n_waiting, 1) + 1);
}

static void list_remove(Call **list, Call *c) {
    if (c->prev)
        c->prev->next = c->next;
    else
        *list = c->next;
    if (c->next)
        c->next->prev = c->prev;
    stat_set(c->serve->depth, atomic_fetch_sub(&c->serve->n_waiting, 1) - 1);
}

/* ---- worker thread ---- */

static void on_done(void *arg);

/* Bytes of weights per second of computation, an average that forgets. */
static void count_rate(Serve *s, uint64_t bytes, int64_t compute_us) {
    int64_t now = clock_now_us();
    double keep = exp(-(double)(now - s->rate_us) * 1e-6 / RATE_WINDOW_S);
    s->rate_us = now;
    s->rate_bytes = s->rate_bytes * keep + (double)bytes;
    s->rate_s = s->rate_s * keep + (double)compute_us * 1e-6;
    if (s->rate_s > 0)
        stat_set(s->rate, s->rate_bytes / s->rate_s);
}

static void on_opening(void *arg);
static void take_ring_calls(Serve *s);

static void ring_call_free(Call *c) {
    list_remove(&c->serve->ring_open, c);
    free(c->expert);
    free(c);
}

static void compute(Serve *s, Call *c, void (*between)(void *arg)) {
    int64_t begin = clock_now_us(), inside_before = s->inside_us;
    StoreWork work =
        store_compute(s->store, c->layer, c->n, c->k, c->x, c->expert, c->weight, c->y, between, s);
    c->done_us = clock_now_us();
    c->compute_us = c->done_us - begin - (s->inside_us - inside_before);
    stat_observe(s->wait_s, (double)(begin - c->arrived_us) * 1e-6);
    stat_observe(s->compute_s, (double)c->compute_us * 1e-6);
    stat_observe(s->call_rows, c->n);
    stat_observe(s->call_experts, work.n_experts);
    stat_add(s->bytes, (double)work.bytes);
    count_rate(s, work.bytes, c->compute_us);
    if (c->in_ring) {
        shmserver_answer(s->shm, &c->ring, 0, NULL);
        stat_observe(s->reply_s, (double)(clock_now_us() - c->done_us) * 1e-6);
        ring_call_free(c);
    } else {
        CHECK(loop_post(s->loop, on_done, c)); /* at most SERVE_QUEUE and one round of the loop */
    }
}

static void work(Serve *s, Call *c) {
    if (c->in_ring && shmserver_gone(s->shm, &c->ring)) { /* nobody reads it */
        shmserver_answer(s->shm, &c->ring, BATON__FAIL_CODE__FAIL_CANCELED, "caller gone");
        ring_call_free(c);
        return;
    }
    compute(s, c, c->n > STORE_SMALL_ROWS ? on_opening : NULL);
}

/* Between two parts of a large call. */
static void on_opening(void *arg) {
    Serve *s = arg;
    int64_t begin = clock_now_us();
    Call *c = NULL;
    if (s->shm)
        take_ring_calls(s);
    for (int i = 0; i < INSIDE && (c = order_pop_small(s->order)); i++) {
        work(s, c);
        stat_add(s->inside, 1);
    }
    s->inside_us += clock_now_us() - begin;
}

static void *worker_main(void *arg) {
    Serve *s = arg;
    Err err = {0};
    if (store_pin_caller(s->store, &err))
        LOG_WARN("the worker thread stays unpinned: %s", err.text);
    while (!atomic_load(&s->stop)) {
        uint32_t bell = s->shm ? shmserver_bell(s->shm) : 0; /* before it looks for work */
        if (s->shm)
            take_ring_calls(s);
        Call *c = order_pop(s->order, s->shm ? 0 : -1);
        if (c) {
            atomic_store(&s->busy_since_ms, clock_now_ms());
            work(s, c);
            atomic_store(&s->busy_since_ms, 0);
        } else if (s->shm && !atomic_load(&s->stop)) {
            shmserver_sleep(s->shm, bell, SLEEP_MS);
        }
    }
    return NULL;
}

/* ---- loop thread ---- */

static void call_free(Call *c) {
    Serve *s = c->serve;
    list_remove(&s->open, c);
    free(c->x);
    free(c);
}

static void reply(Serve *s, BusPeer *peer, Baton__ExpertReply *r, const void *y, size_t bytes) {
    Err err = {0};
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_EXPERT_REPLY;
    env.expert_reply = r;
    r->generation = s->generation;
    if (bus_send(peer, &env, y, bytes, &err))
        LOG_WARN("call %llu: cannot answer: %s", (unsigned long long)r->call, err.text);
}

static void on_done(void *arg) {
    Call *c = arg;
    Serve *s = c->serve;
    if (c->peer) {
        Baton__ExpertReply r = BATON__EXPERT_REPLY__INIT;
        r.call = c->id;
        r.compute_us = (uint32_t)c->compute_us;
        reply(s, c->peer, &r, c->y, (size_t)c->n * (size_t)s->shape->hidden * sizeof(float));
        stat_observe(s->reply_s, (double)(clock_now_us() - c->done_us) * 1e-6);
    }
    call_free(c);
}

static void refuse(Serve *s, BusPeer *peer, uint64_t call, Baton__FailCode code,
                   const char *reason) {
    Baton__ExpertReply r = BATON__EXPERT_REPLY__INIT;
    r.call = call;
    r.code = code;
    r.reason = (char *)reason;
    stat_add(s->refused, 1);
    LOG_WARN("call %llu from %s: %s", (unsigned long long)call, bus_peer_hello(peer)->name, reason);
    reply(s, peer, &r, NULL, 0);
}

/* What is wrong with the numbers of a call, or NULL. */
static const char *check_numbers(const Serve *s, uint32_t layer, uint32_t n_rows, uint32_t k) {
    if (layer >= (uint32_t)(s->shape->n_layers + s->shape->n_mtp) || s->shape->layer_dense[layer])
        return "layer without experts";
    if (n_rows < 1 || n_rows > (uint32_t)s->max_rows)
        return "n_rows outside 1..max_rows";
    if (k < 1 || k > SHAPE_MAX_TOPK_EXPERTS)
        return "k out of range";
    return NULL;
}

static size_t blob_bytes(const Serve *s, const Baton__ExpertCall *c) {
    return (size_t)c->n_rows * ((size_t)s->shape->hidden * sizeof(float) +
                                (size_t)c->k * (sizeof(int32_t) + sizeof(float)));
}

/* What is wrong with a call, or NULL. */
static const char *check(const Serve *s, const Baton__ExpertCall *c, const void *blob,
                         size_t blob_len) {
    if (c->generation != s->generation)
        return "generation of another process";
    const char *wrong = check_numbers(s, c->layer, c->n_rows, c->k);
    if (wrong)
        return wrong;
    if (!blob || blob_len != blob_bytes(s, c))
        return "activations of another size than n_rows and k say";
    return NULL;
}

/* What is wrong with the ids of a call, or NULL. */
static const char *check_ids(const Serve *s, const Call *c) {
    for (int r = 0; r < c->n; r++) {
        const int32_t *id = c->expert + (size_t)r * (size_t)c->k;
        for (int i = 0; i < c->k; i++) {
            if (id[i] == -1)
                continue;
            if (!store_holds(s->store, c->layer, id[i]))
                return "an expert that this daemon does not hold";
            for (int j = 0; j < i; j++)
                if (id[j] == id[i])
                    return "an expert twice in one row";
        }
    }
    return NULL;
}

/* Why a call that makes sense is not taken all the same, or NULL. */
static const char *enqueue(Serve *s, Call *c) {
    if (atomic_load(&s->draining))
        return "draining";
    return order_push(s->order, c, c->n <= STORE_SMALL_ROWS) ? NULL : "too many calls wait";
}

static void count_call(Serve *s, const Call *c, StatCounter *path) {
    stat_add(s->calls, 1);
    stat_add(s->rows, c->n);
    stat_add(path, 1);
}

static Call *call_new(Serve *s, BusPeer *peer, const Baton__ExpertCall *m, const void *blob,
                      size_t blob_len) {
    size_t nx = (size_t)m->n_rows * (size_t)s->shape->hidden, nk = (size_t)m->n_rows * m->k;
    Call *c = xcalloc(1, sizeof *c);
    *c = (Call){.serve = s,
                .peer = peer,
                .id = m->call,
                .layer = (int)m->layer,
                .n = (int)m->n_rows,
                .k = (int)m->k,
                .arrived_us = clock_now_us()};
    c->x = xmalloc(blob_len + nx * sizeof(float)); /* the frame, then room for y */
    memcpy(c->x, blob, blob_len);
    c->expert = (int32_t *)(c->x + nx);
    c->weight = (float *)(c->expert + nk);
    c->y = c->weight + nk;
    list_add(&s->open, c);
    return c;
}

void serve_on_message(Serve *s, BusPeer *peer, const Baton__Envelope *env, const void *blob,
                      size_t blob_len) {
    if (env->body_case != BATON__ENVELOPE__BODY_EXPERT_CALL)
        return;
    const Baton__ExpertCall *m = env->expert_call;
    const char *wrong = check(s, m, blob, blob_len);
    if (wrong) {
        refuse(s, peer, m->call, BATON__FAIL_CODE__FAIL_INVALID, wrong);
        return;
    }
    Call *c = call_new(s, peer, m, blob, blob_len);
    if ((wrong = check_ids(s, c))) {
        refuse(s, peer, m->call, BATON__FAIL_CODE__FAIL_INVALID, wrong);
        call_free(c);
    } else if ((wrong = enqueue(s, c))) {
        refuse(s, peer, m->call, BATON__FAIL_CODE__FAIL_BUSY, wrong);
        call_free(c);
    } else {
        count_call(s, c, s->by_message);
        if (s->shm)
            shmserver_ring(s->shm);
    }
}

/* ---- worker thread: calls in shared memory ---- */

static const char *check_room(const Serve *s, const ShmCall *r) {
    uint64_t n = r->head.b, k = r->head.c, row = (uint64_t)s->shape->hidden * sizeof(float);
    if (n * (row + k * (sizeof(int32_t) + sizeof(float))) > r->in_bytes || n * row > r->out_bytes)
        return "more rows than its slot has room for";
    return NULL;
}

/* Ids and weights are copied before they are checked: what lies in the slot may change. */
static Call *ring_call(Serve *s, const ShmCall *r) {
    size_t nx = (size_t)r->head.b * (size_t)s->shape->hidden,
           nk = (size_t)r->head.b * (size_t)r->head.c;
    Call *c = xcalloc(1, sizeof *c);
    *c = (Call){.serve = s,
                .layer = (int)r->head.a,
                .n = (int)r->head.b,
                .k = (int)r->head.c,
                .x = (float *)r->in,
                .y = r->out,
                .arrived_us = clock_now_us(),
                .in_ring = true,
                .ring = *r};
    c->expert = xmalloc(nk * (sizeof(int32_t) + sizeof(float)));
    memcpy(c->expert, c->x + nx, nk * (sizeof(int32_t) + sizeof(float)));
    c->weight = (float *)(c->expert + nk);
    return c;
}

static void take_ring_calls(Serve *s) {
    ShmCall r;
    for (int i = 0; i < TAKES && shmserver_take(s->shm, &r); i++) {
        Call *c = NULL;
        uint32_t code = BATON__FAIL_CODE__FAIL_INVALID;
        const char *wrong = check_numbers(s, r.head.a, r.head.b, r.head.c);
        if (!wrong)
            wrong = check_room(s, &r);
        if (!wrong) {
            c = ring_call(s, &r);
            wrong = check_ids(s, c);
        }
        if (!wrong && (wrong = enqueue(s, c)))
            code = BATON__FAIL_CODE__FAIL_BUSY;
        if (wrong) {
            LOG_WARN("call in shared memory: %s", wrong);
            stat_add(s->refused, 1);
            shmserver_answer(s->shm, &r, code, wrong);
            if (c)
                free(c->expert);
            free(c);
            continue;
        }
        list_add(&s->ring_open, c);
        count_call(s, c, s->by_ring);
    }
}

/* ---- loop thread ---- */

void serve_on_gone(Serve *s, BusPeer *peer) {
    for (Call *c = s->open; c; c = c->next)
        if (c->peer == peer)
            c->peer = NULL;
}

void serve_drain(Serve *s) {
    atomic_store(&s->draining, true);
}

int serve_n_waiting(const Serve *s) {
    return atomic_load(&s->n_waiting);
}

bool serve_alive(const Serve *s) {
    int64_t since = atomic_load(&s->busy_since_ms);
    return since == 0 || clock_now_ms() - since < SERVE_STUCK_MS;
}

static void open_stats(Serve *s) {
    static const double powers[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    s->calls = stat_counter("baton_expert_calls_total", "", "Expert calls accepted.");
    s->refused = stat_counter("baton_expert_refused_total", "", "Expert calls refused.");
    s->by_message = stat_counter("baton_expert_path_calls_total", "path=\"zmq\"",
                                 "Accepted calls by the way they came.");
    s->by_ring = stat_counter("baton_expert_path_calls_total", "path=\"shm\"",
                              "Accepted calls by the way they came.");
    s->inside = stat_counter("baton_expert_inside_total", "",
                             "Small calls computed in the middle of a large one.");
    s->rows = stat_counter("baton_expert_rows_total", "", "Tokens in accepted expert calls.");
    s->wait_s = stat_hist_seconds("baton_expert_wait_seconds", "",
                                  "From the arrival of a call to the begin of its computation.");
    s->compute_s = stat_hist_seconds("baton_expert_compute_seconds", "", "Computation of a call.");
    s->reply_s = stat_hist_seconds("baton_expert_reply_seconds", "",
                                   "From the end of a call's computation to its sent answer.");
    s->call_rows = stat_hist("baton_expert_call_rows", "", "Tokens of a computed call.", powers,
                             (int)(sizeof powers / sizeof *powers));
    s->call_experts =
        stat_hist("baton_expert_call_experts", "", "Distinct experts that a call read.", powers,
                  (int)(sizeof powers / sizeof *powers));
    s->bytes = stat_counter("baton_expert_weight_bytes_total", "",
                            "Bytes of weights that computed calls read.");
    s->rate = stat_gauge("baton_expert_weight_bytes_per_second", "",
                         "Bytes of weights per second of computation, over the last seconds.");
    s->depth = stat_gauge("baton_expert_waiting", "", "Calls accepted and not yet answered.");
}

static int open_shm(Serve *s, const char *name, Err *err) {
    uint64_t row = (uint64_t)s->shape->hidden * sizeof(float), n = (uint64_t)s->max_rows,
             places = SHAPE_MAX_TOPK_EXPERTS * (sizeof(int32_t) + sizeof(float));
    ShmGeom most = {.generation = s->generation,
                    .in_bytes = (n * (row + places) + 63) / 64 * 64,
                    .out_bytes = (n * row + 63) / 64 * 64};
    return shmserver_open(&s->shm, name, &most, err);
}

int serve_open(Serve **out, Loop *loop, Store *store, const Shape *shape, int max_rows,
               uint64_t generation, const char *shm_name, Err *err) {
    Serve *s = xcalloc(1, sizeof *s);
    *s = (Serve){.loop = loop,
                 .store = store,
                 .shape = shape,
                 .max_rows = max_rows,
                 .generation = generation};
    s->order = order_new(SERVE_QUEUE);
    open_stats(s);
    int rc = shm_name ? open_shm(s, shm_name, err) : 0;
    if (!rc) {
        int why = pthread_create(&s->worker, NULL, worker_main, s);
        if (why)
            rc = err_set(err, E_IO, "cannot start the worker thread: %s", strerror(why));
    }
    if (rc) {
        shmserver_close(s->shm);
        order_free(s->order);
        free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void serve_close(Serve *s) {
    if (!s)
        return;
    atomic_store(&s->stop, true);
    order_close(s->order); /* what waits in it is freed through the lists below */
    if (s->shm)
        shmserver_ring(s->shm);
    pthread_join(s->worker, NULL);
    while (s->open)
        call_free(s->open);
    while (s->ring_open)
        ring_call_free(s->ring_open);
    shmserver_close(s->shm);
    order_free(s->order);
    free(s);
}
