/* GLM-5.2's chat template. No state; any thread.
 *
 * The template has no end-of-turn token and no newline between turns: each turn begins with its
 * role's token. A null content counts as an empty one. Messages come from clients, so every field
 * is checked before it is read, and an error names it. */
#include "model/chat.h"

#include "model/chat_json.h"

#include <string.h>

/* What one rendering reads and writes. */
typedef struct Render {
    const json_t *messages, *tools; /* arrays; tools may be NULL */
    const ChatOptions *options;
    size_t n_to_last_user; /* messages up to the last user message, that one included */
    Buf *out;
    Err *err;
} Render;

ChatOptions chat_options_default(void) {
    return (ChatOptions){.enable_thinking = true, .add_generation_prompt = true};
}

static void put(Buf *out, const json_t *string) {
    buf_put(out, json_string_value(string), json_string_length(string));
}

/* Bytes of a client's string that an error may repeat: at most 40, whole characters. */
static int quotable(const char *s) {
    int n = (int)strnlen(s, 40);
    while (n > 0 && ((unsigned char)s[n] & 0xc0) == 0x80)
        n--;
    return n;
}

static bool string_is(const json_t *value, const char *s) {
    return json_is_string(value) && !strcmp(json_string_value(value), s);
}

static bool truthy(const json_t *value) {
    if (json_is_string(value))
        return json_string_length(value) > 0;
    if (json_is_number(value))
        return json_number_value(value) != 0;
    return json_is_true(value) || json_array_size(value) > 0 || json_object_size(value) > 0;
}

/* obj.function where it is given, else obj: a tool or a call with or without OpenAI's wrapper. */
static const json_t *unwrapped(const json_t *obj) {
    const json_t *function = json_object_get(obj, "function");
    return function && !json_is_null(function) ? function : obj;
}

/* ---- content ---- */

