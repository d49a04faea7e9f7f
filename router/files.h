/* What the router reads of a model's folder: tokenizer.json, config.json, generation_config.json.
 * Start-up only. */
#pragma once

#include "model/tok.h"
#include "router/api.h"

typedef struct Files {
    Tok *tok;
    uint64_t tokenizer_hash; /* XXH3-64 of tokenizer.json's bytes */
    int max_positions;
    float temperature, top_p; /* defaults for requests */
    int eos[SHAPE_MAX_EOS];   /* of both configurations */
    int n_eos;
    int32_t think_end;
} Files;

/* Reads dir. The error names the file. generation_config.json may be missing. */
int files_open(Files *out, const char *dir, Err *err);
void files_close(Files *f);
