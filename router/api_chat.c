/* See api.h. What only chat requests have: messages and thinking. */
#include "router/api_int.h"

#include <stdio.h>
#include <string.h>

static bool one_of(const char *s, const char *const *names) {
    for (; *names; names++)
        if (!strcmp(s, *names))
            return true;
    return false;
}

/* null, false, "", [] and {} say nothing. */
static bool says_nothing(const json_t *v) {
    return json_is_null(v) || json_is_false(v) ||
           (json_is_string(v) && json_string_length(v) == 0) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

/* Content parts may only hold text: the model sees nothing else. */
static int check_content(ApiParse *p, size_t i, const json_t *content) {
    char param[128];
    size_t k;
    json_t *part;
    if (!json_is_array(content))
        return 0; /* the template checks strings and null */
    json_array_foreach((json_t *)content, k, part) {
        const json_t *type = json_object_get(part, "type");
        if (!json_is_string(type) || !strcmp(json_string_value(type), "text"))
            continue; /* the template names a missing type */
        snprintf(param, sizeof param, "messages[%zu].content[%zu].type", i, k);
        return api_unsupported(p, param, "only text parts are supported");
    }
    return 0;
}

static int check_message(ApiParse *p, size_t i, const json_t *message) {
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", NULL};
    static const char *const known[] = {"role",       "content",      "name", "reasoning_content",
                                        "tool_calls", "tool_call_id", NULL};
    char param[128];
    snprintf(param, sizeof param, "messages[%zu]", i);
    if (!json_is_object(message))
        return api_bad_type(p, param, "an object");
    snprintf(param, sizeof param, "messages[%zu].role", i);
    const json_t *role = json_object_get(message, "role");
    if (!json_is_string(role))
        return api_bad_type(p, param, "a string");
    if (!one_of(json_string_value(role), roles))
        return api_bad_value(p, param, "%s: expected system, developer, user, assistant or tool",
                             param);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)message, key, value) {
        if (one_of(key, known) || says_nothing(value))
            continue;
        snprintf(param, sizeof param, "messages[%zu].%.60s", i, key);
        return api_unsupported(p, param, "this field of a message is not supported");
    }
    return check_content(p, i, json_object_get(message, "content"));
}

int api_messages(ApiParse *p, const json_t *value) {
    size_t i;
    json_t *message;
    if (!json_is_array(value))
        return api_bad_type(p, "messages", "an array");
    if (json_array_size(value) == 0)
        return api_bad_value(p, "messages", "messages: at least one message is required");
    json_array_foreach((json_t *)value, i, message) {
        int rc = check_message(p, i, message);
        if (rc)
            return rc;
    }
    p->req->messages = json_incref((json_t *)value);
    return 0;
}

int api_template_kwargs(ApiParse *p, const json_t *value) {
    const char *key;
    json_t *v;
    char param[128];
    if (!json_is_object(value))
        return api_bad_type(p, "chat_template_kwargs", "an object");
    json_object_foreach((json_t *)value, key, v) {
        snprintf(param, sizeof param, "chat_template_kwargs.%.60s", key);
        bool enable = !strcmp(key, "enable_thinking");
        if (!enable && strcmp(key, "clear_thinking") != 0)
            return api_unsupported(p, param, "unknown template argument");
        if (json_is_null(v))
            continue;
        if (!json_is_boolean(v))
            return api_bad_type(p, param, "a boolean");
        if (enable) {
            p->thinking_is_set = true;
            p->req->options.enable_thinking = json_is_true(v);
        } else {
            p->req->options.clear_thinking_is_set = true;
            p->req->options.clear_thinking = json_is_true(v);
        }
    }
    return 0;
}

int api_effort(ApiParse *p, const json_t *value) {
    /* The model knows two efforts; the others that clients send mean the larger one. */
    static const char *const known[] = {"none", "minimal", "low", "medium",
                                        "high", "xhigh",   "max", NULL};
    if (!json_is_string(value))
        return api_bad_type(p, "reasoning_effort", "a string");
    const char *effort = json_string_value(value);
    if (!one_of(effort, known))
        return api_bad_value(
            p, "reasoning_effort",
            "reasoning_effort: expected none, minimal, low, medium, high, xhigh or max");
    p->effort = !strcmp(effort, "none") ? "none" : !strcmp(effort, "high") ? "high" : "max";
    return 0;
}

void api_thinking(ApiParse *p) {
    if (!p->effort)
        return;
    if (strcmp(p->effort, "none") != 0)
        p->req->options.reasoning_effort = p->effort;
    else if (!p->thinking_is_set)
        p->req->options.enable_thinking = false;
}
