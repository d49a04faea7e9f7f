/* From logits to a token: penalties, bias, temperature, top-k, top-p, min-p, and log-probabilities.
 * Pure but for the caller's state; any thread.
 *
 * Reproducible: the n-th draw of a request depends on its seed and n alone, never on other
 * requests. Order: repetition, presence and frequency penalties, logit bias, masks;
 * log-probabilities are taken there; then temperature, top-k, top-p, min-p and the draw.
 * temperature 0 takes the largest logit, lowest id among equals. */
#pragma once

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

enum { SAMPLE_MAX_TOP = 20, SAMPLE_MAX_STOP = 64, SAMPLE_MAX_BIAS = 1024 };

typedef struct SampleBias {
    int32_t token;
    float bias;
} SampleBias;

typedef struct SampleParams {
    float temperature; /* >= 0 */
    float top_p;       /* (0, 1] */
    int top_k;         /* 0: all */
    float min_p;       /* [0, 1] */
    uint64_t seed;
    float presence, frequency; /* OpenAI: counted over the answer */
    float repetition;          /* > 0, 1: none; over prompt and answer */
    int n_bias, n_stop;
    SampleBias *bias; /* [n_bias], owner: the request */
    int32_t *stop;    /* [n_stop] */
    int max_tokens, min_tokens;
    bool logprobs;
    int n_top; /* 0..SAMPLE_MAX_TOP */
} SampleParams;

typedef struct SampleOut {
    int32_t token;
    float logprob;
    int n_top;
    int32_t top_token[SAMPLE_MAX_TOP];
    float top_logprob[SAMPLE_MAX_TOP];
} SampleOut;

/* Whether the params make sense for a vocabulary of `valid` tokens: E_INVAL names what does not. */
int sample_params_check(const SampleParams *p, int valid, Err *err);

typedef struct Sampler Sampler;             /* one request's counts of tokens */
typedef struct SampleScratch SampleScratch; /* one thread's working memory */

/* valid: ids >= valid are padding rows of the vocabulary and never come out. The params are
 * borrowed for the sampler's life. */
Sampler *sampler_new(const SampleParams *params, int vocab, int valid);
void sampler_free(Sampler *s);
/* Counts tokens of the prompt (for the repetition penalty) or of the answer (for all). */
void sampler_see(Sampler *s, const int32_t *token, int n, bool answer);
const SampleParams *sampler_params(const Sampler *s);
/* Whether token ends the answer, given n_answer tokens before it. */
bool sampler_is_stop(const Sampler *s, int32_t token, int n_answer);

SampleScratch *sample_scratch_new(int vocab);
void sample_scratch_free(SampleScratch *c);

/* Chooses the draw-th answer token (0 is the first) from logits[vocab]. Does not count it: call
 * sampler_see. Stop tokens are masked while draw < min_tokens. E_FORMAT when a logit is NaN or no
 * token remains: the step is broken, no token is made up. */
int sample_token(const Sampler *s, SampleScratch *c, const float *logits, int draw, SampleOut *out,
                 Err *err);
