/* What every daemon answers over HTTP about itself: /live (200 while the loop turns), /ready (200,
 * or 503 with the reason) and /metrics (Prometheus text). Loop thread only. */
#pragma once

#include "base/httpd.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct Admin Admin;

/* Whether new work can be served; when not, writes the reason into why[n] as one line. */
typedef bool (*AdminReadyFn)(void *arg, char *why, size_t n);

/* Serves the three paths on host and port (0: any). ready may be NULL: always ready. arg is
 * borrowed until admin_close. E_IO when the port is in use. */
int admin_open(Admin **out, Loop *loop, const char *host, int port, AdminReadyFn ready, void *arg,
               Err *err);
int admin_port(const Admin *a);
/* NULL is a no-op. */
void admin_close(Admin *a);

/* Answers req when its path is one of the three, 405 with Allow for a method other than GET and
 * HEAD included. False, with req untouched, for any other path. For daemons that have a server of
 * their own. */
bool admin_handle(HttpReq *req, AdminReadyFn ready, void *arg);
