"""Define the core's own config sections. Sections of components come from the registry (``config.tree``)."""

from __future__ import annotations

import ipaddress
import re
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from dovetail.config.adapters import AdaptersSection
from dovetail.config.experiment import ExperimentSection
from dovetail.config.hub_files import parse_hub_name
from dovetail.config.kinds import (
    API,
    ATTENTION,
    CACHE,
    EXECUTOR,
    EXPERTS,
    GRAMMAR,
    LOGITS_PROCESSOR,
    MIXER,
    POLICY,
    QUANTIZATION,
    REASONING_PARSER,
    SPECULATIVE,
    STORE,
    TOOL_PARSER,
    KindSection,
)
from dovetail.config.plugin import AttentionSelection, GrammarSelection, Section, Selection
from dovetail.config.supervision import SupervisionSection
from dovetail.config.telemetry import MetricsSection, TracingSection

Auto = Literal["auto"]

DEFAULT_MODEL = "default"
"""The name by which requests may always name the served model, as in SGLang."""


class ModelSection(Section):
    """Select the model, and configure how it is loaded. A bare string is short for ``{path: ...}``."""

    path: str = Field(
        default="tiny",
        description="`tiny` (the embedded model), a local directory in Hugging Face layout, a GGUF file, a model of `dovetail pull`, or a hub name: `org/name`, `org/name@revision`, `org/name:Q4_K_M` or `org/name/file.gguf`.",
    )
    arch: str = Field(
        default="auto", description="Model component; `auto` takes one that implements config.json's `architectures`."
    )
    implementation: Literal["auto", "dovetail", "transformers"] = Field(
        default="auto",
        description="What computes the model: `dovetail`, a component written for its architecture; `transformers`, the modules of transformers with Dovetail's attention and linear layers, which are slower; `auto` takes the second only for an architecture that no component lists.",
    )
    served_name: str | tuple[str, ...] | None = Field(
        default=None,
        description="Name in the API, or several; by default the last part of `path`. Answers contain the first one. `default` always names the model too.",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Names that requests may give instead, for tools that insist on a name: patterns (`claude-*`), each with the served name that it stands for.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="`auto` is the checkpoint's dtype on CUDA, float32 on CPU."
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        default="safetensors", description="`dummy` fills random weights, for benchmarks."
    )
    context_len: int | None = Field(
        default=None, ge=8, description="Upper bound on prompt plus output; by default, and at most, the model's own."
    )
    tokenizer: str | None = Field(default=None, description="Directory of tokenizer.json, if not the model's.")
    chat_template: str | None = Field(
        default=None, description="A file with the chat template (Jinja), if not the tokenizer's."
    )
    special_tokens_in_messages: bool = Field(
        default=False,
        description="Let texts of chats that spell special tokens, such as <|im_end|>, become these tokens. A client can then forge turns of others.",
    )
    generation_config: str = Field(
        default="auto",
        description="Where the sampling defaults come from, which apply to requests that set no value of their own: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `max_new_tokens`. `auto`: the checkpoint's generation_config.json; `none`: the defaults of each API; or a directory with such a file, or the file.",
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="Keys of config.json to replace.")
    seed: int = Field(default=0, description="Seed of dummy weights.")

    @property
    def name(self) -> str:
        """Return the model's name in the API; of several, the first."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model in the API."""
        given = self.served_name or _name_of(self.path)
        return (given,) if isinstance(given, str) else given

    def is_served(self, name: str) -> bool:
        """Return True if requests may name the model ``name``: by one of its names, as ``default``, or by an alias."""
        return name in (DEFAULT_MODEL, *self.names) or any(fnmatchcase(name, pattern) for pattern in self.aliases)

    @model_validator(mode="after")
    def _aliases_have_targets(self) -> ModelSection:
        allowed = (*self.names, DEFAULT_MODEL)
        for pattern, name in self.aliases.items():
            if name not in allowed:
                raise ValueError(f"aliases.{pattern} is {name!r}; allowed: {', '.join(allowed)}")
        return self


def _name_of(path: str) -> str:
    """Return the last part of a path. A name of the hub loses its revision."""
    hub = parse_hub_name(path)
    if hub is not None and hub.revision is not None:
        label = "" if hub.gguf is None else f"/{hub.gguf}" if hub.gguf.endswith(".gguf") else f":{hub.gguf}"
        path = hub.repository + label
    return path.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


