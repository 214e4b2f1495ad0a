"""The hooks of the control plane. They are called while parts are found and resolved, never inside a step.

A plugin is an entry point in the group ``dovetail.plugins`` that names an import-light module with functions marked
``@hookimpl``; each function takes only the arguments it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer
    from prometheus_client import CollectorRegistry

    from dovetail.registry.resolution import Candidate, Resolved, ResolveRequest
    from dovetail.registry.specs import ComponentKind, ComponentSpec

PROJECT = "dovetail"
ENTRY_POINT_GROUP = "dovetail.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_attention_backends() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Attention backends (``interfaces.attention.AttentionBackend``)."""


@hookspec
def register_prefix_caches() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Prefix caches (``interfaces.cache.PrefixCache``)."""


@hookspec
def register_grammar_backends() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Grammar backends (``interfaces.grammar.GrammarBackend``)."""


@hookspec
def register_drafters() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Drafters (``interfaces.speculative.Drafter``)."""


@hookspec
def register_policies() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Schedule policies (``interfaces.policy.SchedulePolicy``)."""


@hookspec
def register_models() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Model architectures (``interfaces.model.ModelArchitecture``)."""


@hookspec
def register_tool_parsers() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Tool parsers (``interfaces.parsers.ToolParser``)."""


@hookspec
def register_reasoning_parsers() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Reasoning parsers (``interfaces.parsers.ReasoningParser``)."""


@hookspec
def register_apis() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Protocols over HTTP (``interfaces.api.Api``)."""


@hookspec
def adjust_candidates(kind: ComponentKind, request: ResolveRequest, candidates: list[Candidate]) -> None:
    """Reorder ``candidates`` in place, or veto one with ``candidate.veto(reason)``."""


@hookspec
def on_resolved(resolved: Resolved) -> None:
    """The parts are chosen; nothing is built yet."""


@hookspec
def on_engine_start(info: dict[str, Any]) -> None:
    """The engine, a server's or an ``LLM``'s, can take requests; ``info`` is what /server_info shows as ``engine``."""


@hookspec
def on_engine_stop() -> None:
    """The engine takes no more requests and is about to be freed; not called where it failed."""


@hookspec
def register_metrics(registry: CollectorRegistry) -> None:
    """Add collectors to the server's prometheus ``CollectorRegistry``."""


@hookspec
def register_cli(app: typer.Typer) -> None:
    """Add commands to ``dovetail``."""
