"""List the flags of SGLang and vLLM that ``dovetail serve`` refuses, each with what to use instead.

This is data, like ``cli/serve_flags.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

INSTEAD: Mapping[str, tuple[str, ...]] = {
    "code of checkpoints is never run; leave it out. `dovetail explain` shows which plugin implements the model": (
        "--trust-remote-code",
    ),
    "one server is one replica; start several, and a proxy before them. With --enable-dp-attention leave it out: all ranks of --tp take part": (
        "--dp",
        "--dp-size",
        "--data-parallel-size",
    ),
    "one server is one replica; start several, and a proxy before them": (
        "--data-parallel-size-local",
        "--data-parallel-rank",
        "--data-parallel-address",
        "--headless",
        "--load-balance-method",
    ),
    "pipelines of ranks are not supported yet; use --tp": (
        "--pp",
        "--pp-size",
        "--pipeline-parallel-size",
    ),
    "the ranks of --tp divide the experts; use --tp with --enable-expert-parallel": (
        "--ep",
        "--ep-size",
        "--expert-parallel-size",
    ),
    "use --enable-expert-distribution-metrics, and GET /expert_load": ("--expert-distribution-recorder-mode",),
    "experts are not moved between ranks; --enable-expert-distribution-metrics shows their load": (
        "--enable-eplb",
        "--ep-num-redundant-experts",
        "--eplb-config",
        "--eplb-algorithm",
    ),
    "all ranks are on one host; use --tp with the devices of this host": (
        "--nnodes",
        "--node-rank",
        "--dist-init-addr",
        "--master-addr",
        "--master-port",
        "--nccl-port",
    ),
    "the executor is chosen by the number of ranks; use --set executor=workers or --set executor=local": (
        "--distributed-executor-backend",
    ),
    "the KV pool is counted in pages; use --num-gpu-blocks-override, which is memory.num_pages, or --set memory.kv_gib=...": (
        "--max-total-tokens",
    ),
    "KV is not swapped to the host: retracted requests are computed again; leave it out": ("--swap-space",),
    "weights are not offloaded; use --tp, or a smaller model": ("--cpu-offload-gb",),
    "give the revision after the name: org/name@REVISION": (
        "--revision",
        "--tokenizer-revision",
        "--code-revision",
    ),
    "hub files are in the cache of huggingface-hub; set HF_HOME": ("--download-dir",),
    "tokenizer.json is read; give a directory that has one with --tokenizer": ("--tokenizer-mode",),
    "write the values into a generation_config.json, and give its directory with --generation-config": (
        "--override-generation-config",
        "--preferred-sampling-params",
    ),
    "the server needs the tokenizer; use LLM for token ids only": ("--skip-tokenizer-init",),
    "prompts are always chunked; give --chunked-prefill-size the context length": ("--no-enable-chunked-prefill",),
    "use --otlp-traces-endpoint, which traces requests": ("--enable-trace",),
    "traces always have the phases of requests; leave it out": ("--collect-detailed-traces",),
    "statistics are not logged; GET /metrics has them. Leave it out": ("--disable-log-stats",),
    "use --log-level": (
        "--uvicorn-log-level",
        "--log-level-http",
    ),
    "the server speaks plain HTTP; terminate TLS in a proxy before it": (
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--ssl-cert-reqs",
        "--ssl-keyfile-password",
    ),
    "give the path to the proxy before the server": (
        "--root-path",
        "--fastapi-root-path",
    ),
    "one process parses and tokenizes requests; for more, start several servers, and a proxy before them": (
        "--api-server-count",
        "--tokenizer-worker-num",
    ),
    "embeddings are served next to generation; leave it out": ("--is-embedding",),
    "generation, embeddings and scores are served together; leave it out": (
        "--task",
        "--runner",
    ),
    "CUDA graphs take its place; use --cuda-graph-max-bs": (
        "--torch-compile-max-bs",
        "--enable-torch-compile",
    ),
    "CUDA graphs take its place; set graphs.* (docs/config.md)": (
        "--compilation-config",
        "--optimization-level",
        "--performance-mode",
    ),
    "one sampler serves all requests; leave it out": ("--sampling-backend",),
    "tokens are sent as they are read; leave it out": ("--stream-interval",),
    "prefill and decode on separate workers are not supported yet": (
        "--kv-transfer-config",
        "--disaggregation-mode",
    ),
    "a cache in host memory is not supported yet; use a larger memory.fraction": (
        "--enable-hierarchical-cache",
        "--enable-hicache",
        "--hicache-ratio",
        "--hicache-size",
        "--hicache-storage-backend",
        "--enable-lmcache",
        "--kv-offloading-size",
    ),
    "ranks of experts add up by the collectives of --tp; leave it out": (
        "--moe-a2a-backend",
        "--deepep-mode",
        "--all2all-backend",
        "--enable-two-batch-overlap",
        "--enable-dbo",
    ),
    "a context is not divided among ranks yet; use --tp": (
        "--dcp-size",
        "--decode-context-parallel-size",
        "--attn-cp-size",
        "--prefill-context-parallel-size",
    ),
    "the collectives of ranks are chosen by what the devices can do; leave it out": (
        "--disable-custom-all-reduce",
        "--enable-p2p-check",
        "--enable-symm-mem",
        "--enable-torch-symm-mem",
        "--enable-nccl-nvls",
    ),
    "use --device cuda:N, or CUDA_VISIBLE_DEVICES": (
        "--base-gpu-id",
        "--gpu-id-step",
        "--device-ids",
    ),
    "a config file is an argument without a flag: dovetail serve server.yaml": ("--config",),
    "set the variable HF_TOKEN": ("--hf-token",),
    "config.json is read from the model; change keys with --hf-overrides": (
        "--hf-config-path",
        "--config-format",
        "--model-config-parser",
    ),
    "weights are read in parts while they are copied to the device; leave it out": (
        "--model-loader-extra-config",
        "--max-parallel-loading-workers",
        "--safetensors-load-strategy",
        "--weight-loader-disable-mmap",
    ),
    "--api-key has the rights of an admin; a key file (server.keys) has keys of admins and of tenants": (
        "--admin-api-key",
    ),
    "images, sound and video are not supported yet": (
        "--limit-mm-per-prompt",
        "--limit-mm-data-per-request",
        "--mm-processor-kwargs",
        "--enable-multimodal",
        "--mm-attention-backend",
        "--allowed-local-media-path",
        "--language-model-only",
    ),
    "the kernels of adapters are chosen by the device; leave it out": (
        "--lora-backend",
        "--max-lora-chunk-size",
        "--lora-dtype",
        "--fully-sharded-loras",
        "--specialize-active-lora",
    ),
    "the adapter that was used least recently leaves the device first; leave it out": ("--lora-eviction-policy",),
    "adapters that change the vocabulary are not supported": ("--lora-extra-vocab-size",),
    "the KV pool is counted in pages or GiB; use --num-gpu-blocks-override, or --set memory.kv_gib=...": (
        "--kv-cache-memory-bytes",
    ),
    "use --kv-store scaled (docs/stores.md)": (
        "--calculate-kv-scales",
        "--quantization-param-path",
    ),
    "all cache groups of a model share the memory; there is nothing to divide. Leave it out": (
        "--swa-full-tokens-ratio",
        "--mamba-full-memory-ratio",
        "--max-mamba-cache-size",
        "--disable-hybrid-swa-memory",
        "--disable-hybrid-kv-cache-manager",
    ),
    "one backend computes prompts, decode steps and drafts; use --mixer-backend": (
        "--linear-attn-prefill-backend",
        "--linear-attn-decode-backend",
        "--gdn-prefill-backend",
    ),
    "use --set cache.eviction=lru, lfu or priority": ("--radix-eviction-policy",),
    "cached prefixes are compared token by token; leave it out": ("--prefix-caching-hash-algo",),
    "events of the cache are not published; GET /metrics counts hits": ("--kv-events-config",),
    "memory and weights are not given back while the server runs: not supported yet": (
        "--enable-sleep-mode",
        "--enable-memory-saver",
        "--enable-weights-cpu-backup",
        "--weight-transfer-config",
    ),
    "use --schedule-policy priority; every request may have a priority": ("--enable-priority-scheduling",),
    "prompts are admitted by the memory that they need, and requests retracted when it does not suffice; leave it out": (
        "--schedule-conservativeness",
        "--num-continuous-decode-steps",
        "--num-reserved-decode-tokens",
        "--prefill-max-requests",
    ),
    "set scheduler.chunk_size with --chunked-prefill-size, and scheduler.tenants_step_ms": (
        "--long-prefill-token-threshold",
        "--max-num-partial-prefills",
        "--prefill-decode-interval",
    ),
    "CUDA graphs have sizes of a ladder, which are captured when they are needed; use --cuda-graph-max-bs": (
        "--cuda-graph-bs",
        "--cudagraph-capture-sizes",
        "--disable-cuda-graph-padding",
    ),
    "products are chosen by what was measured for their shape; leave it out": (
        "--fp8-gemm-backend",
        "--fp4-gemm-backend",
        "--bf16-gemm-backend",
        "--fp8-gemm-runner-backend",
        "--linear-backend",
        "--enable-flashinfer-autotune",
        "--disable-flashinfer-autotune",
        "--kernel-config",
    ),
    "the parts of a long context are counted for each step; leave it out": ("--triton-attention-num-kv-splits",),
    "use --attention-backend": (
        "--attention-config",
        "--mm-encoder-attn-backend",
    ),
    "use --speculative-config with method, model and num_speculative_tokens": (
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        "--num-speculative-tokens",
    ),
    "a drafter has the quantization of its checkpoint; leave it out": ("--speculative-draft-model-quantization",),
    "drafters have settings of their own; set speculative.* (docs/config.md)": (
        "--speculative-ngram-max-trie-depth",
        "--speculative-ngram-match-type",
        "--speculative-ngram-capacity",
        "--speculative-attention-mode",
        "--speculative-token-map",
    ),
    "drafts are accepted so that the distribution of outputs stays exact; leave it out": (
        "--speculative-accept-threshold-single",
        "--speculative-accept-threshold-acc",
        "--speculative-use-rejection-sampling",
    ),
    "use --grammar-backend; max_whitespace in the section grammar limits white space (docs/config.md)": (
        "--structured-outputs-config",
        "--constrained-json-disable-any-whitespace",
        "--constrained-json-whitespace-pattern",
    ),
    "parsers are plugins (docs/plugins.md); use --tool-call-parser or --reasoning-parser": (
        "--tool-parser-plugin",
        "--reasoning-parser-plugin",
    ),
    "use --reasoning-parser": ("--reasoning-config",),
    "logits processors are plugins (docs/plugins.md), and requests name them": (
        "--logits-processors",
        "--enable-custom-logit-processor",
    ),
    "each request decides; see chat_template_kwargs in docs/apis.md": ("--default-chat-template-kwargs",),
    "the form of content is that of the chat template; leave it out": ("--chat-template-content-format",),
    "each request sets stream_options": (
        "--enable-force-include-usage",
        "--stream-response-default-include-usage",
    ),
    "the line of a request at level info never has contents; leave it out": (
        "--log-requests-level",
        "--log-requests-format",
        "--max-log-len",
        "--enable-log-outputs",
        "--disable-uvicorn-access-log",
        "--uvicorn-access-log-exclude-prefixes",
        "--decode-log-interval",
    ),
    "answers repeat the header x-request-id of the request; leave it out": ("--enable-request-id-headers",),
    "the server restarts an engine that stands still; set supervision.* (docs/config.md)": (
        "--watchdog-timeout",
        "--soft-watchdog-timeout",
    ),
    "kernels are compiled ahead while the server starts; leave it out": (
        "--skip-server-warmup",
        "--warmups",
    ),
    "the server has its own routes; add one with an API plugin (docs/apis.md)": ("--middleware",),
}
"""Map what to use instead to the flags that mean nothing here or are not supported."""

REFUSED: Mapping[str, str] = {flag: text for text, flags in INSTEAD.items() for flag in flags}
"""Map each of these flags to what to use instead."""
