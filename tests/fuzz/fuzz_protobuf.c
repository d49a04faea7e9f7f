/* Fuzzes what the bus reads from outside: an envelope and its checks. No input may crash it, every
 * refusal has words, what is accepted keeps its promises and survives being packed again. A hello
 * is also compared with one of ours. */
#include "proto/bus.h"
#include "proto/bus_frame.h"
#include "proto/hello.h"

#include <string.h>

static void check_grant(const Baton__Grant *g) {
    CHECK(g);
    for (size_t i = 0; i < g->n_page; i++)
        CHECK(g->page[i] < g->total_pages);
}

static void check_text(const char *text) {
    char out[BUS_REASON_MAX + 1];
    bus_frame_text(out, sizeof out, text);
    CHECK(strlen(out) == strlen(text));
    for (size_t i = 0; out[i]; i++)
        CHECK((unsigned char)out[i] >= ' ');
}

static void check_hello(const Baton__Hello *theirs) {
    Baton__Hello mine = BATON__HELLO__INIT;
    mine.protocol = PROTOCOL_VERSION;
    mine.role = BATON__ROLE__ROLE_DECODE;
    mine.name = (char *)"decode-0";
    mine.generation = 1;
    mine.page_tokens = 64;
    mine.kv_dtype = (char *)"bf16";
    Err err = {0};
    if (hello_check(&mine, theirs, &err) == 0)
        CHECK(theirs->name[0] && theirs->generation && theirs->role != BATON__ROLE__ROLE_DECODE);
    else
        CHECK(err.code == E_MISMATCH && err.text[0] && !strpbrk(err.text, "\n\r\x1b"));
    Baton__Hello *copy = hello_copy(theirs);
    CHECK(hello_same_process(copy, theirs));
    hello_free(copy);
}

static void check_promises(const Baton__Envelope *env) {
    switch (env->body_case) {
    case BATON__ENVELOPE__BODY_HELLO:
        check_hello(env->hello);
        break;
    case BATON__ENVELOPE__BODY_REFUSE:
        check_text(env->refuse->reason);
        break;
    case BATON__ENVELOPE__BODY_RESERVE:
        CHECK(env->reserve->sampling);
        break;
    case BATON__ENVELOPE__BODY_GRANT:
        check_grant(env->grant);
        break;
    case BATON__ENVELOPE__BODY_PREFILL:
        CHECK(env->prefill->sampling);
        check_grant(env->prefill->grant);
        break;
    case BATON__ENVELOPE__BODY_FAILED:
        check_text(env->failed->reason);
        break;
    case BATON__ENVELOPE__BODY_EXPERT_REPLY:
        check_text(env->expert_reply->reason);
        break;
    default:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Err err = {0};
    Baton__Envelope *env = bus_frame_unpack(data, size, &err);
    if (!env) {
        CHECK(err.code != 0 && err.text[0]);
        return 0;
    }
    check_promises(env);
    size_t n = baton__envelope__get_packed_size(env);
    uint8_t *bytes = xmalloc(n ? n : 1);
    CHECK(baton__envelope__pack(env, bytes) == n);
    bus_frame_free(env);
    free(bytes);
    return 0;
}
