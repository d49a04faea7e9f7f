/* See bus_wire.h. The context is shared by all threads of the process under a lock; everything else
 * belongs to the caller. */
#include "proto/bus_wire.h"

#include "base/clock.h"
#include "proto/bus.h"
#include "proto/bus_frame.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { HANDSHAKE_MS = 5000, SOCKETS_MAX = 8192, BACKLOG = 1024 };

static pthread_mutex_t context_lock = PTHREAD_MUTEX_INITIALIZER;
static void *context;          /* context_lock */
static int n_context_users;    /* context_lock */
static atomic_uint n_monitors; /* names of inproc endpoints */

void *bus_wire_context_get(void) {
    pthread_mutex_lock(&context_lock);
    if (n_context_users++ == 0) {
        context = zmq_ctx_new();
        CHECK(context);
        zmq_ctx_set(context, ZMQ_MAX_SOCKETS, SOCKETS_MAX);
    }
    void *mine = context;
    pthread_mutex_unlock(&context_lock);
    return mine;
}

void bus_wire_context_put(void) {
    pthread_mutex_lock(&context_lock);
    if (--n_context_users == 0) {
        while (zmq_ctx_term(context) != 0 && errno == EINTR)
            ;
        context = NULL;
    }
    pthread_mutex_unlock(&context_lock);
}

static void set_int(void *socket, int option, int value) {
    CHECK(zmq_setsockopt(socket, option, &value, sizeof value) == 0);
}

void *bus_wire_open(void *ctx, int type, const BusWireConf *conf, Err *err) {
    void *socket = zmq_socket(ctx, type);
    if (!socket) {
        err_set(err, E_IO, "cannot open a socket: %s", zmq_strerror(errno));
        return NULL;
    }
    int64_t max_bytes = (int64_t)conf->max_frame_bytes;
    CHECK(zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &max_bytes, sizeof max_bytes) == 0);
    set_int(socket, ZMQ_LINGER, 0);
    set_int(socket, ZMQ_SNDHWM, conf->max_queued);
    set_int(socket, ZMQ_RCVHWM, conf->max_queued);
    set_int(socket, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    set_int(socket, ZMQ_IPV6, 1);
    if (type == ZMQ_ROUTER) {
        set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
        set_int(socket, ZMQ_BACKLOG, BACKLOG);
    } else {
        /* A first byte other than 0: those ids are ZeroMQ's own. */
        uint8_t id[9] = {'b'};
        uint64_t unique = clock_unique();
        memcpy(id + 1, &unique, sizeof unique);
        CHECK(zmq_setsockopt(socket, ZMQ_ROUTING_ID, id, sizeof id) == 0);
        set_int(socket, ZMQ_RECONNECT_IVL, -1);
    }
    return socket;
}

void bus_wire_close(void *socket, bool last_word) {
    if (!socket)
        return;
    if (last_word)
        set_int(socket, ZMQ_LINGER, BUS_WIRE_LAST_WORD_MS);
    zmq_close(socket);
}

void *bus_wire_monitor(void *ctx, void *socket, int events) {
    char name[64];
    snprintf(name, sizeof name, "inproc://bus-monitor-%u", atomic_fetch_add(&n_monitors, 1));
    if (zmq_socket_monitor(socket, name, events) != 0)
        return NULL;
    void *monitor = zmq_socket(ctx, ZMQ_PAIR);
    if (!monitor)
        return NULL;
    set_int(monitor, ZMQ_LINGER, 0);
    if (zmq_connect(monitor, name) != 0) {
        zmq_close(monitor);
        return NULL;
    }
    return monitor;
}

void bus_wire_unmonitor(void *socket, void *monitor) {
    zmq_socket_monitor(socket, NULL, 0);
    zmq_close(monitor);
}

int bus_wire_event(void *monitor) {
    uint8_t frame[6]; /* u16 event, u32 value; then a frame with the address */
    if (zmq_recv(monitor, frame, sizeof frame, ZMQ_DONTWAIT) < 0)
        return 0;
    uint16_t event;
    memcpy(&event, frame, sizeof event);
    int more = 0;
    size_t n = sizeof more;
    while (zmq_getsockopt(monitor, ZMQ_RCVMORE, &more, &n) == 0 && more)
        if (zmq_recv(monitor, NULL, 0, ZMQ_DONTWAIT) < 0)
            break;
    return event;
}

int bus_wire_fd(void *socket) {
    int fd = -1;
    size_t n = sizeof fd;
    CHECK(zmq_getsockopt(socket, ZMQ_FD, &fd, &n) == 0);
    return fd;
}

