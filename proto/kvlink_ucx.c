/* See kvlink_ucx.h. Error mode is PEER everywhere, so that requests to a dead process end.
 *
 * Where the transport cannot write into foreign memory (TCP), UCX would emulate the put, and UCX
 * 1.13 aborts a receiver that cannot acknowledge such a put because the writer died. There a put
 * is a message of our own, which the receiver copies into its pool and does not answer. Messages
 * stay in order, since they all take one lane (MAX_EAGER_RAILS).
 *
 * A pool in GPU memory is written by what UCX calls cuda_ipc, on one host, or by RDMA. Whether an
 * endpoint has such a lane is looked at when it is opened: without one UCX would fall back to
 * copies through host memory, slow and in silence. */
#include "proto/kvlink_ucx.h"

#include "base/clock.h"
#include "proto/kvlink.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    NOTICE_ID = 1,
    PUT_ID,
    PIECE_BYTES = 1 << 18,
    SELFTEST_MS = 5000,
    SELFTEST_MEASURE_MS = 100
};

/* What a callback needs; UCX carries the pointer. */
typedef struct Call {
    UcxDoneFn done;
    void *arg;
} Call;

static Call *call_new(UcxDoneFn done, void *arg) {
    Call *c = xmalloc(sizeof *c);
    *c = (Call){done, arg};
    return c;
}

static void call_end(Call *c, ucs_status_t status) {
    Call copy = *c;
    free(c);
    copy.done(copy.arg, status == UCS_OK ? 0 : E_PEER);
}

static void on_sent(void *request, ucs_status_t status, void *user) {
    ucp_request_free(request);
    call_end(user, status);
}

/* A UCX call has returned: at once, failed, or with a request whose callback will come. */
static void returned(ucs_status_ptr_t request, Call *c) {
    if (!UCS_PTR_IS_PTR(request))
        call_end(c, UCS_PTR_STATUS(request));
}

static ucp_request_param_t with_callback(Call *c) {
    return (ucp_request_param_t){.op_attr_mask =
                                     UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
                                 .cb.send = on_sent,
                                 .user_data = c};
}

