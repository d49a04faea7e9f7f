/* See failure.h. */
#include "router/failure.h"

ApiError failure_unavailable(const char *code, const char *message, int64_t retry_after_ms) {
    ApiError e;
    api_refuse(&e, 503, "server_error", code, NULL, "%s", message);
    e.retry_after_ms = retry_after_ms;
    return e;
}

ApiError failure_of(const Baton__Failed *f, const char *who) {
    static const struct {
        Baton__FailCode code;
        int status;
        const char *type, *name;
    } known[] = {
        {BATON__FAIL_CODE__FAIL_BUSY, 429, "rate_limit_error", "no_capacity"},
        {BATON__FAIL_CODE__FAIL_DRAINING, 503, "server_error", "draining"},
        {BATON__FAIL_CODE__FAIL_INVALID, 400, "invalid_request_error", "invalid_value"},
        {BATON__FAIL_CODE__FAIL_TRANSFER, 503, "server_error", "transfer_failed"},
        {BATON__FAIL_CODE__FAIL_EXPERT, 503, "server_error", "expert_failed"},
        {BATON__FAIL_CODE__FAIL_DEADLINE, 504, "server_error", "timeout"},
        {BATON__FAIL_CODE__FAIL_MISMATCH, 503, "server_error", "mismatch"},
    };
    ApiError e;
    const char *why = f->reason && *f->reason ? f->reason : "no reason given";
    api_refuse(&e, 500, "server_error", "internal_error", NULL, "%s: %s", who, why);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].code != f->code)
            continue;
        e.status = known[i].status;
        e.type = known[i].type;
        e.code = known[i].name;
    }
    if (e.status == 429 || e.status == 503)
        e.retry_after_ms = f->retry_after_ms ? f->retry_after_ms : 1000;
    return e;
}

bool failure_worth_again(Baton__FailCode code) {
    return code != BATON__FAIL_CODE__FAIL_INVALID && code != BATON__FAIL_CODE__FAIL_DEADLINE;
}
