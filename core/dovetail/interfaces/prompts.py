"""Define what plugins see of a prompt before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.config import Config


@dataclass(slots=True)
class PromptDraft:
    """Hold one prompt before it is tokenized: either ``text``, or the ``messages`` of a chat before the chat template
    renders them.

    Implementations of the hook ``on_prompt`` assign new values. ``messages`` are mappings with at least ``role`` and
    ``content`` (a text). They belong to the caller: to change a message, an implementation assigns a new list with a
    new mapping.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class PromptContext:
    """Hold what the constructor of a component receives as ``context`` if its kind has ``for_prompts``."""

    config: Config
    """Hold the complete config of this process. In a server process, values that are ``auto`` may not be resolved."""
