"""List the flags of ``dovetail serve``: those of SGLang and vLLM that people know by heart, with the config key of each.

This is data. ``cli/serve.py`` makes options of it, and ``cli/serve_docs.py`` the page docs/cli.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SERVER, MODEL, MEMORY, STEPS = "Server", "Model", "Memory", "Scheduling"
PARTS, PARALLEL, SPECULATION, ALWAYS = "Components", "Parallelism", "Speculative decoding", "Always on"
ADAPTERS = "Adapters (LoRA)"


@dataclass(frozen=True, slots=True)
class ServeFlag:
    """Describe a flag. ``key`` is the config key that it sets.

    ``type`` is the type of its value; bool stands for a switch, which sets each key of ``sets`` to a constant. ``values``
    are other spellings of values. A ``repeatable`` flag sets a list, a ``json`` flag reads its value as JSON.
    ``example`` is a value that a test tries.
    """

    names: tuple[str, ...]
    key: str
    group: str
    help: str
    type: type[str] | type[int] | type[float] | type[bool] = str
    example: Any = None
    values: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    repeatable: bool = False
    json: bool = False
    metavar: str | None = None

    @property
    def parameter(self) -> str:
        """Return the name of the flag's parameter in Python."""
        return self.names[0].lstrip("-").replace("-", "_")


def _switch(names: tuple[str, ...], group: str, help: str, sets: Mapping[str, Any]) -> ServeFlag:
    return ServeFlag(names, ", ".join(sets), group, help, bool, sets=sets)


_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}
_IMPLEMENTATIONS = {"vllm": "dovetail", "sglang": "dovetail"}
_KV_DTYPES = {**_DTYPES, "fp8": "fp8_e4m3"}
_QUANTIZATIONS = {
    **dict.fromkeys(("w8a8_fp8", "fbgemm_fp8"), "fp8"),
    **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin"), "integer"),
    "compressed-tensors": "auto",  # which component loads such a checkpoint depends on its formats
}
_ATTENTION = {
    "fa3": "flash_attn",
    "FLASH_ATTN": "flash_attn",
    "FLASH_ATTN_MLA": "flash_attn_mla",
    "FLASHINFER": "flashinfer",
    "FLASHINFER_MLA": "flashinfer_mla",
    "TRITON_ATTN": "triton",
    "TRITON_MLA": "triton",
    "TORCH_SDPA": "torch_native",
}
_GRAMMARS = {"guidance": "llguidance", "lm-format-enforcer": "lm_format_enforcer"}
_POLICIES = {"dfs-weight": "dfs_weight"}

