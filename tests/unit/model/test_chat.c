/* The chat template against vectors of the reference template, and what it says about bad messages.
 */
#include "model/chat.h"
#include "model/chat_json.h"
#include "model/tok.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#define MODEL    "tests/models/tiny-glm52/"
#define START    "[gMASK]<sop><|system|>Reasoning Effort: Max"
#define ASK      "<|assistant|><think>"
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* JSON with ' for ". */
static json_t *parse(const char *text) {
    Buf json = {0};
    buf_puts(&json, text);
    for (char *p = json.data; *p; p++)
        if (*p == '\'')
            *p = '"';
    json_error_t at;
    json_t *v = json_loadb(json.data, json.len, JSON_DECODE_ANY | JSON_ALLOW_NUL, &at);
    if (!v)
        fail_msg("%s in %s", at.text, text);
    buf_done(&json);
    return v;
}

/* The options of one vector; what it leaves out is the template's default. */
static ChatOptions vector_options(const json_t *given) {
    ChatOptions o = chat_options_default();
    const json_t *v;
    if ((v = json_object_get(given, "enable_thinking")))
        o.enable_thinking = json_is_true(v);
    if ((v = json_object_get(given, "clear_thinking"))) {
        o.clear_thinking_is_set = true;
        o.clear_thinking = json_is_true(v);
    }
    if ((v = json_object_get(given, "add_generation_prompt")))
        o.add_generation_prompt = json_is_true(v);
    o.reasoning_effort = json_string_value(json_object_get(given, "reasoning_effort"));
    return o;
}

static void vectors_are_exact(void **state) {
    (void)state;
    json_t *list = json_load_file(MODEL "oracle/chat.json", 0, NULL);
    Err err;
    Tok *tok;
    assert_int_equal(tok_open(&tok, MODEL "fp8/tokenizer.json", &err), 0);
    TokScratch *scratch = tok_scratch_new(tok);
    assert_int_equal(json_array_size(list), 21);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i), *given = json_object_get(v, "options");
        const json_t *tools = json_object_get(given, "tools"), *want = json_object_get(v, "ids");
        ChatOptions o = vector_options(given);
        Buf out = {0};
        TokIds ids = {0};
        assert_int_equal(chat_render(json_object_get(v, "messages"), tools, &o, &out, &err), 0);
        assert_string_equal(out.data, json_string_value(json_object_get(v, "text")));
        assert_int_equal(tok_encode(tok, scratch, out.data, out.len, true, 10000, &ids, &err), 0);
        assert_int_equal(ids.n, json_array_size(want));
        for (size_t k = 0; k < ids.n; k++)
            assert_int_equal(ids.id[k], json_integer_value(json_array_get(want, k)));
        tok_ids_done(&ids);
        buf_done(&out);
    }
    tok_scratch_free(scratch);
    tok_close(tok);
    json_decref(list);
}

/* Renders and compares. */
static void expect(const char *messages, const char *tools, const ChatOptions *options,
                   const char *wanted) {
    json_t *m = parse(messages), *t = tools ? parse(tools) : NULL;
    Buf out = {0};
    Err err = {0};
    if (chat_render(m, t, options, &out, &err))
        fail_msg("%s: %s", messages, err.text);
    assert_string_equal(out.data, wanted);
    buf_done(&out);
    json_decref(m);
    json_decref(t);
}

