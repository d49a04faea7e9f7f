/* Sampling: penalties, masks, filters, statistics, determinism, and refusal of broken logits. */
#include "model/sample.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { VOCAB = 16, VALID = 12 };

static SampleParams plain(void) {
    return (SampleParams){.temperature = 1, .top_p = 1, .repetition = 1, .max_tokens = 10};
}

static int sample(const SampleParams *p, const float *logits, int draw, SampleOut *out, Err *err) {
    Sampler *s = sampler_new(p, VOCAB, VALID);
    SampleScratch *c = sample_scratch_new(VOCAB);
    int rc = sample_token(s, c, logits, draw, out, err);
    sample_scratch_free(c);
    sampler_free(s);
    return rc;
}

static int32_t pick(const SampleParams *p, const float *logits, int draw) {
    SampleOut out;
    assert_int_equal(sample(p, logits, draw, &out, NULL), 0);
    return out.token;
}

static void test_greedy_takes_the_largest_lowest_id_first(void **state) {
    (void)state;
    SampleParams p = plain();
    float logits[VOCAB] = {0, 3, 5, 5, 1};
    p.temperature = 0;
    assert_int_equal(pick(&p, logits, 0), 2);
    logits[14] = 100; /* a padding row */
    assert_int_equal(pick(&p, logits, 0), 2);
    logits[11] = 7;
    assert_int_equal(pick(&p, logits, 0), 11);
}

static void test_statistics_follow_the_softmax(void **state) {
    (void)state;
    enum { DRAWS = 40000 };
    SampleParams p = plain();
    float logits[VOCAB];
    int count[VOCAB] = {0};
    double want[VOCAB], sum = 0, chi2 = 0;
    p.temperature = 0.7f;
    for (int i = 0; i < VOCAB; i++)
        logits[i] = i < VALID ? (float)((i * 7) % 5) * 0.5f : 50;
    for (int i = 0; i < VALID; i++)
        sum += want[i] = exp(logits[i] / 0.7);
    for (int n = 0; n < DRAWS; n++) {
        p.seed = (uint64_t)n * 977;
        count[pick(&p, logits, n % 13)]++;
    }
    for (int i = 0; i < VALID; i++) {
        double e = DRAWS * want[i] / sum;
        chi2 += (count[i] - e) * (count[i] - e) / e;
    }
    assert_true(chi2 < 31.3); /* 11 degrees of freedom, p = 0.001 */
    for (int i = VALID; i < VOCAB; i++)
        assert_int_equal(count[i], 0);
}

/* Which tokens come out in many draws. */
static unsigned seen(const SampleParams *base, const float *logits) {
    SampleParams p = *base;
    unsigned mask = 0;
    for (int n = 0; n < 3000; n++) {
        p.seed = (uint64_t)n;
        mask |= 1u << pick(&p, logits, 0);
    }
    return mask;
}

static void test_filters_keep_what_they_say(void **state) {
    (void)state;
    float logits[VOCAB];
    SampleParams p = plain();
    for (int i = 0; i < VOCAB; i++)
        logits[i] = -INFINITY;
    logits[3] = logf(0.4f), logits[1] = logf(0.3f), logits[7] = logf(0.2f), logits[5] = logf(0.1f);
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1 | 1u << 7 | 1u << 5);
    p.top_k = 2;
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1);
    p.top_k = 0, p.top_p = 0.65f;
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1);
    p.top_p = 0.75f;
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1 | 1u << 7);
    p.top_p = 1e-6f;
    assert_int_equal(seen(&p, logits), 1u << 3);
    p.top_p = 1, p.min_p = 0.45f;
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1 | 1u << 7);
    p.min_p = 1;
    assert_int_equal(seen(&p, logits), 1u << 3);
    p = plain(), p.top_k = 3, p.top_p = 0.7f; /* of the mass that top-k left: 0.9 */
    assert_int_equal(seen(&p, logits), 1u << 3 | 1u << 1);
}

static void test_a_draw_depends_on_seed_and_number_alone(void **state) {
    (void)state;
    SampleParams p = plain();
    float logits[VOCAB] = {0};
    int32_t a[64], differ_draw = 0, differ_seed = 0;
    p.seed = 5;
    for (int i = 0; i < 64; i++)
        a[i] = pick(&p, logits, i);
    for (int i = 63; i >= 0; i--) /* in any order, from a fresh sampler */
        assert_int_equal(pick(&p, logits, i), a[i]);
    for (int i = 1; i < 64; i++)
        differ_draw += a[i] != a[0];
    p.seed = 6;
    for (int i = 0; i < 64; i++)
        differ_seed += pick(&p, logits, i) != a[i];
    assert_true(differ_draw > 40 && differ_seed > 40);
}

