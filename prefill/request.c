/* See request.h. */
#include "prefill/request.h"

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

static int check_prompt(const Baton__Prefill *m, int max_context, int n_tokens, Err *err) {
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

/* Whether KV of this service means the same to the decode that granted, and fits where it goes. */
static int check_grant(const Baton__Grant *g, uint64_t request, size_t n_prompt, const Runtime *rt,
                       KvLayout *remote, Err *err) {
    uint64_t fingerprint = rt->fingerprint, hash = kv_layout_hash(&rt->layout);
    *remote = rt->layout;
    remote->n_pages = g->total_pages;
    if (g->request != request)
        return err_set(err, E_MISMATCH, "the grant is for another request");
    if (g->generation == 0)
        return err_set(err, E_MISMATCH, "the grant has no generation");
    if (g->fingerprint != fingerprint)
        return err_set(err, E_MISMATCH, "decode runs model %016llx, prefill %016llx",
                       (unsigned long long)g->fingerprint, (unsigned long long)fingerprint);
    if (g->kv_layout_hash != hash)
        return err_set(err, E_MISMATCH, "decode has KV layout %016llx, prefill %016llx",
                       (unsigned long long)g->kv_layout_hash, (unsigned long long)hash);
    if (g->n_page != (size_t)kv_pages_of((int64_t)n_prompt))
        return err_set(err, E_MISMATCH, "grant of %zu pages for %zu tokens", g->n_page, n_prompt);
    if (g->have >= n_prompt || g->have % KV_PAGE_TOKENS != 0)
        return err_set(err, E_MISMATCH, "decode says that it has %u of %zu tokens", g->have,
                       n_prompt);
    if (g->kv_bytes < kv_pool_bytes(remote))
        return err_set(err, E_MISMATCH, "decode's pool of %llu bytes does not hold %u pages",
                       (unsigned long long)g->kv_bytes, g->total_pages);
    for (size_t i = 0; i < g->n_page; i++)
        if (g->page[i] >= g->total_pages)
            return err_set(err, E_MISMATCH, "grant of a page outside the pool");
    return 0;
}

static void copy_message(PrefillRequest *r, const Baton__Prefill *m) {
    r->id = m->request;
    r->n_prompt = (int)m->n_prompt;
    r->n_pages = kv_pages_of(r->n_prompt);
    r->have = (int)m->grant->have;
    r->ticket = m->grant->ticket;
    r->prompt = xcalloc(m->n_prompt, sizeof *r->prompt);
    r->page = xcalloc((size_t)r->n_pages, sizeof *r->page);
    r->remote_page = xcalloc((size_t)r->n_pages, sizeof *r->remote_page);
    r->hash = xcalloc((size_t)r->n_pages, sizeof *r->hash);
    for (int i = 0; i < r->n_prompt; i++)
        r->prompt[i] = (int32_t)m->prompt[i];
    for (int i = 0; i < r->n_pages; i++)
        r->remote_page[i] = (int32_t)m->grant->page[i];
}

int prefill_request_new(PrefillRequest **out, const Baton__Prefill *m,
                        const PrefillRequestLimits *limits, Err *err) {
    const Runtime *rt = limits->runtime;
    KvLayout remote;
    int rc = check_prompt(m, limits->max_context, rt->n_tokens, err);
    if (rc == 0)
        rc = check_grant(m->grant, m->request, m->n_prompt, rt, &remote, err);
    if (rc)
        return rc;
    PrefillRequest *r = xcalloc(1, sizeof *r);
    rc = copy_sampling(&r->params, m->sampling, err);
    if (rc == 0)
        rc = sample_params_check(&r->params, rt->n_tokens, err);
    if (rc) {
        prefill_request_free(r);
        return rc;
    }
    copy_message(r, m);
    r->remote = remote;
    r->sampler = sampler_new(&r->params, rt->shape->vocab, rt->n_tokens);
    sampler_see(r->sampler, r->prompt, r->n_prompt, false);
    *out = r;
    return 0;
}

void prefill_request_free(PrefillRequest *r) {
    if (!r)
        return;
    sampler_free(r->sampler);
    free(r->params.bias);
    free(r->params.stop);
    free(r->prompt);
    free(r->page);
    free(r->remote_page);
    free(r->hash);
    free(r);
}
