/* Rank threads and steps. The thread that calls engine_step is rank 0; ranks 1 .. tp - 1 have
 * threads of their own, which sleep between steps on `wake` and report through `done`. A command is
 * written by the caller before it wakes them, and read-only while they run. */
#include "model/engine.h"

#include "model/selftest.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ENGINE_MAX_TP = 8 };

typedef enum Command {
    CMD_OPEN,
    CMD_BIND,
    CMD_STEP,
    CMD_MTP,
    CMD_PLACE,
    CMD_SWAP,
    CMD_CLOSE,
    CMD_EXIT
} Command;

typedef struct Rank {
    Engine *engine;
    int index;
    pthread_t thread;
    Forward *forward;
    SampleScratch *scratch;
    Tensor mtp_in; /* [max_rows, hidden] */
    Tensor state;  /* of the last MTP step */
    int status;    /* of the last command */
    Err err;
} Rank;

/* The arguments of the command that runs; borrowed from the caller of engine_*. */
typedef struct Job {
    Command command;
    const OpsBatch *batch;
    EngineRow *rows;
    int n_rows;
    const ForwardProbe *probe;
    const int32_t *hidden_row;
    bool from_state;
    const KvLayout *layout;
    void *pool;
    int layer;            /* place */
    const bool *resident; /* place: [n_experts] */
    bool take;            /* swap */
} Job;

struct Engine {
    EngineConf conf;
    ExpertPort port;
    const Weights *weights;
    const Ops *ops;
    Dev *dev[ENGINE_MAX_TP];
    Rank rank[ENGINE_MAX_TP];
    int n_threads;      /* started, ranks 1 .. n_threads */
    float *host_logits; /* [max_logits, vocab] of the last step; row i is written by rank i % tp */
    int32_t *logit_row; /* [max_logits] */
    Job job;

    pthread_mutex_t lock; /* guards the next three */
    pthread_cond_t wake, done;
    unsigned turn;
    int running;
};

/* ---- what a rank does ---- */

static int rank_open(Rank *r) {
    Engine *e = r->engine;
    const EngineConf *c = &e->conf;
    ForwardConf fc = {
        .ops = e->ops,
        .dev = e->dev[r->index],
        .rank = r->index,
        .n_ranks = c->tp,
        .max_rows = c->max_rows,
        .max_logits = c->max_logits,
        .mtp = c->mtp,
        .resident = c->resident,
        .port = c->port ? &e->port : NULL,
        .counts = r->index == 0 ? c->counts : NULL,
        .count_all = c->count_all,
    };
    const Shape *s = weights_shape(e->weights);
    int rc = forward_open(&r->forward, e->weights, &fc, &r->err);
    if (rc == 0 && c->mtp)
        rc = e->ops->tensor_new(fc.dev, DT_F32, c->max_rows, s->hidden, &r->mtp_in, &r->err);
    r->scratch = sample_scratch_new(s->vocab);
    return rc;
}

static void rank_close(Rank *r) {
    if (r->mtp_in.at)
        r->engine->ops->tensor_free(r->engine->dev[r->index], &r->mtp_in);
    forward_close(r->forward);
    sample_scratch_free(r->scratch);
    r->forward = NULL;
    r->scratch = NULL;
}

/* Brings the logits of the rows that fall to this rank to the host and samples them; every rank
 * sees all logits after forward_head. */
static void rank_sample(Rank *r, Tensor logits) {
    Engine *e = r->engine;
    size_t vocab = (size_t)weights_shape(e->weights)->vocab;
    for (int i = r->index; i < e->job.n_rows; i += e->conf.tp) {
        EngineRow *row = &e->job.rows[i];
        Tensor one = tensor_row(logits, i);
        float *host = e->host_logits + (size_t)i * vocab;
        e->ops->download(e->dev[r->index], &one, host);
        row->status = row->sampler
                          ? sample_token(row->sampler, r->scratch, host, row->draw, &row->out, NULL)
                          : 0;
    }
}

static int rank_step(Rank *r) {
    Engine *e = r->engine;
    Job *j = &e->job;
    Tensor logits = {0};
    int rc = forward_run(r->forward, j->batch, e->logit_row, j->n_rows,
                         r->index == 0 ? j->probe : NULL, &logits, &r->err);
    if (rc == 0)
        rank_sample(r, logits);
    return rc;
}

static int rank_mtp(Rank *r) {
    Engine *e = r->engine;
    Job *j = &e->job;
    Tensor logits = {0}, from = j->from_state ? r->state : forward_final(r->forward),
           in = tensor_head(r->mtp_in, j->batch->n_tok);
    e->ops->gather_rows(e->dev[r->index], in, from, j->hidden_row, j->batch->n_tok);
    int rc =
        mtp_run(r->forward, j->batch, in, e->logit_row, j->n_rows, &r->state, &logits, &r->err);
    if (rc == 0)
        rank_sample(r, logits);
    return rc;
}

