/* JSON as the chat template prints it: what Python's json.dumps(value, ensure_ascii=False) gives,
 * which is what the model saw in training. Separators ", " and ": ", keys in their order, non-ASCII
 * as it is, floats as Python's repr. Pure; any thread. */
#pragma once

#include "base/buf.h"

#include <jansson.h>

/* Appends value, which came from jansson's parser: its nesting bounds the recursion here. */
void chat_json_put(const json_t *value, Buf *out);

/* Appends s[0, len) in quotes, escaped. */
void chat_json_put_string(const char *s, size_t len, Buf *out);

/* Appends the shortest decimal that reads back as value, in Python's notation: 1.0, 0.1, 1e-07,
 * 1e+16. value is finite. */
void chat_json_put_real(double value, Buf *out);
