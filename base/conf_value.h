/* One configuration value: text to a field of the daemon's struct and back. Used by conf.c only. */
#pragma once

#include "base/buf.h"
#include "base/conf.h"

/* Parses text into the field of o in *out (a CONF_STR field is freed first). E_INVAL with what was
 * expected and what was found; the field then keeps its value. */
int conf_value_set(const ConfOpt *o, const char *text, void *out, Err *err);

/* Writes the field of o in *values so that conf_value_set reads the same value. */
void conf_value_print(const ConfOpt *o, const void *values, FILE *to);

/* Appends what the option takes: "an integer, from 1 to 65535", "one of auto, cpu, cuda". */
void conf_value_expected(const ConfOpt *o, Buf *out);
