/* Foreign options: both forms of text, what each becomes, and that MIGRATING.md says the same. */
#include "deploy/baton/sglang.h"

#include "deploy/baton/sglang_int.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#define CASES "tests/unit/deploy/cases"

typedef struct Result {
    Sglang s;
    ConfDoc *docs;
    int n;
    Services services;
} Result;

static char *file_text(const char *path) {
    FILE *f = fopen(path, "re");
    if (!f)
        fail_msg("%s is missing", path);
    char *text = xcalloc(1 << 18, 1);
    assert_true(fread(text, 1, (1 << 18) - 1, f) > 0);
    fclose(f);
    return text;
}

/* Everything that comes out passes the daemons' own checks. */
static Result translate(const char *given) {
    Result r = {0};
    Err err = {0};
    char *text = xstrdup(given);
    if (sglang_read(&r.s, "test", text, &err))
        fail_msg("%s", err.text);
    free(text);
    sglang_docs(&r.s, &r.docs, &r.n);
    if (services_add_docs(&r.services, r.docs, r.n, &err))
        fail_msg("%s", err.text);
    return r;
}

static void done(Result *r) {
    services_done(&r->services);
    for (int i = 0; i < r->n; i++)
        conf_doc_done(&r->docs[i]);
    free(r->docs);
    sglang_done(&r->s);
}

static const SglangRemark *remark_of(const Result *r, const char *option) {
    for (int i = 0; i < r->s.n; i++)
        if (strcmp(r->s.remark[i].option, option) == 0)
            return &r->s.remark[i];
    fail_msg("no remark about %s", option);
    return NULL;
}

static void assert_state(const Result *r, const char *option, SglangState state) {
    const SglangRemark *m = remark_of(r, option);
    if (m->state != state)
        fail_msg("%s: %s, expected %s", option, sglang_state_name(m->state),
                 sglang_state_name(state));
}

static const EngineOpts *engine(const Result *r, ServiceKind kind) {
    const Service *s = services_get(&r->services, kind, 0);
    assert_non_null(s);
    return service_engine(s);
}

static void the_slow_machine(void **state) {
    (void)state;
    char *text = file_text(CASES "/slow_4xh100/options.txt");
    Result r = translate(text);
    const EngineOpts *e = engine(&r, SERVICE_DECODE);
    assert_int_equal(r.n, 5);
    assert_int_equal(e->tp, 4);
    assert_int_equal(e->kv_dtype, 2);
    assert_int_equal(e->max_context, 262144);
    assert_int_equal(e->pages, 4096);
    assert_string_equal(e->resident, "64");
    assert_int_equal(e->update_ms, 30000);
    assert_string_equal(e->dir, "GLM-5.2-FP8");
    assert_string_equal(e->name, "GLM5.2");
    const Service *decode = services_get(&r.services, SERVICE_DECODE, 0);
    assert_int_equal(decode->decode.max_running, 1);
    const Service *x = services_get(&r.services, SERVICE_EXPERTD, 1);
    assert_int_equal(services_count(&r.services, SERVICE_EXPERTD), 2);
    assert_int_equal(x->expertd.node, 1);
    assert_int_equal(x->expertd.threads, 32);
    assert_int_equal(x->expertd.shard, 1);
    assert_int_equal(x->expertd.n_shards, 2);
    assert_string_equal(x->expertd.device, "none"); /* residents change */
    assert_string_equal(x->expertd.files, "GLM-5.2-CPU-INT4");
    const Service *router = services_get(&r.services, SERVICE_ROUTER, 0);
    assert_string_equal(router->router.http_host, "0.0.0.0");
    assert_int_equal(router->router.http_port, 30000);
    assert_state(&r, "tp-size", SGLANG_KEPT);
    assert_state(&r, "kt-weight-path", SGLANG_CHANGED);
    assert_state(&r, "attention-backend", SGLANG_NEEDLESS);
    assert_state(&r, "tool-call-parser", SGLANG_LOST);
    assert_state(&r, "kt-gpu-prefill-token-threshold", SGLANG_LOST);
    assert_non_null(strstr(remark_of(&r, "(expert files)")->why, "--bits 4"));
    done(&r);
    free(text);
}

