/* GLM-5.2's chat template in C: messages in, prompt text out. Pure; any thread. */
#pragma once

#include "base/buf.h"
#include "base/err.h"

#include <jansson.h>

#include <stdbool.h>

typedef struct ChatOptions {
    bool enable_thinking;       /* default true */
    bool clear_thinking_is_set; /* whether the caller defined clear_thinking */
    bool clear_thinking;
    bool add_generation_prompt;   /* default true */
    const char *reasoning_effort; /* "high" or anything else; NULL: unset */
} ChatOptions;

ChatOptions chat_options_default(void);

/* Appends the prompt for messages (a JSON array of OpenAI message objects) and tools (array or
 * NULL) to out. Messages are borrowed. "developer" counts as "system". Tool-call arguments may be
 * an object or a JSON string of one. E_INVAL names the message index and field. */
int chat_render(const json_t *messages, const json_t *tools, const ChatOptions *options, Buf *out,
                Err *err);
