/* See sglang_take.h. */
#include "deploy/baton/sglang_take.h"

#include <jansson.h>

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <strings.h>

void sglang_say(SglangTake *t, SglangState state, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(t->remark->why, sizeof t->remark->why, fmt, args);
    va_end(args);
    t->remark->state = state;
    if (state == SGLANG_LOST)
        t->remark->baton = "";
}

/* ---- kinds of values ---- */

static bool parse_number(const char *s, int64_t low, int64_t high, int64_t *out) {
    static const struct {
        char suffix;
        int64_t factor;
    } units[] = {{'k', 1000}, {'K', 1024}, {'m', 1000000}, {'M', 1048576}, {0, 1}};
    char *end;
    errno = 0;
    long long v = strtoll(s, &end, 10);
    if (end == s || errno || isspace((unsigned char)*s))
        return false;
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        int64_t product;
        if (*end != units[i].suffix || (*end && end[1]))
            continue;
        if (__builtin_mul_overflow(v, units[i].factor, &product) || product < low || product > high)
            return false;
        *out = product;
        return true;
    }
    return false;
}

bool sglang_number(SglangTake *t, int64_t low, int64_t high, int64_t *out) {
    if (parse_number(t->value[0], low, high, out))
        return true;
    snprintf(t->expected, sizeof t->expected, "a number from %lld to %lld", (long long)low,
             (long long)high);
    return false;
}

/* What a config file can hold, see conf_value: neither control characters nor " ;". */
static bool text(SglangTake *t, char *out, size_t n) {
    const char *s = t->value[0];
    bool good = *s && !isspace((unsigned char)*s) && *s != ';' && strlen(s) < n;
    for (const char *p = s; *p && good; p++)
        good = (unsigned char)*p >= 0x20 && *p != 0x7f && !(*p == ' ' && (p[1] == ';' || !p[1]));
    if (!good) {
        snprintf(t->expected, sizeof t->expected,
                 "up to %zu characters, none of them a control character", n - 1);
        return false;
    }
    snprintf(out, n, "%s", s);
    return true;
}

static bool one_of(const char *s, const char *const *list) {
    for (; *list; list++)
        if (strcasecmp(s, *list) == 0)
            return true;
    return false;
}

/* ---- model ---- */

bool sglang_take_model(SglangTake *t) {
    return text(t, t->wish->model, sizeof t->wish->model);
}

bool sglang_take_name(SglangTake *t) {
    if (t->n > 1)
        sglang_say(t, SGLANG_CHANGED, "The first of %d names is kept.", t->n);
    return text(t, t->wish->name, sizeof t->wish->name);
}

bool sglang_take_tokenizer(SglangTake *t) {
    if (*t->wish->model && strcmp(t->wish->model, t->value[0]) == 0)
        sglang_say(t, SGLANG_KEPT, "It is the model's directory.");
    return true;
}

bool sglang_take_load_format(SglangTake *t) {
    static const char *const good[] = {"auto", "safetensors", "fastsafetensors", NULL};
    if (!one_of(t->value[0], good))
        sglang_say(t, SGLANG_LOST, "Only safetensors files are read.");
    return true;
}

bool sglang_take_dtype(SglangTake *t) {
    static const char *const good[] = {"auto", "bfloat16", NULL};
    if (!one_of(t->value[0], good))
        sglang_say(t, SGLANG_LOST, "Dtypes are taken per tensor from the checkpoint.");
    return true;
}

bool sglang_take_quantization(SglangTake *t) {
    static const char *const good[] = {"fp8",          "modelopt_fp4", "modelopt",
                                       "modelopt_fp8", "nvfp4",        NULL};
    static const char *const fp4[] = {"modelopt_fp4", "nvfp4", NULL};
    t->wish->fp4 = one_of(t->value[0], fp4);
    if (!one_of(t->value[0], good))
        sglang_say(t, SGLANG_LOST,
                   "Checkpoints in BF16, FP8 (128 x 128 blocks) and NVFP4 are "
                   "read, nothing else.");
    return true;
}

static json_t *object_of(SglangTake *t) {
    json_error_t e;
    json_t *o = json_loads(t->value[0], JSON_REJECT_DUPLICATES, &e);
    if (json_is_object(o))
        return o;
    json_decref(o);
    snprintf(t->expected, sizeof t->expected, "a JSON object");
    return NULL;
}