static void other_cases_and_speculation(void **state) {
    (void)state;
    char *text = file_text(CASES "/b200_2xtp4/options.txt");
    Result r = translate(text);
    assert_int_equal(r.s.wish.spec_tokens, 3);
    assert_true(r.s.wish.fp4);
    assert_state(&r, "speculative-algorithm", SGLANG_LOST);
    assert_string_equal(engine(&r, SERVICE_PREFILL)->resident, "all");
    assert_int_equal(services_count(&r.services, SERVICE_EXPERTD), 0);
    done(&r);
    free(text);
    text = file_text(CASES "/rtx6000pro_tp8/options.txt");
    r = translate(text);
    assert_state(&r, "ep-size", SGLANG_NEEDLESS);
    assert_int_equal(engine(&r, SERVICE_DECODE)->pages, 4096);
    assert_non_null(strstr(remark_of(&r, "(KV pool)")->why, "262144"));
    done(&r);
    free(text);
}

static void a_whole_command(void **state) {
    (void)state;
    Result r =
        translate("# start\nexport X=1\nCUDA_VISIBLE_DEVICES=0,1 numactl --interleave=all \\\n"
                  "  python3 -m sglang.launch_server --model-path '/m/GLM 5' --tp 2 \\\n"
                  "  --kt-numa-nodes 2 3 --kt_cpuinfer=60 --trust-remote-code --port=1234 \\\r\n"
                  "  --served-model-name \"a\\\"b\" --kt-method AMXINT8 --dp 2 > log 2>&1 &\n");
    assert_string_equal(engine(&r, SERVICE_DECODE)->dir, "/m/GLM 5");
    assert_int_equal(engine(&r, SERVICE_DECODE)->tp, 2);
    assert_string_equal(r.s.wish.name, "a\"b");
    assert_int_equal(r.s.wish.bits, 8);
    assert_int_equal(services_count(&r.services, SERVICE_PREFILL), 2);
    const Service *x = services_get(&r.services, SERVICE_EXPERTD, 1);
    assert_int_equal(x->expertd.node, 3);
    assert_int_equal(x->expertd.threads, 30);
    assert_string_equal(x->expertd.files, "/m/GLM 5-int8");
    assert_state(&r, "CUDA_VISIBLE_DEVICES", SGLANG_CHANGED);
    assert_state(&r, "X", SGLANG_LOST);
    assert_state(&r, "numactl", SGLANG_LOST);
    assert_int_equal(remark_of(&r, "port")->line, 5);
    done(&r);
    r = translate("vllm serve /m/x --max-model-len 128k --max-num-seqs 8 --enforce-eager "
                  "--speculative-config '{\"method\": \"mtp\", \"num_speculative_tokens\": 2}' "
                  "--default-chat-template-kwargs '{\"enable_thinking\": false}' --bogus 1 "
                  "--kv-cache-dtype fp8_e5m2");
    assert_string_equal(engine(&r, SERVICE_DECODE)->dir, "/m/x");
    assert_int_equal(r.s.wish.context, 128000);
    assert_int_equal(r.s.wish.spec_tokens, 2);
    assert_int_equal(engine(&r, SERVICE_DECODE)->pages, 8 * 2000);
    assert_int_equal(engine(&r, SERVICE_PREFILL)->pages, 2000);
    assert_false(services_get(&r.services, SERVICE_ROUTER, 0)->router.enable_thinking);
    assert_state(&r, "bogus", SGLANG_LOST);
    assert_state(&r, "kv-cache-dtype", SGLANG_LOST);
    assert_int_equal(engine(&r, SERVICE_DECODE)->kv_dtype, 1);
    done(&r);
}

static void near_names_are_offered(void **state) {
    (void)state;
    Result r = translate("max-runing-requests 4\n");
    assert_non_null(strstr(remark_of(&r, "max-runing-requests")->why, "max-running-requests"));
    done(&r);
}

static void pools_that_do_not_divide(void **state) {
    (void)state;
    Result r = translate("kt-threadpool-count 6\nkt-cpuinfer 48\n");
    assert_int_equal(services_count(&r.services, SERVICE_EXPERTD), 4);
    assert_non_null(strstr(remark_of(&r, "(daemons)")->why, "6 daemons"));
    done(&r);
    r = translate("kt-numa-nodes 0 2\nkt-threadpool-count 4\n");
    assert_int_equal(services_count(&r.services, SERVICE_EXPERTD), 2);
    done(&r);
}

