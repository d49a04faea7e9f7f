/* See expertlink.h. Everything belongs to the calling thread. */
#include "proto/expertlink.h"

#include "base/clock.h"
#include "proto/bus.h"
#include "proto/bus_frame.h"
#include "proto/expertlink_int.h"
#include "proto/hello.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RING_WAIT_MS = 2 }; /* between two looks at whether a daemon lives */

/* ---- connections ---- */

static void disconnect(Daemon *d, bool last_word) {
    if (d->monitor)
        bus_wire_unmonitor(d->socket, d->monitor);
    bus_wire_close(d->socket, last_word);
    d->socket = d->monitor = NULL;
    hello_free(d->hello);
    d->hello = NULL;
    d->state = STATE_CLOSED;
    d->ring_tried = false;
    expertlink_ring_drop(d);
    d->n_open = d->n_calls = 0;
}

/* Ends the connection and says whose it was. */
static int fail(Daemon *d, int code, const char *reason, Err *err) {
    err_set(err, code, "expertd at %s: %s", d->endpoint, reason);
    disconnect(d, false);
    return code;
}

static int send_envelope(ExpertLink *l, Daemon *d, Baton__Envelope__BodyCase body,
                         ProtobufCMessage *m, const void *blob, size_t blob_len, Err *err) {
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = body;
    env.hello = (Baton__Hello *)m; /* every member of the union is a pointer to a message */
    Err cause = {0};
    int rc = bus_wire_send(d->socket, &l->wire, NULL, 0, &env, blob, blob_len, &cause);
    return rc ? fail(d, E_PEER, cause.text, err) : 0;
}

static int ping(ExpertLink *l, Daemon *d, uint64_t seq, Err *err) {
    Baton__Ping p = BATON__PING__INIT;
    p.seq = seq;
    return send_envelope(l, d, BATON__ENVELOPE__BODY_PING, &p.base, NULL, 0, err);
}

static int connect_daemon(ExpertLink *l, Daemon *d, Err *err) {
    Err cause = {0};
    d->socket = bus_wire_open(l->context, ZMQ_DEALER, &l->wire, &cause);
    if (!d->socket)
        return fail(d, E_IO, cause.text, err);
    d->monitor = bus_wire_monitor(l->context, d->socket, ZMQ_EVENT_CLOSED | ZMQ_EVENT_DISCONNECTED);
    if (!d->monitor)
        return fail(d, E_IO, "cannot monitor its socket", err);
    if (zmq_connect(d->socket, d->endpoint) != 0)
        return fail(d, E_INVAL, zmq_strerror(errno), err);
    d->state = STATE_GREETING;
    return send_envelope(l, d, BATON__ENVELOPE__BODY_HELLO, &l->self->base, NULL, 0, err);
}

/* ---- what comes in ---- */

static int on_hello(ExpertLink *l, Daemon *d, const Baton__Hello *h, Err *err) {
    Err why = {0};
    int rc = hello_check(l->self, h, &why);
    if (!rc && h->role != BATON__ROLE__ROLE_EXPERTD)
        rc = err_set(&why, E_MISMATCH, "%s is no expertd", h->name);
    if (!rc && (h->hidden < 1 || h->hidden > SIZE_LIMIT))
        rc = err_set(&why, E_MISMATCH, "%s has hidden %u", h->name, h->hidden);
    if (!rc && (h->max_rows < 1 || h->max_rows > SIZE_LIMIT))
        rc = err_set(&why, E_MISMATCH, "%s has max_rows %u", h->name, h->max_rows);
    if (rc) {
        bus_wire_send_refuse(d->socket, &l->wire, NULL, 0, why.text);
        err_set(err, E_MISMATCH, "expertd at %s: %.400s", d->endpoint, why.text);
        disconnect(d, true);
        return E_MISMATCH;
    }
    d->hello = hello_copy(h);
    d->state = STATE_GREETED;
    return ping(l, d, ++l->ping_seq, err);
}