static int send_failed(Err *err) {
    if (errno == EAGAIN)
        return err_set(err, E_BUSY, "too many frames wait");
    return err_set(err, E_PEER, "connection ended: %s", zmq_strerror(errno));
}

int bus_wire_send(void *socket, const BusWireConf *conf, const uint8_t *id, size_t id_len,
                  const Baton__Envelope *env, const void *blob, size_t blob_len, Err *err) {
    size_t n = baton__envelope__get_packed_size(env);
    if (n > BUS_ENVELOPE_MAX || n > conf->max_frame_bytes)
        return err_set(err, E_LIMIT, "envelope of %zu bytes is too large", n);
    if (blob && blob_len > conf->max_frame_bytes)
        return err_set(err, E_LIMIT, "blob of %zu bytes, at most %zu", blob_len,
                       conf->max_frame_bytes);
    zmq_msg_t head;
    if (zmq_msg_init_size(&head, n) != 0)
        return err_set(err, E_BUSY, "no memory for a frame of %zu bytes", n);
    baton__envelope__pack(env, zmq_msg_data(&head));
    /* The first part alone can find the queue full or the connection ended: the others follow it
     * into the same queue. */
    if (id && zmq_send(socket, id, id_len, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
        int rc = send_failed(err);
        zmq_msg_close(&head);
        return rc;
    }
    if (zmq_msg_send(&head, socket, ZMQ_DONTWAIT | (blob ? ZMQ_SNDMORE : 0)) < 0) {
        int rc = send_failed(err);
        zmq_msg_close(&head);
        return rc;
    }
    if (blob && zmq_send(socket, blob, blob_len, ZMQ_DONTWAIT) < 0)
        return send_failed(err);
    return 0;
}

int bus_wire_send_refuse(void *socket, const BusWireConf *conf, const uint8_t *id, size_t id_len,
                         const char *reason) {
    char text[BUS_REASON_MAX + 1];
    bus_frame_text(text, sizeof text, reason);
    Baton__Refuse refuse = BATON__REFUSE__INIT;
    refuse.reason = text;
    Baton__Envelope env = BATON__ENVELOPE__INIT;
    env.body_case = BATON__ENVELOPE__BODY_REFUSE;
    env.refuse = &refuse;
    return bus_wire_send(socket, conf, id, id_len, &env, NULL, 0, NULL);
}

bool bus_wire_readable(void *socket) {
    int events = 0;
    size_t n = sizeof events;
    return zmq_getsockopt(socket, ZMQ_EVENTS, &events, &n) == 0 && (events & ZMQ_POLLIN);
}

static bool more_follows(void *socket) {
    int more = 0;
    size_t n = sizeof more;
    return zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &n) == 0 && more;
}

bool bus_wire_recv(void *socket, bool with_id, BusWireMsg *msg) {
    msg->id_len = 0;
    msg->n_frames = 0;
    if (with_id) {
        int n = zmq_recv(socket, msg->id, sizeof msg->id, ZMQ_DONTWAIT);
        if (n < 0)
            return false;
        msg->id_len = (size_t)n < sizeof msg->id ? (size_t)n : sizeof msg->id;
    }
    zmq_msg_init(&msg->head);
    zmq_msg_init(&msg->blob);
    if (with_id && !more_follows(socket))
        return true;
    do {
        zmq_msg_t *part = msg->n_frames == 0 ? &msg->head : &msg->blob;
        if (zmq_msg_recv(part, socket, ZMQ_DONTWAIT) < 0) {
            if (msg->n_frames > 0 || with_id)
                return true; /* cut off inside a message: unpack refuses what is missing */
            bus_wire_release(msg);
            return false;
        }
        if (msg->n_frames < 3)
            msg->n_frames++;
    } while (more_follows(socket));
    return true;
}

void bus_wire_release(BusWireMsg *msg) {
    zmq_msg_close(&msg->head);
    zmq_msg_close(&msg->blob);
}

const char *bus_wire_address(BusWireMsg *msg) {
    const char *address = zmq_msg_gets(&msg->head, "Peer-Address");
    return address ? address : "";
}

Baton__Envelope *bus_wire_unpack(BusWireMsg *msg, Err *err) {
    if (msg->n_frames < 1 || msg->n_frames > 2) {
        err_set(err, E_FORMAT, "message of %s frames", msg->n_frames < 1 ? "no" : "more than two");
        return NULL;
    }
    return bus_frame_unpack(zmq_msg_data(&msg->head), zmq_msg_size(&msg->head), err);
}

const void *bus_wire_blob(BusWireMsg *msg, size_t *len) {
    *len = msg->n_frames == 2 ? zmq_msg_size(&msg->blob) : 0;
    return msg->n_frames == 2 ? zmq_msg_data(&msg->blob) : NULL;
}
