/* See stats.h. */
#include "prefill/stats.h"

void prefill_stats_init(PrefillStats *s) {
    static const double tokens[] = {16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
    *s = (PrefillStats){
        .running = stat_gauge("baton_running_requests", "", "Requests being computed or pushed."),
        .waiting = stat_gauge("baton_waiting_requests", "", "Requests that have not begun."),
        .free_pages = stat_gauge("baton_kv_pages", "state=\"free\"", "Pages of the KV pool."),
        .used_pages = stat_gauge("baton_kv_pages", "state=\"used\"", "Pages of the KV pool."),
        .quarantined_pages =
            stat_gauge("baton_kv_pages", "state=\"quarantined\"", "Pages of the KV pool."),
        .queued_tokens =
            stat_gauge("baton_queued_tokens", "", "Prompt tokens that are not computed yet."),
        .peers = stat_gauge("baton_kv_peers", "", "Decodes that KV is written to."),
        .requests = stat_counter("baton_requests_total", "", "Requests taken."),
        .refused = stat_counter("baton_refused_total", "", "Requests not taken."),
        .failed = stat_counter("baton_failed_total", "", "Requests that failed after being taken."),
        .canceled = stat_counter("baton_canceled_total", "", "Requests that were given up."),
        .tokens = stat_counter("baton_tokens_total", "", "Prompt tokens computed."),
        .pushed_bytes =
            stat_counter("baton_pushed_bytes_total", "", "KV bytes queued for writing to decodes."),
        .step_s = stat_hist_seconds("baton_step_seconds", "", "Duration of a step."),
        .step_tokens = stat_hist("baton_step_tokens", "", "Prompt tokens in a step.", tokens,
                                 sizeof tokens / sizeof *tokens),
        .queue_s = stat_hist_seconds("baton_queue_seconds", "",
                                     "From a request's arrival to the begin of its first step."),
        .compute_s = stat_hist_seconds("baton_compute_seconds", "",
                                       "From a request's first step to the end of its last."),
        .push_s = stat_hist_seconds("baton_push_seconds", "",
                                    "From the end of its last step until all KV is written."),
    };
}
