/* See sample.h. Sampler state belongs to the request's owner; sample_token only reads it. */
#include "model/sample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct Sampler {
    const SampleParams *params;
    int vocab, valid;
    uint16_t
        *answer; /* [vocab] times seen in the answer, saturating; NULL when no penalty needs it */
    uint8_t *anywhere; /* [vocab] seen in prompt or answer; NULL when repetition is 1 */
};

struct SampleScratch {
    float *logit;   /* [vocab] */
    float *prob;    /* [vocab], of the ids in `order` */
    int32_t *order; /* [vocab] candidates */
};

/* ---- params ---- */

static bool in(float x, float low, float high) {
    return x >= low && x <= high; /* false for NaN */
}

int sample_params_check(const SampleParams *p, int valid, Err *err) {
    const char *wrong = !in(p->temperature, 0, 1e6f)                   ? "temperature"
                        : !(in(p->top_p, 0, 1) && p->top_p > 0)        ? "top_p"
                        : p->top_k < 0                                 ? "top_k"
                        : !in(p->min_p, 0, 1)                          ? "min_p"
                        : !in(p->presence, -1e6f, 1e6f)                ? "presence penalty"
                        : !in(p->frequency, -1e6f, 1e6f)               ? "frequency penalty"
                        : !in(p->repetition, 1e-6f, 1e6f)              ? "repetition penalty"
                        : p->n_bias < 0 || p->n_bias > SAMPLE_MAX_BIAS ? "number of logit biases"
                        : p->n_stop < 0 || p->n_stop > SAMPLE_MAX_STOP ? "number of stop tokens"
                        : p->max_tokens < 1                            ? "max_tokens"
                        : p->min_tokens < 0                            ? "min_tokens"
                        : p->n_top < 0 || p->n_top > SAMPLE_MAX_TOP    ? "top_logprobs"
                                                                       : NULL;
    for (int i = 0; !wrong && i < p->n_bias; i++)
        if (p->bias[i].token < 0 || p->bias[i].token >= valid || !in(p->bias[i].bias, -1e6f, 1e6f))
            wrong = "logit bias";
    for (int i = 0; !wrong && i < p->n_stop; i++)
        if (p->stop[i] < 0 || p->stop[i] >= valid)
            wrong = "stop token";
    return wrong ? err_set(err, E_INVAL, "%s out of range", wrong) : 0;
}

/* ---- life ---- */

Sampler *sampler_new(const SampleParams *params, int vocab, int valid) {
    CHECK(valid > 0 && valid <= vocab);
    Sampler *s = xcalloc(1, sizeof *s);
    *s = (Sampler){.params = params, .vocab = vocab, .valid = valid};
    if (params->presence != 0 || params->frequency != 0)
        s->answer = xcalloc((size_t)vocab, sizeof *s->answer);
    if (params->repetition != 1)
        s->anywhere = xcalloc((size_t)vocab, sizeof *s->anywhere);
    return s;
}

void sampler_free(Sampler *s) {
    if (!s)
        return;
    free(s->answer);
    free(s->anywhere);
    free(s);
}

void sampler_see(Sampler *s, const int32_t *token, int n, bool answer) {
    for (int i = 0; i < n; i++) {
        if (token[i] < 0 || token[i] >= s->vocab)
            continue;
        if (s->anywhere)
            s->anywhere[token[i]] = 1;
        if (s->answer && answer && s->answer[token[i]] < UINT16_MAX)
            s->answer[token[i]]++;
    }
}

const SampleParams *sampler_params(const Sampler *s) {
    return s->params;
}

bool sampler_is_stop(const Sampler *s, int32_t token, int n_answer) {
    for (int i = 0; i < s->params->n_stop && n_answer >= s->params->min_tokens; i++)
        if (s->params->stop[i] == token)
            return true;
    return false;
}

SampleScratch *sample_scratch_new(int vocab) {
    SampleScratch *c = xcalloc(1, sizeof *c);
    c->logit = xmalloc((size_t)vocab * sizeof *c->logit);
    c->prob = xmalloc((size_t)vocab * sizeof *c->prob);
    c->order = xmalloc((size_t)vocab * sizeof *c->order);
    return c;
}

void sample_scratch_free(SampleScratch *c) {
    if (!c)
        return;
    free(c->logit);
    free(c->prob);
    free(c->order);
    free(c);
}

/* ---- randomness ---- */

/* splitmix64's finaliser over (seed, draw): the n-th number of a request without any state. */
static double uniform(uint64_t seed, int draw) {
    uint64_t z = seed + 0x9e3779b97f4a7c15ull * ((uint64_t)draw + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1.0p-53;
}

/* ---- logits ---- */

static void penalise(const Sampler *s, float *logit) {
    const SampleParams *p = s->params;
    for (int i = 0; s->anywhere && i < s->valid; i++)
        if (s->anywhere[i])
            logit[i] = logit[i] > 0 ? logit[i] / p->repetition : logit[i] * p->repetition;
    for (int i = 0; s->answer && i < s->valid; i++)
        if (s->answer[i])
            logit[i] -= p->presence + p->frequency * (float)s->answer[i];
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].token >= 0 && p->bias[i].token < s->valid)
            logit[p->bias[i].token] += p->bias[i].bias;
}

