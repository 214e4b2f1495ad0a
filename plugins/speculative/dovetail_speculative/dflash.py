"""Draft a block of tokens in one pass: DFlash, block diffusion for flash speculative decoding (Chen et al. 2026, arXiv
2602.06036).

The drafter computes its keys and values of a text from hidden states of the target, as tokens are committed. To draft,
a block of the text's last token and mask tokens goes through the drafter once. Each token of the block sees the text
and the whole block, or, if the drafter is causal, the text and the part of the block before it. The prediction at each
mask is the draft for its place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import Drafter, DrafterContext, DraftPass, DraftSteps
from dovetail.ops.transfer import to_device
from dovetail_speculative.checkpoints import find_checkpoint, target_ids, tensor_names
from dovetail_speculative.dflash_checkpoint import DFlashShape, describe_dflash
from dovetail_speculative.dflash_model import DFlashModel
from dovetail_speculative.observed import ObservedTexts
from dovetail_speculative.steps import TextSteps, chains

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.types import Batch, Committed, DepartedRequest, DraftTree, ForwardOutput
    from dovetail_speculative.config import DFlashConfig
    from dovetail_speculative.steps import CommittedTokens


class Blocks(NamedTuple):
    """Hold the state of blocks.

    ``ids [rows, width]`` are their tokens, and ``predicted [rows, width]`` the model's most likely token at each. Bool
    ``seen [rows, width, width]`` tells which tokens of its block each token sees.
    """

    ids: torch.Tensor
    predicted: torch.Tensor
    seen: torch.Tensor


class BlockSteps(DraftSteps):
    """Run the single pass over blocks of up to ``width`` tokens."""

    def __init__(
        self, predict: Callable[[Batch], torch.Tensor], width: int, shape: DFlashShape, device: torch.device
    ) -> None:
        """Build the pass. ``predict`` runs the model and returns the most likely token at each token of a batch: int64
        ``[tokens]``."""
        self.widths = (width,)
        self._predict, self._shape, self._device = predict, shape, device

    def state(self, rows: int) -> Blocks:
        """Return blocks of mask tokens. See ``DraftSteps.state``."""
        (width,) = self.widths
        ids = torch.full((rows, width), self._shape.mask_token_id, device=self._device)
        seen = torch.ones(rows, width, width, dtype=torch.bool, device=self._device)
        return Blocks(ids, torch.zeros_like(ids), seen.tril_() if self._shape.causal else seen)

    def mask(self, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """See ``DraftSteps.mask``."""
        return Blocks(*state).seen

    def run(self, kind: int, batch: Batch, tokens: torch.Tensor, state: tuple[torch.Tensor, ...]) -> None:
        """Run the model and store its predictions. See ``DraftSteps.run``.

        The predictions of a graph's padding tokens are written to the first token of a block, whose prediction is not
        used.
        """
        blocks = Blocks(*state)
        batch.input_ids = blocks.ids.flatten().index_select(0, tokens)
        blocks.predicted.view(-1).index_copy_(0, tokens, self._predict(batch))


class DFlashDrafter(Drafter):
    """Draft blocks with a DFlash model.

    The only state of a request is the KV of its text in the draft cache. If a token of a request was not observed, the
    request gets no drafts until it starts again.
    """

    def __init__(self, config: DFlashConfig, context: DrafterContext) -> None:
        """Load the drafter. Raises ``ConfigError`` if the checkpoint does not fit the target."""
        runtime = context.runtime
        assert runtime is not None, "drafters that run a model are built by an engine"
        directory = find_checkpoint(runtime, config)
        names = frozenset() if config.load_format == "dummy" else tensor_names(directory)
        target = runtime.target.info
        info = describe_dflash(read_json(directory, "config.json"), target, context.max_context, names)
        self._shape: DFlashShape = info.config
        _check_layers(self._shape.layer_ids, target.num_layers)
        self._num_draft_tokens = _num_draft_tokens(config, self._shape)
        self._device = context.device
        runtime.watch([layer + 1 for layer in self._shape.layer_ids])
        self._cache = runtime.create_cache(info)
        build = partial(DFlashModel, target=runtime.target)
        self._model = cast("DFlashModel", runtime.load(build, info, directory, config.load_format))
        ids = target_ids(directory, names, self._shape.draft_vocab or target.vocab_size, target.vocab_size)
        # The target's token of each token of the draft vocabulary; None if both vocabularies are the same.
        self._target_ids = None if ids is None else ids.to(context.device)
        width, size = 1 + self._num_draft_tokens, len(self._shape.layer_ids) * target.hidden_size
        self._texts = TextSteps(self._store_context, width, (size, 0), runtime.dtype, context.device)
        self._block = BlockSteps(self._predict, width, self._shape, context.device)
        self._cache.register(self._texts)
        self._cache.register(self._block)
        self._observed = ObservedTexts()

    @property
    def max_draft_tokens(self) -> int:
        """Return ``num_draft_tokens`` of the config; by default, the size of a block less one."""
        return self._num_draft_tokens

    @property
    def must_see_all(self) -> bool:
        """Return True: the hidden states of every token are needed."""
        return True

    @torch.inference_mode()
    def observe(self, batch: Batch, output: ForwardOutput, committed: Committed) -> None:
        """Write the keys and values of the tokens that were committed."""
        new = self._observed.take(batch, output, committed)
        if new is not None:
            self._read(batch, new)
            self._observed.finish(batch, new)

    def _read(self, batch: Batch, new: CommittedTokens) -> None:
        assert batch.hidden is not None, "the engine keeps the layers that are watched"
        slots, counts = batch.slots[new.rows], new.counts
        few = int(counts.max()) <= self._texts.widths[-1]
        arrays = [new.index, new.next_ids, *([self._texts.places(counts)] if few else [])]
        index, next_ids, *places = to_device(np.stack(arrays), self._device)
        features = batch.hidden.index_select(0, index)
        if few:
            self._texts.take(self._cache, (slots, new.starts, counts), places[0], next_ids, features)
        else:
            self._model.store_context(self._cache.batch(slots, new.starts, counts), features)

    def _store_context(self, batch: Batch, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        self._model.store_context(batch, features)
        return features[:, :0]  # there is no output

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """Return a chain for each decode row whose tokens were all observed. All blocks run in one pass."""
        assert batch.draft_limits is not None, "no pages were reserved for drafts"
        limits = batch.draft_limits.tolist()
        rows = self._observed.draft_rows(batch, limits)
        if not rows:
            return None
        ends = batch.prefix_lens[rows]
        lens = np.minimum(batch.draft_limits[rows], self._num_draft_tokens)
        state = self._block.state(len(rows))
        lasts = np.array([batch.reqs[row].token_ids[batch.prefix_lens[row]] for row in rows], np.int64)
        state.ids[:, 0] = to_device(lasts, self._device)
        passes = [DraftPass(0, ends, (lens + 1).astype(np.int32))]
        predicted = self._cache.run(self._block, batch.slots[rows], passes, state)[1]
        drafts = predicted.cpu().numpy().astype(np.int32)
        return chains(len(limits), {row: drafts[i, 1 : 1 + lens[i]] for i, row in enumerate(rows)})

    def _predict(self, batch: Batch) -> torch.Tensor:
        predicted = self._model.logits(self._model.forward(batch)).argmax(-1)
        return predicted if self._target_ids is None else self._target_ids[predicted]

    def forget(self, request: DepartedRequest) -> None:
        """Drop the request's state. Its pages belong to the prefix cache or are free."""
        self._observed.forget(request.uid)


def _check_layers(layer_ids: tuple[int, ...], count: int) -> None:
    if max(layer_ids) >= count:
        raise ConfigError(
            f"config.json of the drafter names layers {list(layer_ids)} of its target, counted from 0; this target has {count} layers. "
            "A drafter works only with the target that it was trained for"
        )


def _num_draft_tokens(config: DFlashConfig, shape: DFlashShape) -> int:
    most = shape.block_size - 1
    if config.num_draft_tokens is not None and config.num_draft_tokens > most:
        raise ConfigError(
            f"speculative.num_draft_tokens is {config.num_draft_tokens}; a block of this drafter has {shape.block_size} tokens, one of "
            f"which is the text's last token; allowed: 1 to {most}"
        )
    return config.num_draft_tokens or most
