"""Define the base of every plugin's config section, and how a section selects components."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny


class Section(BaseModel):
    """Hold the values of one section. It is frozen and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)


class PluginConfig(Section):
    """Hold a component's own settings. Subclasses narrow ``kind`` to ``Literal["name"] = "name"`` and add their
    fields, each with a default, so that the bare name selects the component."""

    kind: str


class Selection(Section):
    """Select nothing (``none``), any component (``auto``), or candidates in order of preference.

    In config: ``auto``, ``none`` (optional kinds only), ``name``, ``{kind: name, ...}``, or a list of the last two.
    """

    disabled: bool = False
    candidates: tuple[SerializeAsAny[PluginConfig], ...] = ()

    @property
    def is_auto(self) -> bool:
        """Return True if the resolver may choose among all installed components."""
        return not self.disabled and not self.candidates


class PhasedSelection(Section):
    """Select components of one kind for each phase. Subclasses have a field of type ``Selection`` for each."""


class AttentionSelection(PhasedSelection):
    """Select the attention backends: a batch with extend rows uses ``prefill``, every other batch ``decode``.

    In config: any form of ``Selection`` for both, or ``{prefill: ..., decode: ...}``.
    """

    prefill: Selection = Selection()
    decode: Selection = Selection()


class GrammarSettings(Section):
    """Configure how constraints are compiled, by any backend."""

    isolation: Literal["process", "thread"] = Field(
        default="process",
        description="`process`: constraints are compiled in processes of low priority, which are ended if a constraint takes too long or too much memory. `thread`: they are compiled on threads of the engine, which starts sooner; nothing can be ended there, so use it only for constraints that are trusted.",
    )
    workers: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Number of constraints that compile at the same time. One more compiles for a tenant that has none compiling.",
    )
    timeout: float = Field(default=10.0, gt=0, description="Seconds that a constraint may take to compile.")
    memory_mib: int = Field(
        default=1024, ge=16, description="Memory (MiB) that compiling a constraint may take in its process."
    )
    stall_seconds: float = Field(
        default=3.0,
        gt=0,
        description="Seconds after which a process that compiles and was stopped (SIGSTOP) is replaced; its constraint is compiled by another.",
    )
    mask_ms: float = Field(
        default=20.0,
        gt=0,
        description="Milliseconds that the masks of one request may take for each of its tokens, on average. All requests of the batch wait for them. A request whose masks take longer ends with an error, and its constraint is refused for a minute. Under `isolation: process` masks are tried out when a constraint is compiled.",
    )
    mask_burst_ms: float = Field(
        default=1000.0,
        gt=0,
        description="Milliseconds by which the masks of one request may exceed `mask_ms` times its tokens.",
    )
    cache_mib: int = Field(
        default=256,
        ge=0,
        description="Memory (MiB) for compiled constraints that are kept. Counted is what they take in the engine, as far as each backend can say.",
    )
    jump_forward: bool = Field(
        default=False,
        description="Append text that the constraint forces at once, in the tokenizer's own tokens. Needs a backend that offers grammar.jump_forward, and cannot be combined with a drafter. Requests with log-probabilities or biases do not use it.",
    )


class GrammarSelection(GrammarSettings, Selection):
    """Select grammar backends, and configure how they run. Requests that name no backend are served by the first of
    ``candidates`` that supports the constraint.

    In config: any form of ``Selection``, or ``{backend: any of them, timeout: ..., ...}``.
    """
