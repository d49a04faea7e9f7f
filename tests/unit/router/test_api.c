/* Tests router/api*.c: what is taken, and every refusal with its param and code. */
#include "router/api.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const ApiModel model = {.name = "m",
                               .max_context = 100,
                               .default_max_tokens = 20,
                               .n_tokens = 1000,
                               .temperature = 0.5f,
                               .top_p = 0.25f,
                               .enable_thinking = true,
                               .eos = {7, 8},
                               .n_eos = 2,
                               .think_end = 9};

/* A whole body from the fields after the model and the prompt. */
static char *body_of(bool chat, const char *fields) {
    return xasprintf("{\"model\":\"m\",%s%s%s}",
                     chat ? "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
                          : "\"prompt\":\"hi\"",
                     *fields ? "," : "", fields);
}

static void parse(bool chat, const char *fields, ApiReq *req) {
    ApiError e;
    char *body = body_of(chat, fields);
    if (api_parse(&model, chat, body, strlen(body), req, &e))
        fail_msg("%s: %s", body, e.message);
    free(body);
}

typedef struct Refusal {
    const char *body; /* whole when it begins with {, [ or a space; else fields */
    const char *param, *code;
    int status; /* 0: 400 */
} Refusal;

static void check_refusal(bool chat, const Refusal *r) {
    ApiReq req;
    ApiError e;
    bool whole = strchr("{[ ", r->body[0]) != NULL;
    char *body = whole ? xstrdup(r->body) : body_of(chat, r->body);
    int rc = api_parse(&model, chat, body, strlen(body), &req, &e);
    if (rc == 0)
        fail_msg("taken: %s", body);
    if (strcmp(e.param, r->param) != 0 || strcmp(e.code, r->code) != 0 ||
        e.status != (r->status ? r->status : 400))
        fail_msg("%s: %d, param %s, code %s: %s", body, e.status, e.param, e.code, e.message);
    assert_true(e.message[0] != '\0');
    assert_string_equal(e.type, "invalid_request_error");
    free(body);
}

#define CHECK_REFUSALS(chat, list)                                                                 \
    for (size_t i = 0; i < sizeof(list) / sizeof *(list); i++)                                     \
    check_refusal(chat, &(list)[i])

static const char INV[] = "invalid_value", TYP[] = "invalid_type", UNS[] = "unsupported_parameter",
                  MIS[] = "missing_required_parameter", JSN[] = "invalid_json";

/* ---- what is taken ---- */

static void test_defaults(void **state) {
    ApiReq r;
    (void)state;
    parse(true, "", &r);
    assert_true(r.chat && !r.stream && !r.include_usage);
    assert_int_equal(json_array_size(r.messages), 1);
    assert_true(r.options.enable_thinking && r.options.add_generation_prompt);
    assert_null(r.options.reasoning_effort);
    assert_true(r.sampling.temperature == 0.5f && r.sampling.top_p == 0.25f);
    assert_true(r.sampling.repetition_penalty == 1);
    assert_int_equal(r.sampling.n_stop_token, 2);
    assert_int_equal(r.sampling.stop_token[0], 7);
    assert_int_equal(r.sampling.stop_token[1], 8);
    assert_int_equal(r.max_tokens, -1);
    assert_false(r.sampling.logprobs);
    api_done(&r);
}

static void test_sampling(void **state) {
    ApiReq r;
    (void)state;
    parse(true,
          "\"temperature\":0,\"top_p\":1,\"top_k\":40,\"min_p\":0.1,\"seed\":-3,"
          "\"presence_penalty\":-2,\"frequency_penalty\":1.5,\"repetition_penalty\":1.1,"
          "\"logit_bias\":{\"5\":-100,\"999\":2.5},\"max_tokens\":10,\"min_tokens\":2,"
          "\"stop_token_ids\":[3,4],\"logprobs\":true,\"top_logprobs\":20,\"stream\":true,"
          "\"stream_options\":{\"include_usage\":true}",
          &r);
    assert_true(r.stream && r.include_usage);
    assert_true(r.sampling.temperature == 0 && r.sampling.top_p == 1);
    assert_int_equal(r.sampling.top_k, 40);
    assert_true(r.sampling.min_p == 0.1f && r.sampling.presence_penalty == -2);
    assert_true(r.sampling.seed == (uint64_t)-3);
    assert_int_equal(r.sampling.n_logit_bias, 2);
    assert_int_equal(r.sampling.logit_bias[1]->token, 999);
    assert_true(r.sampling.logit_bias[0]->bias == -100);
    assert_int_equal(r.max_tokens, 10);
    assert_int_equal(r.sampling.min_tokens, 2);
    assert_int_equal(r.sampling.n_stop_token, 4);
    assert_int_equal(r.sampling.stop_token[3], 4);
    assert_true(r.sampling.logprobs);
    assert_int_equal(r.sampling.top_logprobs, 20);
    api_done(&r);
}