static void switches(void **state) {
    (void)state;
    ChatOptions on = chat_options_default(), off = on, keep = on, high = on, bare = on;
    off.enable_thinking = false;
    keep.clear_thinking_is_set = true;
    high.reasoning_effort = "high";
    bare.add_generation_prompt = false;
    const char *one = "[{'role':'user','content':'hi'}]";
    expect(one, NULL, &on, START "<|user|>hi" ASK);
    expect(one, "[]", &off, "[gMASK]<sop><|user|>hi" ASK "</think>");
    expect(one, "null", &high, "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>hi" ASK);
    expect(one, NULL, &bare, START "<|user|>hi");
    high.reasoning_effort = "low";
    expect(one, NULL, &high, START "<|user|>hi" ASK);
    const char *turns = "[{'role':'user','content':'a'},{'role':'assistant',"
                        "'reasoning_content':'r1','content':' \\nans\\n '},"
                        "{'role':'user','content':'b'}]";
    expect(turns, NULL, &on, START "<|user|>a" ASK "</think>ans<|user|>b" ASK);
    expect(turns, NULL, &keep, START "<|user|>a" ASK "r1</think>ans<|user|>b" ASK);
    keep.clear_thinking = true;
    expect(turns, NULL, &keep, START "<|user|>a" ASK "</think>ans<|user|>b" ASK);
}

static void reasoning(void **state) {
    (void)state;
    ChatOptions o = chat_options_default();
    o.add_generation_prompt = false;
    static const char *const cases[][2] = {
        {"'content':'<think> r </think> x '", "<think> r </think>x"},
        {"'content':'no<think>a<think>b</think>c<think>d</think>e'", "<think>b</think>e"},
        {"'content':'b</think>c'", "<think>b</think>c"},
        {"'content':'<think>never closed'", "<think></think><think>never closed"},
        {"'reasoning_content':' r\\n','content':null", "<think> r\n</think>"},
        {"'reasoning_content':''", "<think></think>"},
        {"'reasoning_content':null,'content':['<think>r</think>',{'type':'text','text':' x'}]",
         "<think>r</think>x"},
        {"'reasoning_content':'r','content':'a</think>b'", "<think>r</think>a</think>b"},
        {"'content':'\\u3000\\u0085\\u001f\\u00a0x\\u2028y\\u205f\\u1680 '",
         "<think></think>x\u2028y"},
        {"'content':' \\u200b \\u2003\\u00e9\\u2003'", "<think></think>\u200b \u2003é"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char messages[300], wanted[300];
        snprintf(messages, sizeof messages, "[{'role':'assistant',%s}]", cases[i][0]);
        snprintf(wanted, sizeof wanted, START "<|assistant|>%s", cases[i][1]);
        expect(messages, NULL, &o, wanted);
    }
}

static void content(void **state) {
    (void)state;
    ChatOptions o = chat_options_default();
    o.add_generation_prompt = false;
    expect(
        "[{'role':'developer','content':' S\\n'},{'role':'user','content':null},{'role':'user'}]",
        NULL, &o, START "<|system|> S\n<|user|><|user|>");
    expect("[{'role':'user','content':['a',{'type':'text','text':'b'},{'type':'image_url'},"
           "{'type':'input_audio'},{'type':'video'}]}]",
           NULL, &o,
           START "<|user|>ab<reminder>You are unable to process this image because you don't have "
                 "multi-modal input ability. Try different methods.</reminder>"
                 "<reminder>You are unable to process this audio because you don't have "
                 "multi-modal input ability. Try different methods.</reminder>"
                 "<reminder>You are unable to process this video because you don't have "
                 "multi-modal input ability. Try different methods.</reminder>");
    expect("[]", NULL, &o, START);
}

#define TOOLS_HEAD                                                                                 \
    START "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "     \
          "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n" \
          "<tools>\n"
#define TOOLS_TAIL                                                                                 \
    "</tools>\n\nFor each function call, output the function name and arguments within the "       \
    "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>"   \
    "{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>"  \
    "...</tool_call>"

static void tools(void **state) {
    (void)state;
    ChatOptions o = chat_options_default();
    expect("[{'role':'system','content':'S'},{'role':'user','content':'hi'}]",
           "[{'type':'function','function':{'name':'f','strict':true,'parameters':{'z':1,'a':[]}}},"
           "{'name':'bare','defer_loading':false},"
           "{'type':'function','function':{'name':'late','defer_loading':true}},"
           "{'type':'function','defer_loading':1,'function':{'name':'later'}}]",
           &o,
           TOOLS_HEAD "{\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": []}}\n"
                      "{\"name\": \"bare\"}\n" TOOLS_TAIL "<|system|>S<|user|>hi" ASK);
}

