/* See session_stat.h. */
#include "router/session_stat.h"

#include <string.h>

void session_stat_init(SessionStat *s) {
    const char *requests = "baton_router_requests_total", *help = "Requests that ended, by outcome";
    s->complete = stat_counter(requests, "outcome=\"complete\"", help);
    s->refused = stat_counter(requests, "outcome=\"refused\"", help);
    s->failed = stat_counter(requests, "outcome=\"failed\"", help);
    s->gone = stat_counter(requests, "outcome=\"gone\"", help);
    s->retries = stat_counter("baton_router_retries_total", "", "Second attempts at a request");
    s->tokens = stat_counter("baton_router_answer_tokens_total", "", "Answer tokens received");
    s->running = stat_gauge("baton_router_running", "", "Requests being served");
    s->attempts =
        stat_gauge("baton_router_attempts", "", "Attempts that a prefill or decode still works on");
    s->dropped = stat_gauge("baton_router_attempts_dropped", "",
                            "Attempts whose prefill never said that it is quiet");
    s->first_s = stat_hist_seconds("baton_router_first_token_seconds", "",
                                   "From the request to its first token");
    s->total_s =
        stat_hist_seconds("baton_router_request_seconds", "", "From the request to its end");
    s->queue_s =
        stat_hist_seconds("baton_router_prefill_queue_seconds", "", "Waiting inside prefill");
    s->compute_s =
        stat_hist_seconds("baton_router_prefill_compute_seconds", "", "Computing inside prefill");
    s->push_s = stat_hist_seconds("baton_router_prefill_push_seconds", "",
                                  "From the last computed token to the end of the transfer");
}

void session_stat_end(SessionStat *s, const char *how, int64_t ms) {
    StatCounter *c = !strcmp(how, "complete")  ? s->complete
                     : !strcmp(how, "refused") ? s->refused
                     : !strcmp(how, "gone")    ? s->gone
                                               : s->failed;
    stat_add(c, 1);
    stat_observe(s->total_s, (double)ms * 1e-3);
}

void session_stat_first(SessionStat *s, int64_t ms) {
    stat_observe(s->first_s, (double)ms * 1e-3);
}

void session_stat_prefill(SessionStat *s, const Baton__PrefillDone *done) {
    stat_observe(s->queue_s, done->queue_ms * 1e-3);
    stat_observe(s->compute_s, done->compute_ms * 1e-3);
    stat_observe(s->push_s, done->push_ms * 1e-3);
}

void session_stat_tokens(SessionStat *s, size_t n) {
    stat_add(s->tokens, (double)n);
}

void session_stat_retry(SessionStat *s) {
    stat_add(s->retries, 1);
}

void session_stat_running(SessionStat *s, int n) {
    stat_set(s->running, n);
}

void session_stat_attempts(SessionStat *s, int n, int n_dropped) {
    stat_set(s->attempts, n);
    stat_set(s->dropped, n_dropped);
}
