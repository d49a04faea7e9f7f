/* Tests router/answer.c against golden events. */
#include "router/answer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

static Tok *tok;
static Answer a;
static Buf out;
static int32_t think_end;

/* The token that is this one byte. */
static int32_t byte_id(unsigned char byte) {
    for (int32_t id = 0; id < tok_size(tok); id++) {
        size_t n;
        const char *bytes = tok_bytes(tok, id, &n);
        if (n == 1 && (unsigned char)*bytes == byte && !tok_is_added(tok, id))
            return id;
    }
    fail_msg("no token for byte %d", byte);
    return -1;
}

static void begin(AnswerConf conf) {
    conf.tok = tok;
    conf.model = "m \"1\"";
    conf.id = "00ff";
    conf.created = 5;
    conf.think_end = think_end;
    conf.n_prompt = 3;
    buf_clear(&out);
    answer_init(&a, &conf);
}

static void give_id(int32_t id) {
    Baton__TokenOut o = BATON__TOKEN_OUT__INIT;
    o.token = (uint32_t)id;
    o.logprob = -0.5f;
    answer_token(&a, &o);
}

/* Gives text byte by byte, events after each. */
static void give_streaming(const char *text) {
    for (; *text; text++) {
        give_id(byte_id((unsigned char)*text));
        answer_events(&a, &out);
    }
}

static void expect(const char *want) {
    assert_string_equal(out.data ? out.data : "", want);
    buf_clear(&out);
}

#define HEAD                                                                                       \
    "data: {\"id\":\"chatcmpl-00ff\",\"object\":\"chat.completion.chunk\",\"created\":5,"          \
    "\"model\":\"m \\\"1\\\"\",\"choices\":["
#define TEXT_HEAD                                                                                  \
    "data: {\"id\":\"cmpl-00ff\",\"object\":\"text_completion\",\"created\":5,"                    \
    "\"model\":\"m \\\"1\\\"\",\"choices\":["
#define NO_LP ",\"logprobs\":null"
#define OPEN  NO_LP ",\"finish_reason\":null}]}\n\n"

static void test_stream_chat(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true});
    answer_events(&a, &out);
    expect("");
    give_streaming("h");
    expect(HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"h\"}" OPEN);
    give_streaming("\"");
    expect(HEAD "{\"index\":0,\"delta\":{\"content\":\"\\\"\"}" OPEN);
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_last_events(&a, &out);
    expect(HEAD "{\"index\":0,\"delta\":{}" NO_LP ",\"finish_reason\":\"stop\"}]}\n\n"
                "data: [DONE]\n\n");
}

static void test_stream_thinking_and_usage(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .thinking = true, .include_usage = true});
    give_streaming("h");
    expect(HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"reasoning_content\":\"h\"}" NO_LP
                ",\"finish_reason\":null}],\"usage\":null}\n\n");
    give_id(think_end);
    answer_events(&a, &out);
    expect("");
    give_streaming("i");
    expect(HEAD "{\"index\":0,\"delta\":{\"content\":\"i\"}" NO_LP
                ",\"finish_reason\":null}],\"usage\":null}\n\n");
    answer_finish(&a, BATON__FINISH__FINISH_LENGTH);
    answer_last_events(&a, &out);
    expect(HEAD "{\"index\":0,\"delta\":{}" NO_LP
                ",\"finish_reason\":\"length\"}],\"usage\":null}\n\n" HEAD
                "],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":3,\"total_tokens\":6,"
                "\"completion_tokens_details\":{\"reasoning_tokens\":1}}}\n\n"
                "data: [DONE]\n\n");
}

/* Reasoning and content of one step go out in their order. */
static void test_stream_both_in_a_step(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .thinking = true});
    give_id(byte_id('a'));
    give_id(think_end);
    give_id(byte_id('b'));
    answer_events(&a, &out);
    expect(HEAD
           "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"reasoning_content\":\"a\"}" OPEN HEAD
           "{\"index\":0,\"delta\":{\"content\":\"b\"}" OPEN);
}

static void test_stream_nothing(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true});
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_last_events(&a, &out);
    expect(HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" NO_LP
                ",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
}

/* A character of three tokens comes out whole; what never becomes whole is U+FFFD. */
static void test_utf8(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true});
    give_streaming("\xe4");
    expect(HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}" OPEN);
    give_streaming("\xbd");
    expect("");
    give_streaming("\xa0");
    expect(HEAD "{\"index\":0,\"delta\":{\"content\":\"\xe4\xbd\xa0\"}" OPEN);
    give_streaming("\xe4");
    answer_finish(&a, BATON__FINISH__FINISH_LENGTH);
    answer_last_events(&a, &out);
    expect(HEAD "{\"index\":0,\"delta\":{\"content\":\"\xef\xbf\xbd\"}" OPEN HEAD
                "{\"index\":0,\"delta\":{}" NO_LP ",\"finish_reason\":\"length\"}]}\n\n"
                "data: [DONE]\n\n");
}

static void test_stream_completion(void **state) {
    (void)state;
    begin((AnswerConf){.chat = false});
    give_streaming("h");
    expect(TEXT_HEAD "{\"index\":0,\"text\":\"h\"" OPEN);
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_last_events(&a, &out);
    expect(TEXT_HEAD "{\"index\":0,\"text\":\"\"" NO_LP
                     ",\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n");
}