/* Between the pool and host memory. */
static void copy(const Ucx *u, void *to, const void *from, uint64_t bytes) {
    if (u->device.at)
        u->device.copy(u->device.arg, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

/* ---- notices ---- */

static ucs_status_t on_am(void *arg, const void *header, size_t header_len, void *data, size_t len,
                          const ucp_am_recv_param_t *param) {
    Ucx *u = arg;
    (void)header;
    if (header_len == 0 && len <= KVLINK_NOTICE_MAX &&
        !(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV))
        u->on_notice(u->arg, data, len);
    return UCS_OK; /* anything else is not ours: dropped */
}

/* A piece of a put by message: the header is the address that it goes to. */
static ucs_status_t on_am_put(void *arg, const void *header, size_t header_len, void *data,
                              size_t len, const ucp_am_recv_param_t *param) {
    Ucx *u = arg;
    uint64_t to, base = (uint64_t)(uintptr_t)u->pool;
    if (header_len != sizeof to || param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)
        return UCS_OK;
    memcpy(&to, header, sizeof to);
    if (to >= base && len <= u->pool_bytes && to - base <= u->pool_bytes - len)
        copy(u, (char *)u->pool + (to - base), data, len);
    return UCS_OK;
}

/* ---- life ---- */

/* A setting that the user's environment may overrule; keys that this UCX does not know are left
 * out. */
static void prefer(ucp_config_t *config, const char *key, const char *value) {
    char env[64] = "UCX_";
    strncat(env, key, sizeof env - 5);
    if (!getenv(env))
        (void)ucp_config_modify(config, key, value);
}

/* Within a host UCX would take TCP: under error mode PEER its shared memory counts only when told
 * to watch the other process, and writes go through it only when the pool lies in such memory. Of
 * the two kinds POSIX segments are tied to a file, so that nothing outlives the processes. UCX
 * warns of the first setting when no such transport is wanted. */
static void prefer_shared_memory(ucp_config_t *config, const char *transports) {
    const char *env = getenv("UCX_TLS"), *wanted = *transports ? transports : env ? env : "";
    if (!*wanted)
        (void)ucp_config_modify(config, "TLS", "^sysv");
    if (!*wanted || strstr(wanted, "posix") || strstr(wanted, "sm") || strstr(wanted, "shm") ||
        strstr(wanted, "all"))
        prefer(config, "MM_ERROR_HANDLING", "y");
    prefer(config, "ALLOC_PRIO", "md:posix,huge,thp,md:*,mmap,heap");
}

static int open_context(Ucx *u, const char *transports, const char *devices, Err *err) {
    ucp_config_t *config;
    ucs_status_t s = ucp_config_read(NULL, NULL, &config);
    if (s != UCS_OK)
        return err_set(err, E_UNSUPPORTED, "UCX: cannot read its configuration: %s",
                       ucs_status_string(s));
    prefer(config, "RNDV_THRESH", "inf");
    (void)ucp_config_modify(config, "MAX_EAGER_RAILS", "1");
    prefer(config, "KEEPALIVE_INTERVAL", "1s");
    prefer_shared_memory(config, transports);
    if (*transports && ucp_config_modify(config, "TLS", transports) != UCS_OK)
        s = UCS_ERR_INVALID_PARAM;
    if (*devices && ucp_config_modify(config, "NET_DEVICES", devices) != UCS_OK)
        s = UCS_ERR_INVALID_PARAM;
    ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                      .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    if (s == UCS_OK)
        s = ucp_init(&p, config, &u->context);
    ucp_config_release(config);
    return s == UCS_OK ? 0
                       : err_set(err, E_UNSUPPORTED, "UCX (transports \"%s\", devices \"%s\"): %s",
                                 transports, devices, ucs_status_string(s));
}

static ucs_status_t handle(Ucx *u, unsigned id, ucp_am_recv_callback_t fn) {
    ucp_am_handler_param_t am = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = fn,
        .arg = u};
    return ucp_worker_set_am_recv_handler(u->worker, &am);
}

static int open_worker(Ucx *u, Err *err) {
    ucp_worker_params_t p = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                             .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t s = ucp_worker_create(u->context, &p, &u->worker);
    if (s == UCS_OK)
        s = handle(u, NOTICE_ID, on_am);
    if (s == UCS_OK)
        s = handle(u, PUT_ID, on_am_put);
    if (s == UCS_OK)
        s = ucp_worker_get_efd(u->worker, &u->event_fd);
    if (s == UCS_OK)
        s = ucp_worker_get_address(u->worker, (ucp_address_t **)&u->address, &u->address_len);
    return s == UCS_OK ? 0 : err_set(err, E_UNSUPPORTED, "UCX worker: %s", ucs_status_string(s));
}

static const char *version(void) {
    return ucp_get_version_string();
}

/* UCX sees by itself what kind of memory lies at an address, if it was built for that kind. */
static int check_memory(const Ucx *u, const ucp_mem_attr_t *attr, Err *err) {
    if (!u->device.at || attr->mem_type == UCS_MEMORY_TYPE_CUDA)
        return 0;
    return err_set(
        err, E_UNSUPPORTED,
        "UCX %s does not know GPU memory (it takes the KV pool for %s memory): a UCX with "
        "CUDA support is needed",
        version(), ucs_memory_type_names[attr->mem_type]);
}

static int open_pool(Ucx *u, uint64_t bytes, Err *err) {
    ucp_mem_map_params_t p = {.field_mask =
                                  UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                              .length = bytes,
                              .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS | UCP_MEM_ATTR_FIELD_MEM_TYPE};
    if (u->device.at) {
        p.field_mask |= UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
        p.address = u->device.at;
        p.flags = 0;
    }
    ucs_status_t s = ucp_mem_map(u->context, &p, &u->memory);
    if (s != UCS_OK)
        return err_set(err, E_NOMEM, "UCX %s: cannot take a pool of %llu bytes: %s", version(),
                       (unsigned long long)bytes, ucs_status_string(s));
    s = ucp_mem_query(u->memory, &attr);
    if (s == UCS_OK && check_memory(u, &attr, err))
        return E_UNSUPPORTED;
    u->pool = attr.address;
    u->pool_bytes = bytes;
    if (s == UCS_OK)
        s = ucp_rkey_pack(u->context, u->memory, &u->rkey, &u->rkey_len);
    if (s != UCS_OK)
        return err_set(err, E_UNSUPPORTED, "UCX %s: cannot share the pool: %s", version(),
                       ucs_status_string(s));
    if (!u->device.at)
        memset(u->pool, 0, bytes);
    return 0;
}

int ucx_open(Ucx *u, const KvLinkConf *conf, UcxNoticeFn on_notice, void *arg, Err *err) {
    *u = (Ucx){.event_fd = -1,
               .device = conf->memory,
               .staged = strstr(conf->transports, "tcp") != NULL,
               .on_notice = on_notice,
               .arg = arg};
    if (u->device.at)
        u->device.enter(u->device.arg);
    int rc = open_context(u, conf->transports, conf->devices, err);
    if (rc == 0)
        rc = open_worker(u, err);
    return rc ? rc : open_pool(u, conf->pool_bytes, err);
}

void ucx_close(Ucx *u) {
    if (u->rkey)
        ucp_rkey_buffer_release(u->rkey);
    if (u->memory)
        ucp_mem_unmap(u->context, u->memory);
    if (u->address)
        ucp_worker_release_address(u->worker, u->address);
    if (u->worker)
        ucp_worker_destroy(u->worker);
    if (u->context)
        ucp_cleanup(u->context);
    *u = (Ucx){.event_fd = -1};
}

bool ucx_progress(Ucx *u) {
    return ucp_worker_progress(u->worker) != 0;
}

bool ucx_arm(Ucx *u) {
    return ucp_worker_arm(u->worker) == UCS_OK;
}

/* ---- endpoints ---- */

static void on_ep_error(void *arg, ucp_ep_h handle, ucs_status_t status) {
    UcxEp *ep = arg;
    (void)handle, (void)status;
    if (ep->on_error)
        ep->on_error(ep->arg);
}

/* UCX tells only in words what an endpoint does: "lane[0]: 3:posix/memory.0 ... am rma_bw#0". That
 * it writes into foreign memory shows in a line "put[0]: ..." of its older protocols, and in its
 * newer ones, which choose at the first put, by a lane for such writes. UCX counts TCP among those
 * lanes, though the other process has to take part. Lanes that write host memory are no use to a
 * pool on a GPU. */
static bool is_one_sided(const UcxEp *ep, const char *lane) {
    if (!ep->ucx->device.at)
        return strcmp(lane, "tcp") != 0;
    const char *near = ep->watched ? "cuda_ipc" : "cuda_copy";
    return !strcmp(lane, near) || !strncmp(lane, "rc_", 3) || !strncmp(lane, "dc_", 3);
}

static void learn_transport(UcxEp *ep) {
    bool device = ep->ucx->device.at != NULL;
    char *text = NULL, *rest, flags[256];
    size_t len;
    FILE *f = open_memstream(&text, &len);
    CHECK(f);
    ucp_ep_print_info(ep->ep, f);
    CHECK(fclose(f) == 0);
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char name[sizeof ep->transport];
        const char *lane = strstr(line, "lane[");
        ep->one_sided |= !device && strstr(line, " put[") != NULL;
        if (!lane || sscanf(lane, "lane[%*d]: %*d:%31[^/ ]%255[^\n]", name, flags) != 2)
            continue;
        bool writes = is_one_sided(ep, name) && strstr(flags, " rma") != NULL;
        if (!ep->transport[0] || (device && writes && !ep->one_sided))
            memcpy(ep->transport, name, sizeof name);
        ep->one_sided |= writes;
    }
    free(text);
}

