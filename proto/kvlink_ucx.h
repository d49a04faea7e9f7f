/* UCX behind a few calls: context, worker, pool, endpoints, writes, flush, notices. Internal to
 * kvlink; everything here runs on the link's thread, but for ucx_open and ucx_close, which run
 * before it starts and after it has ended. UCX codes become E_ codes here and go no further. */
#pragma once

#include "base/err.h"
#include "proto/kvlink.h"

#include <ucp/api/ucp.h>

#include <stdbool.h>
#include <stdint.h>

typedef void (*UcxNoticeFn)(void *arg, const void *bytes, size_t len);
typedef void (*UcxDoneFn)(
    void *arg, int status); /* 0 or E_PEER; called once, perhaps before the call returns */
typedef void (*UcxFn)(void *arg);

typedef struct Ucx {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memory;
    KvMemory device; /* at NULL: the pool is host memory */
    bool staged;     /* of a device: copies through host memory are allowed */
    void *pool;
    uint64_t pool_bytes;
    void *address; /* ucp_address_t */
    size_t address_len;
    void *rkey;
    size_t rkey_len;
    int event_fd;
    char transport[32]; /* that the self-test took; "" before */
    UcxNoticeFn on_notice;
    void *arg;
} Ucx;

typedef struct UcxEp {
    Ucx *ucx;
    ucp_ep_h ep; /* NULL: never opened, or closing */
    ucp_rkey_h rkey;
    bool one_sided; /* puts go straight into the peer's memory */
    bool watched;   /* fails when the peer dies */
    char transport[32];
    UcxFn on_error, on_closed;
    void *arg, *closed_arg;
} UcxEp;

/* Opens everything, and the pool that *conf describes. */
int ucx_open(Ucx *u, const KvLinkConf *conf, UcxNoticeFn on_notice, void *arg, Err *err);
void ucx_close(Ucx *u);

/* Whether anything happened. */
bool ucx_progress(Ucx *u);
/* Whether event_fd will tell of the next thing; false when something waits already. */
bool ucx_arm(Ucx *u);

/* ep must not move. on_error is called at most once, when UCX sees the peer fail. E_UNSUPPORTED
 * when nothing writes from GPU to GPU and copies through host memory are not allowed. */
int ucx_ep_open(Ucx *u, UcxEp *ep, const void *address, const void *rkey, UcxFn on_error,
                void *arg);
/* By force: what is in flight ends with an error. on_closed is called when the endpoint is gone.
 * Later calls do nothing. */
void ucx_ep_close(UcxEp *ep, UcxFn on_closed, void *arg);
/* After on_closed. */
void ucx_ep_done(UcxEp *ep);

void ucx_put(UcxEp *ep, const void *from, uint64_t to, uint64_t bytes, UcxDoneFn done, void *arg);
void ucx_flush(UcxEp *ep, UcxDoneFn done, void *arg);
/* bytes must stay until done. */
void ucx_notice(UcxEp *ep, const void *bytes, size_t len, UcxDoneFn done, void *arg);

/* Copies `bytes` from the pool's first to its second half through an endpoint to ourselves, again
 * and again for a moment. E_DEADLINE after 5 s. */
int ucx_selftest(Ucx *u, uint64_t bytes, double *gb_per_s);