bool sglang_take_template_kwargs(SglangTake *t) {
    json_t *o = object_of(t), *v = json_object_get(o, "enable_thinking");
    if (!o)
        return false;
    if (json_is_boolean(v))
        t->wish->enable_thinking = json_is_true(v);
    if (!json_is_boolean(v))
        sglang_say(t, SGLANG_LOST, "Only enable_thinking can be set for all requests.");
    else if (json_object_size(o) > 1)
        sglang_say(t, SGLANG_CHANGED, "enable_thinking is kept, the others are not.");
    json_decref(o);
    return true;
}

/* ---- server ---- */

bool sglang_take_host(SglangTake *t) {
    return text(t, t->wish->host, sizeof t->wish->host);
}

bool sglang_take_port(SglangTake *t) {
    return sglang_number(t, 0, 65535, &t->wish->port);
}

bool sglang_take_log_level(SglangTake *t) {
    static const char *const names[][2] = {{"error", "error"},  {"critical", "error"},
                                           {"warning", "warn"}, {"warn", "warn"},
                                           {"info", "info"},    {"debug", "debug"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcasecmp(t->value[0], names[i][0]) == 0) {
            snprintf(t->wish->log_level, sizeof t->wish->log_level, "%s", names[i][1]);
            return true;
        }
    snprintf(t->expected, sizeof t->expected, "critical, error, warning, info or debug");
    return false;
}

bool sglang_take_watchdog(SglangTake *t) {
    int64_t s;
    if (!sglang_number(t, 1, 86400, &s))
        return false;
    t->wish->step_ms = s * 1000;
    return true;
}

bool sglang_take_tokenize_threads(SglangTake *t) {
    return sglang_number(t, 1, 64, &t->wish->tokenize_threads);
}

/* ---- parallelism ---- */

bool sglang_take_tp(SglangTake *t) {
    return sglang_number(t, 1, 8, &t->wish->tp);
}

bool sglang_take_replicas(SglangTake *t) {
    if (!sglang_number(t, 1, 64, &t->wish->replicas))
        return false;
    if (t->wish->replicas == 1)
        sglang_say(t, SGLANG_NEEDLESS, "One replica.");
    return true;
}

bool sglang_take_one_only(SglangTake *t) {
    int64_t v;
    if (!sglang_number(t, 1, 4096, &v))
        return false;
    if (v > 1)
        t->remark->state = SGLANG_LOST;
    return true;
}

/* ---- memory ---- */

bool sglang_take_context(SglangTake *t) {
    return sglang_number(t, 1, 1 << 24, &t->wish->context);
}

bool sglang_take_pool(SglangTake *t) {
    return sglang_number(t, 1, (int64_t)64 << 24, &t->wish->pool_tokens);
}

bool sglang_take_kv_dtype(SglangTake *t) {
    static const char *const fp8[] = {"fp8", "fp8_e4m3", "fp8_ds_mla", NULL};
    static const char *const bf16[] = {"auto", "bf16", "bfloat16", NULL};
    if (one_of(t->value[0], fp8))
        t->wish->kv_dtype = 2;
    else if (one_of(t->value[0], bf16))
        t->wish->kv_dtype = 1;
    else
        sglang_say(t, SGLANG_LOST, "KV is stored as fp8 (e4m3), bf16 or f32; bf16 is taken.");
    return true;
}

bool sglang_take_page_size(SglangTake *t) {
    int64_t v;
    if (!sglang_number(t, 1, 4096, &v))
        return false;
    if (v != 64)
        t->remark->state = SGLANG_LOST;
    return true;
}

/* ---- scheduling ---- */

bool sglang_take_max_running(SglangTake *t) {
    return sglang_number(t, 1, 4096, &t->wish->max_running);
}

bool sglang_take_max_waiting(SglangTake *t) {
    return sglang_number(t, 1, 65536, &t->wish->max_waiting);
}

bool sglang_take_chunk(SglangTake *t) {
    int64_t v;
    if (!sglang_number(t, -1, 1 << 24, &v))
        return false;
    if (v >= 1 && v <= 65536)
        t->wish->step_tokens = v;
    else
        sglang_say(t, SGLANG_LOST, "Prompts are always cut, into at most 65536 tokens per step.");
    return true;
}

/* ---- experts in host memory ---- */

bool sglang_take_expert_files(SglangTake *t) {
    t->wish->offload = true;
    return text(t, t->wish->expert_files, sizeof t->wish->expert_files);
}

bool sglang_take_method(SglangTake *t) {
    t->wish->offload = true;
    if (strcasecmp(t->value[0], "AMXINT4") == 0 || strcasecmp(t->value[0], "RAWINT4") == 0) {
        t->wish->bits = 4;
    } else if (strcasecmp(t->value[0], "AMXINT8") == 0) {
        t->wish->bits = 8;
    } else if (strcasecmp(t->value[0], "FP8") == 0 || strcasecmp(t->value[0], "BF16") == 0) {
        t->wish->bits = 0;
        sglang_say(t, SGLANG_CHANGED,
                   "expertd computes the checkpoint's own format; files of `baton pack --bits 8` "
                   "are far faster.");
    } else {
        sglang_say(t, SGLANG_LOST,
                   "4 bits are taken: `baton pack` makes 4 or 8 bits from BF16, "
                   "FP8 or NVFP4.");
    }
    return true;
}

bool sglang_take_nodes(SglangTake *t) {
    SglangWish *w = t->wish;
    w->offload = true;
    w->n_nodes = 0;
    for (int i = 0; i < t->n; i++) {
        int64_t node;
        bool good = i < SGLANG_NODES && parse_number(t->value[i], 0, 1023, &node);
        for (int j = 0; j < i && good; j++)
            good = w->node[j] != node;
        if (!good) {
            snprintf(t->expected, sizeof t->expected, "different NUMA nodes, at most %d",
                     SGLANG_NODES);
            return false;
        }
        w->node[w->n_nodes++] = (int)node;
    }
    return true;
}

bool sglang_take_pools(SglangTake *t) {
    t->wish->offload = true;
    return sglang_number(t, 1, SGLANG_NODES, &t->wish->pools);
}

bool sglang_take_cpu_threads(SglangTake *t) {
    t->wish->offload = true;
    return sglang_number(t, 1, 65536, &t->wish->cpu_threads);
}

bool sglang_take_resident(SglangTake *t) {
    t->wish->offload = true;
    return sglang_number(t, 0, 256, &t->wish->resident);
}

bool sglang_take_ratio(SglangTake *t) {
    char *end;
    double v = strtod(t->value[0], &end);
    t->wish->offload = true;
    if (end == t->value[0] || *end || !(v >= 0 && v <= 1)) {
        snprintf(t->expected, sizeof t->expected, "a number from 0 to 1");
        return false;
    }
    t->wish->resident = (int64_t)(v * 256 + 0.5);
    return true;
}

bool sglang_take_strategy(SglangTake *t) {
    t->wish->offload = true;
    if (strcmp(t->value[0], "uniform") == 0)
        t->wish->strategy = PLACE_UNIFORM;
    else if (strcmp(t->value[0], "front-loading") == 0)
        t->wish->strategy = PLACE_FRONT;
    else if (strcmp(t->value[0], "frequency") == 0)
        sglang_say(t, SGLANG_LOST,
                   "uniform is taken: frequency needs counts that [experts] record "
                   "of a running decode wrote ([experts] counts).");
    else
        sglang_say(t, SGLANG_LOST,
                   "uniform is taken: there are uniform, frequency, front and "
                   "file.");
    return true;
}

bool sglang_take_update(SglangTake *t) {
    t->wish->offload = t->wish->update = true;
    return true;
}

/* ---- drafting ---- */

bool sglang_take_spec(SglangTake *t) {
    if (t->wish->spec_tokens == 0)
        t->wish->spec_tokens = 1;
    return true;
}

bool sglang_take_spec_steps(SglangTake *t) {
    int64_t v;
    if (!sglang_number(t, 0, 64, &v))
        return false;
    t->wish->spec_tokens = (int)v;
    return true;
}

bool sglang_take_spec_config(SglangTake *t) {
    json_t *o = object_of(t);
    if (!o)
        return false;
    json_int_t v = json_integer_value(json_object_get(o, "num_speculative_tokens"));
    t->wish->spec_tokens = v > 0 && v <= 64 ? (int)v : 1;
    json_decref(o);
    return true;
}

/* ---- the rest ---- */

bool sglang_take_kv_devices(SglangTake *t) {
    return text(t, t->wish->kv_devices, sizeof t->wish->kv_devices);
}

bool sglang_take_reasoning(SglangTake *t) {
    static const char *const glm[] = {"glm45", "glm47", "glm", NULL};
    if (!one_of(t->value[0], glm))
        sglang_say(t, SGLANG_LOST, "Reasoning is split as GLM-5 writes it, no other way.");
    return true;
}
