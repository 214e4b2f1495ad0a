"""Declare the hooks that plugins may implement. None of them is called inside a step.

A plugin is an entry point in the group ``dovetail.plugins``. It names a light module with functions marked
``@hookimpl``; each function takes only the arguments that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import typer
    from prometheus_client import CollectorRegistry

    from dovetail.interfaces.features import FeatureDescriptor
    from dovetail.interfaces.prompts import PromptDraft
    from dovetail.registry.resolution import Candidate, Resolved, ResolveRequest
    from dovetail.registry.specs import ComponentKind, ComponentSpec, KindDescriptor

PROJECT = "dovetail"
ENTRY_POINT_GROUP = "dovetail.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_kinds() -> Sequence[KindDescriptor]:  # type: ignore[empty-body]
    """Return the kinds of component that the plugin adds."""


@hookspec
def register_features() -> Sequence[FeatureDescriptor]:  # type: ignore[empty-body]
    """Return the features that the plugin adds, in the namespaces of its own kinds or of other kinds."""


@hookspec
def register_components() -> Sequence[ComponentSpec]:  # type: ignore[empty-body]
    """Return the components that the plugin adds. They may be of any kind."""


@hookspec
def adjust_candidates(kind: ComponentKind, request: ResolveRequest, candidates: list[Candidate]) -> None:
    """Reorder the ``candidates`` for a choice in place, or veto one with ``candidate.veto(reason)``."""


@hookspec
def on_resolved(resolved: Resolved) -> None:
    """Receive what was chosen, before anything is built. Called in the process that resolves the config."""


@hookspec
def on_prompt(prompt: PromptDraft, parts: Mapping[str, Sequence[Any]]) -> None:
    """Change a prompt before it is tokenized, by assigning to ``prompt``; raise ``RequestError`` to refuse the request.

    Called once for each prompt that is given as text, including prompts of embeddings and scores, and for each chat.
    The call happens where prompts are tokenized: in the process of an ``LLM``, or in the server's process, which
    handles long prompts on other threads. ``parts`` maps each kind with ``for_prompts`` to the components that config
    selects.
    """


@hookspec
def on_engine_start(info: dict[str, Any]) -> None:
    """Run when the engine of a server or an ``LLM`` is ready for requests. ``info`` is the entry ``engine`` of
    /server_info."""


@hookspec
def on_engine_stop() -> None:
    """Run when the engine accepts no more requests and is about to be freed. Not called if the engine failed."""


@hookspec
def register_metrics(registry: CollectorRegistry) -> None:
    """Add collectors to the server's prometheus ``CollectorRegistry``."""


@hookspec
def register_cli(app: typer.Typer) -> None:
    """Add commands to ``dovetail``."""
