/* What becomes of each option: the one table behind --from-sglang and MIGRATING.md. Pure. */
#include "deploy/baton/sglang_take.h"

#define S  "SGLang"
#define K  "KTransformers"
#define V  "vLLM"
#define SV "SGLang, vLLM"

#define HEADING(text)                                                                              \
    { .why = text }
#define KEPT(names, of, baton, take, why)                                                          \
    { names, of, SGLANG_ONE, SGLANG_KEPT, baton, why, take }
#define CHANGED(names, of, baton, take, why)                                                       \
    { names, of, SGLANG_ONE, SGLANG_CHANGED, baton, why, take }
#define NEEDLESS(names, of, arity, why)                                                            \
    { names, of, arity, SGLANG_NEEDLESS, "", why, NULL }
#define LOST(names, of, arity, why)                                                                \
    { names, of, arity, SGLANG_LOST, "", why, NULL }

#define FLAG  SGLANG_FLAG
#define ONE   SGLANG_ONE
#define MANY  SGLANG_MANY
#define MAYBE SGLANG_MAYBE

const SglangRow SGLANG_TABLE[] = {
    HEADING("Model"),
    KEPT("model-path|model", SV, "router, prefill, decode [model] dir", sglang_take_model,
         "A directory with config.json, tokenizer.json and safetensors files; nothing is "
         "downloaded."),
    {"served-model-name", SV, MANY, SGLANG_KEPT, "router, prefill, decode [model] name",
     "One name; vLLM's further names are not kept.", sglang_take_name},
    CHANGED("tokenizer-path|tokenizer", SV, "router [model] dir", sglang_take_tokenizer,
            "tokenizer.json is read from the model's directory and must stand there."),
    NEEDLESS("tokenizer-mode", SV, ONE, "There is one tokenizer."),
    LOST("revision|tokenizer-revision|code-revision", SV, ONE,
         "A directory is served as it is; its fingerprint is logged and compared between "
         "services."),
    LOST("download-dir", SV, ONE, "Nothing is downloaded."),
    {"load-format", SV, ONE, SGLANG_NEEDLESS, "", "safetensors are read.", sglang_take_load_format},
    NEEDLESS("trust-remote-code", SV, FLAG, "No code of a checkpoint is ever run."),
    {"dtype", SV, ONE, SGLANG_NEEDLESS, "",
     "Dtypes are taken per tensor from the checkpoint; activations are as kernels/ops.h says.",
     sglang_take_dtype},
    {"quantization", SV, ONE, SGLANG_NEEDLESS, "",
     "BF16, FP8 in blocks of 128 x 128 and NVFP4 are recognised per tensor.",
     sglang_take_quantization},
    LOST("json-model-override-args|hf-overrides|override-neuron-config", SV, ONE,
         "config.json is taken as it is."),
    LOST("chat-template", SV, ONE, "The template of GLM-5 is built in (model/chat)."),
    {"default-chat-template-kwargs", V, ONE, SGLANG_KEPT, "router [chat] enable_thinking",
     "enable_thinking is kept, other arguments are not.", sglang_take_template_kwargs},
    NEEDLESS("generation-config", V, ONE,
             "generation_config.json of the model's directory is read."),
    LOST("override-generation-config|preferred-sampling-params", SV, ONE,
         "Sampling comes from the request and from generation_config.json."),
    LOST("enable-lora|lora-paths|lora-modules|max-loras|max-lora-rank", SV, MAYBE,
         "There are no adapters."),

    HEADING("Server"),
    KEPT("host", SV, "router [http] host", sglang_take_host, ""),
    KEPT("port", SV, "router [http] port", sglang_take_port,
         "Without it SGLang listens on 30000, vLLM on 8000, Baton on 8080."),
    LOST("api-key|admin-api-key", SV, MANY,
         "The router does not ask for a key: put a proxy in front of it that does."),
    LOST("ssl-certfile|ssl-keyfile|ssl-ca-certs|ssl-keyfile-password", SV, ONE,
         "The router speaks plain HTTP: put a proxy in front of it."),
    LOST("root-path|fastapi-root-path|uds|allowed-origins|allow-credentials|middleware", SV, MAYBE,
         "A matter of the proxy in front."),
    KEPT("log-level", S, "all daemons [log] level", sglang_take_log_level, ""),
    NEEDLESS(
        "log-level-http|uvicorn-log-level|disable-log-requests|disable-log-stats|"
        "enable-log-requests|disable-uvicorn-access-log|decode-log-interval|log-requests-level",
        SV, MAYBE, "One line per request, at its end, is what is logged."),
    LOST("log-requests|crash-dump-folder|enable-trace|otlp-traces-endpoint", SV, MAYBE,
         "Prompts and answers are never written to the log."),
    NEEDLESS("enable-metrics|enable-metrics-for-all-schedulers|enable-cache-report|"
             "enable-prompt-tokens-details",
             SV, FLAG, "Every daemon has /metrics on its admin port."),
    NEEDLESS("skip-server-warmup", S, FLAG,
             "Kernels and links are tried at every start, which takes about a second; it cannot be "
             "left out."),
    CHANGED("watchdog-timeout", S, "prefill, decode [limits] step_ms", sglang_take_watchdog,
            "A step that takes longer stops the systemd watchdog's feed."),
    KEPT("tokenizer-worker-num|api-server-count", SV, "router [tokenize] threads",
         sglang_take_tokenize_threads, "Or start several routers."),
    LOST("stream-interval", SV, ONE, "Every step's tokens are sent."),
    NEEDLESS("stream-output|incremental-streaming-output", S, FLAG, "Streams carry increments."),
    LOST("config", SV, ONE, "Options in a YAML file are not read: list them."),

    HEADING("Parallelism"),
    KEPT("tensor-parallel-size|tp-size|tp", SV, "prefill, decode [engine] tp", sglang_take_tp,
         "Ranks are threads of one process. Prefill and decode each have a group of their own."),
    CHANGED("data-parallel-size|dp-size|dp", SV, "so many prefill and decode instances",
            sglang_take_replicas, "Whole replicas behind one router, each with its own KV."),
    {"pipeline-parallel-size|pp-size|pp", SV, ONE, SGLANG_NEEDLESS, "",
     "There are no pipeline stages.", sglang_take_one_only},
    {"expert-parallel-size|ep-size|ep", S, ONE, SGLANG_NEEDLESS, "",
     "Every expert is cut over the ranks of the group.", sglang_take_one_only},
    LOST("enable-expert-parallel|enable-ep-moe|enable-deepep-moe|enable-eplb|enable-dp-attention|"
         "enable-dp-lm-head|moe-dense-tp-size|ep-num-redundant-experts|init-expert-location|"
         "ep-dispatch-algorithm",
         SV, MAYBE, "Every expert is cut over the ranks of the group; experts are not moved."),
    {"nnodes", SV, ONE, SGLANG_NEEDLESS, "", "A TP group is one process on one host.",
     sglang_take_one_only},
    LOST("node-rank|dist-init-addr|nccl-init-addr|dist-timeout|distributed-executor-backend|"
         "master-addr|master-port|nccl-port",
         SV, ONE, "A TP group is one process: it has no processes to find."),
    LOST("base-gpu-id|gpu-id-step", S, ONE,
         "Ranks take the GPUs that the process sees, in order: set CUDA_VISIBLE_DEVICES of the "
         "service."),
    LOST("numa-node", S, MANY, "Only expertd is bound to nodes, by [engine] node."),
    NEEDLESS("enable-p2p-check|enable-nccl-nvls|enable-symm-mem|disable-custom-all-reduce|"
             "enable-mscclpp|enable-torch-symm-mem",
             SV, FLAG, "There is one all-reduce, over peer memory of the ranks' threads."),

    HEADING("Memory and KV"),
    KEPT("context-length|max-model-len", SV, "router, prefill, decode max_context",
         sglang_take_context, ""),
    KEPT("max-total-tokens", S, "prefill, decode [engine] pages", sglang_take_pool,
         "In pages of 64 tokens. Prefill has a pool of its own."),
    KEPT("kv-cache-dtype", SV, "prefill, decode [engine] kv_dtype", sglang_take_kv_dtype,
         "auto becomes bf16. What is served is logged and compared: there is no silent fallback."),
    LOST("mem-fraction-static|gpu-memory-utilization", SV, ONE,
         "The KV pool is not what is left of a fraction but [engine] pages or pool_bytes; `baton "
         "plan` says what fits."),
    {"page-size|block-size", SV, ONE, SGLANG_NEEDLESS, "", "Pages have 64 tokens.",
     sglang_take_page_size},
    NEEDLESS("disable-radix-cache|no-enable-prefix-caching", SV, FLAG,
             "This version keeps no prefixes."),
    LOST("enable-prefix-caching|radix-eviction-policy|prefix-caching-hash-algo", V, MAYBE,
         "This version keeps no prefixes: every prompt is computed whole."),
    LOST("enable-hierarchical-cache|hicache-ratio|hicache-size|hicache-write-policy|"
         "hicache-io-backend|hicache-storage-backend|enable-lmcache|swap-space|kv-offloading-size",
         SV, MAYBE, "KV stays on its device."),
    LOST("cpu-offload-gb", SV, ONE,
         "Weights are not moved over PCIe: experts in host memory are computed there ([experts] "
         "resident and expertd)."),
    LOST("allow-auto-truncate", S, FLAG,
         "A prompt that is too long gets 400, never an answer to a "
         "part of it."),
    NEEDLESS("enable-memory-saver|enable-sleep-mode", SV, FLAG, "Memory is taken once, at start."),

    HEADING("Scheduling"),
    KEPT("max-running-requests|max-num-seqs", SV, "decode [sched] max_running, max_batch",
         sglang_take_max_running, "Further requests get 429 with a time to retry after."),
    KEPT("max-queued-requests", S, "prefill [sched] max_waiting", sglang_take_max_waiting, ""),
    KEPT("chunked-prefill-size|max-num-batched-tokens", SV, "prefill [sched] step_tokens",
         sglang_take_chunk, ""),
    NEEDLESS("max-prefill-tokens", S, ONE, "[sched] step_tokens bounds every step."),
    NEEDLESS("enable-chunked-prefill|enable-mixed-chunk|enable-overlap-schedule|"
             "disable-overlap-schedule|async-scheduling|enable-two-batch-overlap|"
             "num-continuous-decode-steps|enable-single-batch-overlap",
             SV, MAYBE,
             "Prompts are always read in chunks, in a process of their own: they never share a "
             "step with answers."),
    NEEDLESS("schedule-policy|scheduling-policy|schedule-conservativeness", SV, ONE,
             "Short prompts overtake long ones for at most [sched] patience_ms; decode takes pages "
             "for the whole request, so that none is taken back."),
    LOST("enable-priority-scheduling|priority-scheduling-preemption-threshold", S, MAYBE,
         "Requests have no priorities."),
    LOST("random-seed|seed", SV, ONE, "A request's own seed makes it repeatable."),
    NEEDLESS("enable-deterministic-inference", S, FLAG,
             "The same batch gives the same bits; sums have a fixed order."),

    HEADING("Experts in host memory"),
    CHANGED("kt-weight-path|kt-amx-weight-path", K, "expertd [experts] files",
            sglang_take_expert_files,
            "Files of KTransformers cannot be read: `baton pack` makes Baton's from the "
            "checkpoint, once for any number of daemons."),
    CHANGED("kt-method|kt-amx-method", K, "baton pack --bits, or expertd [model] dir",
            sglang_take_method,
            "AMXINT4 and AMXINT8 become files with a scale per group of 128 instead of per row; "
            "the processor's best instructions are found at start."),
    {"kt-numa-nodes", K, MANY, SGLANG_CHANGED, "one expertd each, [engine] node", "",
     sglang_take_nodes},
    CHANGED("kt-threadpool-count", K, "number of expertd, [experts] shard, shards",
            sglang_take_pools, "One per NUMA node is right; without kt-numa-nodes the first ones."),
    CHANGED("kt-cpuinfer", K, "expertd [engine] threads", sglang_take_cpu_threads,
            "Divided by the number of daemons; without it all physical cores of the node."),
    KEPT("kt-num-gpu-experts", K, "prefill, decode [experts] resident", sglang_take_resident,
         "expertd need not hold those: [experts] device."),
    CHANGED("kt-gpu-experts-ratio", K, "prefill, decode [experts] resident", sglang_take_ratio,
            "As a number of each layer's 256 experts."),
    KEPT("kt-expert-placement-strategy", K, "prefill, decode [experts] strategy",
         sglang_take_strategy,
         "uniform and front-loading; frequency needs counts that [experts] record wrote."),
    {"kt-enable-dynamic-expert-update", K, FLAG, SGLANG_CHANGED,
     "prefill, decode [experts] update_ms",
     "Follows recent use all the time, not after long prompts only; every expertd then holds all "
     "experts.",
     sglang_take_update},
    LOST("kt-gpu-prefill-token-threshold", K, ONE,
         "Experts of long prompts are not streamed to the GPUs: expertd computes them, cut into "
         "calls of [experts] max_rows."),
    LOST("kt-max-deferred-experts-per-token", K, ONE,
         "No expert's part is added a layer late: that would change answers."),
    LOST("kt-expert-cache-mode|kt-expert-gpu-cache-capacity|kt-expert-cpu-cache-capacity", K, ONE,
         "The resident set has a fixed size, which [experts] resident states."),

    HEADING("Kernels"),
    NEEDLESS(
        "attention-backend|prefill-attention-backend|decode-attention-backend|"
        "nsa-prefill-backend|nsa-decode-backend|dsa-prefill-backend|dsa-decode-backend|"
        "fp8-gemm-backend|fp8-gemm-runner-backend|fp4-gemm-backend|moe-runner-backend|"
        "moe-a2a-backend|sampling-backend|mm-attention-backend|all2all-backend|deepep-mode|"
        "enable-flashinfer-allreduce-fusion|enable-flashinfer-mla|flashinfer-mla-disable-ragged",
        SV, MAYBE,
        "One implementation per operation and device, tried against plain C at every start; "
        "attention is always sparse (DSA)."),
    NEEDLESS("cuda-graph-max-bs|cuda-graph-bs|disable-cuda-graph|disable-cuda-graph-padding|"
             "enforce-eager|enable-torch-compile|torch-compile-max-bs|compilation-config|O|"
             "enable-piecewise-cuda-graph|disable-piecewise-cuda-graph|cuda-graph-sizes",
             SV, MAYBE,
             "Nothing is compiled at run time; which steps are captured is not an option."),
    NEEDLESS("disable-shared-experts-fusion", S, FLAG,
             "The shared expert is always computed by itself."),
    NEEDLESS("triton-attention-num-kv-splits|triton-attention-reduce-in-fp32|attention-config", SV,
             MAYBE, "There is no Triton."),

    HEADING("Speculative decoding"),
    {"speculative-algorithm|speculative-algo", S, ONE, SGLANG_LOST, "",
     "This version has no option for drafting with the MTP layer.", sglang_take_spec},
    {"speculative-num-draft-tokens", S, ONE, SGLANG_LOST, "",
     "This version has no option for drafting.", NULL},
    {"speculative-num-steps", S, ONE, SGLANG_LOST, "", "This version has no option for drafting.",
     sglang_take_spec_steps},
    LOST("speculative-eagle-topk|speculative-draft-model-path|speculative-draft-model|"
         "speculative-token-map|speculative-accept-threshold-single|"
         "speculative-accept-threshold-acc|speculative-attention-mode",
         S, ONE, "This version has no option for drafting."),
    {"speculative-config", V, ONE, SGLANG_LOST, "", "This version has no option for drafting.",
     sglang_take_spec_config},

    HEADING("Prefill and decode apart"),
    NEEDLESS("disaggregation-mode|disaggregation-transfer-backend|disaggregation-bootstrap-port|"
             "disaggregation-decode-tp|disaggregation-prefill-pp|kv-transfer-config",
             SV, ONE,
             "Prefill and decode are always processes of their own, and KV goes over UCX; the "
             "router's [peers] names them."),
    KEPT("disaggregation-ib-device", S, "prefill, decode [kvlink] devices", sglang_take_kv_devices,
         "As UCX names them: mlx5_0:1."),

    HEADING("Output"),
    {"reasoning-parser", SV, ONE, SGLANG_NEEDLESS, "",
     "Reasoning is split at the token </think> and given as reasoning_content.",
     sglang_take_reasoning},
    LOST("tool-call-parser|enable-auto-tool-choice|tool-parser-plugin|tool-server", SV, MAYBE,
         "This version refuses requests with tools (400, unsupported_parameter)."),
    LOST("grammar-backend|guided-decoding-backend|structured-outputs-config|"
         "constrained-json-whitespace-pattern",
         SV, ONE, "This version refuses response_format other than text."),
    NEEDLESS("enable-reasoning", V, FLAG, "Reasoning is always split from the answer."),
    LOST("max-logprobs", V, ONE, "The router's own bound holds."),
    {0},
};