/* watched: the peer's death is noticed (error mode PEER). */
static int ep_open(Ucx *u, UcxEp *ep, const void *address, const void *rkey, bool watched,
                   UcxFn on_error, void *arg) {
    ucp_ep_params_t p = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = address,
        .err_mode = watched ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE,
        .err_handler = {.cb = on_ep_error, .arg = ep}};
    *ep = (UcxEp){.ucx = u, .watched = watched, .on_error = on_error, .arg = arg};
    if (ucp_ep_create(u->worker, &p, &ep->ep) != UCS_OK) {
        ep->ep = NULL;
        return E_PEER;
    }
    if (ucp_ep_rkey_unpack(ep->ep, rkey, &ep->rkey) != UCS_OK) {
        ep->rkey = NULL;
        return E_MISMATCH;
    }
    learn_transport(ep);
    return u->device.at && !ep->one_sided && !u->staged ? E_UNSUPPORTED : 0;
}

int ucx_ep_open(Ucx *u, UcxEp *ep, const void *address, const void *rkey, UcxFn on_error,
                void *arg) {
    return ep_open(u, ep, address, rkey, true, on_error, arg);
}

static void on_ep_closed(void *request, ucs_status_t status, void *user) {
    UcxEp *ep = user;
    (void)status;
    ucp_request_free(request);
    ep->on_closed(ep->closed_arg);
}

