"""Register the kind, its features and two components, and apply the components to prompts. Importing this module imports
none of the components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dovetail.interfaces.features import FeatureDescriptor
from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentSpec, KindDescriptor
from dovetail_prompt_rewriters.kind import FEATURES, IDEMPOTENT, KIND, NORMALIZES, PROMPT_REWRITER

if TYPE_CHECKING:
    from dovetail.interfaces.prompts import PromptDraft
    from dovetail_prompt_rewriters.interface import PromptRewriter


@hookimpl
def register_kinds() -> Sequence[KindDescriptor]:
    """Return the kind ``prompt_rewriter``."""
    return (KIND,)


@hookimpl
def register_features() -> Sequence[FeatureDescriptor]:
    """Return what rewriters may offer."""
    return FEATURES


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return ``normalize`` and ``redact``."""
    return (
        ComponentSpec(
            kind=PROMPT_REWRITER,
            name="normalize",
            target="dovetail_prompt_rewriters.rewriters:Normalize",
            config="dovetail_prompt_rewriters.config:NormalizeConfig",
            summary="Brings text to a Unicode normal form.",
            offers=frozenset({NORMALIZES, IDEMPOTENT}),
            priority=10,  # `auto` puts it first
        ),
        ComponentSpec(
            kind=PROMPT_REWRITER,
            name="redact",
            target="dovetail_prompt_rewriters.rewriters:Redact",
            config="dovetail_prompt_rewriters.config:RedactConfig",
            summary="Replaces text that matches a pattern, by default e-mail addresses.",
            offers=frozenset({IDEMPOTENT}),
            needs=frozenset({NORMALIZES}),
        ),
    )


@hookimpl
def on_prompt(prompt: PromptDraft, parts: Mapping[str, Sequence[PromptRewriter]]) -> None:
    """Apply the rewriters that config selects, in order: to a text, or to the messages of the user."""
    for rewriter in parts.get(PROMPT_REWRITER, ()):
        if prompt.text is not None:
            prompt.text = rewriter.rewrite(prompt.text)
        if prompt.messages is not None:
            prompt.messages = [
                {**message, "content": rewriter.rewrite(message["content"])} if message["role"] == "user" else message
                for message in prompt.messages
            ]
