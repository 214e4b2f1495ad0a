"""Define the interface of drafters, which propose the tokens that the engine verifies with the target model.

Verification is exact for every drafter (see ``Drafter``). A drafter that runs a model gets a ``DraftRuntime`` from the
engine. The runtime provides the target model, functions that load weights, and draft caches, which hold the keys and
values of the drafter's model. A draft cache has as many pages as the target's KV pool and uses the same page table: the
KV of the token at index i of a request is at the same location in both. The pages that the prefix cache keeps therefore
hold the KV of both models, and when drafts are rejected, the KV of both is discarded together.

In this module, the index of a token counts the tokens of its request from 0: it selects the location of the token's KV.
The position of a token is what rotary embedding, attention and windows use. They differ for the nodes of a draft tree
only.
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

    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.types import Batch, BoolArray, Committed, DepartedRequest, DraftTree, ForwardOutput, IntArray


class DraftPass(NamedTuple):
    """Describe one forward pass of a drafter's model, as ``DraftCache.run`` takes it.

    Row i has ``counts[i]`` tokens at indices ``starts[i]``, ``starts[i] + 1`` and so on (both int32 ``[rows]``). Rows
    with a count of 0 come after all other rows. ``kind`` is an index into ``DraftSteps.widths``: no row has more tokens
    than that width. ``positions`` (int32 ``[tokens]``) are the positions of the tokens; None means that they equal the
    indices.
    """

    kind: int
    starts: IntArray
    counts: IntArray
    positions: IntArray | None = None


class DraftSteps(ABC):
    """Run a drafter's model in passes that follow each other without the host between them.

    Where the attention backend can be captured, the passes are replayed as CUDA graphs. ``run`` must therefore not wait
    for the device, and its work must not depend on anything on the host but the sizes of its arguments.
    """

    widths: tuple[int, ...]
    """Hold the largest number of tokens that a row can have, for each kind of pass."""

    @abstractmethod
    def state(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Allocate the state of ``rows`` rows on the device: the tensors that passes read and write.

        The first dimension of every tensor is ``rows``. ``run`` must accept any values in these tensors: the values as
        returned, zeros, and whatever earlier passes left. The engine runs it on such values when it captures a graph,
        and for the rows of a graph that the step does not fill.
        """

    @abstractmethod
    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Run one pass of kind ``kind`` (an index into ``widths``). Mutates ``state`` and the draft cache.

        ``batch`` is planned, and all of its fields that a model reads are set except ``input_ids``. ``tokens`` (int64
        ``[tokens]``) maps the tokens of ``batch`` to the state: token t is number ``tokens[t]`` of the flattened
        ``[rows, max(widths)]`` tokens that the rows of ``state`` could have.

        ``state`` may have more rows, and ``batch`` more tokens, than the pass has. These additional tokens read and
        write page 0, and their results are ignored.
        """

    def mask(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """Return the tree mask of the passes, or None if every token sees itself and the tokens before it.

        The mask is bool ``[rows, max(widths), max(widths)]`` and a view of ``state``: entry ``[r, i, j]`` is True if
        token i of row r sees token j of the same row. Every token must see itself.
        """
        return None


class DraftCache(ABC):
    """Hold the KV of a drafter's model, and run passes with attention over it.

    It has the pages of the target's KV pool. Its memory is allocated when the engine has been built, after the
    drafter's constructor has returned. The constructor may therefore call ``register`` only; ``batch`` and ``run`` are
    for ``propose`` and ``observe``. KV that was never written reads as zeros.
    """

    @abstractmethod
    def batch(
        self, slots: IntArray, starts: IntArray, counts: IntArray, *, tree: tuple[IntArray, BoolArray] | None = None
    ) -> Batch:
        """Return a planned batch for the drafter's model.

        Row i has ``counts[i] >= 1`` tokens of the request in slot ``slots[i]``, at indices ``starts[i]``,
        ``starts[i] + 1`` and so on (all int32 ``[rows]``). It attends to the KV that this cache holds for the request's
        tokens before ``starts[i]``. The caller must set ``input_ids`` (int64 ``[tokens]``); all other fields that
        ``ModelArchitecture.forward`` reads are set. With data-parallel attention these include ``own``: layers of attention
        compute, read and write the KV of these rows only.

        With ``tree`` = (positions int32 ``[tokens]``, mask bool ``[tokens, longest row]``) the tokens have these
        positions, and see those tokens of their own row that the mask allows, as in ``AttentionBackend.plan``.
        """

    @abstractmethod
    def register(self, steps: DraftSteps) -> None:
        """Declare that ``run`` will be called with ``steps``.

        The drafter calls this in its constructor, because the engine may capture the passes of ``steps`` from then on.
        """

    @abstractmethod
    def run(
        self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Run ``passes`` one after the other over the requests in ``slots``, and return the final state.

        ``slots`` is int32 ``[rows]``. ``state`` is the initial state, with the shapes and dtypes of
        ``steps.state(rows)``. It may be mutated. The returned tensors are valid until the next call. The host does not
        wait for the device. A row writes KV only at the indices of its own tokens.
        """