static void refuse(const char *given, const char *where, const char *what) {
    Sglang s = {0};
    Err err = {0};
    char *text = xstrdup(given);
    assert_int_equal(sglang_read(&s, "opts", text, &err), E_FORMAT);
    if (!strstr(err.text, where) || !strstr(err.text, what))
        fail_msg("\"%s\" lacks \"%s\" or \"%s\"", err.text, where, what);
    free(text);
}

static void bad_values_name_line_and_option(void **state) {
    (void)state;
    refuse("", "opts", "no options");
    refuse("# only\n", "opts", "no options");
    refuse("tp-size 4\n\ntp-size 9\n", "opts:3: tp-size", "from 1 to 8");
    refuse("tp\033size 4\n", "opts:1: option", "letters");
    refuse("tp-size\n", "opts:1: tp-size", "a value");
    refuse("tp-size 4 5\n", "opts:1: tp-size", "one value");
    refuse("trust-remote-code yes\n", "opts:1: trust-remote-code", "no value");
    refuse("port 99999999999999999999\n", "opts:1: port", "65535");
    refuse("kt-numa-nodes 0 0\n", "opts:1: kt-numa-nodes", "different");
    refuse("served-model-name 'a\tb'\n", "opts:1", "control character");
    refuse("host \"x ;y\"\n", "opts:1", "control character");
    refuse("x --model-path 'open\n", "opts:1", "quote");
    refuse("python -m sglang.launch_server --model-path $MODEL\n", "opts:1", "shell variables");
    refuse("sglang serve a b\n--tp 2\n", "opts:1", "an option");
    refuse("speculative-config [1]\n", "opts:1", "JSON object");
    refuse("kt-gpu-experts-ratio 1.5\n", "opts:1", "from 0 to 1");
}

static void names_stand_once(void **state) {
    (void)state;
    for (const SglangRow *r = SGLANG_TABLE; r->names || r->why; r++) {
        for (const char *at = r->names; at;) {
            size_t n = strcspn(at, "|");
            char *name = xasprintf("%.*s", (int)n, at);
            if (sglang_find(name) != r)
                fail_msg("--%s stands twice", name);
            free(name);
            at = at[n] ? at + n + 1 : NULL;
        }
    }
}

/* "[section] key" of the Baton column is an option of some daemon. */
static void baton_options_exist(void **state) {
    (void)state;
    for (const SglangRow *r = SGLANG_TABLE; r->names || r->why; r++) {
        char section[32], key[32];
        const char *at = r->names ? strchr(r->baton, '[') : NULL;
        if (!at || sscanf(at, "[%31[a-z]] %31[a-z_]", section, key) != 2)
            continue;
        bool found = false;
        for (int k = 0; k < SERVICE_KINDS; k++)
            for (const ConfOpt *o = service_kind_table((ServiceKind)k)->opts; o->section; o++)
                found |= strcmp(o->section, section) == 0 && strcmp(o->key, key) == 0;
        if (!found)
            fail_msg("%s: no daemon has [%s] %s", r->names, section, key);
    }
}

/* Each option of each case is known. */
static void cases_are_covered(void **state) {
    (void)state;
    const char *const files[] = {"slow_4xh100", "b200_2xtp4", "rtx6000pro_tp8"};
    for (int i = 0; i < 3; i++) {
        char *path = xasprintf(CASES "/%s/options.txt", files[i]), *text = file_text(path);
        Result r = translate(text);
        for (int j = 0; j < r.s.n; j++)
            if (strncmp(r.s.remark[j].why, "Unknown", 7) == 0)
                fail_msg("%s: %s", path, r.s.remark[j].option);
        done(&r);
        free(text);
        free(path);
    }
}

static void migrating_says_the_same(void **state) {
    (void)state;
    char *table = NULL, *text = file_text("deploy/MIGRATING.md");
    size_t n;
    FILE *to = open_memstream(&table, &n);
    sglang_print_table(to);
    fclose(to);
    if (!strstr(text, table))
        fail_msg("deploy/MIGRATING.md differs from `baton doctor --list-options`");
    free(table);
    free(text);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_slow_machine),
        cmocka_unit_test(other_cases_and_speculation),
        cmocka_unit_test(a_whole_command),
        cmocka_unit_test(near_names_are_offered),
        cmocka_unit_test(pools_that_do_not_divide),
        cmocka_unit_test(bad_values_name_line_and_option),
        cmocka_unit_test(names_stand_once),
        cmocka_unit_test(baton_options_exist),
        cmocka_unit_test(cases_are_covered),
        cmocka_unit_test(migrating_says_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