static void rank_do(Rank *r) {
    Engine *e = r->engine;
    r->status = 0;
    switch (e->job.command) {
    case CMD_OPEN:
        r->status = rank_open(r);
        break;
    case CMD_BIND:
        e->ops->kv_bind(e->dev[r->index], e->job.layout, e->job.pool);
        break;
    case CMD_STEP:
        r->status = rank_step(r);
        break;
    case CMD_MTP:
        r->status = rank_mtp(r);
        break;
    case CMD_PLACE:
        r->status = forward_place_load(r->forward, e->job.layer, e->job.resident, &r->err);
        break;
    case CMD_SWAP:
        forward_place_swap(r->forward, e->job.take);
        break;
    case CMD_CLOSE:
        rank_close(r);
        break;
    case CMD_EXIT:
        break;
    }
}

/* ---- threads ---- */

static void *rank_main(void *arg) {
    Rank *r = arg;
    Engine *e = r->engine;
    unsigned seen = 0;
    for (bool stop = false; !stop;) {
        pthread_mutex_lock(&e->lock);
        while (e->turn == seen)
            pthread_cond_wait(&e->wake, &e->lock);
        seen = e->turn;
        pthread_mutex_unlock(&e->lock);

        stop = e->job.command == CMD_EXIT;
        rank_do(r);

        pthread_mutex_lock(&e->lock);
        if (--e->running == 0)
            pthread_cond_signal(&e->done);
        pthread_mutex_unlock(&e->lock);
    }
    return NULL;
}

/* Runs e->job on every rank, rank 0 on the calling thread. Returns the first rank's failure. */
static int all_ranks(Engine *e, Err *err) {
    pthread_mutex_lock(&e->lock);
    e->turn++;
    e->running = e->n_threads;
    pthread_cond_broadcast(&e->wake);
    pthread_mutex_unlock(&e->lock);

    rank_do(&e->rank[0]);

    pthread_mutex_lock(&e->lock);
    while (e->running > 0)
        pthread_cond_wait(&e->done, &e->lock);
    pthread_mutex_unlock(&e->lock);
    for (int i = 0; i < e->conf.tp; i++)
        if (e->rank[i].status) {
            if (err)
                *err = e->rank[i].err;
            return e->rank[i].status;
        }
    return 0;
}

static int start_threads(Engine *e, Err *err) {
    for (int i = 1; i < e->conf.tp; i++) {
        int rc = pthread_create(&e->rank[i].thread, NULL, rank_main, &e->rank[i]);
        if (rc)
            return err_set(err, E_IO, "cannot start the thread of rank %d: %s", i, strerror(rc));
        e->n_threads++;
    }
    return 0;
}

/* ---- life ---- */

static const Ops *find_backend(const EngineConf *c, Err *err) {
    if (c->ops)
        return c->ops;
    const Ops *ops = NULL;
    if (!strcmp(c->backend, "cuda"))
        return ops_cuda(err);
    if (!strcmp(c->backend, "ref"))
        ops = ops_ref();
    else if (!strcmp(c->backend, "cpu"))
        ops = ops_cpu(NULL);
    else if (!strncmp(c->backend, "cpu-", 4))
        ops = ops_cpu(c->backend + 4);
    if (!ops)
        err_set(err, E_UNSUPPORTED, "backend %s: this build and processor offer ref, cpu%s%s%s",
                c->backend, ops_cpu("avx2") ? ", cpu-avx2" : "",
                ops_cpu("avx512") ? ", cpu-avx512" : "", ops_cuda(NULL) ? ", cuda" : "");
    return ops;
}

static Engine *engine_new(const Weights *w, const EngineConf *conf, const Ops *ops) {
    Engine *e = xcalloc(1, sizeof *e);
    e->conf = *conf;
    if (conf->port)
        e->port = *conf->port;
    e->weights = w;
    e->ops = ops;
    e->host_logits =
        xmalloc((size_t)conf->max_logits * (size_t)weights_shape(w)->vocab * sizeof(float));
    e->logit_row = xmalloc((size_t)conf->max_logits * sizeof(int32_t));
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->wake, NULL);
    pthread_cond_init(&e->done, NULL);
    for (int i = 0; i < ENGINE_MAX_TP; i++)
        e->rank[i] = (Rank){.engine = e, .index = i};
    return e;
}

