"""Describe the config sections that select components: one for each kind, including kinds of third parties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dovetail.config.plugin import AttentionSelection, GrammarSelection, GrammarSettings, Section, Selection

BACKEND = "backend"
"""The key of the selection in a section that also has settings, as in ``grammar: {backend: ..., timeout: 5}``."""


@dataclass(frozen=True, slots=True)
class KindSection:
    """Describe the config section of one kind of component.

    ``key`` is the top-level key. An ``optional`` section accepts ``none``. If a list is given, a section selects the
    first component that fits, or all of them if it ``takes_all``. A section ``of_server`` configures the server and not
    an engine, so it is the same for all arms of an experiment. ``default`` is the selection of a config without the
    key. ``phases`` are the keys of a section that may select one component for each phase. ``settings`` has the fields
    that are allowed in the section next to ``backend``. ``selection`` is the class of the value in ``Config``; a
    section with phases or settings has a separate class, with a field for each. Only built-in kinds may set ``phases``,
    ``settings`` and ``selection``.
    """

    key: str
    description: str
    optional: bool = False
    takes_all: bool = False
    of_server: bool = False
    default: Literal["auto", "none"] = "auto"
    phases: tuple[str, ...] = ()
    settings: type[Section] | None = None
    selection: type[Section] = Selection

    @property
    def reserved(self) -> tuple[str, ...]:
        """Return the words that the section accepts instead of a component's name. They cannot be names of
        components."""
        return ("auto", "none") if self.optional else ("auto",)

    @property
    def value(self) -> Section:
        """Return the selection of a config without the key."""
        return self.selection.model_validate({"disabled": True}) if self.default == "none" else self.selection()

    @property
    def field(self) -> Any:
        """Return the pydantic field of the section in ``Config``."""
        return Field(default=self.value, description=self.description)

    def is_phased(self, value: Any) -> bool:
        """Return True for ``{prefill: ..., decode: ...}``, a section that selects a component for each phase."""
        return isinstance(value, dict) and "kind" not in value and any(phase in value for phase in self.phases)


Sections = Sequence[KindSection]

ATTENTION = KindSection(
    "attention",
    "Attention over the paged KV pool; may differ by phase.",
    phases=("prefill", "decode"),
    selection=AttentionSelection,
)
CACHE = KindSection("cache", "Prefix cache: which computed prompts are kept.")
GRAMMAR = KindSection(
    "grammar",
    "Compiles JSON schemas, regexes and grammars to token masks.",
    optional=True,
    settings=GrammarSettings,
    selection=GrammarSelection,
)
SPECULATIVE = KindSection(
    "speculative",
    "Drafter: proposes tokens that the model then verifies at once.",
    optional=True,
    default="none",
)
POLICY = KindSection("policy", "The order in which waiting requests are admitted.")
TOOL_PARSER = KindSection(
    "tool_parser",
    "Finds tool calls in outputs; `auto` chooses by the model's chat template.",
    optional=True,
    of_server=True,
)
REASONING_PARSER = KindSection(
    "reasoning_parser",
    "Separates reasoning from answer; `auto` chooses by the model's chat template.",
    optional=True,
    of_server=True,
)
API = KindSection(
    "api",
    "APIs that the server serves: with `auto` all that are installed, with a list those that it names.",
    optional=True,
    takes_all=True,
    of_server=True,
)

EXECUTOR = KindSection(
    "executor",
    "Where the ranks of the engine run: in the engine's process, or in processes of their own.",
)

LOGITS_PROCESSOR = KindSection(
    "logits_processor",
    "Logits processors that requests may name: with `auto` all that are installed, with a list those that it names.",
    optional=True,
    takes_all=True,
)

QUANTIZATION = KindSection(
    "quantization",
    "How weights are stored: `auto` as in the checkpoint; a name also quantizes an unquantized checkpoint while it is loaded.",
    optional=True,
)

EXPERTS = KindSection(
    "experts",
    "What computes the products of experts, for models that have experts.",
    optional=True,
)

MIXER = KindSection(
    "mixer",
    "What computes recurrences and short convolutions, for models with layers that keep a state for each request.",
    optional=True,
)

STORE = KindSection(
    "store",
    "How keys and values are kept in memory: `auto` as they are, or with the checkpoint's scales if it has some.",
)

BUILT_IN: Sections = (
    ATTENTION,
    CACHE,
    GRAMMAR,
    SPECULATIVE,
    POLICY,
    TOOL_PARSER,
    REASONING_PARSER,
    API,
    EXECUTOR,
    LOGITS_PROCESSOR,
    QUANTIZATION,
    EXPERTS,
    MIXER,
    STORE,
)
"""The sections of the built-in kinds."""