FLAGS: tuple[ServeFlag, ...] = (
    ServeFlag(("--host",), "server.host", SERVER, "Address to listen on.", example="::1"),
    ServeFlag(("--port",), "server.port", SERVER, "Port to listen on; 0 picks a free one.", int, 8123),
    ServeFlag(
        ("--api-key",),
        "server.keys",
        SERVER,
        "A key that every request must have, with the rights of an admin. Other users of the machine can read it in the "
        "list of processes; a key file has tenants, limits and digests instead of keys.",
        example="secret-key-of-this-test",
        repeatable=True,
    ),
    ServeFlag(
        ("--served-model-name",),
        "model.served_name",
        SERVER,
        "Name of the model in the API. Repeat the flag for several names.",
        example="mine",
        repeatable=True,
    ),
    ServeFlag(
        ("--otlp-traces-endpoint",),
        "tracing.endpoint",
        SERVER,
        "Receiver of OpenTelemetry traces, by OTLP over HTTP; needs the extra otel.",
        example="http://127.0.0.1:4318",
    ),
    _switch(
        ("--enable-expert-distribution-metrics",),
        SERVER,
        "Count the tokens of each expert in /metrics.",
        {"metrics.expert_load": "experts"},
    ),
    ServeFlag(
        ("--max-logprobs",),
        "server.max_logprobs",
        SERVER,
        "Log-probabilities that a request may ask for at each position.",
        int,
        7,
    ),
    ServeFlag(
        ("--shutdown-timeout",),
        "server.drain_seconds",
        SERVER,
        "Seconds that running requests have to finish after SIGTERM.",
        float,
        5.0,
    ),
    ServeFlag(("--log-level",), "server.log_level", SERVER, "The lowest level that is logged.", example="debug"),
    ServeFlag(
        ("--allowed-origins",),
        "server.cors_origins",
        SERVER,
        "JSON list of origins whose pages may call the server.",
        example='["https://a.example"]',
        json=True,
        metavar="JSON",
    ),
    _switch(
        ("--disable-log-requests", "--no-enable-log-requests"),
        SERVER,
        "Log no line for each request.",
        {"server.log_requests": False},
    ),
    _switch(
        ("--log-requests", "--enable-log-requests"),
        SERVER,
        "Log a line for each request: the default.",
        {"server.log_requests": True},
    ),
    ServeFlag(
        ("--model", "--model-path", "-m"), "model.path", MODEL, "The model, if it is not an argument.", example="tiny"
    ),
    ServeFlag(
        ("--tokenizer", "--tokenizer-path"), "model.tokenizer", MODEL, "Directory of tokenizer.json.", example="tiny"
    ),
    ServeFlag(
        ("--chat-template",),
        "model.chat_template",
        MODEL,
        "A file with the chat template, in Jinja.",
        example="template.jinja",
    ),
    ServeFlag(
        ("--model-impl",),
        "model.implementation",
        MODEL,
        "What computes the model: a component written for it, or the modules of transformers.",
        example="transformers",
        values=_IMPLEMENTATIONS,
    ),
    ServeFlag(
        ("--dtype",), "model.dtype", MODEL, "Data type of weights and activations.", example="float32", values=_DTYPES
    ),
    ServeFlag(
        ("--load-format",),
        "model.load_format",
        MODEL,
        "How weights are read; `dummy`: random ones.",
        example="dummy",
        values=dict.fromkeys(("auto", "gguf"), "safetensors"),  # GGUF files are recognized by their names
    ),
    ServeFlag(
        ("--max-model-len", "--context-length"),
        "model.context_len",
        MODEL,
        "The longest prompt with its output.",
        int,
        512,
    ),
    ServeFlag(
        ("--hf-overrides", "--json-model-override-args"),
        "model.overrides",
        MODEL,
        "JSON object that replaces keys of config.json.",
        example='{"rope_theta": 5.0}',
        json=True,
        metavar="JSON",
    ),
    ServeFlag(
        ("--generation-config",),
        "model.generation_config",
        MODEL,
        "Where sampling defaults come from: auto (the checkpoint's generation_config.json), vllm (the API's), or a directory.",
        example="vllm",
        values={"vllm": "none"},
    ),
    ServeFlag(
        ("--sampling-defaults",),
        "model.generation_config",
        MODEL,
        "Where sampling defaults come from: model (its generation_config.json), or openai (the API's).",
        example="openai",
        values={"model": "auto", "openai": "none"},
    ),
    ServeFlag(
        ("--seed", "--random-seed"),
        "server.seed",
        MODEL,
        "Seed for requests that set none, drawn in the order of their arrival.",
        int,
        7,
    ),
    ServeFlag(("--device",), "device", MODEL, "cpu, cuda, or cuda:N.", example="cpu"),
    ServeFlag(
        ("--mem-fraction-static", "--gpu-memory-utilization", "--device-memory-utilization"),
        "memory.fraction",
        MEMORY,
        "Share of the device's memory for weights, KV pool and workspaces together.",
        float,
        0.5,
    ),
    ServeFlag(
        ("--kv-cache-dtype",),
        "memory.kv_dtype",
        MEMORY,
        "Data type of the KV pool.",
        example="fp8_e5m2",
        values=_KV_DTYPES,
    ),
    ServeFlag(
        ("--mamba-ssm-dtype", "--mamba-ssm-cache-dtype", "--mamba-cache-dtype"),
        "memory.state_dtype",
        MEMORY,
        "Data type in which states of recurrences are kept: float32 or bfloat16.",
        example="bfloat16",
        values={**_DTYPES, "auto": "float32"},
    ),
    ServeFlag(("--kv-store",), "store", MEMORY, "How keys and values are kept: paged, or scaled.", example="scaled"),
    ServeFlag(("--page-size", "--block-size"), "memory.page_size", MEMORY, "Tokens in a page.", int, 32),
    ServeFlag(("--num-gpu-blocks-override",), "memory.num_pages", MEMORY, "Pages in the KV pool.", int, 99),
    _switch(("--disable-radix-cache", "--no-enable-prefix-caching"), MEMORY, "Keep no prefixes.", {"cache": "none"}),
    _switch(("--enable-prefix-caching",), MEMORY, "Keep prefixes: the default.", {"cache": "radix"}),
    ServeFlag(
        ("--chunked-prefill-size", "--max-num-batched-tokens", "--max-prefill-tokens"),
        "scheduler.chunk_size",
        STEPS,
        "Prompt tokens in a step; longer prompts are cut into chunks.",
        int,
        256,
    ),
    ServeFlag(
        ("--max-num-seqs", "--max-running-requests"),
        "scheduler.max_running",
        STEPS,
        "Requests that decode together.",
        int,
        9,
    ),
    ServeFlag(
        ("--max-queued-requests", "--max-num-queued-reqs"),
        "scheduler.max_waiting",
        STEPS,
        "Requests that may wait.",
        int,
        77,
    ),
    ServeFlag(
        ("--schedule-policy", "--scheduling-policy"),
        "policy",
        STEPS,
        "The order in which requests are admitted.",
        example="lpm",
        values=_POLICIES,
    ),
    _switch(
        ("--disable-overlap-schedule", "--no-async-scheduling"),
        STEPS,
        "Do not launch a step before the tokens of the last one are read.",
        {"scheduler.overlap": False},
    ),
    _switch(("--async-scheduling",), STEPS, "Launch steps ahead.", {"scheduler.overlap": True}),
    _switch(
        ("--enable-mixed-chunk",),
        STEPS,
        "Let steps with prompt chunks have decode rows too: the default.",
        {"scheduler.mixed": True},
    ),
    _switch(
        ("--enable-deterministic-inference",),
        STEPS,
        "Give a token the same logits whatever else is in its step, at the cost of speed.",
        {"batch_invariant": True},
    ),
    _switch(
        ("--enforce-eager", "--disable-cuda-graph"),
        STEPS,
        "Launch every step kernel by kernel.",
        {"graphs.decode": False, "graphs.piecewise_tokens": 0},
    ),
    ServeFlag(
        ("--cuda-graph-max-bs", "--max-cudagraph-capture-size"),
        "graphs.max_rows",
        STEPS,
        "The largest batch that is a CUDA graph.",
        int,
        16,
    ),
    ServeFlag(
        ("--attention-backend",), "attention", PARTS, "Attention kernels.", example="torch_native", values=_ATTENTION
    ),
    ServeFlag(
        ("--prefill-attention-backend",),
        "attention.prefill",
        PARTS,
        "Attention kernels of prompts.",
        example="torch_native",
        values=_ATTENTION,
    ),
    ServeFlag(
        ("--decode-attention-backend",),
        "attention.decode",
        PARTS,
        "Attention kernels of decode steps.",
        example="torch_native",
        values=_ATTENTION,
    ),
    ServeFlag(
        ("--quantization", "-q"),
        "quantization",
        MODEL,
        "How weights are stored; a name also quantizes an unquantized checkpoint.",
        example="fp8",
        values=_QUANTIZATIONS,
    ),
    ServeFlag(
        ("--experts", "--moe-runner-backend", "--moe-backend"),
        "experts",
        PARTS,
        "What computes the products of experts.",
        example="torch_native",
    ),
    ServeFlag(
        ("--mixer-backend", "--linear-attn-backend", "--mamba-backend"),
        "mixer",
        PARTS,
        "What computes recurrences and short convolutions.",
        example="torch_native",
    ),
    ServeFlag(
        ("--grammar-backend", "--guided-decoding-backend"),
        "grammar.backend",
        PARTS,
        "Engine for constraints.",
        example="llguidance",
        values=_GRAMMARS,
    ),
    ServeFlag(
        ("--tool-call-parser",),
        "tool_parser",
        PARTS,
        "Format of the model's tool calls, by its name here, in SGLang or in vLLM.",
        example="hermes",
    ),
    ServeFlag(
        ("--reasoning-parser",),
        "reasoning_parser",
        PARTS,
        "Marks of the model's reasoning, by their name here, in SGLang or in vLLM.",
        example="qwen3",
    ),
    ServeFlag(
        ("--tp", "--tp-size", "--tensor-parallel-size"),
        "parallel.tp",
        PARALLEL,
        "Ranks that share every layer.",
        int,
        2,
    ),
    _switch(
        ("--enable-expert-parallel",),
        PARALLEL,
        "Give each rank whole experts instead of a share of every expert.",
        {"parallel.experts": "ep"},
    ),
    _switch(
        ("--enable-dp-attention",),
        PARALLEL,
        "Let each rank of --tp attend for requests of its own.",
        {"parallel.attention": "data"},
    ),
    ServeFlag(
        ("--speculative-algorithm",),
        "speculative",
        SPECULATION,
        "The drafter: its name here, or SGLang's (NGRAM, EAGLE, EAGLE3, NEXTN, STANDALONE).",
        example="NGRAM",
    ),
    ServeFlag(
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        "speculative.path",
        SPECULATION,
        "Checkpoint of the drafter.",
        example="tiny",
    ),
    ServeFlag(
        ("--speculative-num-steps",),
        "speculative.depth",
        SPECULATION,
        "Levels of a draft tree, or tokens of a chain.",
        int,
        3,
    ),
    ServeFlag(
        ("--speculative-eagle-topk",), "speculative.topk", SPECULATION, "Children of each node of a tree.", int, 2
    ),
    ServeFlag(
        ("--speculative-num-draft-tokens",),
        "speculative.num_draft_tokens",
        SPECULATION,
        "Tokens that are verified; as in SGLang, with the token before the drafts.",
        int,
        8,
    ),
    ServeFlag(
        ("--speculative-config",),
        "speculative",
        SPECULATION,
        "vLLM's JSON object: method, model, num_speculative_tokens, prompt_lookup_min, prompt_lookup_max.",
        json=True,
        metavar="JSON",
        example='{"method": "ngram", "num_speculative_tokens": 5}',
    ),
    _switch(("--enable-lora",), ADAPTERS, "Serve adapters.", {"adapters.enabled": True}),
    ServeFlag(
        ("--lora-modules",),
        "adapters.load",
        ADAPTERS,
        'An adapter that is known from the start: name=directory, or vLLM\'s JSON object, {"name": ..., "path": ...}. Repeat the '
        "flag for several.",
        example="mine=/adapters/mine",
        repeatable=True,
    ),
    ServeFlag(
        ("--lora-paths",),
        "adapters.load",
        ADAPTERS,
        "The same with SGLang's name; a directory alone is its own name.",
        example="/adapters/mine",
        repeatable=True,
    ),
    ServeFlag(
        ("--lora-target-modules",),
        "adapters.modules",
        ADAPTERS,
        "What adapters may have matrices of: embed_tokens, lm_head, experts, all, or names such as q_proj, which stand for all linear "
        "layers. Repeat the flag for several.",
        example="embed_tokens",
        repeatable=True,
    ),
    ServeFlag(
        ("--max-loras", "--max-loras-per-batch"),
        "adapters.max_resident",
        ADAPTERS,
        "Adapters on the device at the same time.",
        int,
        4,
    ),
    ServeFlag(("--max-lora-rank",), "adapters.max_rank", ADAPTERS, "The largest rank of an adapter.", int, 64),
    ServeFlag(
        ("--max-cpu-loras", "--max-loaded-loras"),
        "adapters.max_host",
        ADAPTERS,
        "Adapters in host memory, ready to be copied to the device.",
        int,
        16,
    ),
    *(
        ServeFlag((name,), "", ALWAYS, help, bool)
        for name, help in (
            ("--enable-metrics", "/metrics is always there."),
            ("--enable-cache-report", "Answers always report cached tokens."),
            ("--enable-auto-tool-choice", "tool_choice: auto always works."),
            ("--enable-chunked-prefill", "Long prompts are always chunked."),
            ("--enable-prompt-tokens-details", "usage always has prompt_tokens_details."),
            ("--enable-tokenizer-info-endpoint", "/tokenizer_info is always there."),
            ("--enable-server-load-tracking", "/load is always there."),
        )
    ),
)
