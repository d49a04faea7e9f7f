/* See request.h. */
#include "decode/request.h"

#include "kernels/kv_layout.h"

#include <stdlib.h>

static int copy_sampling(SampleParams *p, const Baton__Sampling *s, Err *err) {
    if (s->n_logit_bias > SAMPLE_MAX_BIAS || s->n_stop_token > SAMPLE_MAX_STOP)
        return err_set(err, E_LIMIT, "more than %d logit biases or %d stop tokens", SAMPLE_MAX_BIAS,
                       SAMPLE_MAX_STOP);
    *p = (SampleParams){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .top_k = (int)s->top_k,
        .min_p = s->min_p,
        .seed = s->seed,
        .presence = s->presence_penalty,
        .frequency = s->frequency_penalty,
        .repetition = s->repetition_penalty,
        .n_bias = (int)s->n_logit_bias,
        .n_stop = (int)s->n_stop_token,
        .max_tokens = s->max_tokens > INT32_MAX ? INT32_MAX : (int)s->max_tokens,
        .min_tokens = s->min_tokens > INT32_MAX ? INT32_MAX : (int)s->min_tokens,
        .logprobs = s->logprobs,
        .n_top = (int)s->top_logprobs,
    };
    p->bias = xcalloc(s->n_logit_bias + 1, sizeof *p->bias);
    p->stop = xcalloc(s->n_stop_token + 1, sizeof *p->stop);
    for (size_t i = 0; i < s->n_logit_bias; i++)
        p->bias[i] = (SampleBias){(int32_t)s->logit_bias[i]->token, s->logit_bias[i]->bias};
    for (size_t i = 0; i < s->n_stop_token; i++)
        p->stop[i] = (int32_t)s->stop_token[i];
    return 0;
}

static int check_prompt(const Baton__Reserve *m, int max_context, int n_tokens, Err *err) {
    if (m->n_prompt < 1)
        return err_set(err, E_INVAL, "empty prompt");
    if (m->n_prompt >= (size_t)max_context)
        return err_set(err, E_LIMIT, "prompt of %zu tokens, the context has %d", m->n_prompt,
                       max_context);
    for (size_t i = 0; i < m->n_prompt; i++)
        if (m->prompt[i] >= (uint32_t)n_tokens)
            return err_set(err, E_INVAL, "prompt token %zu is %u, the vocabulary has %d", i,
                           m->prompt[i], n_tokens);
    return 0;
}

int decode_request_new(DecodeRequest **out, const Baton__Reserve *m, int max_context, int n_tokens,
                       int vocab, Err *err) {
    int rc = check_prompt(m, max_context, n_tokens, err);
    if (rc)
        return rc;
    DecodeRequest *r = xcalloc(1, sizeof *r);
    rc = copy_sampling(&r->params, m->sampling, err);
    if (rc == 0)
        rc = sample_params_check(&r->params, n_tokens, err);
    if (rc) {
        decode_request_free(r);
        return rc;
    }
    r->id = m->request;
    r->n_prompt = (int)m->n_prompt;
    int room = max_context - r->n_prompt;
    r->max_answer = r->params.max_tokens < room ? r->params.max_tokens : room;
    r->n_granted = kv_pages_of(r->n_prompt);
    r->n_pages = kv_pages_of(r->n_prompt + r->max_answer - 1); /* the last token is never stored */
    r->page = xcalloc((size_t)r->n_pages, sizeof *r->page);
    r->sampler = sampler_new(&r->params, vocab, n_tokens);
    sampler_see(r->sampler, (const int32_t *)m->prompt, r->n_prompt, false);
    *out = r;
    return 0;
}

void decode_request_free(DecodeRequest *r) {
    if (!r)
        return;
    sampler_free(r->sampler);
    free(r->params.bias);
    free(r->params.stop);
    free(r->page);
    free(r->page_hash);
    free(r);
}

static DecodeRequest **bucket(const DecodeRequests *all, uint64_t id) {
    return (DecodeRequest **)&all->buckets[id % DECODE_BUCKETS];
}

DecodeRequest *decode_requests_find(const DecodeRequests *all, uint64_t id) {
    DecodeRequest *r = *bucket(all, id);
    while (r && r->id != id)
        r = r->next_in_bucket;
    return r;
}

void decode_requests_put(DecodeRequests *all, DecodeRequest *r) {
    r->next_in_bucket = *bucket(all, r->id);
    *bucket(all, r->id) = r;
    r->prev = NULL;
    r->next = all->list;
    if (r->next)
        r->next->prev = r;
    all->list = r;
    all->n++;
}

void decode_requests_remove(DecodeRequests *all, DecodeRequest *r) {
    DecodeRequest **at = bucket(all, r->id);
    while (*at != r)
        at = &(*at)->next_in_bucket;
    *at = r->next_in_bucket;
    if (r->prev)
        r->prev->next = r->next;
    else
        all->list = r->next;
    if (r->next)
        r->next->prev = r->prev;
    all->n--;
}
