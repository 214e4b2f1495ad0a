"""Define what a program needs from a model, independently of where the model runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dovetail.errors import RequestError
from dovetail.lang.choices import Scored
from dovetail.lang.conversation import Conversation, Template
from dovetail.lang.ir import SamplingOptions

OnText = Callable[[str], None]
"""Called with each piece of text as it becomes final, in the thread that generates."""


@dataclass(frozen=True, slots=True)
class ReuseHints:
    """Announce which prefixes other requests will reuse, so that the engine keeps them cached.

    Requests of one ``group`` (``group_size`` requests) have a common prefix and arrive at the same time. The next
    request of a ``session`` continues where this request ends.
    """

    group: str = ""
    group_size: int = 1
    session: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """Hold one output. ``meta`` is what ``get_meta_info`` returns, with the names of the native API."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Features:
    """Describe what a backend can do in addition to generating.

    ``scores``: return log-probabilities of given text (``select``). ``prefills``: compute a prefix ahead. ``images``:
    accept pictures. ``continues``: continue an assistant message that has begun. ``constraints``: the kinds of
    constraints that it can apply to outputs.
    """

    scores: bool = False
    prefills: bool = False
    images: bool = False
    continues: bool = True
    constraints: frozenset[str] = frozenset()


class Backend(ABC):
    """Give programs access to a model, from many threads at once.

    Every call returns, or raises a ``DovetailError``: ``RequestError`` if the request is wrong, ``EngineError`` if the
    model failed or the backend was closed in the meantime.
    """

    features: ClassVar[Features] = Features()

    @abstractmethod
    def template(self) -> Template:
        """Return the function that renders conversations. Raises ``RequestError`` if the model has no chat template."""

    @abstractmethod
    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """Continue ``conversation`` with ``sampling.n`` outputs (by default 1).

        ``on_text`` is called with pieces of the first output as it grows; the pieces joined are its text.
        """

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        """Return the log-probabilities of each of ``choices`` after ``conversation``, and what ``get_meta_info``
        returns for the calls.

        The text of the conversation is computed once.
        """
        raise RequestError(
            f"{self!r} returns no log-probabilities of a given text, which select needs; use gen(...) instead"
        )

    def prefill(self, text: str, chat: bool) -> None:
        """Compute ``text`` ahead, so that prompts that begin with it find it cached.

        ``chat`` is True if a template rendered it. Does nothing if ``features.prefills`` is False.
        """

    def flush_cache(self) -> None:
        """Remove every cached prefix. Raises ``EngineError`` while requests are running."""
        raise RequestError(f"the cache of {self!r} cannot be emptied through its API")

    def server_info(self) -> dict[str, Any]:
        """Return what the backend reports about the system on which the model runs."""
        raise RequestError(f"{self!r} does not report what it runs on")

    def close(self) -> None:
        """End running calls with an error, and release threads and connections. May be called twice."""

    def check(self, conversation: Conversation, sampling: SamplingOptions) -> None:
        """Raise ``RequestError`` if the prompt or the constraint needs a feature that this backend does not have."""
        features = self.features
        if conversation.images and not features.images:
            raise RequestError(
                f"{self!r} does not accept pictures; leave image(...) out, or use a backend of a vision model"
            )
        kind = sampling.constraint[0] if sampling.constraint else None
        if kind is not None and kind not in features.constraints:
            allowed = ", ".join(sorted(features.constraints)) or "none"
            raise RequestError(f"{self!r} cannot constrain an output with {kind}; allowed: {allowed}", param=kind)
        message = conversation.open
        if not features.continues and message is not None and message.role == "assistant" and message.parts:
            raise RequestError(
                f"{self!r} cannot continue a message that has begun ({message.text!r:.60}); put gen(...) first in "
                "assistant(...)"
            )

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joined_scores(prompt: Sequence[int], per_choice: Sequence[Sequence[tuple[int, float]]]) -> list[Scored]:
    """Return the tokens of each choice with their log-probabilities.

    ``prompt`` holds the tokens of the prompt alone, and ``per_choice`` the tokens of the prompt with each choice, all
    starting at the same position. The text before a choice may be tokenized differently with the choice. Therefore all
    choices are scored from the first token in which any of them differs from the prompt.
    """
    same = min(common_prefix_length(prompt, [token for token, _ in tokens]) for tokens in per_choice)
    return [Scored(tuple(t for t, _ in tokens[same:]), tuple(p for _, p in tokens[same:])) for tokens in per_choice]


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