class SchedulerSection(Section):
    """Configure how requests share steps."""

    max_running: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="Requests that decode at the same time. By default 512 on CUDA, else 256.",
    )
    max_waiting: int = Field(
        default=8192, ge=1, description="Number of requests that may wait; one more is answered with 503."
    )
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens that enter one step; longer prompts are chunked. By default 8192 on CUDA, else 2048.",
    )
    tenants_step_ms: float = Field(
        default=10.0,
        ge=0,
        description="While several tenants send requests, steps have as many prompt tokens as take about this time (milliseconds), between a sixteenth and a quarter of `chunk_size`: requests of other tenants begin sooner, and long prompts take longer. 0: steps have `chunk_size` tokens then too.",
    )
    mixed: bool = Field(default=True, description="Let steps with prompt chunks have decode rows too.")
    overlap: Auto | bool = Field(
        default="auto",
        description="Launch step N+1 before the tokens of step N are read; steps with drafts are launched once these tokens are known. `auto`: on CUDA.",
    )
    draft: Literal["adaptive", "always"] = Field(
        default="adaptive",
        description="When the drafter proposes tokens. `adaptive`: while steps with drafts produce more tokens in the same time than steps without, as measured at each number of running requests, and with fewer draft tokens where few are accepted. `always`: in every step.",
    )
    min_draft_probability: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="A draft token is not verified if the drafter gives it, together with the draft tokens before it, a lower probability than this. Needs a drafter that states probabilities (`draft.probs`): `eagle`, `eagle3_tree`. 0: all are verified.",
    )
    wait_for_prefix: bool = Field(
        default=True,
        description="Let a request whose prefix another request is computing wait for it, instead of computing it again.",
    )
    shared_prefixes: bool = Field(
        default=True,
        description="Group decode rows by the prefixes that they share, which attention then reads once if that is faster. Has no effect with `batch_invariant`.",
    )
    pin_seconds: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="Seconds for which the prefix of a group or session stays in the cache without a request for it. It is released sooner if the memory is needed.",
    )
    pin_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of the pool that groups and sessions may keep; beyond it the oldest are released. 0: none. Has no effect with a prefix cache that keeps nothing.",
    )

    @property
    def rows(self) -> int:
        """Return ``max_running`` of a resolved config."""
        assert self.max_running is not None, "resolve() fills it in"
        return self.max_running

    @property
    def chunk(self) -> int:
        """Return ``chunk_size`` of a resolved config."""
        assert self.chunk_size is not None, "resolve() fills it in"
        return self.chunk_size


class GraphsSection(Section):
    """Configure CUDA graphs: a step is captured once for each of a ladder of sizes, and then launched as a whole."""

    decode: Auto | bool = Field(
        default="auto",
        description="Capture decode steps and verify steps, from embedding to sampled tokens. `auto`: on CUDA, if the attention backend can be captured.",
    )
    max_rows: int = Field(
        default=512,
        ge=1,
        description="Decode steps of more rows, and verify steps of more tokens, are launched kernel by kernel.",
    )
    piecewise_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Steps with prompt tokens, up to this number of tokens in all, are captured in pieces, with attention between them. 0: none. By default the number of tokens that the device computes in the time that it takes to launch a step kernel by kernel (at most 2048, and as many as take a tenth of the memory that the weights leave free).",
    )
    capture: Literal["idle", "start"] = Field(
        default="idle",
        description="`idle`: a size is captured once it is needed repeatedly, or while the engine has nothing to do (the most common ones at the start, if all kernels are in Triton's cache); `start`: all before the engine is ready. A step whose capture fails is launched kernel by kernel.",
    )


class MemorySection(Section):
    """Configure the KV pool."""

    page_size: int = Field(default=16, ge=1, le=1024, description="Tokens per page.")
    num_pages: int | None = Field(
        default=None, ge=2, description="Pages in the pool; by default as many as fit into `kv_gib` or `fraction`."
    )
    kv_gib: float | None = Field(
        default=None,
        gt=0,
        description="Memory for the pool. Default on CUDA: `fraction` of free memory after loading; on CPU: 1 GiB.",
    )
    fraction: float = Field(
        default=0.88,
        gt=0,
        lt=1,
        description="Share of the device's memory that weights, pool and workspaces may take together.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto",
        description="`auto` is `fp8_e4m3` with the checkpoint's scales where the checkpoint has scales of keys and values (docs/stores.md), otherwise the model's dtype. The fp8 dtypes hold twice as many tokens as 16 bits. Store `paged` keeps keys and values unscaled, which saturate at 448 or 57344; store `scaled` keeps `fp8_e4m3` with scales (docs/stores.md). On CUDA `fp8_e4m3` needs compute capability 8.9.",
    )
    state_snapshot_tokens: int | None = Field(
        default=None,
        ge=1,
        description="For models with states (Mamba, gated delta nets): a prompt makes a snapshot of them after each this many tokens, rounded up to full pages, from which later prompts resume. Each costs a step and the memory of a slot. By default there is one in the middle of prompts of 1,024 new tokens and more, and at ends of chunks. In both cases there are others where prompts are known to branch, at the end of the prompt, and while answers are generated (docs/cache.md).",
    )