static void test_harmless(void **state) {
    ApiReq r;
    (void)state;
    parse(true,
          "\"n\":1,\"stop\":null,\"tools\":[],\"tool_choice\":\"none\",\"functions\":[],"
          "\"response_format\":{\"type\":\"text\"},\"user\":\"u\",\"metadata\":{\"a\":\"b\"},"
          "\"service_tier\":\"auto\",\"ignore_eos\":false,"
          "\"store\":false,\"logprobs\":false,\"top_logprobs\":0,\"unknown\":null,\"top_k\":-1",
          &r);
    assert_int_equal(r.sampling.top_k, 0);
    api_done(&r);
    parse(false, "\"best_of\":1,\"echo\":false,\"suffix\":\"\",\"stop\":[],\"logprobs\":0", &r);
    assert_true(r.sampling.logprobs);
    assert_int_equal(r.sampling.top_logprobs, 0);
    api_done(&r);
}

/* Only the end tokens that the request itself names are left. */
static void test_ignore_eos(void **state) {
    ApiReq r;
    (void)state;
    parse(false, "\"stop_token_ids\":[3,7],\"ignore_eos\":true", &r);
    assert_int_equal(r.sampling.n_stop_token, 2);
    assert_int_equal(r.sampling.stop_token[0], 3);
    assert_int_equal(r.sampling.stop_token[1], 7);
    api_done(&r);
    parse(true, "\"ignore_eos\":true", &r);
    assert_int_equal(r.sampling.n_stop_token, 0);
    api_done(&r);
}

static void test_max_tokens(void **state) {
    ApiReq r;
    (void)state;
    parse(true, "\"max_completion_tokens\":5,\"max_tokens\":50", &r);
    assert_int_equal(r.max_tokens, 5);
    api_done(&r);
}

