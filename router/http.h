/* The router's HTTP side: which path does what, and what a client sees when something is wrong with
 * the request itself. Loop thread only. */
#pragma once

#include "base/admin.h"
#include "base/httpd.h"
#include "router/session.h"

/* Answers requests. All borrowed; http_handle's arg. */
typedef struct HttpFront {
    Sessions *sessions;
    const ApiModel *model;
    AdminReadyFn ready;
    void *ready_arg;
    int (*max_context)(void *arg); /* for /v1/models */
    void *context_arg;
    int64_t started_s;
} HttpFront;

/* An HttpHandler. */
void http_handle(void *front, HttpReq *req);

/* Copies a client's request id when it is 1 to 64 characters of [A-Za-z0-9._:-], else writes "". */
void http_clean_id(const char *value, char out[65]);