MOST_TP = 64
"""The largest number of ranks of one host."""


class ParallelSection(Section):
    """Configure how the ranks of one host divide the model. A rank is one process with one device."""

    tp: int = Field(
        default=1,
        ge=1,
        le=MOST_TP,
        description="Ranks of tensor parallelism: each computes a share of every layer, and the ranks add up their results. It must divide `num_attention_heads` and `intermediate_size`, and divide `num_key_value_heads` or be a multiple of it. On CUDA the ranks use consecutive devices from `device` on.",
    )
    experts: Literal["auto", "tp", "ep"] = Field(
        default="auto",
        description="How the ranks divide the experts of a mixture of experts: `tp` gives each rank a share of every expert, `ep` whole experts. `auto` is what was measured to be faster (docs/parallel.md), otherwise `tp`, if the ranks can divide the experts so. The number or the size of the experts must be a multiple of the ranks.",
    )


class LimitsSection(Section):
    """Configure what clients may hold of the server. docs/reliability.md explains each limit."""

    connections: int | None = Field(
        default=None,
        ge=1,
        description="Open connections. Beyond it the connection that has waited longest for the rest of its request is closed, or an idle one; if there is none, requests get 503. By default what the limit of file descriptors allows (16384 at most).",
    )
    connections_per_address: int | None = Field(
        default=None,
        ge=1,
        description="Open connections of one address (IPv6: one /64 network). By default three quarters of `connections`. Behind a proxy all clients have its address.",
    )
    header_kib: int = Field(
        default=64,
        ge=1,
        le=1024,
        description="Larger headers (KiB) are answered with 431, and the connection is closed.",
    )
    header_seconds: float = Field(
        default=10.0, gt=0, description="Seconds in which the headers of a request must arrive; 408 otherwise."
    )
    body_seconds: float = Field(
        default=60.0, gt=0, description="Seconds in which the body of a request must arrive; 408 otherwise."
    )
    idle_seconds: float = Field(
        default=65.0, gt=0, description="Seconds for which a connection may be idle between two requests."
    )
    write_seconds: float = Field(
        default=120.0,
        gt=0,
        description="A client that takes none of its answer for this number of seconds is disconnected.",
    )
    template_seconds: float = Field(
        default=5.0,
        gt=0,
        description="Processor time (seconds) in which the chat template must render a conversation, and in which it must be compiled at the start; more is refused with 400.",
    )
    bodies_mib: float = Field(
        default=512.0,
        gt=0,
        description="Request bodies (MiB) that are held at the same time, while they arrive and until they are parsed; more get 503. A tenant may hold half of it. One body of each tenant is always accepted.",
    )
    answer_mib: float = Field(
        default=64.0,
        gt=0,
        description="The largest answer (MiB), as estimated from the request before it starts; more is refused with 400. The large answers (over 1 MiB) of a tenant that are open at the same time may have twice this size; more get 429.",
    )


class ServerSection(Section):
    """Configure the HTTP server."""

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.")
    port: int = Field(default=30000, ge=0, le=65535, description="0 picks a free port.")
    max_body_mib: float = Field(default=8.0, gt=0, description="Larger request bodies (MiB) are answered with 413.")
    drain_seconds: float = Field(
        default=30.0, ge=0, description="Seconds that running requests have to finish after SIGTERM."
    )
    health_seconds: float = Field(
        default=30.0, gt=0, description="/health_generate fails if a token takes more than this number of seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="The lowest level that is logged."
    )
    keys: str | None = Field(
        default=None,
        description="The key file, or `env:NAME` for an environment variable that holds its text. With it every request needs a key, and belongs to a tenant: docs/tenants.md.",
    )
    allow_public_without_keys: bool = Field(
        default=False,
        description="Allow the server to listen on an address that other machines can reach although there are no keys.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names by which a server without keys may be called, in addition to `localhost`, IP addresses and `host`; `*` for any. With `allow_public_without_keys` an empty list allows any name.",
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses and networks (`10.0.0.0/8`) of proxies whose X-Forwarded-For states the client's address. Clients without a key are counted by their address, behind other proxies by that of the proxy. A client whose own address is in the list can forge the header.",
    )
    max_seconds: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="A request that runs for more than this number of seconds is ended with an error (504).",
    )
    max_logprobs: int = Field(
        default=20,
        ge=0,
        le=100,
        description="Log-probabilities that a request may ask for at each position, of the output and of the prompt.",
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Web pages of other origins that may call the server, as in `https://chat.example.org`; `*` for all.",
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**63,
        description="Requests that set no seed get seeds that follow from this one, in the order of their arrival. By default they get random seeds.",
    )
    log_requests: bool = Field(
        default=True,
        description="Log a line for each finished request, at level info: id, tenant, route, tokens, times and finish reason. Never prompts or outputs.",
    )
    profile_dir: str | None = Field(
        default=None,
        description="Directory to which POST /start_profile writes traces of the engine, in files whose names the server chooses. Without it profiles are refused.",
    )
    profile_seconds: float = Field(
        default=10.0, gt=0, le=600, description="A profile ends at the latest after this number of seconds."
    )
    usage_log: str | None = Field(
        default=None, description="File to which a line of JSON is added for each request: tenant, tokens, seconds."
    )
    usage_log_texts: bool = Field(default=False, description="Write prompts and outputs into the usage log too.")
    limits: LimitsSection = LimitsSection()

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin; allowed: *, or scheme://host[:port] without a path")
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if host != "*" and not re.fullmatch(r"[A-Za-z0-9_.-]+", host):
                raise ValueError(f"{host!r} is not a host; allowed: *, or a name without scheme and port")
        return tuple(host.lower() for host in hosts)

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(
                    f"{proxy!r} is no address or network ({error}); allowed: 127.0.0.1, 10.0.0.0/8"
                ) from None
        return proxies

    @model_validator(mode="after")
    def _log_has_tenants(self) -> ServerSection:
        if self.usage_log and not self.keys:
            raise ValueError("usage_log needs keys, which identify the tenants; give server.keys")
        return self


