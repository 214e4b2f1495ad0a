"""Block drafting in one pass: DFlash, block diffusion for flash speculative decoding (Chen et al. 2026, arXiv 2602.06036).

The drafter's keys and values of the text are made from hidden states of the target as tokens are committed. To draft, a block
of the text's last token and mask tokens goes through the drafter once, each seeing the text and all of the block, or where the
drafter is causal what is before it; what it says at each mask is the draft for that place.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.layers.drafts import chains, committed
from dovetail.ops.transfer import to_device
from dovetail_speculative.checkpoints import find_checkpoint, target_ids, tensor_names
from dovetail_speculative.dflash_checkpoint import DFlashShape, describe_dflash
from dovetail_speculative.dflash_model import DFlashModel

if TYPE_CHECKING:
    from dovetail.layers.drafts import Committed
    from dovetail.types import Batch, BoolArray, DraftTree, ForwardOutput, Req
    from dovetail_speculative.config import DFlashConfig

MISSED = -1
"""In place of a length: tokens of the request went unseen."""


class DFlashDrafter(Drafter):
    """Needs nothing of a request but the keys and values of its text in the room. A request of which a token was missed is not
    drafted for until it starts anew."""

    def __init__(self, config: DFlashConfig, context: DrafterContext) -> None:
        """Raises ``ConfigError`` for a checkpoint that does not fit the target."""
        runtime = context.runtime
        assert runtime is not None, "drafters that run a model are built by an engine"
        directory = find_checkpoint(runtime, config)
        names = frozenset() if config.load_format == "dummy" else tensor_names(directory)
        target = runtime.target.info
        info = describe_dflash(read_json(directory, "config.json"), target, context.max_context, names)
        self._shape: DFlashShape = info.config
        self._num_draft_tokens = _num_draft_tokens(config, self._shape)
        self._device = context.device
        runtime.watch([layer + 1 for layer in self._shape.layer_ids])
        self._room = runtime.room(info)
        build = partial(DFlashModel, target=runtime.target)
        self._model = cast("DFlashModel", runtime.load(build, info, directory, config.load_format))
        ids = target_ids(directory, names, self._shape.draft_vocab or target.vocab_size, target.vocab_size)
        self._target_ids = (
            None if ids is None else ids.to(context.device)
        )  # of the draft vocabulary, where it is another
        self._seen_lens: dict[int, int] = {}  # by uid: tokens of its text whose keys and values are in the room

    @property
    def max_draft_tokens(self) -> int:
        """``num_draft_tokens`` of the config, or all of a block."""
        return self._num_draft_tokens

    @property
    def must_see_all(self) -> bool:
        """True: every token's hidden states are needed."""
        return True

    @torch.inference_mode()
    def observe(self, batch: Batch, output: ForwardOutput) -> None:
        """Write keys and values of what is part of the text from now on."""
        new = committed(batch, output)
        if new is None:
            return
        seen = self._seen(batch, new)
        if not seen.any():
            return
        assert batch.hidden is not None, "the engine keeps the layers that are watched"
        index = new.index
        if not seen.all():
            index = index[to_device(np.flatnonzero(np.repeat(seen, new.counts)), self._device)]
        own = self._room.batch(batch.slots[new.rows[seen]], new.starts[seen], new.counts[seen])
        self._model.remember(own, batch.hidden.index_select(0, index))

    def _seen(self, batch: Batch, new: Committed) -> BoolArray:
        """Of which rows nothing was missed before."""
        seen = np.zeros(len(new.rows), np.bool_)
        for i, (row, start) in enumerate(zip(new.rows.tolist(), new.starts.tolist(), strict=True)):
            uid = batch.reqs[row].uid
            before = self._seen_lens.get(uid)
            seen[i] = start == before if before is not None else row < batch.num_extend
            self._seen_lens[uid] = start + int(new.counts[i]) if seen[i] else MISSED
        return seen

    @torch.inference_mode()
    def propose(self, batch: Batch) -> DraftTree | None:
        """A chain for each decode row of which every token was seen: all blocks in one pass."""
        assert batch.draft_room is not None, "pages were reserved for no drafts"
        rows = [row for row in range(batch.num_extend, len(batch.reqs)) if self._can_draft(batch, row)]
        if not rows:
            return None
        ends = np.array([batch.reqs[row].known_len - 1 for row in rows], np.int32)
        lens = np.minimum(batch.draft_room[rows], self._num_draft_tokens)
        counts = lens + np.int32(1)
        firsts = np.cumsum(counts) - counts
        tokens = np.full(int(counts.sum()), self._shape.mask_token_id, np.int64)
        tokens[firsts] = [batch.reqs[row].token_ids[end] for row, end in zip(rows, ends.tolist(), strict=True)]
        positions = np.arange(len(tokens)) + np.repeat(ends - firsts, counts)
        seen_to = np.arange(len(tokens)) - np.repeat(firsts, counts) if self._shape.causal else np.repeat(lens, counts)
        seen = np.arange(int(counts.max())) <= seen_to[:, None]
        own = self._room.batch(batch.slots[rows], ends, counts, tree=(positions.astype(np.int32), seen))
        own.input_ids = to_device(tokens, self._device)
        masks = to_device(np.delete(np.arange(len(tokens)), firsts), self._device)
        said = self._model.logits(self._model.forward(own).index_select(0, masks)).argmax(-1)
        if self._target_ids is not None:
            said = self._target_ids[said]
        drafts = np.split(said.cpu().numpy().astype(np.int32), np.cumsum(lens)[:-1])
        return chains(len(batch.reqs), dict(zip(rows, drafts, strict=True)))

    def _can_draft(self, batch: Batch, row: int) -> bool:
        assert batch.draft_room is not None
        req = batch.reqs[row]
        return batch.draft_room[row] > 0 and self._seen_lens.get(req.uid) == req.known_len - 1

    def forget(self, req: Req) -> None:
        """What its pages held is the prefix cache's, or nobody's."""
        self._seen_lens.pop(req.uid, None)


def _num_draft_tokens(config: DFlashConfig, shape: DFlashShape) -> int:
    most = shape.block_size - 1
    if config.num_draft_tokens is not None and config.num_draft_tokens > most:
        raise ConfigError(
            f"speculative.num_draft_tokens is {config.num_draft_tokens}; this drafter's blocks have {shape.block_size} tokens with the "
            f"text's last one: allowed: 1 to {most}"
        )
    return config.num_draft_tokens or most
