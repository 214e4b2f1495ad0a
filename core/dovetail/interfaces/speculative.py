"""Drafters propose tokens; the core verifies them, exactly, whoever proposed them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from dovetail.types import Batch, DraftTree, ForwardOutput, Req


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built for."""

    device: torch.device
    vocab_size: int
    max_rows: int
    max_context: int


class Drafter(ABC):
    """Proposes what a request may say next. A wrong proposal costs time, never correctness.

    The target samples at every drafted position with the request's own parameters and random numbers; a draft is
    accepted where it equals the sample, so that outputs are those of decoding without drafts.
    """

    def __init__(self, config: BaseModel, context: DrafterContext) -> None:
        """``config`` is this drafter's own section."""

    @property
    @abstractmethod
    def max_draft_tokens(self) -> int:
        """The most nodes that a row's tree can have; the scheduler reserves pages for them."""

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree | None:
        """Drafts for the decode rows ``[num_extend, rows)`` of ``batch``, at most ``batch.draft_room[r]`` for row r;
        None where there are none at all. ``req.token_ids[:req.known_len]`` is each row's text so far."""

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Called after each commit with what was accepted; for drafters that learn or keep state."""
        return

    def forget(self, req: Req) -> None:
        """The request has ended or was retracted: drop its state."""
        return