static void test_penalties(void **state) {
    (void)state;
    SampleParams p = plain();
    float logits[VOCAB] = {[1] = 4, [2] = 3, [3] = 2.5f, [4] = -1};
    SampleOut out;
    const int32_t prompt[2] = {2, 4}, answer[3] = {1, 1, 3};
    p.temperature = 0, p.logprobs = true, p.n_top = 4;
    p.presence = 0.5f, p.frequency = 0.25f, p.repetition = 2;
    Sampler *s = sampler_new(&p, VOCAB, VALID);
    SampleScratch *c = sample_scratch_new(VOCAB);
    sampler_see(s, prompt, 2, false);
    sampler_see(s, answer, 3, true);
    assert_int_equal(sample_token(s, c, logits, 0, &out, NULL), 0);
    /* 1: 4 / 2 - 0.5 - 2 * 0.25; 2: 3 / 2; 3: 2.5 / 2 - 0.75; 4: -1 * 2 */
    double want[VALID] = {0}, sum = 0;
    want[1] = 1, want[2] = 1.5, want[3] = 0.5, want[4] = -2;
    for (int i = 0; i < VALID; i++)
        sum += exp(want[i]);
    assert_int_equal(out.token, 2);
    assert_true(fabs(out.logprob - (1.5 - log(sum))) < 1e-5);
    const int32_t order[4] = {2, 1, 3, 0};
    assert_int_equal(out.n_top, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(out.top_token[i], order[i]);
        assert_true(fabs(out.top_logprob[i] - (want[order[i]] - log(sum))) < 1e-5);
    }
    sample_scratch_free(c);
    sampler_free(s);
}

static void test_bias_and_log_probabilities(void **state) {
    (void)state;
    SampleParams p = plain();
    SampleBias bias[2] = {{6, 5}, {0, -INFINITY}};
    float logits[VOCAB] = {3};
    SampleOut out;
    p.temperature = 0, p.bias = bias, p.n_bias = 2, p.logprobs = true;
    assert_int_equal(sample(&p, logits, 0, &out, NULL), 0);
    assert_int_equal(out.token, 6);
    assert_true(fabs(out.logprob - (5 - log(exp(5) + 10))) < 1e-5); /* 0 is out of the sum */
    assert_int_equal(out.n_top, 0);
}

static void test_stop_tokens_wait_for_min_tokens(void **state) {
    (void)state;
    SampleParams p = plain();
    int32_t stop[1] = {4};
    float logits[VOCAB] = {[4] = 9, [2] = 1};
    p.temperature = 0, p.stop = stop, p.n_stop = 1, p.min_tokens = 2;
    assert_int_equal(pick(&p, logits, 0), 2);
    assert_int_equal(pick(&p, logits, 1), 2);
    assert_int_equal(pick(&p, logits, 2), 4);
    Sampler *s = sampler_new(&p, VOCAB, VALID);
    assert_false(sampler_is_stop(s, 4, 1));
    assert_true(sampler_is_stop(s, 4, 2));
    assert_false(sampler_is_stop(s, 2, 2));
    sampler_free(s);
}

static void test_broken_logits_give_no_token(void **state) {
    (void)state;
    SampleParams p = plain();
    SampleOut out = {.token = -5};
    Err err = {0};
    float logits[VOCAB] = {0};
    logits[7] = NAN;
    assert_int_equal(sample(&p, logits, 0, &out, &err), E_FORMAT);
    assert_non_null(strstr(err.text, "logit 7"));
    logits[7] = INFINITY;
    assert_int_equal(sample(&p, logits, 0, &out, &err), E_FORMAT);
    for (int i = 0; i < VOCAB; i++)
        logits[i] = -INFINITY;
    assert_int_equal(sample(&p, logits, 0, &out, &err), E_FORMAT);
    assert_int_equal(out.token, -5);
    logits[13] = NAN; /* padding rows may hold anything */
    logits[2] = 0;
    assert_int_equal(sample(&p, logits, 0, &out, &err), 0);
    assert_int_equal(out.token, 2);
}

static void test_params_are_checked(void **state) {
    (void)state;
    Err err = {0};
    SampleBias bias = {VALID, 0};
    int32_t stop = -1;
    SampleParams ok = plain(), p;
    assert_int_equal(sample_params_check(&ok, VALID, &err), 0);
#define REFUSED(change, name)                                                                      \
    do {                                                                                           \
        p = ok;                                                                                    \
        change;                                                                                    \
        assert_int_equal(sample_params_check(&p, VALID, &err), E_INVAL);                           \
        assert_non_null(strstr(err.text, name));                                                   \
    } while (0)
    REFUSED(p.temperature = -0.1f, "temperature");
    REFUSED(p.temperature = NAN, "temperature");
    REFUSED(p.top_p = 0, "top_p");
    REFUSED(p.top_p = 1.01f, "top_p");
    REFUSED(p.top_k = -1, "top_k");
    REFUSED(p.min_p = 1.5f, "min_p");
    REFUSED(p.presence = INFINITY, "presence");
    REFUSED(p.frequency = NAN, "frequency");
    REFUSED(p.repetition = 0, "repetition");
    REFUSED(p.max_tokens = 0, "max_tokens");
    REFUSED(p.min_tokens = -1, "min_tokens");
    REFUSED(p.n_top = SAMPLE_MAX_TOP + 1, "top_logprobs");
    REFUSED((p.bias = &bias, p.n_bias = 1), "logit bias");
    REFUSED((p.stop = &stop, p.n_stop = 1), "stop token");
#undef REFUSED
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_takes_the_largest_lowest_id_first),
        cmocka_unit_test(test_statistics_follow_the_softmax),
        cmocka_unit_test(test_filters_keep_what_they_say),
        cmocka_unit_test(test_a_draw_depends_on_seed_and_number_alone),
        cmocka_unit_test(test_penalties),
        cmocka_unit_test(test_bias_and_log_probabilities),
        cmocka_unit_test(test_stop_tokens_wait_for_min_tokens),
        cmocka_unit_test(test_broken_logits_give_no_token),
        cmocka_unit_test(test_params_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