static void on_pong(Daemon *d, const Baton__Pong *p) {
    if (d->state == STATE_GREETED)
        d->state = STATE_READY;
    if (p->seq == 0)
        return; /* sent unasked */
    d->pong_seq = p->seq;
    d->pong_ready = p->ready;
    bus_frame_text(d->pong_reason, sizeof d->pong_reason, p->reason);
}

/* Answers to calls that were given up, or meant for another process, are passed over. */
static int on_reply(ExpertLink *l, Daemon *d, const Baton__ExpertReply *r, const void *blob,
                    size_t blob_len, Err *err) {
    uint64_t i = r->call - d->first_call;
    if (r->generation != d->hello->generation || i >= (uint64_t)d->n_calls || d->answered[i])
        return 0;
    if (r->code != BATON__FAIL_CODE__FAIL_NONE) {
        char reason[BUS_REASON_MAX + 1];
        bus_frame_text(reason, sizeof reason, r->reason);
        return err_set(err, E_PEER, "expertd at %s: refuses the call: %.300s", d->endpoint, reason);
    }
    int first = (int)i * (int)d->hello->max_rows, rows = l->n_rows - first;
    if (rows > (int)d->hello->max_rows)
        rows = (int)d->hello->max_rows;
    size_t row_bytes = (size_t)l->hidden * sizeof(float);
    if (!blob || blob_len != (size_t)rows * row_bytes)
        return fail(d, E_PEER, "an answer of another size than asked for", err);
    memcpy(d->y + (size_t)first * (size_t)l->hidden, blob, blob_len);
    d->answered[i] = true;
    d->n_open--;
    return 0;
}

static int on_envelope(ExpertLink *l, Daemon *d, const Baton__Envelope *env, const void *blob,
                       size_t blob_len, Err *err) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_REFUSE: {
        char reason[BUS_REASON_MAX + 1];
        bus_frame_text(reason, sizeof reason, env->refuse->reason);
        return fail(d, E_PEER, reason, err);
    }
    case BATON__ENVELOPE__BODY_HELLO:
        if (d->state != STATE_GREETING)
            return fail(d, E_PEER, "a second hello on one connection", err);
        return on_hello(l, d, env->hello, err);
    case BATON__ENVELOPE__BODY_PING:
        return 0;
    case BATON__ENVELOPE__BODY_PONG:
        on_pong(d, env->pong);
        return 0;
    case BATON__ENVELOPE__BODY_EXPERT_REPLY:
        if (d->state == STATE_READY)
            return on_reply(l, d, env->expert_reply, blob, blob_len, err);
        return fail(d, E_PEER, "an answer before the hello", err);
    default:
        return fail(d, E_PEER, "a message that is not for callers of experts", err);
    }
}

/* Takes everything that has come from one daemon; first what it said, then whether it is gone. */
static int drain(ExpertLink *l, Daemon *d, Err *err) {
    int event = bus_wire_event(d->monitor);
    while (bus_wire_recv(d->socket, false, &l->msg)) {
        Err why = {0};
        size_t blob_len;
        const void *blob = bus_wire_blob(&l->msg, &blob_len);
        Baton__Envelope *env = bus_wire_unpack(&l->msg, &why);
        int rc = env ? on_envelope(l, d, env, blob, blob_len, err) : fail(d, E_PEER, why.text, err);
        bus_frame_free(env);
        bus_wire_release(&l->msg);
        if (rc)
            return rc;
    }
    if (event)
        return fail(
            d, E_PEER,
            event == ZMQ_EVENT_CLOSED ? "no connection can be made" : "its connection closed", err);
    return 0;
}

/* ---- waiting ---- */

static void look_after_rings(ExpertLink *l, int *rc, Err *err) {
    for (int i = 0; i < l->n && *rc == 0; i++)
        if (l->daemon[i].on_ring && l->daemon[i].n_open > 0)
            *rc = drain(l, &l->daemon[i], err);
}

/* Waits in the first ring that has a call under way, if there is one. While it is late, looks after
 * the daemons of all rings: a ring does not tell that a process has died. False when no ring has
 * any. */