static const char *part_media(const char *type) {
    static const struct {
        const char *type, *media;
    } known[] = {{"image", "image"},      {"image_url", "image"}, {"video", "video"},
                 {"video_url", "video"},  {"audio", "audio"},     {"audio_url", "audio"},
                 {"input_audio", "audio"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(type, known[i].type))
            return known[i].media;
    return NULL;
}

/* Part k of the content of message i. */
static int put_part(Render *r, size_t i, size_t k, const json_t *part, Buf *out) {
    if (json_is_string(part)) {
        put(out, part);
        return 0;
    }
    const json_t *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
    if (!json_is_string(type))
        return err_set(r->err, E_INVAL, "messages[%zu].content[%zu].type: expected a string", i, k);
    if (string_is(type, "text")) {
        if (!json_is_string(text))
            return err_set(r->err, E_INVAL, "messages[%zu].content[%zu].text: expected a string", i,
                           k);
        put(out, text);
        return 0;
    }
    const char *name = json_string_value(type), *media = part_media(name);
    if (!media)
        return err_set(r->err, E_INVAL, "messages[%zu].content[%zu].type: unknown type \"%.*s\"", i,
                       k, quotable(name), name);
    buf_printf(out,
               "<reminder>You are unable to process this %s because you don't have multi-modal "
               "input ability. Try different methods.</reminder>",
               media);
    return 0;
}

/* The text of message i: a string, a list of parts, or nothing. */
static int put_content(Render *r, size_t i, const json_t *content, Buf *out) {
    if (!content || json_is_null(content))
        return 0;
    if (json_is_string(content)) {
        put(out, content);
        return 0;
    }
    if (!json_is_array(content))
        return err_set(r->err, E_INVAL,
                       "messages[%zu].content: expected a string, a list of parts or null", i);
    for (size_t k = 0; k < json_array_size(content); k++) {
        int rc = put_part(r, i, k, json_array_get(content, k), out);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- tools ---- */

/* A tool's JSON without the keys that are for servers. */
static void put_tool(Render *r, const json_t *function) {
    const char *key, *separator = "";
    json_t *value;
    buf_puts(r->out, "{");
    json_object_foreach((json_t *)function, key, value) {
        if (!strcmp(key, "strict") || !strcmp(key, "defer_loading"))
            continue;
        buf_puts(r->out, separator);
        separator = ", ";
        chat_json_put_string(key, strlen(key), r->out);
        buf_puts(r->out, ": ");
        chat_json_put(value, r->out);
    }
    buf_puts(r->out, "}\n");
}

static int put_tools(Render *r) {
    size_t n = json_array_size(r->tools);
    if (n == 0)
        return 0;
    buf_puts(r->out,
             "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
             "query.\n\nYou are provided with function signatures within <tools></tools> XML "
             "tags:\n<tools>\n");
    for (size_t i = 0; i < n; i++) {
        const json_t *tool = json_array_get(r->tools, i), *function = unwrapped(tool);
        if (!json_is_object(tool) || !json_is_object(function))
            return err_set(r->err, E_INVAL, "tools[%zu]%s: expected an object", i,
                           json_is_object(tool) ? ".function" : "");
        if (!truthy(json_object_get(tool, "defer_loading")) &&
            !truthy(json_object_get(function, "defer_loading")))
            put_tool(r, function);
    }
    buf_puts(
        r->out,
        "</tools>\n\nFor each function call, output the function name and arguments within the "
        "following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"
        "<arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}</arg_key>"
        "<arg_value>{arg-value-2}</arg_value>...</tool_call>");
    return 0;
}

/* The arguments of a call as an object that the caller owns; NULL when they are not one. Absent,
 * null and "" stand for none. */
static json_t *call_arguments(const json_t *arguments) {
    if (!arguments || json_is_null(arguments))
        return json_object();
    if (!json_is_string(arguments))
        return json_is_object(arguments) ? json_incref((json_t *)arguments) : NULL;
    if (json_string_length(arguments) == 0)
        return json_object();
    json_t *parsed = json_loadb(json_string_value(arguments), json_string_length(arguments),
                                JSON_ALLOW_NUL, NULL);
    if (json_is_object(parsed))
        return parsed;
    json_decref(parsed);
    return NULL;
}

/* Call k of message i. */
static int put_call(Render *r, size_t i, size_t k, const json_t *call) {
    const json_t *function = unwrapped(call), *name = json_object_get(function, "name");
    const char *wrapper = function == call ? "" : ".function";
    if (!json_is_string(name))
        return err_set(r->err, E_INVAL, "messages[%zu].tool_calls[%zu]%s.name: expected a string",
                       i, k, wrapper);
    json_t *arguments = call_arguments(json_object_get(function, "arguments"));
    if (!arguments)
        return err_set(r->err, E_INVAL,
                       "messages[%zu].tool_calls[%zu]%s.arguments: expected an object, or a string "
                       "that holds one",
                       i, k, wrapper);
    buf_puts(r->out, "<tool_call>");
    put(r->out, name);
    const char *key;
    json_t *value;
    json_object_foreach(arguments, key, value) {
        buf_printf(r->out, "<arg_key>%s</arg_key><arg_value>", key);
        if (json_is_string(value))
            put(r->out, value);
        else
            chat_json_put(value, r->out);
        buf_puts(r->out, "</arg_value>");
    }
    buf_puts(r->out, "</tool_call>");
    json_decref(arguments);
    return 0;
}

static int put_calls(Render *r, size_t i, const json_t *calls) {
    if (!calls || json_is_null(calls))
        return 0;
    if (!json_is_array(calls))
        return err_set(r->err, E_INVAL, "messages[%zu].tool_calls: expected a list or null", i);
    for (size_t k = 0; k < json_array_size(calls); k++) {
        int rc = put_call(r, i, k, json_array_get(calls, k));
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- messages ---- */

/* A stretch of bytes in somebody else's buffer. */
typedef struct Span {
    const char *at;
    size_t len;
} Span;

/* The first (or last) place of needle in s, or NULL. */
static const char *span_find(Span s, const char *needle, bool last) {
    const char *found = NULL, *end = s.at + s.len;
    size_t n = strlen(needle);
    for (const char *p = s.at; (p = memmem(p, (size_t)(end - p), needle, n)); p += n) {
        found = p;
        if (!last)
            break;
    }
    return found;
}

/* Length of the white space character at p, or 0; what Python's str.strip takes off. */
static size_t space_at(const unsigned char *p, size_t n) {
    if (p[0] < 0x80)
        return p[0] == ' ' || (p[0] >= 9 && p[0] <= 13) || (p[0] >= 0x1c && p[0] <= 0x1f);
    if (n >= 2 && p[0] == 0xc2)
        return p[1] == 0x85 || p[1] == 0xa0 ? 2 : 0;
    if (n < 3)
        return 0;
    unsigned c = (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
    bool space = c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
                 c == 0x202f || c == 0x205f || c == 0x3000;
    return p[0] >> 4 == 0xe && space ? 3 : 0;
}

static Span span_strip(Span s) {
    size_t n;
    while (s.len && (n = space_at((const unsigned char *)s.at, s.len))) {
        s.at += n;
        s.len -= n;
    }
    while (s.len) {
        size_t last = s.len - 1; /* where the last character begins */
        while (last > 0 && ((unsigned char)s.at[last] & 0xc0) == 0x80)
            last--;
        if (!space_at((const unsigned char *)s.at + last, s.len - last))
            break;
        s.len = last;
    }
    return s;
}

/* Takes the reasoning out of content that has it inline: between the last <think> before the first
 * </think> and that; what follows the last </think> is left. */
static void split_reasoning(Span *content, Span *reasoning) {
    const char *open = "<think>", *close = "</think>";
    const char *first = span_find(*content, close, false), *end = content->at + content->len;
    if (!first)
        return;
    *reasoning = (Span){content->at, (size_t)(first - content->at)};
    const char *start = span_find(*reasoning, open, true);
    if (start)
        *reasoning = (Span){start + strlen(open), (size_t)(first - start) - strlen(open)};
    const char *rest = span_find(*content, close, true) + strlen(close);
    *content = (Span){rest, (size_t)(end - rest)};
}

static int put_assistant(Render *r, size_t i, const json_t *message) {
    const json_t *given = json_object_get(message, "reasoning_content");
    if (given && !json_is_string(given) && !json_is_null(given))
        return err_set(r->err, E_INVAL,
                       "messages[%zu].reasoning_content: expected a string or null", i);
    Buf text = {0};
    int rc = put_content(r, i, json_object_get(message, "content"), &text);
    if (rc) {
        buf_done(&text);
        return rc;
    }
    Span content = {text.data ? text.data : "", text.len}, reasoning = {"", 0};
    if (json_is_string(given))
        reasoning = (Span){json_string_value(given), json_string_length(given)};
    else
        split_reasoning(&content, &reasoning);
    bool keep = r->options->clear_thinking_is_set && !r->options->clear_thinking;
    buf_puts(r->out, "<|assistant|><think>");
    if (keep || i >= r->n_to_last_user)
        buf_put(r->out, reasoning.at, reasoning.len);
    buf_puts(r->out, "</think>");
    content = span_strip(content);
    buf_put(r->out, content.at, content.len);
    buf_done(&text);
    return put_calls(r, i, json_object_get(message, "tool_calls"));
}

/* A tool result that names tools, which a search over deferred tools found: their JSON. */
static int put_tool_references(Render *r, size_t i, const json_t *list) {
    buf_puts(r->out, "<tool_response><tools>\n");
    for (size_t k = 0; k < json_array_size(list); k++) {
        const char *name = json_string_value(json_object_get(json_array_get(list, k), "name"));
        if (!name)
            return err_set(r->err, E_INVAL, "messages[%zu].content[%zu].name: expected a string", i,
                           k);
        for (size_t t = 0; t < json_array_size(r->tools); t++) {
            const json_t *function = unwrapped(json_array_get(r->tools, t));
            if (string_is(json_object_get(function, "name"), name))
                put_tool(r, function);
        }
    }
    buf_puts(r->out, "</tools></tool_response>");
    return 0;
}

/* A tool message that answers several calls at once. */
static int put_outputs(Render *r, size_t i, const json_t *list) {
    for (size_t k = 0; k < json_array_size(list); k++) {
        const json_t *output = json_object_get(json_array_get(list, k), "output");
        if (!json_is_string(output))
            return err_set(r->err, E_INVAL, "messages[%zu].content[%zu].output: expected a string",
                           i, k);
        buf_puts(r->out, "<tool_response>");
        put(r->out, output);
        buf_puts(r->out, "</tool_response>");
    }
    return 0;
}

static int put_tool_result(Render *r, size_t i, const json_t *message) {
    const json_t *before = i ? json_array_get(r->messages, i - 1) : NULL;
    if (!string_is(json_object_get(before, "role"), "tool"))
        buf_puts(r->out, "<|observation|>");
    const json_t *content = json_object_get(message, "content");
    const json_t *first = json_array_get(content, 0);
    if (string_is(json_object_get(first, "type"), "tool_reference"))
        return put_tool_references(r, i, content);
    if (json_object_get(first, "output"))
        return put_outputs(r, i, content);
    buf_puts(r->out, "<tool_response>");
    int rc = put_content(r, i, content, r->out);
    buf_puts(r->out, "</tool_response>");
    return rc;
}

static int put_message(Render *r, size_t i) {
    const json_t *message = json_array_get(r->messages, i);
    if (!json_is_object(message))
        return err_set(r->err, E_INVAL, "messages[%zu]: expected an object", i);
    const json_t *role = json_object_get(message, "role");
    if (!json_is_string(role))
        return err_set(r->err, E_INVAL, "messages[%zu].role: expected a string", i);
    if (string_is(role, "assistant"))
        return put_assistant(r, i, message);
    if (string_is(role, "tool"))
        return put_tool_result(r, i, message);
    if (string_is(role, "user"))
        buf_puts(r->out, "<|user|>");
    else if (string_is(role, "system") || string_is(role, "developer"))
        buf_puts(r->out, "<|system|>");
    else
        return err_set(r->err, E_INVAL, "messages[%zu].role: unknown role \"%.*s\"", i,
                       quotable(json_string_value(role)), json_string_value(role));
    return put_content(r, i, json_object_get(message, "content"), r->out);
}

/* The whole prompt into r->out. */
static int put_prompt(Render *r) {
    const ChatOptions *o = r->options;
    buf_puts(r->out, "[gMASK]<sop>");
    if (o->enable_thinking) {
        bool high = o->reasoning_effort && !strcmp(o->reasoning_effort, "high");
        buf_printf(r->out, "<|system|>Reasoning Effort: %s", high ? "High" : "Max");
    }
    int rc = put_tools(r);
    for (size_t i = 0; rc == 0 && i < json_array_size(r->messages); i++)
        rc = put_message(r, i);
    if (rc == 0 && o->add_generation_prompt)
        buf_printf(r->out, "<|assistant|><think>%s", o->enable_thinking ? "" : "</think>");
    return rc;
}

int chat_render(const json_t *messages, const json_t *tools, const ChatOptions *options, Buf *out,
                Err *err) {
    if (!json_is_array(messages))
        return err_set(err, E_INVAL, "messages: expected a list");
    if (json_is_null(tools))
        tools = NULL;
    if (tools && !json_is_array(tools))
        return err_set(err, E_INVAL, "tools: expected a list or null");
    Buf prompt = {0};
    Render r = {
        .messages = messages, .tools = tools, .options = options, .out = &prompt, .err = err};
    for (size_t i = 0; i < json_array_size(messages); i++)
        if (string_is(json_object_get(json_array_get(messages, i), "role"), "user"))
            r.n_to_last_user = i + 1;
    int rc = put_prompt(&r);
    if (rc == 0)
        buf_put(out, prompt.data, prompt.len);
    buf_done(&prompt);
    return rc;
}
