"""Define the config tree, and the core's sections that have no module of their own. Sections of components come from the
registry (``config.tree``)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from dovetail.config.adapters import AdaptersSection
from dovetail.config.experiment import ExperimentSection
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
from dovetail.config.model import ModelSection
from dovetail.config.parallel import ParallelSection
from dovetail.config.plugin import AttentionSelection, GrammarSelection, Section, Selection
from dovetail.config.scheduler import SchedulerSection
from dovetail.config.server import ServerSection
from dovetail.config.supervision import SupervisionSection
from dovetail.config.telemetry import MetricsSection, TracingSection


class GraphsSection(Section):
    """Configure CUDA graphs: a step is captured once for each of a ladder of sizes, and then launched as a whole."""

    decode: Literal["auto"] | bool = Field(
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
        description="`idle`: a size is captured once it is needed repeatedly, or while the engine has nothing to do. If all kernels are in Triton's cache, the most common sizes are captured at the start; a large model on one GPU then leaves out steps with shared prefixes. `start`: all before the engine is ready. A step whose capture fails is launched kernel by kernel.",
    )


class MemorySection(Section):
    """Configure the KV pool."""

    page_size: int = Field(default=16, ge=1, le=1024, description="Tokens per page.")
    num_pages: int | None = Field(
        default=None,
        ge=2,
        le=(1 << 31) - 1,
        description="Pages in the pool; by default as many as fit into `kv_gib` or `fraction`.",
    )
    kv_gib: float | None = Field(
        default=None,
        gt=0,
        le=1 << 20,
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
        description="`auto` is `fp8_e4m3` with the checkpoint's scales where the checkpoint has scales of keys and values (docs/stores.md), otherwise the model's dtype; latents (MLA) have the model's dtype unless `fp8_e4m3` is named. The fp8 dtypes hold twice as many tokens as 16 bits. Store `paged` keeps keys and values unscaled, which saturate at 448 or 57344; store `scaled` keeps `fp8_e4m3` with scales (docs/stores.md). On CUDA `fp8_e4m3` needs compute capability 8.9.",
    )
    state_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="For models with recurrences (Mamba, gated delta nets, Kimi delta attention): in which dtype their states are kept between steps. `bfloat16` halves their memory, and decode steps read and write half as much, but each step rounds them; sums are computed in float32 in both cases. States of convolutions have the model's dtype. Needs `mixer.bfloat16_states` (docs/mixers.md).",
    )
    state_snapshot_tokens: int | None = Field(
        default=None,
        ge=1,
        description="For models with states (Mamba, gated delta nets): a prompt makes a snapshot of them after each this many tokens, rounded up to full pages, from which later prompts resume. Each costs a step and the memory of a slot. By default there is one in the middle of prompts of 1,024 new tokens and more, and at ends of chunks. In both cases there are others where prompts are known to branch, at the end of the prompt, and while answers are generated (docs/cache.md).",
    )


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
        default=None,
        ge=1,
        description="CPU threads of the engine. By default those of torch, and on a CPU (one rank, Linux) fewer while other processes need the cores; then a few products of torch may round differently (docs/install.md).",
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
