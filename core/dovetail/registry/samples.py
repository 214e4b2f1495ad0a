"""Make contexts in which components can be built without a device and without a model, to check that they can be."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext, Match, PrefixCache
from dovetail.interfaces.experts import ExpertsContext
from dovetail.interfaces.grammar import GrammarContext
from dovetail.interfaces.logits import ProcessorContext
from dovetail.interfaces.mixer import MixerContext
from dovetail.interfaces.parsers import ParserContext
from dovetail.interfaces.policy import PolicyContext
from dovetail.interfaces.store import StoreContext
from dovetail.types import IntArray


class EmptyCache(PrefixCache):
    """Contain nothing."""

    def __init__(self) -> None:
        """Create the cache, which has no settings."""

    def match(self, tokens: IntArray, namespace: str = "") -> Match:
        """Return a match of no tokens."""
        return Match(0, _no_pages(), None)

    def insert(
        self,
        tokens: IntArray,
        pages: IntArray,
        namespace: str = "",
        priority: int = 0,
        states: IntArray | None = None,
    ) -> Match:
        """Keep nothing."""
        return Match(0, _no_pages(), None)

    def lock(self, handle: Any) -> None:
        """Do nothing."""

    def unlock(self, handle: Any) -> None:
        """Do nothing."""

    def evict(self, short: Sequence[int]) -> list[IntArray]:
        """Return no page."""
        return [np.zeros(0, np.int32)]

    def reset(self) -> list[IntArray]:
        """Return no page."""
        return [np.zeros(0, np.int32)]

    @property
    def evictable(self) -> tuple[int, ...]:
        """Return 0."""
        return (0,)

    @property
    def total(self) -> tuple[int, ...]:
        """Return 0."""
        return (0,)


def _no_pages() -> IntArray:
    return np.zeros((1, 0), np.int32)


def for_policy() -> PolicyContext:
    """Return a context with an empty prefix cache."""
    return PolicyContext(EmptyCache())


def for_cache() -> CacheContext:
    """Return a context of pages of 16 tokens."""
    return CacheContext(page_size=16)


def for_parser() -> ParserContext:
    """Return the context of a model without a chat template."""
    return ParserContext()


@functools.cache
def for_grammar() -> GrammarContext:
    """Return a context with the vocabulary of the embedded model."""
    from dovetail.tokenizer import Tokenizer

    tiny = Path(str(resources.files("dovetail"))) / "assets" / "tiny"
    tokenizer = Tokenizer.from_dir(tiny, tiny)
    eos = tuple(sorted(tokenizer.eos_token_ids))
    return GrammarContext(len(tokenizer.token_bytes), tokenizer.token_bytes, eos, tokenizer.json)


def for_logits() -> ProcessorContext:
    """Return the context of an engine on the CPU."""
    import torch

    return ProcessorContext(torch.device("cpu"), 4096, frozenset({2}))


def for_experts() -> ExpertsContext:
    """Return the context of an engine on the CPU."""
    import torch

    return ExpertsContext(torch.device("cpu"), torch.float32)


def for_mixer() -> MixerContext:
    """Return the context of an engine on the CPU."""
    import torch

    return MixerContext(torch.device("cpu"), torch.float32)


def for_store() -> StoreContext:
    """Return the context of an engine on the CPU."""
    import torch

    return StoreContext(16, torch.float8_e4m3fn, torch.device("cpu"), model_dtype=torch.bfloat16)


def for_api() -> None:
    """Return None: an API has no context."""