void ucx_ep_close(UcxEp *ep, UcxFn on_closed, void *arg) {
    if (!ep->ep)
        return;
    ucp_request_param_t p = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK |
                                             UCP_OP_ATTR_FIELD_USER_DATA,
                             .flags = ep->watched ? UCP_EP_CLOSE_FLAG_FORCE : 0,
                             .cb.send = on_ep_closed,
                             .user_data = ep};
    ucp_ep_h handle = ep->ep;
    ep->on_closed = on_closed;
    ep->closed_arg = arg;
    ep->ep = NULL;
    if (!UCS_PTR_IS_PTR(ucp_ep_close_nbx(handle, &p)))
        on_closed(arg);
}

void ucx_ep_done(UcxEp *ep) {
    if (ep->rkey)
        ucp_rkey_destroy(ep->rkey);
    ep->rkey = NULL;
}

/* ---- data ---- */

/* A put on its way as messages. */
typedef struct Pieces {
    UcxDoneFn done;
    void *arg;
    int status;
    size_t left;
    char *bytes;   /* of a device: what is sent, in host memory */
    uint64_t to[]; /* headers */
} Pieces;

static void on_piece(void *arg, int status) {
    Pieces *all = arg;
    if (status)
        all->status = status;
    if (--all->left > 0)
        return;
    UcxDoneFn done = all->done;
    void *done_arg = all->arg;
    int how = all->status;
    free(all->bytes);
    free(all);
    done(done_arg, how);
}

static void put_by_message(UcxEp *ep, const char *from, uint64_t to, uint64_t bytes, UcxDoneFn done,
                           void *arg) {
    size_t n = bytes ? (size_t)((bytes - 1) / PIECE_BYTES + 1) : 1;
    Pieces *all = xcalloc(1, sizeof *all + n * sizeof *all->to);
    *all = (Pieces){.done = done, .arg = arg, .left = n};
    if (ep->ucx->device.at) {
        all->bytes = xmalloc(bytes + 1);
        copy(ep->ucx, all->bytes, from, bytes);
        from = all->bytes;
    }
    for (size_t i = 0; i < n; i++) { /* `all` is gone after the last */
        uint64_t at = (uint64_t)i * PIECE_BYTES, rest = bytes - at;
        if (!ep->ep) { /* closed by what the piece before made known */
            on_piece(all, E_PEER);
            continue;
        }
        Call *c = call_new(on_piece, all);
        ucp_request_param_t p = with_callback(c);
        p.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
        p.flags = UCP_AM_SEND_FLAG_EAGER;
        all->to[i] = to + at;
        returned(ucp_am_send_nbx(ep->ep, PUT_ID, &all->to[i], sizeof *all->to, from + at,
                                 rest < PIECE_BYTES ? rest : PIECE_BYTES, &p),
                 c);
    }
}

static void put_to_memory(UcxEp *ep, const void *from, uint64_t to, uint64_t bytes, UcxDoneFn done,
                          void *arg) {
    Call *c = call_new(done, arg);
    ucp_request_param_t p = with_callback(c);
    p.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    p.memh = ep->ucx->memory;
    returned(ucp_put_nbx(ep->ep, from, bytes, to, ep->rkey, &p), c);
}

void ucx_put(UcxEp *ep, const void *from, uint64_t to, uint64_t bytes, UcxDoneFn done, void *arg) {
    if (!ep->ep)
        done(arg, E_PEER);
    else if (ep->one_sided)
        put_to_memory(ep, from, to, bytes, done, arg);
    else
        put_by_message(ep, from, to, bytes, done, arg);
}