static void tool_round(void **state) {
    (void)state;
    ChatOptions o = chat_options_default();
    expect("[{'role':'user','content':'a'},{'role':'assistant','reasoning_content':'rr\\n',"
           "'content':'','tool_calls':[{'type':'function','function':{'name':'get_weather',"
           "'arguments':{'n':3,'z':null}}},{'name':'noargs','arguments':''}]},"
           "{'role':'tool','content':'T1'},{'role':'tool','content':[{'type':'text','text':'T'},'2'"
           "]}]",
           NULL, &o,
           START "<|user|>a" ASK
                 "rr\n</think><tool_call>get_weather<arg_key>n</arg_key><arg_value>3</arg_value>"
                 "<arg_key>z</arg_key><arg_value>null</arg_value></tool_call><tool_call>noargs"
                 "</tool_call><|observation|><tool_response>T1</tool_response><tool_response>T2"
                 "</tool_response>" ASK);
    o.add_generation_prompt = false;
    json_t *m = json_pack("[{s:s,s:[{s:{s:s,s:s}}]}]", "role", "assistant", "tool_calls",
                          "function", "name", "f", "arguments",
                          "{\"s\": \"a\\\"\\nb\", \"l\": [1, \"x\", 1e-7], \"t\": true}");
    Buf out = {0};
    assert_int_equal(chat_render(m, NULL, &o, &out, NULL), 0);
    assert_string_equal(out.data,
                        START ASK "</think><tool_call>f<arg_key>s</arg_key><arg_value>a\"\nb"
                                  "</arg_value><arg_key>l</arg_key><arg_value>[1, \"x\", "
                                  "1e-07]</arg_value><arg_key>t</arg_key><arg_value>true"
                                  "</arg_value></tool_call>");
    buf_done(&out);
    json_decref(m);
}

static void tool_lists(void **state) {
    (void)state;
    ChatOptions o = chat_options_default();
    o.add_generation_prompt = false;
    expect("[{'role':'tool','content':[{'output':'1'},{'output':'2'}]},"
           "{'role':'tool','content':[{'type':'tool_reference','name':'late'},"
           "{'type':'tool_reference','name':'gone'}]},{'role':'tool','content':null}]",
           "[{'type':'function','function':{'name':'late','defer_loading':true,'d':0.5}}]", &o,
           TOOLS_HEAD TOOLS_TAIL
           "<|observation|><tool_response>1</tool_response><tool_response>2</tool_response>"
           "<tool_response><tools>\n{\"name\": \"late\", \"d\": 0.5}\n</tools></tool_response>"
           "<tool_response></tool_response>");
}

static void json_is_pythons(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{'b':1,'a':[true,false,null,-5],'c':{}}",
         "{\"b\": 1, \"a\": [true, false, null, -5], \"c\": {}}"},
        {"'\\u0000\\u001f\\b\\f\\n\\r\\t\\\\/\\u007f\\u00e9\\u2028\\ud83d\\ude00'",
         "\"\\u0000\\u001f\\b\\f\\n\\r\\t\\\\/\x7fé\u2028😀\""},
        {"[1.0,-0.0,0.1,1e-7,1E5,123456789012345680.0,1e16,1e15,0.0001,0.00001]",
         "[1.0, -0.0, 0.1, 1e-07, 100000.0, 1.2345678901234568e+17, 1e+16, 1000000000000000.0, "
         "0.0001, 1e-05]"},
        {"[5e-324,1.7976931348623157e308,5.684341886080802e-14,0.30000000000000004,2.5e-5]",
         "[5e-324, 1.7976931348623157e+308, 5.684341886080802e-14, 0.30000000000000004, 2.5e-05]"},
        {"[9223372036854775807,9007199254740993.0,123.456,1234567890123456.7]",
         "[9223372036854775807, 9007199254740992.0, 123.456, 1234567890123456.8]"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        json_t *v = parse(cases[i][0]);
        Buf out = {0};
        chat_json_put(v, &out);
        assert_string_equal(out.data, cases[i][1]);
        buf_done(&out);
        json_decref(v);
    }
}

