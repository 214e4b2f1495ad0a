"""What a plugin says about each of its parts, before any of it is imported."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dovetail.interfaces.features import Feature


class ComponentKind(enum.StrEnum):
    """The kinds of part, and the name of the config section that selects each."""

    ATTENTION = "attention"
    CACHE = "cache"
    GRAMMAR = "grammar"
    DRAFTER = "speculative"
    POLICY = "policy"
    MODEL = "model"
    TOOL_PARSER = "tool_parser"
    REASONING_PARSER = "reasoning_parser"
    API = "api"


API_VERSIONS: dict[ComponentKind, tuple[int, int]] = {
    **dict.fromkeys(ComponentKind, (1, 0)),
    # shares, shared prefixes, graph hooks as the engine calls them; graphs of verify rows; AttentionContext.batch_invariant
    ComponentKind.ATTENTION: (1, 3),
    ComponentKind.CACHE: (1, 1),  # shared_prefixes
    ComponentKind.GRAMMAR: (1, 2),  # check, GrammarSpec.backend, more kinds; dump and load
    ComponentKind.DRAFTER: (1, 3),  # DraftRuntime, must_see_all; DraftCache.run; draft.probs, tokens_ahead
    # batch.last; batch.watch, embed_tokens; before the final norm; model.batch_invariant
    ComponentKind.MODEL: (1, 4),
    ComponentKind.TOOL_PARSER: (1, 1),  # ConstraintGate.marks
}
"""The version (major, minor) of each kind's interface. A plugin built for another major version is incompatible; one
built for a newer minor version may call what is not there, and is incompatible too."""


class Stability(enum.StrEnum):
    """How much a component has been proven."""

    STABLE = "stable"
    BETA = "beta"
    EXPERIMENTAL = "experimental"


@dataclass(frozen=True, slots=True)
class Requirement:
    """A distribution that must be installed: its name, a version range (PEP 440), and the command that installs it.
    Checked with importlib.metadata, never by importing."""

    distribution: str
    versions: str = ""
    install: str = ""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where a component can run. An empty tuple allows everything.

    ``min_compute_capability`` is (major, minor) and applies on CUDA only.
    """

    devices: tuple[str, ...] = ()
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    page_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """One part. ``target``, ``config`` and ``describe`` are "module:attribute" and are imported only when needed.

    ``target`` is the class that implements the kind's interface; ``config`` a ``PluginConfig`` whose ``kind`` is a
    Literal of ``name`` (imported to validate config, so its module must be import-light). Models also name
    ``describe``, a function from config.json (a dict) to ``ModelInfo``, and list in ``aliases`` the ``architectures``
    entries of config.json that they implement. ``replace`` names a distribution whose component of the same name this
    one overrides. ``probe`` is an optional "module:function" that returns None, or the reason why the component cannot work
    here; it is called only for candidates that passed every other stage. Of the arguments ``section``, the component's own
    config, and ``config``, the whole, it takes those it needs. Parsers name in ``template`` a regular expression that is found
    in the chat templates of the models that write what they read; by it ``auto`` chooses.
    """

    kind: ComponentKind
    name: str
    target: str
    config: str
    summary: str
    api: tuple[int, int] = (1, 0)
    requires: tuple[Requirement, ...] = ()
    offers: frozenset[Feature] = frozenset()
    needs: frozenset[Feature] = frozenset()
    constraints: Constraints = Constraints()
    priority: int = 0
    stability: Stability = Stability.STABLE
    aliases: tuple[str, ...] = ()
    describe: str | None = None
    deprecated: str | None = None
    replace: str | None = None
    probe: str | None = None
    template: str | None = None
