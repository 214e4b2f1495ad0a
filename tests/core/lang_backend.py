"""Provide a backend for tests of programs: its output is a function of the prompt, and the test controls how long it
takes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.lang.backends.base import Backend, Features, Generated, OnText, ReuseHints
from dovetail.lang.choices import Scored
from dovetail.lang.conversation import Conversation, Template
from dovetail.lang.ir import SamplingOptions


def answer_to(text: str, salt: str = "") -> str:
    """Return the output of the backend after ``text``."""
    return "<" + hashlib.sha256((salt + text).encode()).hexdigest()[:6] + ">"


def marked(messages: Sequence[dict[str, Any]], opened: bool) -> str:
    """Render messages as a chat template does."""
    return "".join(f"[{m['role']}|{m['content']}]" for m in messages) + ("[assistant|" if opened else "")


class Scripted(Backend):
    """Generate ``answer_to`` of the prompt in pieces of two characters.

    ``during`` is called with each prompt while it is answered. ``prompts``, ``hints``, ``samplings`` and ``prefixes``
    record the calls.
    """

    features = Features(scores=True, prefills=True, constraints=frozenset({"regex", "json_schema"}))

    def __init__(self, during: Callable[[str], None] | None = None, template: Template = marked) -> None:
        self.prompts: list[str] = []
        self.hints: list[ReuseHints] = []
        self.samplings: list[SamplingOptions] = []
        self.prefixes: list[str] = []
        self._during = during or (lambda text: None)
        self._template = template
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return "Scripted()"

    def template(self) -> Template:
        return self._template

    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        self.check(conversation, sampling)
        text = self._taken(conversation, sampling, hints)
        said = [answer_to(text, str(i) if i else "") for i in range(sampling.n or 1)]
        if on_text is not None:
            for i in range(0, len(said[0]), 2):
                on_text(said[0][i : i + 2])
        return [Generated(each, {"prompt_tokens": len(text)}) for each in said]

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        text = self._taken(conversation, SamplingOptions(), hints)
        best = int(hashlib.sha256(text.encode()).hexdigest(), 16) % len(choices)
        alone = (None,) if unconditional else ()
        return [Scored((i,), (0.0 if i == best else -1.0,), alone) for i in range(len(choices))], {}

    def prefill(self, text: str, chat: bool) -> None:
        self.prefixes.append(text)

    def _taken(self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints) -> str:
        text = conversation.text(self._template)
        with self._lock:
            self.prompts.append(text)
            self.hints.append(hints)
            self.samplings.append(sampling)
        self._during(text)
        return text