class DraftRuntime(ABC):
    """Provide what the engine offers to a drafter that runs a model. The attributes are read-only."""

    target: ModelArchitecture
    """Hold the target model. A model that offers ``model.hidden_states`` has ``embed_tokens``, and its ``logits`` can
    be applied to the hidden states of a drafter that predicts the target's."""
    directory: Path
    """Hold the directory of the target's checkpoint."""
    checkpoint: Mapping[str, Any]
    """Hold the target's config.json, with ``model.overrides`` applied."""
    dtype: torch.dtype
    """Hold the dtype of the target's weights and activations."""

    @abstractmethod
    def watch(self, layers: Sequence[int]) -> None:
        """Request the target's hidden states of ``layers``, whose numbers ``ModelArchitecture.forward`` defines.

        ``Drafter.observe`` finds them in ``batch.hidden``, in this order, in every step from now on. The drafter calls
        this once, in its constructor. Raises ``ConfigError`` if the target does not have these layers or does not offer
        ``model.hidden_states``.
        """

    @abstractmethod
    def create_cache(self, info: ModelInfo) -> DraftCache:
        """Create a draft cache for a model with the heads and layers of the one cache group of ``info``.

        The drafter calls this in its constructor. Raises ``ConfigError`` if ``info`` has several cache groups, or if
        the attention backends do not support its ``head_dim`` or ``needs``.
        """

    @abstractmethod
    def load(
        self, model: Callable[[ModelInfo, Mesh], ModelArchitecture], info: ModelInfo, directory: Path, load_format: str
    ) -> ModelArchitecture:
        """Build ``model(info, mesh)`` on the target's device and in its dtype, and load its weights.

        The weights come from the safetensors files in ``directory``, or are random numbers if ``load_format`` is
        ``dummy``. ``mesh`` is the target's. If ``directory`` is the target's and its checkpoint is quantized, layers of the model
        are quantized alike. Raises ``WeightsError`` if the files do not fit the model, and
        ``ConfigError`` if the ranks of ``mesh`` cannot divide it.
        """

    @abstractmethod
    def open(self, directory: Path, load_format: str) -> ModelArchitecture:
        """Load a complete model, with the installed architecture that its config.json names, and with the installed
        quantization that can load its ``quantization_config``, if it has one.

        ``model.info.vocab_size`` of the returned model is the size of its own vocabulary, which may differ from the
        target's. Raises ``ConfigError`` if there is no config.json or no installed architecture or quantization fits, and
        ``WeightsError`` like ``load``.
        """


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """Describe the engine that a drafter is built for.

    ``vocab_size`` is the number of tokens of the target, ``max_rows`` the largest number of rows of a batch,
    ``max_context`` the largest number of tokens of a request. ``runtime`` is None where there is no engine, as in the
    conformance suite of drafters that do not run a model.
    """

    device: torch.device
    vocab_size: int
    max_rows: int
    max_context: int
    runtime: DraftRuntime | None = None


