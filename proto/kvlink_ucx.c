/* See kvlink_ucx.h. Error mode is PEER everywhere, so that requests to a dead process end.
 *
 * Where the transport cannot write into foreign memory (TCP), UCX would emulate the put, and UCX
 * 1.13 aborts a receiver that cannot acknowledge such a put because the writer died. There a put
 * is a message of our own, which the receiver copies into its pool and does not answer. Messages
 * stay in order, since they all take one lane (MAX_EAGER_RAILS). */
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
        memcpy((char *)u->pool + (to - base), data, len);
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

static int open_pool(Ucx *u, uint64_t bytes, Err *err) {
    ucp_mem_map_params_t p = {.field_mask =
                                  UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                              .length = bytes,
                              .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    ucs_status_t s = ucp_mem_map(u->context, &p, &u->memory);
    if (s != UCS_OK)
        return err_set(err, E_NOMEM, "UCX: cannot allocate a pool of %llu bytes: %s",
                       (unsigned long long)bytes, ucs_status_string(s));
    s = ucp_mem_query(u->memory, &attr);
    u->pool = attr.address;
    u->pool_bytes = bytes;
    if (s == UCS_OK)
        s = ucp_rkey_pack(u->context, u->memory, &u->rkey, &u->rkey_len);
    if (s != UCS_OK)
        return err_set(err, E_UNSUPPORTED, "UCX: cannot share the pool: %s", ucs_status_string(s));
    memset(u->pool, 0, bytes);
    return 0;
}

int ucx_open(Ucx *u, const char *transports, const char *devices, uint64_t pool_bytes,
             UcxNoticeFn on_notice, void *arg, Err *err) {
    *u = (Ucx){.event_fd = -1, .on_notice = on_notice, .arg = arg};
    int rc = open_context(u, transports, devices, err);
    if (rc == 0)
        rc = open_worker(u, err);
    return rc ? rc : open_pool(u, pool_bytes, err);
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
 * lanes, though the other process has to take part. */
static void learn_transport(UcxEp *ep) {
    char *text = NULL, *rest, flags[256];
    size_t len;
    FILE *f = open_memstream(&text, &len);
    CHECK(f);
    ucp_ep_print_info(ep->ep, f);
    CHECK(fclose(f) == 0);
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char name[sizeof ep->transport];
        const char *lane = strstr(line, "lane[");
        ep->one_sided |= strstr(line, " put[") != NULL;
        if (!lane || sscanf(lane, "lane[%*d]: %*d:%31[^/ ]%255[^\n]", name, flags) != 2)
            continue;
        ep->one_sided |= strcmp(name, "tcp") != 0 && strstr(flags, " rma") != NULL;
        if (!ep->transport[0])
            memcpy(ep->transport, name, sizeof name);
    }
    free(text);
}

int ucx_ep_open(Ucx *u, UcxEp *ep, const void *address, const void *rkey, UcxFn on_error,
                void *arg) {
    ucp_ep_params_t p = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                       UCP_EP_PARAM_FIELD_ERR_HANDLER,
                         .address = address,
                         .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                         .err_handler = {.cb = on_ep_error, .arg = ep}};
    *ep = (UcxEp){.ucx = u, .on_error = on_error, .arg = arg};
    if (ucp_ep_create(u->worker, &p, &ep->ep) != UCS_OK) {
        ep->ep = NULL;
        return E_PEER;
    }
    if (ucp_ep_rkey_unpack(ep->ep, rkey, &ep->rkey) != UCS_OK) {
        ep->rkey = NULL;
        return E_MISMATCH;
    }
    learn_transport(ep);
    return 0;
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
                             .flags = UCP_EP_CLOSE_FLAG_FORCE,
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
    free(all);
    done(done_arg, how);
}

static void put_by_message(UcxEp *ep, const char *from, uint64_t to, uint64_t bytes, UcxDoneFn done,
                           void *arg) {
    size_t n = bytes ? (size_t)((bytes - 1) / PIECE_BYTES + 1) : 1;
    Pieces *all = xcalloc(1, sizeof *all + n * sizeof *all->to);
    *all = (Pieces){.done = done, .arg = arg, .left = n};
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

int ucx_selftest(Ucx *u, uint64_t bytes, double *gb_per_s) {
    UcxEp ep;
    Wait closed = {0};
    int64_t end = clock_now_ms() + SELFTEST_MS, rounds = 0;
    for (uint64_t i = 0; i < bytes; i++)
        ((uint8_t *)u->pool)[i] = (uint8_t)(i * 31 + 7);
    int rc = ucx_ep_open(u, &ep, u->address, u->rkey, NULL, NULL);
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
    while (rc == 0 && memcmp(u->pool, (char *)u->pool + bytes, bytes)) {
        ucx_progress(u); /* the last messages come after the flush */
        if (clock_now_ms() > end)
            rc = E_MISMATCH;
    }
    ucx_ep_close(&ep, on_wait_closed, &closed);
    wait_for(u, &closed, clock_now_ms() + SELFTEST_MS);
    ucx_ep_done(&ep);
    memset(u->pool, 0, 2 * bytes);
    return rc;
}
