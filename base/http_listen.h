/* Listening sockets of the HTTP server. Start-up only. */
#pragma once

#include "base/err.h"

/* Opens a listening, non-blocking TCP socket, the caller's, on host ("::" takes IPv4 as well) and
 * port (0: any). E_IO with host, port and the system's reason. */
int http_listen_open(const char *host, int port, int *out, Err *err);
/* The port of a listening socket; 0 for one that has none. */
int http_listen_port(int fd);