class Drafter(ABC):
    """Propose the next tokens of running requests. A wrong draft costs time and never changes an output.

    The target samples a token at every drafted position, with the request's own parameters and random numbers. A draft
    is accepted if it equals that sample. The outputs are therefore the same as without drafts.

    The loop calls ``propose``, ``observe`` and ``forget`` on one thread. If one of them raises an exception, the loop
    logs and counts it, and the requests go on; after an exception in ``propose`` the step runs without drafts.
    """

    def __init__(self, config: BaseModel, context: DrafterContext) -> None:
        """Build the drafter. ``config`` is its own config section.

        The engine builds it after the target model and before it sizes the KV pool. Raises ``ConfigError`` or
        ``WeightsError`` if it cannot draft for this target.
        """

    @property
    @abstractmethod
    def max_draft_tokens(self) -> int:
        """Return the largest number of nodes in the draft tree of a row. The scheduler reserves pages for them."""

    @property
    def must_see_all(self) -> bool:
        """Return True if the drafter cannot draft for a request any more after one unobserved step of that request.

        This is the case for drafters that need the target's hidden states of every token. While drafts clearly pay, the
        loop does not run steps without such a drafter only to measure them.
        """
        return False

    @property
    def tokens_ahead(self) -> int:
        """Return how many following tokens the drafter's keys and values of a token depend on.

        It is 1 for an EAGLE head. The prefix cache then reuses a cached prefix only for requests whose next
        ``tokens_ahead`` tokens after the prefix are the same.
        """
        return 0

    @abstractmethod
    def propose(self, batch: Batch) -> DraftTree | None:
        """Return drafts for the decode rows ``[num_extend, rows)`` of ``batch``, or None if no row gets a draft.

        The loop calls this after the batch was scheduled and before its forward pass. Row r gets at most
        ``batch.draft_limits[r]`` drafts (the array is read-only); the pages of these drafts are reserved. Further drafts,
        and siblings from a drafter that does not offer ``draft.tree``, are cut off and counted as an error.

        The text of decode row r is ``batch.reqs[r].token_ids[: batch.prefix_lens[r] + 1]``; the host knows all of these
        tokens. The target's KV of all of them but the last is in the pool. Later entries of ``token_ids`` may hold
        anything. The host knows the first ``batch.known_lens[r]`` tokens of extend row r.

        The tree has ``probs`` if and only if the drafter offers ``draft.probs``. Must not mutate ``batch`` or its
        requests.
        """

    def observe(self, batch: Batch, output: ForwardOutput, committed: Committed) -> None:
        """Learn which drafts a step accepted. Drafters override this if they learn from outputs or keep state of
        requests.

        The loop calls this after it has committed a step in which drafts could have been requested. The text of row r
        is now ``batch.reqs[r].token_ids[: committed.known_lens[r]]``, which includes the accepted tokens. Steps that
        run without the drafter, because drafts do not pay at that load, are not observed, so tokens of a request can be
        missing between two calls.

        A request that has ended (``committed.ended[r]``) may be in ``batch``. Its pages have not been given to another
        request yet. If the step was launched before the end of the request was known, ``forget`` may have been called
        for it before: keep no state of such a request.
        """
        return

    def forget(self, request: DepartedRequest) -> None:
        """Drop the state of a request that has ended or was retracted.

        The text of the request was ``token_ids[: request.known_len]`` of the ``AdmittedRequest`` that the drafter saw.
        A retracted request that is admitted again has the same ``uid``. The loop calls this before the drafter sees
        such a request again. The drafter may have no state of the request, and may never have seen it.
        """
        return
