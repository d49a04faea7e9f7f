/* Fuzzes the chat template with {"messages": ..., "tools": ...}. The first byte holds the options.
 * A prompt or an error must be valid UTF-8, and nothing may be written when there is an error. */
#include "model/chat.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0)
        return 0;
    json_t *root = json_loadb((const char *)data + 1, size - 1, JSON_ALLOW_NUL, NULL);
    if (!root)
        return 0;
    ChatOptions o = {.enable_thinking = data[0] & 1,
                     .clear_thinking_is_set = data[0] & 2,
                     .clear_thinking = data[0] & 4,
                     .add_generation_prompt = data[0] & 8,
                     .reasoning_effort = data[0] & 16 ? "high" : NULL};
    Buf out = {0};
    Err err = {0};
    int rc = chat_render(json_object_get(root, "messages"), json_object_get(root, "tools"), &o,
                         &out, &err);
    CHECK(rc == 0 ? out.len > 0 : out.len == 0 && err.code == rc);
    json_t *valid = rc == 0 ? json_stringn(out.data, out.len) : json_string(err.text);
    CHECK(valid); /* jansson takes UTF-8 only */
    json_decref(valid);
    buf_done(&out);
    json_decref(root);
    return 0;
}