static void test_whole(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .thinking = true});
    give_id(byte_id('a'));
    give_id(think_end);
    give_id(byte_id('b'));
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_whole(&a, &out);
    expect("{\"id\":\"chatcmpl-00ff\",\"object\":\"chat.completion\",\"created\":5,"
           "\"model\":\"m \\\"1\\\"\",\"choices\":[{\"index\":0,\"message\":{\"role\":"
           "\"assistant\",\"reasoning_content\":\"a\",\"content\":\"b\"}" NO_LP
           ",\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":3,"
           "\"total_tokens\":6,\"completion_tokens_details\":{\"reasoning_tokens\":1}}}");
    begin((AnswerConf){.chat = false});
    give_id(byte_id('a'));
    answer_finish(&a, BATON__FINISH__FINISH_LENGTH);
    answer_whole(&a, &out);
    expect("{\"id\":\"cmpl-00ff\",\"object\":\"text_completion\",\"created\":5,"
           "\"model\":\"m \\\"1\\\"\",\"choices\":[{\"index\":0,\"text\":\"a\"" NO_LP
           ",\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":1,"
           "\"total_tokens\":4}}");
}

/* Tokens whose text is held back keep their entries until the text goes out. */
static void test_chat_logprobs(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .logprobs = true});
    Baton__Logprob top = BATON__LOGPROB__INIT, *tops[] = {&top};
    Baton__TokenOut o = BATON__TOKEN_OUT__INIT;
    o.token = (uint32_t)byte_id('a');
    o.logprob = -0.25f;
    top.token = (uint32_t)byte_id('b');
    top.logprob = -INFINITY;
    o.n_top = 1;
    o.top = tops;
    answer_token(&a, &o);
    answer_events(&a, &out);
    expect(HEAD "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"a\"},\"logprobs\":"
                "{\"content\":[{\"token\":\"a\",\"logprob\":-0.25,\"bytes\":[97],\"top_logprobs\":["
                "{\"token\":\"b\",\"logprob\":-9999,\"bytes\":[98]}]}],\"refusal\":null},"
                "\"finish_reason\":null}]}\n\n");
    give_streaming("\xc3");
    expect("");
    give_streaming("\xa9");
    expect(HEAD "{\"index\":0,\"delta\":{\"content\":\"\xc3\xa9\"},\"logprobs\":{\"content\":["
                "{\"token\":\"bytes:\\\\xc3\",\"logprob\":-0.5,\"bytes\":[195],\"top_logprobs\":[]}"
                ",{\"token\":\"bytes:\\\\xa9\",\"logprob\":-0.5,\"bytes\":[169],\"top_logprobs\":[]"
                "}],\"refusal\":null},\"finish_reason\":null}]}\n\n");
}

static void test_completion_logprobs(void **state) {
    (void)state;
    begin((AnswerConf){.chat = false, .logprobs = true});
    Baton__Logprob top = BATON__LOGPROB__INIT, *tops[] = {&top};
    Baton__TokenOut o = BATON__TOKEN_OUT__INIT;
    o.token = top.token = (uint32_t)byte_id('a');
    o.logprob = top.logprob = -0.25f;
    o.n_top = 1;
    o.top = tops;
    answer_token(&a, &o);
    give_id(byte_id('b'));
    answer_finish(&a, BATON__FINISH__FINISH_LENGTH);
    answer_whole(&a, &out);
    assert_non_null(strstr(out.data, "\"logprobs\":{\"tokens\":[\"a\",\"b\"],\"token_logprobs\":"
                                     "[-0.25,-0.5],\"top_logprobs\":[{\"a\":-0.25},{}],"
                                     "\"text_offset\":[0,1]}"));
}

/* A retry starts over. */
static void test_again(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .logprobs = true});
    give_id(byte_id('x'));
    give_id(byte_id('\xe4'));
    begin((AnswerConf){.chat = true});
    give_id(byte_id('y'));
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_whole(&a, &out);
    assert_non_null(strstr(out.data, "\"content\":\"y\""));
    assert_non_null(strstr(out.data, "\"completion_tokens\":1,"));
}

/* Ids that hold no token give no text and do no harm. */
static void test_strange_ids(void **state) {
    (void)state;
    begin((AnswerConf){.chat = true, .logprobs = true});
    give_id(-1);
    give_id(INT32_MAX);
    give_id(tok_size(tok));
    answer_finish(&a, BATON__FINISH__FINISH_STOP);
    answer_whole(&a, &out);
    assert_non_null(strstr(out.data, "\"content\":\"\""));
}

static void test_errors(void **state) {
    ApiError e;
    (void)state;
    api_refuse(&e, 400, "t", "c", "p\"", "a\nb");
    buf_clear(&out);
    answer_error(&e, &out);
    expect("{\"error\":{\"message\":\"a\\nb\",\"type\":\"t\",\"param\":\"p\\\"\",\"code\":\"c\"}}");
    api_refuse(&e, 500, "t", "c", NULL, "m");
    answer_error_event(&e, &out);
    expect(
        "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"param\":null,\"code\":\"c\"}}\n\n");
}

static int open_tok(void **state) {
    Err err = {0};
    (void)state;
    int rc = tok_open(&tok, "tests/models/tiny-glm52/fp8/tokenizer.json", &err);
    think_end = rc ? -1 : tok_added_id(tok, "</think>");
    return rc || think_end < 0;
}

static int close_tok(void **state) {
    (void)state;
    answer_done(&a);
    buf_done(&out);
    tok_close(tok);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_chat),
        cmocka_unit_test(test_stream_thinking_and_usage),
        cmocka_unit_test(test_stream_both_in_a_step),
        cmocka_unit_test(test_stream_nothing),
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_stream_completion),
        cmocka_unit_test(test_whole),
        cmocka_unit_test(test_chat_logprobs),
        cmocka_unit_test(test_completion_logprobs),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_strange_ids),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, open_tok, close_tok);
}