static bool wait_in_ring(ExpertLink *l, int64_t left_ms, int *rc, Err *err) {
    for (int i = 0; i < l->n; i++) {
        Daemon *d = &l->daemon[i];
        if (!d->on_ring || d->n_open == 0)
            continue;
        expertlink_ring_wait(l, d, left_ms < RING_WAIT_MS ? left_ms * 1000 : RING_WAIT_MS * 1000);
        *rc = expertlink_ring_take(l, d, err);
        if (d->n_open > 0)
            look_after_rings(l, rc, err);
        return true;
    }
    return false;
}

typedef bool (*DoneFn)(const ExpertLink *l, const Daemon *d);

static bool is_ready(const ExpertLink *l, const Daemon *d) {
    (void)l;
    return d->state == STATE_READY;
}

static bool is_answered(const ExpertLink *l, const Daemon *d) {
    (void)l;
    return d->n_open == 0;
}

static bool is_probed(const ExpertLink *l, const Daemon *d) {
    return d->pong_seq == l->ping_seq;
}

/* Takes in what comes until done holds for every daemon. Daemons that are late lose their
 * connection: what they send afterwards belongs to nothing. */
static int wait_all(ExpertLink *l, DoneFn done, int64_t give_up_ms, Err *err) {
    for (;;) {
        zmq_pollitem_t item[2 * EXPERTLINK_MAX];
        Daemon *late = NULL;
        for (int i = 0; i < l->n; i++) {
            Daemon *d = &l->daemon[i];
            int rc = d->on_ring ? expertlink_ring_take(l, d, err) : drain(l, d, err);
            if (rc)
                return rc;
            if (!done(l, d))
                late = d;
            item[2 * i] = (zmq_pollitem_t){.socket = d->socket, .events = ZMQ_POLLIN};
            item[2 * i + 1] = (zmq_pollitem_t){.socket = d->monitor, .events = ZMQ_POLLIN};
        }
        if (!late)
            return 0;
        int64_t left = give_up_ms - clock_now_ms();
        if (left <= 0)
            return fail(late, E_DEADLINE, "no answer in time", err);
        int ring_rc = 0;
        if (wait_in_ring(l, left, &ring_rc, err)) {
            if (ring_rc)
                return ring_rc;
            continue;
        }
        if (zmq_poll(item, 2 * l->n, left) < 0 && errno != EINTR)
            return err_set(err, E_IO, "cannot wait for expertd: %s", zmq_strerror(errno));
    }
}

/* Answers must not depend on when a process was started: one that comes back computes as before. */
static int check_alike(const ExpertLink *l, const Daemon *d, Err *err) {
    const Baton__Hello *h = d->hello, *first = l->daemon[0].hello;
    bool again = l->hidden > 0;
    const char *format = again ? l->format : first->expert_format;
    uint64_t stored = again ? l->stored : first->expert_hash;
    if (strcmp(h->expert_format, format) != 0)
        return err_set(
            err, E_MISMATCH, "expertd at %s: computes experts as %s, %s %s: answers would differ",
            d->endpoint, h->expert_format, again ? "before it was" : "another one as", format);
    if (h->expert_hash != stored)
        return err_set(err, E_MISMATCH,
                       "expertd at %s: has other expert files (%016llx) than %s (%016llx), though "
                       "all are %s: answers would differ",
                       d->endpoint, (unsigned long long)h->expert_hash,
                       again ? "before" : "another one", (unsigned long long)stored, format);
    return 0;
}