class TuningSection(Section):
    """Configure the file of measurements of this machine. `auto` chooses by them, and `dovetail ab --write-tuning`
    writes them."""

    path: str | None = Field(
        default=None,
        description="The file of records; by default `dovetail/tuning.json` in the user's data folder (XDG).",
    )
    use: bool = Field(default=True, description="Let `auto` prefer the winners of these records.")
    workload: str | None = Field(
        default=None,
        description="The name of a workload, whose records are preferred. By default the newest records are preferred.",
    )


class PluginsSection(Section):
    """Configure which plugins may load. Names are names of entry points or distributions; a list may be written as
    ``a,b``."""

    autoload: bool = Field(default=True, description="Load every installed plugin that the lists below do not exclude.")
    allow: tuple[str, ...] | None = Field(
        default=None, description="Load only these plugins. An unknown name is an error."
    )
    deny: tuple[str, ...] = Field(default=(), description="Never load these plugins.")
    require: tuple[str, ...] = Field(default=(), description="These plugins must load; otherwise startup stops.")

    @field_validator("allow", "deny", "require", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


class Config(Section):
    """Hold the whole config tree. ``config.load_config`` makes it; docs/config.md documents every key."""

    model: ModelSection = ModelSection()
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="`auto`: CUDA if there is one."
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of the engine; by default torch's own choice."
    )
    batch_invariant: bool = Field(
        default=False,
        description="Give a token's logits the same bits regardless of the other rows of its step, of how its row is divided among steps (chunks, decode steps, draft tokens that are verified), and of whether its prefix was cached. `auto` then chooses components that support this. A prefix that decode rows share is read once for each row, and tuning records are not used. Needs CUDA of compute capability 9.0; with drafters of trees also `memory.page_size: 1` (docs/batch_invariance.md).",
    )
    attention: AttentionSelection = ATTENTION.field
    cache: Selection = CACHE.field
    grammar: GrammarSelection = GRAMMAR.field
    speculative: Selection = SPECULATIVE.field
    policy: Selection = POLICY.field
    tool_parser: Selection = TOOL_PARSER.field
    reasoning_parser: Selection = REASONING_PARSER.field
    api: Selection = API.field
    executor: Selection = EXECUTOR.field
    logits_processor: Selection = LOGITS_PROCESSOR.field
    quantization: Selection = QUANTIZATION.field
    experts: Selection = EXPERTS.field
    mixer: Selection = MIXER.field
    store: Selection = STORE.field
    scheduler: SchedulerSection = SchedulerSection()
    graphs: GraphsSection = GraphsSection()
    memory: MemorySection = MemorySection()
    parallel: ParallelSection = ParallelSection()
    adapters: AdaptersSection = AdaptersSection()
    server: ServerSection = ServerSection()
    supervision: SupervisionSection = SupervisionSection()
    metrics: MetricsSection = MetricsSection()
    tracing: TracingSection = TracingSection()
    tuning: TuningSection = TuningSection()
    experiment: ExperimentSection = ExperimentSection()
    plugins: PluginsSection = PluginsSection()
    kinds: dict[str, Selection] = Field(
        default_factory=dict,
        description="The sections of third-party kinds, by their keys. In a config file each section has its own key.",
    )

    def selection(self, section: KindSection) -> Section:
        """Return the selection of this config in the section of a kind, which may be a third party's."""
        if section.key in type(self).model_fields:
            return getattr(self, section.key)
        return self.kinds.get(section.key, section.value)
