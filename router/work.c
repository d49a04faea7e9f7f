/* See work.h. A WorkJob belongs to a worker between queue_push and loop_post, but for fn and arg,
 * which the loop thread alone reads and writes. */
#include "router/work.h"

#include "base/queue.h"
#include "base/stat.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct WorkJob {
    Work *work;
    WorkJob *prev, *next; /* loop thread: jobs not yet handed back */
    bool chat;
    char *body;
    size_t len;
    atomic_bool abandoned; /* set by the loop, read by the worker to save its time */
    WorkFn fn;
    void *arg;
    ApiReq *req; /* the result, or */
    ApiError error;
};

struct Work {
    Loop *loop;
    const ApiModel *model;
    const Tok *tok;
    Queue *queue;
    pthread_t *threads;
    int n_threads;
    WorkJob *jobs;
    StatGauge *waiting;
};

/* ---- worker threads ---- */

/* "messages[1].content: expected ..." names its field: what stands before the colon. */
static void refuse_render(ApiError *error, const char *text) {
    char param[128];
    size_t n = strcspn(text, ":");
    snprintf(param, sizeof param, "%.*s", (int)(n < 120 ? n : 120), text[n] ? text : "messages");
    api_refuse(error, 400, "invalid_request_error", "invalid_value", param, "%s", text);
}

/* The prompt's text to ids. */
static int encode(const Work *w, TokScratch *scratch, ApiReq *req, ApiError *error) {
    Buf prompt = {0};
    Err err = {0};
    TokIds ids = {0};
    int rc = 0;
    if (req->chat) {
        rc = chat_render(req->messages, NULL, &req->options, &prompt, &err);
        if (rc)
            refuse_render(error, err.text);
    } else {
        buf_put(&prompt, req->text, req->text_len);
    }
    if (rc == 0) {
        size_t max_ids = (size_t)w->model->max_context;
        rc = tok_encode(w->tok, scratch, prompt.data ? prompt.data : "", prompt.len, true, max_ids,
                        &ids, &err);
        if (rc == E_LIMIT)
            api_refuse(error, 400, "invalid_request_error", "context_length_exceeded",
                       req->chat ? "messages" : "prompt",
                       "the prompt does not fit in the context of %d tokens",
                       w->model->max_context);
        else if (rc)
            api_refuse(error, 400, "invalid_request_error", "invalid_value",
                       req->chat ? "messages" : "prompt", "%s", err.text);
    }
    buf_done(&prompt);
    api_drop_text(req); /* may take long, so not on the loop */
    req->ids = ids.id;
    req->n_ids = ids.n;
    return rc;
}

static void job_run(const Work *w, TokScratch *scratch, WorkJob *job) {
    ApiReq *req = xcalloc(1, sizeof *req);
    int rc = api_parse(w->model, job->chat, job->body, job->len, req, &job->error);
    if (rc == 0 && !req->ids)
        rc = encode(w, scratch, req, &job->error);
    if (rc == 0) {
        job->req = req;
        return;
    }
    api_done(req);
    free(req);
}

static void on_done(void *arg);

static void *worker_main(void *arg) {
    Work *w = arg;
    TokScratch *scratch = tok_scratch_new(w->tok);
    for (WorkJob *job; (job = queue_pop(w->queue, -1));) {
        if (!atomic_load(&job->abandoned))
            job_run(w, scratch, job);
        CHECK(loop_post(w->loop, on_done, job)); /* far fewer jobs than the loop takes */
    }
    tok_scratch_free(scratch);
    return NULL;
}

/* ---- loop thread ---- */

static void job_free(WorkJob *job) {
    Work *w = job->work;
    if (job->prev)
        job->prev->next = job->next;
    else
        w->jobs = job->next;
    if (job->next)
        job->next->prev = job->prev;
    if (job->req)
        api_done(job->req);
    free(job->req);
    free(job->body);
    free(job);
}

static void on_done(void *arg) {
    WorkJob *job = arg;
    ApiReq *req = job->req;
    stat_set(job->work->waiting, queue_length(job->work->queue));
    if (!atomic_load(&job->abandoned)) {
        job->req = NULL;
        job->fn(job->arg, req, &job->error);
    }
    job_free(job);
}

WorkJob *work_submit(Work *w, bool chat, const char *body, size_t len, WorkFn fn, void *arg) {
    WorkJob *job = xcalloc(1, sizeof *job);
    job->work = w;
    job->chat = chat;
    job->body = xmalloc(len + 1);
    memcpy(job->body, body, len);
    job->body[len] = '\0';
    job->len = len;
    job->fn = fn;
    job->arg = arg;
    job->next = w->jobs;
    if (job->next)
        job->next->prev = job;
    w->jobs = job;
    if (!queue_push(w->queue, job)) {
        job_free(job);
        return NULL;
    }
    stat_set(w->waiting, queue_length(w->queue));
    return job;
}

void work_abandon(WorkJob *job) {
    atomic_store(&job->abandoned, true);
}

Work *work_start(Loop *loop, const ApiModel *model, const Tok *tok, int n_threads,
                 int max_waiting) {
    Work *w = xcalloc(1, sizeof *w);
    w->loop = loop;
    w->model = model;
    w->tok = tok;
    w->queue = queue_new(max_waiting);
    w->n_threads = n_threads;
    w->threads = xcalloc((size_t)n_threads, sizeof *w->threads);
    w->waiting = stat_gauge("baton_router_tokenizer_waiting", "", "Requests in its queue");
    json_object_seed(0); /* not thread safe later */
    for (int i = 0; i < n_threads; i++)
        CHECK(pthread_create(&w->threads[i], NULL, worker_main, w) == 0);
    return w;
}

void work_stop(Work *w) {
    if (!w)
        return;
    queue_close(w->queue);
    for (int i = 0; i < w->n_threads; i++)
        pthread_join(w->threads[i], NULL);
    while (w->jobs)
        job_free(w->jobs);
    queue_free(w->queue);
    free(w->threads);
    free(w);
}
