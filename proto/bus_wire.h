/* Sockets and frames as the bus uses them: one place for the options, for sending an envelope with
 * its blob and for receiving one whole message. A socket belongs to the thread that uses it.
 *
 * A message is [routing id, ROUTER only] envelope [blob]. */
#pragma once

#include "base/err.h"
#include "proto/baton.pb-c.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <zmq.h>

enum { BUS_WIRE_ID_MAX = 255 };

typedef struct BusWireConf {
    int max_queued;
    size_t max_frame_bytes;
} BusWireConf;

typedef struct BusWireMsg {
    uint8_t id[BUS_WIRE_ID_MAX];
    size_t id_len;
    zmq_msg_t head, blob;
    int n_frames; /* without the routing id; only the first two are kept */
} BusWireMsg;

/* The context of the process, made by the first get and ended by the last put. Any thread. put may
 * wait for a last word of a closed socket, at most BUS_WIRE_LAST_WORD_MS. */
void *bus_wire_context_get(void);
void bus_wire_context_put(void);
enum { BUS_WIRE_LAST_WORD_MS = 200 };

/* type: ZMQ_ROUTER or ZMQ_DEALER; the latter gets a fresh random routing id and never reconnects by
 * itself: one socket is one connection. NULL and E_IO when the system has none left. */
void *bus_wire_open(void *context, int type, const BusWireConf *conf, Err *err);
/* last_word: what was sent shortly before may still leave. */
void bus_wire_close(void *socket, bool last_word);
/* A socket on which the events (ZMQ_EVENT_*) of `socket` arrive; NULL when there is none left.
 * Close with bus_wire_unmonitor before `socket`. */
void *bus_wire_monitor(void *context, void *socket, int events);
void bus_wire_unmonitor(void *socket, void *monitor);
/* The next event, or 0. */
int bus_wire_event(void *monitor);
int bus_wire_fd(void *socket);

/* id NULL for a DEALER. E_BUSY when the queue is full, E_PEER when there is no such connection,
 * E_LIMIT when a frame is too large. Never blocks. */
int bus_wire_send(void *socket, const BusWireConf *conf, const uint8_t *id, size_t id_len,
                  const Baton__Envelope *env, const void *blob, size_t blob_len, Err *err);
int bus_wire_send_refuse(void *socket, const BusWireConf *conf, const uint8_t *id, size_t id_len,
                         const char *reason);

/* Whether a message waits. Any call on a socket may take the news of one off its descriptor. */
bool bus_wire_readable(void *socket);
/* Takes one whole message if there is one; then msg must be released. */
bool bus_wire_recv(void *socket, bool with_id, BusWireMsg *msg);
void bus_wire_release(BusWireMsg *msg);
/* The numeric address that a message came from; "" when the transport has none. */
const char *bus_wire_address(BusWireMsg *msg);
/* The envelope of a message with one or two frames, else NULL with words. bus_frame_free it. */
Baton__Envelope *bus_wire_unpack(BusWireMsg *msg, Err *err);
/* The second frame; NULL when there is none. */
const void *bus_wire_blob(BusWireMsg *msg, size_t *len);
