/* How the rows of the table take values. Internal to sglang; pure. */
#pragma once

#include "deploy/baton/sglang_int.h"

bool sglang_take_model(SglangTake *t);
bool sglang_take_name(SglangTake *t);
bool sglang_take_tokenizer(SglangTake *t);
bool sglang_take_load_format(SglangTake *t);
bool sglang_take_dtype(SglangTake *t);
bool sglang_take_quantization(SglangTake *t);
bool sglang_take_template_kwargs(SglangTake *t);
bool sglang_take_host(SglangTake *t);
bool sglang_take_port(SglangTake *t);
bool sglang_take_log_level(SglangTake *t);
bool sglang_take_watchdog(SglangTake *t);
bool sglang_take_tokenize_threads(SglangTake *t);
bool sglang_take_tp(SglangTake *t);
bool sglang_take_replicas(SglangTake *t);
bool sglang_take_one_only(SglangTake *t);
bool sglang_take_context(SglangTake *t);
bool sglang_take_pool(SglangTake *t);
bool sglang_take_kv_dtype(SglangTake *t);
bool sglang_take_page_size(SglangTake *t);
bool sglang_take_max_running(SglangTake *t);
bool sglang_take_max_waiting(SglangTake *t);
bool sglang_take_chunk(SglangTake *t);
bool sglang_take_expert_files(SglangTake *t);
bool sglang_take_method(SglangTake *t);
bool sglang_take_nodes(SglangTake *t);
bool sglang_take_pools(SglangTake *t);
bool sglang_take_cpu_threads(SglangTake *t);
bool sglang_take_resident(SglangTake *t);
bool sglang_take_ratio(SglangTake *t);
bool sglang_take_strategy(SglangTake *t);
bool sglang_take_update(SglangTake *t);
bool sglang_take_spec(SglangTake *t);
bool sglang_take_spec_steps(SglangTake *t);
bool sglang_take_spec_config(SglangTake *t);
bool sglang_take_kv_devices(SglangTake *t);
bool sglang_take_reasoning(SglangTake *t);
