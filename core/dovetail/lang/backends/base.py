"""What a program needs of a model, wherever it runs."""

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
    """What the engine may make use of: requests of one ``group`` (``group_size`` of them) have a common prefix and come
    at once; the next request of a ``session`` goes on where this one ends."""

    group: str = ""
    group_size: int = 1
    session: str = ""


@dataclass(frozen=True, slots=True)
class Generated:
    """One output. ``meta`` is what ``get_meta_info`` shows, with the names of the native API."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Features:
    """What a backend can do beyond generating. ``scores``: log-probabilities of given text (``select``); ``prefills``: compute
    a prefix ahead; ``images``: take pictures; ``continues``: go on with an assistant's message that has begun;
    ``constraints``: the kinds of constraint that it holds outputs to."""

    scores: bool = False
    prefills: bool = False
    images: bool = False
    continues: bool = True
    constraints: frozenset[str] = frozenset()


class Backend(ABC):
    """A model that programs can call, from many threads at once.

    Every call returns, or raises a ``DovetailError``: ``RequestError`` where the request is wrong, ``EngineError`` where the
    model failed or the backend was closed meanwhile.
    """

    features: ClassVar[Features] = Features()

    @abstractmethod
    def template(self) -> Template:
        """How conversations are written out. Raises ``RequestError`` where the model has no chat template."""

    @abstractmethod
    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """Go on with ``conversation``: ``sampling.n`` outputs (by default 1). ``on_text`` hears the first as it grows; the
        pieces joined are its text."""

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        """The log-probabilities of each of ``choices`` after ``conversation``, whose text is computed once; and what
        ``get_meta_info`` shows of the calls."""
        raise RequestError(
            f"{self!r} does not tell how likely a given text is, which select needs; ask with gen(...) instead"
        )

    def prefill(self, text: str, chat: bool) -> None:
        """Compute ``text`` ahead, so that prompts which begin with it find it cached. ``chat``: a template wrote it. Does
        nothing where ``features.prefills`` is False."""

    def flush_cache(self) -> None:
        """Forget every prefix. Raises ``EngineError`` while requests are running."""
        raise RequestError(f"the cache of {self!r} cannot be emptied from here")

    def server_info(self) -> dict[str, Any]:
        """What the model runs on."""
        raise RequestError(f"{self!r} tells nothing of what it runs on")

    def close(self) -> None:
        """End what is still running, with an error, and let go of threads and connections. May be called twice."""

    def check(self, conversation: Conversation, sampling: SamplingOptions) -> None:
        """Raise ``RequestError`` where the prompt or the constraint asks for what this backend does not have."""
        features = self.features
        if conversation.images and not features.images:
            raise RequestError(f"{self!r} takes no pictures; leave image(...) out, or use a backend of a vision model")
        kind = sampling.constraint[0] if sampling.constraint else None
        if kind is not None and kind not in features.constraints:
            allowed = ", ".join(sorted(features.constraints)) or "none"
            raise RequestError(f"{self!r} cannot hold an output to a {kind}; it knows: {allowed}", param=kind)
        message = conversation.open
        if not features.continues and message is not None and message.role == "assistant" and message.parts:
            raise RequestError(
                f"{self!r} cannot go on with a message that has begun ({message.text!r:.60}); let gen(...) come first "
                "in assistant(...)"
            )

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def joined_scores(prompt: Sequence[int], per_choice: Sequence[Sequence[tuple[int, float]]]) -> list[Scored]:
    """Of each choice its tokens with their log-probabilities. ``prompt`` and ``per_choice`` are the tokens of the prompt alone and
    with each choice, from one and the same place on. The text before a choice may be cut into other tokens with it: all
    choices count from the first token in which any of them differs from the prompt."""
    same = min(same_tokens(prompt, [token for token, _ in tokens]) for tokens in per_choice)
    return [Scored(tuple(t for t, _ in tokens[same:]), tuple(p for _, p in tokens[same:])) for tokens in per_choice]


def same_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning on."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differ, min(len(first), len(second)))