/* All daemons together are the shards 0..n-1 of one size, and compute alike. */
static int check_shards(ExpertLink *l, Err *err) {
    int owner[EXPERTLINK_MAX];
    memset(owner, -1, sizeof owner);
    for (int i = 0; i < l->n; i++) {
        Daemon *d = &l->daemon[i];
        const Baton__Hello *h = d->hello;
        if (h->n_shards != (uint32_t)l->n)
            return err_set(err, E_MISMATCH, "expertd at %s: is one of %u shards, %d are configured",
                           d->endpoint, h->n_shards, l->n);
        if (owner[h->shard] >= 0)
            return err_set(err, E_MISMATCH, "expertd at %s: holds shard %u, as does the one at %s",
                           d->endpoint, h->shard, l->daemon[owner[h->shard]].endpoint);
        if (h->hidden != l->daemon[0].hello->hidden)
            return err_set(err, E_MISMATCH, "expertd at %s: has hidden %u, the one at %s has %u",
                           d->endpoint, h->hidden, l->daemon[0].endpoint,
                           l->daemon[0].hello->hidden);
        int rc = check_alike(l, d, err);
        if (rc)
            return rc;
        owner[h->shard] = i;
    }
    if (l->hidden && l->hidden != (int)l->daemon[0].hello->hidden)
        return err_set(err, E_MISMATCH, "expertd at %s: has hidden %u, it was %d before",
                       l->daemon[0].endpoint, l->daemon[0].hello->hidden, l->hidden);
    memcpy(l->by_shard, owner, sizeof owner);
    l->hidden = (int)l->daemon[0].hello->hidden;
    l->stored = l->daemon[0].hello->expert_hash;
    snprintf(l->format, sizeof l->format, "%s", l->daemon[0].hello->expert_format);
    return 0;
}

static void disconnect_all(ExpertLink *l) {
    for (int i = 0; i < l->n; i++)
        disconnect(&l->daemon[i], false);
}

/* Connects what is not connected, at the start and after failures. */
static int connect_all(ExpertLink *l, int64_t give_up_ms, Err *err) {
    bool any = false;
    for (int i = 0; i < l->n; i++) {
        Daemon *d = &l->daemon[i];
        /* A connection that ended meanwhile is noticed here rather than by a lost call. */
        if (d->state != STATE_CLOSED)
            drain(l, d, NULL);
        int rc = d->state == STATE_CLOSED ? connect_daemon(l, d, err) : 0;
        if (rc)
            return rc;
        any |= d->state != STATE_READY;
    }
    if (!any)
        return 0;
    int rc = wait_all(l, is_ready, give_up_ms, err);
    if (rc)
        return rc;
    if ((rc = check_shards(l, err)))
        disconnect_all(l);
    return rc;
}

/* ---- calls ---- */

static bool any_remote(const int32_t *expert, int n) {
    for (int i = 0; i < n; i++)
        if (expert[i] >= 0)
            return true;
    return false;
}

static void *append(void *at, const void *from, size_t bytes) {
    memcpy(at, from, bytes);
    return (uint8_t *)at + bytes;
}

void *expertlink_payload(const ExpertLink *l, const ExpertRows *r, int first, int n, void *to) {
    size_t hidden = (size_t)l->hidden, at = (size_t)first, k = (size_t)r->k, rows = (size_t)n;
    to = append(to, r->x + at * hidden, rows * hidden * sizeof *r->x);
    to = append(to, r->expert + at * k, rows * k * sizeof *r->expert);
    return append(to, r->weight + at * k, rows * k * sizeof *r->weight);
}

/* One call as a message. */
static int send_call(ExpertLink *l, Daemon *d, int i, const ExpertRows *r, int first, int n,
                     Err *err) {
    uint8_t *end = expertlink_payload(l, r, first, n, l->blob);
    Baton__ExpertCall call = BATON__EXPERT_CALL__INIT;
    call.call = d->first_call + (uint64_t)i;
    call.generation = d->hello->generation;
    call.layer = (uint32_t)r->layer;
    call.n_rows = (uint32_t)n;
    call.k = (uint32_t)r->k;
    return send_envelope(l, d, BATON__ENVELOPE__BODY_EXPERT_CALL, &call.base, l->blob,
                         (size_t)(end - l->blob), err);
}

