/* The expertds of a daemon that runs the model: the link to them, and what they must hold.
 *
 * Opened on the thread that starts the daemon; post, wait and probe run on its engine thread. */
#pragma once

#include "model/runtime.h"
#include "proto/expertlink.h"

typedef struct Remote Remote;

/* Connects to all expertds of o and checks that each holds every expert that may be asked of it;
 * says in the log when their format makes answers depend on placement. self and runtime are
 * borrowed. */
int remote_open(Remote **out, const Runtime *runtime, const EngineOpts *o, const Baton__Hello *self,
                Err *err);
/* NULL is a no-op. */
void remote_close(Remote *r);

/* For PlaceLiveConf: one line for the log. arg is not used. */
void remote_on_place(void *arg, bool bad, const char *text);

/* For the engine. A daemon that has come back is checked again before its answers are used:
 * E_MISMATCH. */
ExpertPort remote_port(Remote *r);
/* For ExpertWatchConf. arg is a Remote. */
int remote_probe(void *arg, Err *err);