/* Copies, refuses NaN, applies penalties, bias and masks. */
static int prepare(const Sampler *s, SampleScratch *c, const float *logits, int draw, Err *err) {
    const SampleParams *p = s->params;
    for (int i = 0; i < s->valid; i++)
        if (isnan(logits[i]))
            return err_set(err, E_FORMAT, "logit %d is not a number", i);
    memcpy(c->logit, logits, (size_t)s->valid * sizeof *c->logit);
    penalise(s, c->logit);
    for (int i = 0; i < p->n_stop && draw < p->min_tokens; i++)
        if (p->stop[i] >= 0 && p->stop[i] < s->valid)
            c->logit[p->stop[i]] = -INFINITY;
    return 0;
}

static int largest(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* log of the sum of exp over all valid ids */
static double log_sum(const float *logit, int n, float top) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)logit[i] - top);
    return top + log(sum);
}

/* ---- candidates ---- */

/* a before b: larger logit, then lower id */
static bool before(const float *logit, int32_t a, int32_t b) {
    return logit[a] != logit[b] ? logit[a] > logit[b] : a < b;
}

static void sift(const float *logit, int32_t *heap, int n, int at) {
    for (int child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(logit, heap[child + 1], heap[child]))
            child++;
        if (!before(logit, heap[child], heap[at]))
            return;
        int32_t x = heap[at];
        heap[at] = heap[child];
        heap[child] = x;
    }
}

/* A heap with the best id on top; popping k of n costs n + k log n. */
static void heap_make(const float *logit, int32_t *heap, int n) {
    for (int i = n / 2 - 1; i >= 0; i--)
        sift(logit, heap, n, i);
}

/* Takes the best; the freed place at the heap's end holds it afterwards. */
static int32_t heap_pop(const float *logit, int32_t *heap, int *n) {
    int32_t best = heap[0];
    heap[0] = heap[--*n];
    heap[*n] = best;
    sift(logit, heap, *n, 0);
    return best;
}

static void fill_top(const Sampler *s, SampleScratch *c, double total, SampleOut *out) {
    int n = s->valid, want = s->params->n_top;
    for (int i = 0; i < n; i++)
        c->order[i] = i;
    heap_make(c->logit, c->order, n);
    out->n_top = 0;
    while (out->n_top < want && n > 0) {
        int32_t id = heap_pop(c->logit, c->order, &n);
        out->top_token[out->n_top] = id;
        out->top_logprob[out->n_top++] = (float)(c->logit[id] - total);
    }
}

/* Candidates: ids whose probability at this temperature is at least min_p of the best's, with
 * prob[id] relative to the best. Returns their number and the sum of prob. */
static int find_candidates(const Sampler *s, SampleScratch *c, int32_t top, double *total) {
    const SampleParams *p = s->params;
    double best = c->logit[top], floor = p->min_p > 0 ? log((double)p->min_p) : -INFINITY;
    int n = 0;
    *total = 0;
    for (int i = 0; i < s->valid; i++) {
        double x = ((double)c->logit[i] - best) / (double)p->temperature;
        if (!(x >= floor) || c->logit[i] == -INFINITY)
            continue;
        c->prob[i] = (float)exp(x);
        *total += (double)c->prob[i];
        c->order[n++] = i;
    }
    heap_make(c->logit, c->order, n);
    return n;
}

/* Keeps the best of the n candidates: at most `limit`, and no more than it takes to reach `mass`.
 * Returns their number and the sum of prob. */
static int keep_best(SampleScratch *c, int n, int limit, double mass, double *total) {
    int left = n;
    double sum = 0;
    while (left > 0 && n - left < limit && sum < mass)
        sum += (double)c->prob[heap_pop(c->logit, c->order, &left)];
    *total = sum;
    int kept = n - left; /* popped ids stand at the end */
    memmove(c->order, c->order + left, (size_t)kept * sizeof *c->order);
    heap_make(c->logit, c->order, kept);
    return kept;
}

/* top-k, then top-p within it, then the draw. Candidates are taken in order of falling probability,
 * so that a draw does not depend on how many others there are. */
static int32_t draw_token(const Sampler *s, SampleScratch *c, int32_t top, double u) {
    const SampleParams *p = s->params;
    double total, sum = 0;
    int n = find_candidates(s, c, top, &total);
    if (p->top_k > 0 && p->top_k < n)
        n = keep_best(c, n, p->top_k, INFINITY, &total);
    if (p->top_p < 1)
        n = keep_best(c, n, n, (double)p->top_p * total, &total);
    int32_t id = top;
    for (double at = u * total; n > 0 && sum <= at;) {
        id = heap_pop(c->logit, c->order, &n);
        sum += (double)c->prob[id];
    }
    return id;
}

int sample_token(const Sampler *s, SampleScratch *c, const float *logits, int draw, SampleOut *out,
                 Err *err) {
    const SampleParams *p = s->params;
    int rc = prepare(s, c, logits, draw, err);
    if (rc)
        return rc;
    int32_t top = largest(c->logit, s->valid);
    if (!(c->logit[top] > -INFINITY) || isinf(c->logit[top]))
        return err_set(err, E_FORMAT, "no token remains to choose from, or an infinite logit");
    SampleOut o = {.token = top};
    if (p->temperature > 0)
        o.token = draw_token(s, c, top, uniform(p->seed, draw));
    if (p->logprobs) {
        double total = log_sum(c->logit, s->valid, c->logit[top]);
        o.logprob = (float)(c->logit[o.token] - total);
        if (p->n_top > 0)
            fill_top(s, c, total, &o);
    }
    *out = o;
    return 0;
}