static int post_to(ExpertLink *l, Daemon *d, const ExpertRows *r, Err *err) {
    int max = (int)d->hello->max_rows < r->n ? (int)d->hello->max_rows : r->n;
    int n_calls = (r->n + max - 1) / max;
    if (n_calls > EXPERTLINK_CALLS_MAX)
        return err_set(err, E_LIMIT, "expertd at %s: takes %d rows at once, %d are too many",
                       d->endpoint, max, r->n);
    int rc = expertlink_ring_ready(l, d, r->n, err);
    if (rc)
        return rc;
    if (!d->ring && d->y_rows < r->n) {
        d->y = xrealloc(d->y, (size_t)r->n * (size_t)l->hidden * sizeof *d->y);
        d->y_rows = r->n;
    }
    d->first_call = l->next_call;
    l->next_call += (uint64_t)n_calls;
    d->n_calls = d->n_open = n_calls;
    d->on_ring = d->ring != NULL;
    d->posted_us = clock_now_us();
    memset(d->answered, 0, sizeof d->answered);
    for (int i = 0; i < n_calls && !rc; i++) {
        int first = i * max, n = r->n - first < max ? r->n - first : max;
        if (d->on_ring)
            expertlink_ring_post(l, d, i, r, first, n);
        else
            rc = send_call(l, d, i, r, first, n, err);
    }
    return rc;
}

/* Answers that still come belong to nothing. */
static void end_post(ExpertLink *l) {
    for (int i = 0; i < l->n; i++) {
        Daemon *d = &l->daemon[i];
        if (d->on_ring && d->n_open > 0)
            expertlink_ring_drop(d); /* its slots are the daemon's until they are done */
        d->n_calls = d->n_open = 0;
        d->on_ring = false;
    }
    l->n_rows = -1;
}

static int post_rows(ExpertLink *l, const ExpertRows *r, Err *err) {
    if (r->n < 1 || r->n > SIZE_LIMIT || r->k < 1 || r->k > EXPERTLINK_K_MAX || r->layer < 0)
        return err_set(err, E_INVAL, "an expert call of %d rows, %d places, layer %d", r->n, r->k,
                       r->layer);
    l->n_rows = r->n;
    if (!any_remote(r->expert, r->n * r->k))
        return 0;
    l->give_up_ms = clock_now_ms() + l->deadline_ms;
    int rc = connect_all(l, l->give_up_ms, err);
    if (rc)
        return rc;
    size_t bytes = (size_t)r->n * ((size_t)l->hidden + 2 * (size_t)r->k) * sizeof(float);
    if (l->blob_bytes < bytes) {
        l->blob = xrealloc(l->blob, bytes);
        l->blob_bytes = bytes;
    }
    for (int i = 0; i < l->n && !rc; i++)
        rc = post_to(l, &l->daemon[l->by_shard[i]], r, err);
    return rc;
}

int expertlink_post(void *link, int layer, int n_rows, int k, const float *x, const int32_t *expert,
                    const float *weight, Err *err) {
    ExpertLink *l = link;
    ExpertRows r = {layer, n_rows, k, x, expert, weight};
    l->post_err = (Err){0};
    end_post(l);
    int rc = post_rows(l, &r, &l->post_err);
    if (rc)
        end_post(l);
    if (rc && err)
        *err = l->post_err;
    return rc;
}

/* sum[n_rows, hidden] += one daemon's partial sums. */
static void add_answers(const ExpertLink *l, const Daemon *d, float *sum) {
    size_t n = (size_t)l->n_rows * (size_t)l->hidden,
           each = (size_t)d->hello->max_rows * (size_t)l->hidden;
    for (int i = 0; i < d->n_calls; i++) {
        size_t first = (size_t)i * each, end = first + each < n ? first + each : n;
        const float *y = d->on_ring ? expertlink_ring_answer(d, i) : d->y + first;
        for (size_t k = first; k < end; k++)
            sum[k] += y[k - first];
    }
}

