/* See stats.h. */
#include "decode/stats.h"

void decode_stats_init(DecodeStats *s) {
    static const double rows[] = {1, 2, 4, 8, 16, 32, 64, 128, 256};
    *s = (DecodeStats){
        .running = stat_gauge("baton_running_requests", "", "Requests that answer."),
        .waiting = stat_gauge("baton_waiting_requests", "", "Requests whose KV is on its way."),
        .free_pages = stat_gauge("baton_kv_pages", "state=\"free\"", "Pages of the KV pool."),
        .used_pages = stat_gauge("baton_kv_pages", "state=\"used\"", "Pages of the KV pool."),
        .quarantined_pages =
            stat_gauge("baton_kv_pages", "state=\"quarantined\"", "Pages of the KV pool."),
        .requests = stat_counter("baton_requests_total", "", "Requests let in."),
        .refused = stat_counter("baton_refused_total", "", "Requests not let in."),
        .failed = stat_counter("baton_failed_total", "", "Requests that failed after a grant."),
        .canceled = stat_counter("baton_canceled_total", "", "Requests that were given up."),
        .tokens = stat_counter("baton_tokens_total", "", "Answer tokens, first ones included."),
        .late_notices = stat_counter("baton_late_notices_total", "",
                                     "Notices of KV that no request waits for (any more)."),
        .bad_transfers = stat_counter("baton_bad_transfers_total", "",
                                      "Requests whose KV did not arrive as it was computed."),
        .step_s = stat_hist_seconds("baton_step_seconds", "", "Duration of a step."),
        .transfer_s = stat_hist_seconds("baton_transfer_seconds", "",
                                        "From the grant to the notice that all KV is there."),
        .verify_s = stat_hist_seconds("baton_verify_seconds", "",
                                      "From the notice to the end of the comparison of hashes."),
        .batch_rows = stat_hist("baton_batch_rows", "", "Requests in a step.", rows,
                                sizeof rows / sizeof *rows),
    };
}