static void errors_name_the_field(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{}", "messages: expected a list"},
        {"[1]", "messages[0]: expected an object"},
        {"[{'content':'x'}]", "messages[0].role: expected a string"},
        {"[{'role':'user'},{'role':'function'}]", "messages[1].role: unknown role \"function\""},
        {"[{'role':'user','content':5}]",
         "messages[0].content: expected a string, a list of parts or null"},
        {"[{'role':'system','content':['a',{'type':'text'}]}]",
         "messages[0].content[1].text: expected a string"},
        {"[{'role':'tool','content':[{}]}]", "messages[0].content[0].type: expected a string"},
        {"[{'role':'user','content':[{'type':'file'}]}]",
         "messages[0].content[0].type: unknown type \"file\""},
        {"[{'role':'tool','content':[{'output':'a'},{'output':1}]}]",
         "messages[0].content[1].output: expected a string"},
        {"[{'role':'tool','content':[{'type':'tool_reference'}]}]",
         "messages[0].content[0].name: expected a string"},
        {"[{'role':'assistant','reasoning_content':1}]",
         "messages[0].reasoning_content: expected a string or null"},
        {"[{'role':'assistant','tool_calls':{}}]",
         "messages[0].tool_calls: expected a list or null"},
        {"[{'role':'assistant','tool_calls':[{'function':{'arguments':{}}}]}]",
         "messages[0].tool_calls[0].function.name: expected a string"},
        {"[{'role':'assistant','tool_calls':[{'name':'f','arguments':'[1]'}]}]",
         "messages[0].tool_calls[0].arguments: expected an object, or a string that holds one"},
        {"[{'role':'assistant','tool_calls':[{'function':{'name':'f','arguments':'{'}}]}]",
         "messages[0].tool_calls[0].function.arguments: expected an object, or a string that holds "
         "one"},
        {"[{'role':'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\u00e9'}]",
         "messages[0].role: unknown role \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\""},
    };
    ChatOptions o = chat_options_default();
    for (size_t i = 0; i < COUNT(cases); i++) {
        json_t *m = parse(cases[i][0]);
        Buf out = {0};
        Err err = {0};
        buf_puts(&out, "before");
        assert_int_equal(chat_render(m, NULL, &o, &out, &err), E_INVAL);
        assert_string_equal(err.text, cases[i][1]);
        assert_string_equal(out.data, "before");
        buf_done(&out);
        json_decref(m);
    }
}

static void tool_errors_name_the_field(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{}", "tools: expected a list or null"},
        {"[{'name':'f'},'f']", "tools[1]: expected an object"},
        {"[{'function':'f'}]", "tools[0].function: expected an object"},
    };
    ChatOptions o = chat_options_default();
    json_t *m = json_array();
    for (size_t i = 0; i < COUNT(cases); i++) {
        json_t *t = parse(cases[i][0]);
        Buf out = {0};
        Err err = {0};
        assert_int_equal(chat_render(m, t, &o, &out, &err), E_INVAL);
        assert_string_equal(err.text, cases[i][1]);
        assert_int_equal(out.len, 0);
        buf_done(&out);
        json_decref(t);
    }
    json_decref(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_are_exact),
        cmocka_unit_test(switches),
        cmocka_unit_test(reasoning),
        cmocka_unit_test(content),
        cmocka_unit_test(tools),
        cmocka_unit_test(tool_round),
        cmocka_unit_test(tool_lists),
        cmocka_unit_test(json_is_pythons),
        cmocka_unit_test(errors_name_the_field),
        cmocka_unit_test(tool_errors_name_the_field),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