int engine_open(Engine **out, const Weights *w, const EngineConf *conf, Err *err) {
    const Shape *s = weights_shape(w);
    if (conf->tp < 1 || conf->tp > ENGINE_MAX_TP)
        return err_set(err, E_INVAL, "tp %d: expected 1 to %d", conf->tp, ENGINE_MAX_TP);
    if (conf->max_context < 1 || conf->max_context > s->max_positions)
        return err_set(err, E_INVAL, "max_context %d: the model has %d positions",
                       conf->max_context, s->max_positions);
    int rc = shape_check_tp(s, conf->tp, err);
    const Ops *ops = rc ? NULL : find_backend(conf, err);
    if (!ops)
        return rc ? rc : E_UNSUPPORTED;

    Engine *e = engine_new(w, conf, ops);
    DevConf dc = {.n_ranks = conf->tp,
                  .threads = conf->threads,
                  .max_rows = conf->max_rows,
                  .max_seqs = conf->max_seqs,
                  .max_context = conf->max_context,
                  .index_topk = s->index_topk};
    rc = ops->open(&dc, e->dev, err);
    if (rc == 0)
        rc = start_threads(e, err);
    if (rc == 0) {
        e->job = (Job){.command = CMD_OPEN};
        rc = all_ranks(e, err);
    }
    if (rc) {
        engine_close(e);
        return rc;
    }
    e->conf.resident = NULL; /* borrowed for the call only */
    *out = e;
    return 0;
}

void engine_close(Engine *e) {
    if (!e)
        return;
    e->job = (Job){.command = CMD_CLOSE};
    all_ranks(e, NULL);
    e->job = (Job){.command = CMD_EXIT};
    all_ranks(e, NULL);
    for (int i = 1; i <= e->n_threads; i++)
        pthread_join(e->rank[i].thread, NULL);
    e->ops->close(e->dev, e->conf.tp);
    pthread_cond_destroy(&e->wake);
    pthread_cond_destroy(&e->done);
    pthread_mutex_destroy(&e->lock);
    free(e->host_logits);
    free(e->logit_row);
    free(e);
}

const char *engine_backend(const Engine *e) {
    return e->ops->name;
}

int engine_selftest(const Engine *e, Err *err) {
    return selftest_run(e->ops, weights_shape(e->weights), e->conf.kv_dtype, err);
}

const Shape *engine_shape(const Engine *e) {
    return weights_shape(e->weights);
}

int engine_max_rows(const Engine *e) {
    return e->conf.max_rows;
}

KvLayout engine_kv_layout(const Engine *e) {
    return forward_kv_layout(weights_shape(e->weights), e->conf.kv_dtype, e->conf.mtp);
}

int engine_pool_new(Engine *e, uint64_t bytes, void **out, Err *err) {
    return e->ops->pool_new(e->dev[0], bytes, out, err);
}

void engine_pool_free(Engine *e, void *pool) {
    e->ops->pool_free(e->dev[0], pool);
}

bool engine_pool_on_device(const Engine *e) {
    return e->ops->device_memory;
}

void engine_pool_enter(const Engine *e) {
    e->ops->pool_enter(e->dev[0]);
}

void engine_pool_copy(const Engine *e, void *to, const void *from, uint64_t bytes) {
    e->ops->pool_copy(e->dev[0], to, from, bytes);
}

void engine_kv_hash(Engine *e, const int32_t *page, const int32_t *n_rows, int n, uint64_t *hash) {
    e->ops->kv_hash(e->dev[0], weights_shape(e->weights)->index_slot, page, n_rows, n, hash);
}

void engine_get(Engine *e, const Tensor *t, void *host) {
    e->ops->download(e->dev[0], t, host);
}

void engine_put(Engine *e, Tensor *t, const void *host) {
    e->ops->upload(e->dev[0], t, host);
}

void engine_kv_bind(Engine *e, const KvLayout *layout, void *pool) {
    e->job = (Job){.command = CMD_BIND, .layout = layout, .pool = pool};
    all_ranks(e, NULL);
}

/* ---- steps ---- */

static int run(Engine *e, Job job, Err *err) {
    CHECK(job.n_rows <= e->conf.max_logits);
    for (int i = 0; i < job.n_rows; i++)
        e->logit_row[i] = job.rows[i].row;
    e->job = job;
    return all_ranks(e, err);
}

int engine_step(Engine *e, const OpsBatch *batch, EngineRow *rows, int n_rows,
                const ForwardProbe *probe, Err *err) {
    return run(
        e,
        (Job){.command = CMD_STEP, .batch = batch, .rows = rows, .n_rows = n_rows, .probe = probe},
        err);
}

int engine_mtp(Engine *e, const OpsBatch *batch, const int32_t *hidden_row, bool from_state,
               EngineRow *rows, int n_rows, Err *err) {
    CHECK(e->conf.mtp);
    return run(e,
               (Job){.command = CMD_MTP,
                     .batch = batch,
                     .rows = rows,
                     .n_rows = n_rows,
                     .hidden_row = hidden_row,
                     .from_state = from_state},
               err);
}

int engine_place(Engine *e, int layer, const bool *resident, Err *err) {
    e->job = (Job){.command = CMD_PLACE, .layer = layer, .resident = resident};
    int rc = all_ranks(e, err);
    e->job = (Job){.command = CMD_SWAP, .take = rc == 0};
    all_ranks(e, NULL);
    return rc;
}

const float *engine_logits(const Engine *e, int row) {
    return e->host_logits + (size_t)row * (size_t)weights_shape(e->weights)->vocab;
}