static void test_thinking(void **state) {
    static const struct {
        const char *fields;
        bool thinking;
        const char *effort;
    } cases[] = {
        {"\"reasoning_effort\":\"none\"", false, NULL},
        {"\"reasoning_effort\":\"high\"", true, "high"},
        {"\"reasoning_effort\":\"low\"", true, "max"},
        {"\"chat_template_kwargs\":{\"enable_thinking\":false}", false, NULL},
        {"\"chat_template_kwargs\":{\"enable_thinking\":true},\"reasoning_effort\":\"none\"", true,
         NULL},
        {"\"reasoning_effort\":\"high\",\"chat_template_kwargs\":{\"enable_thinking\":false}",
         false, "high"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ApiReq r;
        parse(true, cases[i].fields, &r);
        assert_int_equal(r.options.enable_thinking, cases[i].thinking);
        if (cases[i].effort)
            assert_string_equal(r.options.reasoning_effort, cases[i].effort);
        else
            assert_null(r.options.reasoning_effort);
        api_done(&r);
    }
    ApiReq r;
    parse(true, "\"chat_template_kwargs\":{\"clear_thinking\":false}", &r);
    assert_true(r.options.clear_thinking_is_set && !r.options.clear_thinking);
    api_done(&r);
}

static void test_prompts(void **state) {
    static const char *const texts[] = {"\"hi\"", "[\"hi\"]"}, *const ids[] = {"[1,2]", "[[1,2]]"};
    char body[200];
    ApiReq r;
    ApiError e;
    (void)state;
    for (int i = 0; i < 2; i++) {
        snprintf(body, sizeof body, "{\"model\":\"m\",\"prompt\":%s}", texts[i]);
        assert_int_equal(api_parse(&model, false, body, strlen(body), &r, &e), 0);
        assert_string_equal(r.text, "hi");
        assert_int_equal(r.text_len, 2);
        api_done(&r);
        snprintf(body, sizeof body, "{\"model\":\"m\",\"prompt\":%s}", ids[i]);
        assert_int_equal(api_parse(&model, false, body, strlen(body), &r, &e), 0);
        assert_null(r.text);
        assert_int_equal(r.n_ids, 2);
        assert_int_equal(r.ids[1], 2);
        api_done(&r);
    }
}

/* ---- what is refused ---- */

static void test_refused_whole(void **state) {
    static const Refusal list[] = {
        {" ", "", JSN, 0},
        {"{\"model\":\"m\",", "", JSN, 0},
        {"{\"model\":\"m\",\"model\":\"m\"}", "", JSN, 0},
        {"{\"model\":\"\xff\"}", "", JSN, 0},
        {"{\"model\":\"a\\u0000b\"}", "", JSN, 0},
        {"[1]", "", TYP, 0},
        {"{\"messages\":[]}", "model", MIS, 0},
        {"{\"model\":5}", "model", TYP, 0},
        {"{\"model\":\"other\",\"bad\":1}", "model", "model_not_found", 404},
        {"{\"model\":\"m\"}", "messages", MIS, 0},
        {"{\"model\":\"m\",\"messages\":null}", "messages", MIS, 0},
        {"{\"model\":\"m\",\"messages\":[]}", "messages", INV, 0},
        {"{\"model\":\"m\",\"messages\":\"hi\"}", "messages", TYP, 0},
        {"{\"model\":\"m\",\"messages\":[\"hi\"]}", "messages[0]", TYP, 0},
        {"{\"model\":\"m\",\"messages\":[{\"content\":\"hi\"}]}", "messages[0].role", TYP, 0},
        {"{\"model\":\"m\",\"messages\":[{\"role\":\"bot\"}]}", "messages[0].role", INV, 0},
        {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"audio\":{\"id\":1}}]}",
         "messages[0].audio", UNS, 0},
        {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\","
         "\"text\":\"a\"},{\"type\":\"image_url\"}]}]}",
         "messages[0].content[1].type", UNS, 0},
        {"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":"
         "\"input_audio\"}]}]}",
         "messages[0].content[0].type", UNS, 0},
    };
    (void)state;
    CHECK_REFUSALS(true, list);
}

static void test_refused_sampling(void **state) {
    static const Refusal list[] = {
        {"\"temperature\":-0.1", "temperature", INV, 0},
        {"\"temperature\":2.1", "temperature", INV, 0},
        {"\"temperature\":\"1\"", "temperature", TYP, 0},
        {"\"top_p\":0", "top_p", INV, 0},
        {"\"top_p\":1.01", "top_p", INV, 0},
        {"\"top_k\":-2", "top_k", INV, 0},
        {"\"top_k\":1.5", "top_k", TYP, 0},
        {"\"min_p\":2", "min_p", INV, 0},
        {"\"seed\":1.5", "seed", TYP, 0},
        {"\"presence_penalty\":3", "presence_penalty", INV, 0},
        {"\"frequency_penalty\":-3", "frequency_penalty", INV, 0},
        {"\"repetition_penalty\":0", "repetition_penalty", INV, 0},
        {"\"logit_bias\":[1]", "logit_bias", TYP, 0},
        {"\"logit_bias\":{\"5\":101}", "logit_bias", INV, 0},
        {"\"logit_bias\":{\"5\":\"x\"}", "logit_bias", TYP, 0},
        {"\"logit_bias\":{\"1000\":1}", "logit_bias", INV, 0},
        {"\"logit_bias\":{\"99999999999999999999\":1}", "logit_bias", INV, 0},
        {"\"logit_bias\":{\"x\":1}", "logit_bias", INV, 0},
        {"\"logit_bias\":{\"-1\":1}", "logit_bias", INV, 0},
        {"\"max_tokens\":0", "max_tokens", INV, 0},
        {"\"max_tokens\":-1", "max_tokens", INV, 0},
        {"\"max_tokens\":true", "max_tokens", TYP, 0},
        {"\"min_tokens\":-1", "min_tokens", INV, 0},
        {"\"min_tokens\":5,\"max_tokens\":4", "min_tokens", INV, 0},
        {"\"stop_token_ids\":5", "stop_token_ids", TYP, 0},
        {"\"stop_token_ids\":[1000]", "stop_token_ids", INV, 0},
        {"\"stop_token_ids\":[\"a\"]", "stop_token_ids", TYP, 0},
        {"\"ignore_eos\":1", "ignore_eos", TYP, 0},
        {"\"stream\":1", "stream", TYP, 0},
        {"\"stream_options\":{\"include_usage\":true}", "stream_options", INV, 0},
        {"\"stream\":true,\"stream_options\":true", "stream_options", TYP, 0},
        {"\"stream\":true,\"stream_options\":{\"x\":1}", "stream_options.x", UNS, 0},
        {"\"stream\":true,\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage",
         TYP, 0},
    };
    (void)state;
    CHECK_REFUSALS(true, list);
    CHECK_REFUSALS(false, list);
}

static void test_refused_chat(void **state) {
    static const Refusal list[] = {
        {"\"max_completion_tokens\":0", "max_completion_tokens", INV, 0},
        {"\"logprobs\":3", "logprobs", TYP, 0},
        {"\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", INV, 0},
        {"\"logprobs\":true,\"top_logprobs\":-1", "top_logprobs", INV, 0},
        {"\"top_logprobs\":2", "top_logprobs", INV, 0},
        {"\"chat_template_kwargs\":5", "chat_template_kwargs", TYP, 0},
        {"\"chat_template_kwargs\":{\"enable_thinking\":\"no\"}",
         "chat_template_kwargs.enable_thinking", TYP, 0},
        {"\"chat_template_kwargs\":{\"x\":1}", "chat_template_kwargs.x", UNS, 0},
        {"\"reasoning_effort\":\"huge\"", "reasoning_effort", INV, 0},
        {"\"reasoning_effort\":1", "reasoning_effort", TYP, 0},
        {"\"n\":2", "n", UNS, 0},
        {"\"n\":\"1\"", "n", TYP, 0},
        {"\"stop\":\"x\"", "stop", UNS, 0},
        {"\"stop\":[\"x\"]", "stop", UNS, 0},
        {"\"tools\":[{\"type\":\"function\"}]", "tools", UNS, 0},
        {"\"tool_choice\":\"auto\"", "tool_choice", UNS, 0},
        {"\"tool_choice\":{\"type\":\"function\"}", "tool_choice", UNS, 0},
        {"\"functions\":[{}]", "functions", UNS, 0},
        {"\"function_call\":\"auto\"", "function_call", UNS, 0},
        {"\"parallel_tool_calls\":true", "parallel_tool_calls", UNS, 0},
        {"\"response_format\":{\"type\":\"json_object\"}", "response_format", UNS, 0},
        {"\"response_format\":\"json\"", "response_format", TYP, 0},
        {"\"service_tier\":\"flex\"", "service_tier", UNS, 0},
        {"\"service_tier\":1", "service_tier", TYP, 0},
        {"\"prediction\":{}", "prediction", UNS, 0},
        {"\"store\":true", "store", UNS, 0},
        {"\"user\":5", "user", TYP, 0},
        {"\"metadata\":\"x\"", "metadata", TYP, 0},
        {"\"modalities\":[\"audio\"]", "modalities", UNS, 0},
        {"\"best_of\":1", "best_of", UNS, 0},
        {"\"prompt\":\"x\"", "prompt", UNS, 0},
        {"\"no_such_thing\":1", "no_such_thing", UNS, 0},
    };
    (void)state;
    CHECK_REFUSALS(true, list);
}

static void test_refused_completion(void **state) {
    static const Refusal list[] = {
        {"{\"model\":\"m\"}", "prompt", MIS, 0},
        {"{\"model\":\"m\",\"prompt\":\"\"}", "prompt", INV, 0},
        {"{\"model\":\"m\",\"prompt\":[]}", "prompt", INV, 0},
        {"{\"model\":\"m\",\"prompt\":5}", "prompt", TYP, 0},
        {"{\"model\":\"m\",\"prompt\":{}}", "prompt", TYP, 0},
        {"{\"model\":\"m\",\"prompt\":[\"a\",\"b\"]}", "prompt", UNS, 0},
        {"{\"model\":\"m\",\"prompt\":[1,\"b\"]}", "prompt", TYP, 0},
        {"{\"model\":\"m\",\"prompt\":[1000]}", "prompt", INV, 0},
        {"{\"model\":\"m\",\"prompt\":[-1]}", "prompt", INV, 0},
        {"{\"model\":\"m\",\"prompt\":[[]]}", "prompt", INV, 0},
        {"{\"model\":\"m\",\"prompt\":[[[1]]]}", "prompt", TYP, 0},
        {"\"echo\":true", "echo", UNS, 0},
        {"\"suffix\":\"x\"", "suffix", UNS, 0},
        {"\"best_of\":2", "best_of", UNS, 0},
        {"\"logprobs\":21", "logprobs", INV, 0},
        {"\"logprobs\":true", "logprobs", TYP, 0},
        {"\"messages\":[]", "messages", UNS, 0},
        {"\"tools\":[]", "tools", UNS, 0},
        {"\"max_completion_tokens\":5", "max_completion_tokens", UNS, 0},
        {"\"reasoning_effort\":\"high\"", "reasoning_effort", UNS, 0},
    };
    (void)state;
    CHECK_REFUSALS(false, list);
}

/* The position of a mistake is named. */
static void test_json_position(void **state) {
    const char *body = "{\"model\":\"m\",\n  \"messages\": nope}";
    ApiReq r;
    ApiError e;
    (void)state;
    assert_int_equal(api_parse(&model, true, body, strlen(body), &r, &e), E_INVAL);
    assert_non_null(strstr(e.message, "line 2"));
}

/* A hundred thousand open brackets are refused, not followed. */
static void test_nesting(void **state) {
    size_t n = 100000;
    char *body = xmalloc(n + 1);
    ApiReq r;
    ApiError e;
    (void)state;
    memset(body, '[', n);
    body[n] = '\0';
    assert_int_equal(api_parse(&model, true, body, n, &r, &e), E_INVAL);
    assert_string_equal(e.code, JSN);
    assert_non_null(strstr(e.message, "depth"));
    free(body);
}

/* A list of n items as a field nobody knows: what it is refused for. */
static const char *code_of_list(const char *item, size_t n) {
    static char code[64];
    ApiReq r;
    ApiError e;
    Buf body = {0};
    buf_puts(&body, "{\"model\":\"m\",\"prompt\":\"x\",\"y\":[");
    for (size_t i = 0; i < n; i++)
        buf_printf(&body, "%s%s", i ? "," : "", item);
    buf_puts(&body, "]}");
    assert_int_equal(api_parse(&model, false, body.data, body.len, &r, &e), E_INVAL);
    snprintf(code, sizeof code, "%s", e.code);
    buf_done(&body);
    return code;
}

/* A body that would become a tree of gigabytes is refused before it is built; one that only looks
 * like it is not. */
static void test_complexity(void **state) {
    (void)state;
    assert_string_equal(code_of_list("{}", 140000), "body_too_complex");
    assert_string_equal(code_of_list("[]", 140000), "body_too_complex");
    assert_string_equal(code_of_list("1", 2200000), "body_too_complex");
    assert_string_equal(code_of_list("1", 1100000), UNS);
    assert_string_equal(code_of_list("{}", 100000), UNS);
    assert_string_equal(code_of_list("\"\\\"{[,,,,,,,,,,,,,,,,,,,,,,,,,,,,\"", 140000), UNS);
}

/* What an error quotes stays UTF-8, cut wherever. */
static void test_error_is_utf8(void **state) {
    ApiReq r;
    ApiError e;
    Buf body = {0};
    (void)state;
    for (int shift = 0; shift < 3; shift++) {
        buf_clear(&body);
        buf_puts(&body, "{\"model\":\"m\",\"prompt\":\"x\",\"");
        buf_put(&body, "ab", (size_t)shift);
        for (int i = 0; i < 60; i++)
            buf_puts(&body, "\xe4\xbd\xa0");
        buf_puts(&body, "\":1}");
        assert_int_equal(api_parse(&model, false, body.data, body.len, &r, &e), E_INVAL);
        assert_string_equal(e.code, UNS);
        json_t *text = json_string(e.message), *param = json_string(e.param);
        assert_true(text && param);
        json_decref(text);
        json_decref(param);
    }
    buf_done(&body);
}

/* ---- the context ---- */

static void test_fit(void **state) {
    ApiReq r;
    ApiError e;
    (void)state;
    parse(true, "", &r);
    r.n_ids = 30;
    assert_int_equal(api_fit(&model, &r, 100, &e), 0);
    assert_int_equal(r.sampling.max_tokens, 20); /* the configured bound */
    r.max_tokens = -1;
    r.n_ids = 95;
    assert_int_equal(api_fit(&model, &r, 100, &e), 0);
    assert_int_equal(r.sampling.max_tokens, 5); /* the context's end */
    r.max_tokens = 6;
    assert_int_equal(api_fit(&model, &r, 100, &e), E_LIMIT);
    assert_int_equal(e.status, 400);
    assert_string_equal(e.code, "context_length_exceeded");
    assert_string_equal(e.param, "messages");
    r.max_tokens = -1;
    r.n_ids = 100;
    assert_int_equal(api_fit(&model, &r, 100, &e), E_LIMIT);
    r.n_ids = 95;
    r.sampling.min_tokens = 6;
    assert_int_equal(api_fit(&model, &r, 100, &e), E_LIMIT);
    assert_string_equal(e.param, "min_tokens");
    api_done(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),      cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_harmless),      cmocka_unit_test(test_max_tokens),
        cmocka_unit_test(test_ignore_eos),    cmocka_unit_test(test_complexity),
        cmocka_unit_test(test_thinking),      cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_refused_whole), cmocka_unit_test(test_refused_sampling),
        cmocka_unit_test(test_refused_chat),  cmocka_unit_test(test_refused_completion),
        cmocka_unit_test(test_json_position), cmocka_unit_test(test_nesting),
        cmocka_unit_test(test_error_is_utf8), cmocka_unit_test(test_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
