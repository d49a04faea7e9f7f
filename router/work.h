/* Worker threads that parse, render and encode requests, so that the loop never does: a prompt of a
 * million tokens takes a while. All functions are for the loop thread. */
#pragma once

#include "base/loop.h"
#include "model/tok.h"
#include "router/api.h"

typedef struct Work Work;
typedef struct WorkJob WorkJob;

/* req, on the heap, is the receiver's; NULL when the request was refused, with *error filled. */
typedef void (*WorkFn)(void *arg, ApiReq *req, const ApiError *error);

/* model and tok are borrowed until work_stop. At most max_waiting jobs wait. */
Work *work_start(Loop *loop, const ApiModel *model, const Tok *tok, int n_threads, int max_waiting);
/* After loop_run: waits for the jobs in hand; no WorkFn is called afterwards. NULL is a no-op. */
void work_stop(Work *w);

/* Copies the body. fn is called later, on the loop. NULL when too much waits. */
WorkJob *work_submit(Work *w, bool chat, const char *body, size_t len, WorkFn fn, void *arg);
/* fn will not be called. The job frees itself. */
void work_abandon(WorkJob *job);