void ucx_flush(UcxEp *ep, UcxDoneFn done, void *arg) {
    Call *c = call_new(done, arg);
    ucp_request_param_t p = with_callback(c);
    returned(ep->ep ? ucp_ep_flush_nbx(ep->ep, &p) : UCS_STATUS_PTR(UCS_ERR_CANCELED), c);
}

void ucx_notice(UcxEp *ep, const void *bytes, size_t len, UcxDoneFn done, void *arg) {
    Call *c = call_new(done, arg);
    ucp_request_param_t p = with_callback(c);
    p.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    p.flags = UCP_AM_SEND_FLAG_EAGER;
    returned(ep->ep ? ucp_am_send_nbx(ep->ep, NOTICE_ID, NULL, 0, bytes, len, &p)
                    : UCS_STATUS_PTR(UCS_ERR_CANCELED),
             c);
}

/* ---- self-test ---- */

typedef struct Wait {
    bool done;
    int status;
} Wait;

static void on_wait(void *arg, int status) {
    Wait *w = arg;
    w->done = true;
    w->status = status;
}

static void on_wait_closed(void *arg) {
    on_wait(arg, 0);
}

static int wait_for(Ucx *u, Wait *w, int64_t end_ms) {
    while (!w->done && clock_now_ms() < end_ms)
        ucx_progress(u);
    return w->done ? w->status : E_DEADLINE;
}

static void on_put_ignored(void *arg, int status) {
    (void)arg, (void)status; /* the flush after it says how it went */
}

static int copy_half(Ucx *u, UcxEp *ep, uint64_t bytes, int64_t end_ms) {
    Wait w = {0};
    ucx_put(ep, u->pool, (uint64_t)(uintptr_t)u->pool + bytes, bytes, on_put_ignored, NULL);
    ucx_flush(ep, on_wait, &w);
    return wait_for(u, &w, end_ms);
}

/* Bytes that are known into the first half of the pool, or a look at what the second half has. */
static bool second_half_is(Ucx *u, const uint8_t *want, uint8_t *have, uint64_t bytes) {
    copy(u, have, (char *)u->pool + bytes, bytes);
    return memcmp(want, have, bytes) == 0;
}

/* GPU memory of one process is not written as that of another is, and what copies within a GPU does
 * not bear being watched: there the test shows that UCX and the GPU work together, and how fast. */
static int copy_and_time(Ucx *u, uint64_t bytes, int64_t end, double *gb_per_s) {
    UcxEp ep;
    Wait closed = {0};
    int64_t rounds = 0;
    int rc = ep_open(u, &ep, u->address, u->rkey, !u->device.at, NULL, NULL);
    memcpy(u->transport, ep.transport, sizeof u->transport);
    if (rc == 0)
        rc = copy_half(u, &ep, bytes, end); /* connects */
    int64_t begin = clock_now_us(), spent = 0;
    while (rc == 0 && spent < SELFTEST_MEASURE_MS * 1000) {
        rc = copy_half(u, &ep, bytes, end);
        rounds++;
        spent = clock_now_us() - begin;
    }
    *gb_per_s = spent > 0 ? (double)bytes * (double)rounds / (double)spent * 1e-3 : 0;
    ucx_ep_close(&ep, on_wait_closed, &closed);
    wait_for(u, &closed, clock_now_ms() + SELFTEST_MS);
    ucx_ep_done(&ep);
    return rc;
}

int ucx_selftest(Ucx *u, uint64_t bytes, double *gb_per_s) {
    int64_t end = clock_now_ms() + SELFTEST_MS;
    uint8_t *want = xmalloc(2 * bytes + 1), *have = want + bytes;
    for (uint64_t i = 0; i < bytes; i++)
        want[i] = (uint8_t)(i * 31 + 7);
    copy(u, u->pool, want, bytes);
    int rc = copy_and_time(u, bytes, end, gb_per_s);
    while (rc == 0 && !second_half_is(u, want, have, bytes)) {
        ucx_progress(u); /* the last messages come after the flush */
        if (clock_now_ms() > end)
            rc = E_MISMATCH;
    }
    memset(want, 0, 2 * bytes);
    copy(u, u->pool, want, 2 * bytes);
    free(want);
    return rc;
}
