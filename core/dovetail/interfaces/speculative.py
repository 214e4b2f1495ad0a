"""Drafters propose tokens; the core verifies them, exactly, whoever proposed them.

A drafter that runs a model of its own gets a ``DraftRuntime``: the target, loaders, and caches for keys and values. A draft cache has
the pages of the target's pool: the token at a place of a request has its KV there in both, so that whatever the prefix cache
keeps is kept for the drafter too, and rejected drafts are abandoned together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from pydantic import BaseModel

    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.types import Batch, BoolArray, DraftTree, ForwardOutput, IntArray, Req


class DraftPass(NamedTuple):
    """A pass of ``DraftCache.run``: row i has ``counts[i]`` tokens, at its places ``starts[i]`` and on (int32 ``[rows]``); rows that
    have none come last. ``kind`` says which of the ``DraftSteps.widths`` it keeps to. ``positions`` int32 ``[tokens]``: where tokens
    stand, if not at their places."""

    kind: int
    starts: IntArray
    counts: IntArray
    positions: IntArray | None = None


class DraftSteps(ABC):
    """What a drafter's model does in passes that follow each other, without the host in between. Where the attention backend
    can be captured, they are replayed as CUDA graphs: ``run`` must then not wait for the device, and its work must not depend
    on anything on the host but the sizes of what it is given."""

    widths: tuple[int, ...]
    """The most tokens of a row, for each kind of pass."""

    @abstractmethod
    def state(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Memory for ``rows`` rows, on the device: what passes read and leave to each other. The first dimension of each tensor
        is the rows'. Anything that it is filled with later, and zeros, must do as input."""

    @abstractmethod
    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """A pass: ``batch`` is planned, but for ``input_ids``. Token t of it is the one of index ``tokens[t]`` (int64) among the
        ``[rows, max(widths)]`` that the rows of ``state`` could have. Mutates ``state``. There may be more rows in ``state``, and more
        tokens in ``batch``, than the pass has: those read and write page 0, and what comes of them is dropped."""

    def mask(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Bool ``[rows, max(widths), max(widths)]``, a view of ``state``: which tokens of its row a token sees, and itself. None: those
        before it."""
        return None


class DraftCache(ABC):
    """KV of a drafter's model at the places of the target's, and the attention over it. Its memory is there once the engine
    is built: use it in ``propose`` and ``observe``, not in a constructor."""

    @abstractmethod
    def batch(
        self, slots: IntArray, starts: IntArray, counts: IntArray, *, tree: tuple[IntArray, BoolArray] | None = None
    ) -> Batch:
        """A planned batch for the drafter's model: row i is ``counts[i] >= 1`` tokens of the request in ``slots[i]`` (all int32
        ``[rows]``), at its places ``starts[i]`` and on; the keys before it are what the cache holds there. ``input_ids`` (int64
        ``[tokens]``) are left to the caller, everything else that ``ModelArchitecture.forward`` reads is set.

        With ``tree`` = (positions int32 ``[tokens]``, mask bool ``[tokens, longest row]``) the tokens stand at other positions
        than their places, and see of their own row's tokens what the mask says, as in ``AttentionBackend.plan``."""

    @abstractmethod
    def register(self, steps: DraftSteps) -> None:
        """``run`` will be called with ``steps``. Called in the constructor, as passes may be captured from then on."""

    @abstractmethod
    def run(
        self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run ``passes`` over the requests in ``slots`` (int32 ``[rows]``), beginning with ``state``, the same tensors as
        ``steps.state(rows)``, and return what they leave, valid until the next call. Mutates ``state``. Nothing waits for the
        device; no row writes to places that none of its tokens has."""


class DraftRuntime(ABC):
    """What the engine lends to a drafter that runs a model. Attributes are read-only."""

    target: ModelArchitecture
    """The target; those that offer model.hidden_states have ``embed_tokens``, and ``logits`` of hidden states like theirs."""
    directory: Path
    """The target's checkpoint."""
    checkpoint: Mapping[str, Any]
    """Its config.json, with ``model.overrides``."""
    dtype: torch.dtype
    """Of the target's weights and activations."""

    @abstractmethod
    def watch(self, layers: Sequence[int]) -> None:
        """From now on ``observe`` finds in ``batch.hidden`` the target's hidden states of these layers, see
        ``Batch.hidden``. Called in the constructor. Raises ``ConfigError`` for layers that the target does not have."""

    @abstractmethod
    def create_cache(self, info: ModelInfo) -> DraftCache:
        """A cache for a model of these heads and layers (its one cache group). Called in the constructor."""

    @abstractmethod
    def load(
        self, model: Callable[[ModelInfo], ModelArchitecture], info: ModelInfo, directory: Path, load_format: str
    ) -> ModelArchitecture:
        """Build ``model(info)`` on the target's device in its dtype, and fill it from the safetensors in ``directory``, or with
        random numbers where ``load_format`` is ``dummy``. Raises ``WeightsError``."""

    @abstractmethod
    def open(self, directory: Path, load_format: str) -> ModelArchitecture:
        """A whole model, by the installed architecture that its config.json names; ``model.info`` tells its vocabulary.
        Raises ``ConfigError`` and ``WeightsError``."""


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is built for. ``runtime`` is None where there is no engine: in the conformance suite of drafters that
    need none."""

    device: torch.device
    vocab_size: int
    max_rows: int
    max_context: int
    runtime: DraftRuntime | None = None


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

    @property
    def must_see_all(self) -> bool:
        """True if a request of which a step was not observed gets no drafts from then on, as for those that live on the
        target's hidden states. It is then not switched off for the sake of a comparison that it is sure to win."""
        return False

    @property
    def tokens_ahead(self) -> int:
        """How many of the tokens after a place its keys and values there depend on; 1 for a head. A cached prefix is then only one for
        texts that go on with the same so many tokens."""
        return 0

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree | None:
        """Drafts for the decode rows ``[num_extend, rows)`` of ``batch``, at most ``batch.draft_limits[r]`` (read-only) for row r;
        None where there are none at all; with ``probs`` if the drafter offers draft.probs. ``req.token_ids[:req.known_len]`` is each row's text so far, all of it known; the
        target's KV of all but the last token is in the pool, and pages are reserved for so many drafts behind it."""

    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Called after the commit of a step in which drafts may be asked for, with what was accepted; for drafters that learn
        or keep state. ``req.known_len`` has moved on; a request that has ended (``req.finish``) may be among them: nobody else
        has its pages yet. It may have been forgotten before, if the step was launched before its end was read: keep no state
        of it then. Steps that run without asking (because drafts do not pay at that load) are not observed: tokens of a
        request can be missing between one call and the next."""
        return

    def forget(self, req: Req) -> None:
        """The request has ended or was retracted: drop its state. One that was retracted and is admitted again, under the same
        ``uid``, is forgotten before any of it is shown again."""
        return