int expertlink_wait(void *link, float *sum, Err *err) {
    ExpertLink *l = link;
    if (l->n_rows < 0) {
        if (!l->post_err.code)
            return err_set(err, E_INVAL, "no expert call is under way");
        if (err)
            *err = l->post_err;
        return l->post_err.code;
    }
    bool sent = l->daemon[0].n_calls > 0;
    int rc = sent ? wait_all(l, is_answered, l->give_up_ms, err) : 0;
    for (int s = 0; s < l->n && sent && !rc; s++)
        add_answers(l, &l->daemon[l->by_shard[s]], sum);
    end_post(l);
    return rc;
}

int expertlink_probe(ExpertLink *l, Err *err) {
    int64_t give_up_ms = clock_now_ms() + l->deadline_ms;
    int rc = connect_all(l, give_up_ms, err);
    uint64_t seq = ++l->ping_seq;
    for (int i = 0; i < l->n && !rc; i++)
        rc = ping(l, &l->daemon[i], seq, err);
    if (rc || (rc = wait_all(l, is_probed, give_up_ms, err)))
        return rc;
    for (int i = 0; i < l->n; i++)
        if (!l->daemon[i].pong_ready)
            return err_set(err, E_PEER, "expertd at %s: not ready: %.300s", l->daemon[i].endpoint,
                           l->daemon[i].pong_reason);
    for (int i = 0; i < l->n && l->reserve_rows > 0 && !rc; i++)
        rc = expertlink_ring_ready(l, &l->daemon[i], 1, err);
    return rc;
}

/* ---- open, close ---- */

int expertlink_open(ExpertLink **out, const char *const *endpoints, int n, const Baton__Hello *self,
                    int64_t deadline_ms, Err *err) {
    if (n < 1 || n > EXPERTLINK_MAX || deadline_ms < 1)
        return err_set(err, E_INVAL, "%d expertd endpoints, deadline %lld ms", n,
                       (long long)deadline_ms);
    ExpertLink *l = xcalloc(1, sizeof *l);
    BusConf conf = bus_conf_default();
    l->wire = (BusWireConf){conf.max_queued, conf.max_frame_bytes};
    l->self = hello_copy(self);
    l->context = bus_wire_context_get();
    l->deadline_ms = deadline_ms;
    l->n = n;
    l->n_rows = -1;
    l->next_call = 1;
    l->spin_us = EXPERTLINK_SPIN_US;
    for (int i = 0; i < n; i++)
        l->daemon[i].endpoint = xstrdup(endpoints[i]);
    int rc = connect_all(l, clock_now_ms() + deadline_ms, err);
    if (rc) {
        expertlink_close(l);
        return rc;
    }
    *out = l;
    return 0;
}

void expertlink_close(ExpertLink *l) {
    if (!l)
        return;
    for (int i = 0; i < l->n; i++) {
        disconnect(&l->daemon[i], false);
        free(l->daemon[i].endpoint);
        free(l->daemon[i].y);
    }
    hello_free(l->self);
    free(l->blob);
    bus_wire_context_put();
    free(l);
}

void expertlink_transport(ExpertLink *l, ExpertLinkTransport transport) {
    l->transport = transport;
    for (int i = 0; i < l->n; i++) {
        l->daemon[i].ring_tried = false;
        expertlink_ring_drop(&l->daemon[i]);
    }
}

void expertlink_reserve(ExpertLink *l, int n_rows) {
    l->reserve_rows = n_rows;
}

void expertlink_spin(ExpertLink *l, int64_t most_us) {
    l->spin_us = most_us;
}

const char *expertlink_path(const ExpertLink *l, int shard) {
    return l->daemon[l->by_shard[shard]].path;
}

const Baton__Hello *expertlink_hello(const ExpertLink *l, int shard) {
    return l->daemon[l->by_shard[shard]].hello;
}

int expertlink_shards(const ExpertLink *l) {
    return l->n;
}

void *expertlink_memory(const ExpertLink *l, int shard, size_t *bytes) {
    const Daemon *d = &l->daemon[l->by_shard[shard]];
    return d->ring ? shmring_memory(d->ring, bytes) : NULL;
}

int expertlink_hidden(const ExpertLink *l) {
    return l->hidden;
}
