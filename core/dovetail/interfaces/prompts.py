"""Define what plugins see of a prompt before it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.config import Config


@dataclass(slots=True)
class PromptDraft:
    """Hold one prompt before it is tokenized: either ``text``, or the ``messages`` of a chat before its template writes them.

    Implementations of the hook ``on_prompt`` assign new values. ``messages`` are mappings with at least ``role`` and
    ``content`` (a text); they belong to the caller, so a changed message is a new mapping in a new list.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class PromptContext:
    """Provide what a component of a kind with ``for_prompts`` is built with: ``cls(config, context)``."""

    config: Config
    """The whole config, as this process has it: in a server's process, ``auto`` may still be in it."""
