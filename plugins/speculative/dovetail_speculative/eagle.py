"""Draft with EAGLE heads: one layer that continues from the target's hidden states, in chains or in trees."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import DrafterContext, DraftRuntime
from dovetail.ops.transfer import to_device
from dovetail.types import DraftTree
from dovetail_speculative.checkpoints import find_checkpoint, target_ids, tensor_names
from dovetail_speculative.eagle_checkpoint import (
    Eagle3ConfigJson,
    EagleConfigJson,
    aux_layers,
    describe,
    parse,
)
from dovetail_speculative.eagle_heads import Eagle3Head, EagleHead, EagleModel
from dovetail_speculative.hidden import DraftRows, HiddenDrafter
from dovetail_speculative.speculators import flattened
from dovetail_speculative.tree_growth import Children, Trees, TreeSteps, best_of

if TYPE_CHECKING:
    from pathlib import Path

    from dovetail.types import Batch, IntArray
    from dovetail_speculative.config import Eagle3Config, Eagle3TreeConfig, EagleConfig, TreeShape


class EagleDrafterBase(HiddenDrafter):
    """Draft chains or trees with a head. Subclasses load the head."""

    def __init__(
        self, context: DrafterContext, head: EagleModel, num_draft_tokens: int, tree: TreeShape | None
    ) -> None:
        """Build the drafter. ``tree`` describes how trees grow; None makes chains."""
        runtime = _runtime(context)
        cache, size = runtime.create_cache(head.info), head.info.hidden_size
        accepted = num_draft_tokens if tree is None else tree.depth
        super().__init__(context, cache, size, num_draft_tokens, accepted=accepted, chains=tree is None)
        self.head = head
        self._growth: TreeSteps | None = None
        if tree is not None:
            self._growth = TreeSteps(tree, self.step, self._best, partial(_zeros, size, runtime.dtype, context.device))
            if tree.depth > 1:
                cache.register(self._growth)
        self._target_ids: torch.Tensor | None = None  # None if both vocabularies are the same

    @property
    def max_draft_tokens(self) -> int:
        """Return ``num_draft_tokens`` of the config, or, if that is more, the number of tokens that growing a tree
        needs pages for."""
        count = super().max_draft_tokens
        return count if self._growth is None else max(count, self._growth.shape.nodes - 1)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``EagleModel.enter``."""
        return self.head.enter(hidden)

    def step(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Run one pass of the head. See ``HiddenDrafter.step``."""
        batch.input_ids, batch.hidden = ids, hidden
        return self.head.forward(batch)

    def tokens(self, output: torch.Tensor) -> torch.Tensor:
        """See ``HiddenDrafter.tokens``."""
        return self._to_target_ids(self.head.logits(output).argmax(-1))

    def _to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self._target_ids is None else self._target_ids[ids]

    def draft(self, rows: DraftRows, outputs: torch.Tensor) -> DraftTree | None:
        """Return draft trees, or chains. See ``HiddenDrafter.draft``."""
        if self._growth is None:
            return super().draft(rows, outputs)
        widths, depths = fitted(self._growth.shape, rows.limits)
        counts = np.minimum(rows.limits, self._num_draft_tokens)
        sent = to_device(np.stack((widths, depths, counts)).astype(np.int64), self.device)
        trees = self._growth.begin(outputs, sent[0], sent[1])
        passes = self._growth.passes(rows.ends, widths, depths)
        if passes:
            trees = Trees(*self.cache.run(self._growth, rows.slots, passes, trees))
        most = min(int(counts.max()), self._growth.candidates)
        return _spread(best_of(trees, sent[2], most), rows)

    def _best(self, outputs: torch.Tensor) -> Children:
        assert self._growth is not None
        best = self.head.logits(outputs).float().log_softmax(-1).topk(self._growth.shape.topk, -1)
        return self._to_target_ids(best.indices), best.values


class EagleDrafter(EagleDrafterBase):
    """Draft with EAGLE-2: the head of EAGLE-1, and trees that grow at their most probable nodes."""

    def __init__(self, config: EagleConfig, context: DrafterContext) -> None:
        runtime = _runtime(context)
        directory = find_checkpoint(runtime, config)
        given = read_json(directory, "config.json")
        head = parse(given, EagleConfigJson)
        _check_size("hidden_size", head.hidden_size, runtime)
        info = describe(head, given, _names(directory, config.load_format), context)
        build = partial(EagleHead, target=runtime.target)
        model = cast("EagleHead", runtime.load(build, info, directory, config.load_format))
        super().__init__(context, model, config.most, config.tree)
        runtime.watch((runtime.target.info.num_layers,))


class Eagle3Drafter(EagleDrafterBase):
    """Draft with EAGLE-3, in chains or in trees."""

    def __init__(self, config: Eagle3Config | Eagle3TreeConfig, context: DrafterContext) -> None:
        runtime = _runtime(context)
        directory = find_checkpoint(runtime, config)
        given = flattened(read_json(directory, "config.json"), "eagle3")
        head = parse(given, Eagle3ConfigJson)
        size = "hidden_size" if head.target_hidden_size is None else "target_hidden_size"
        _check_size(size, head.target_hidden_size or head.hidden_size, runtime)
        info = describe(head, given, _names(directory, config.load_format), context)
        count = head.draft_vocab_size or head.vocab_size
        build = partial(Eagle3Head, target=runtime.target, draft_vocab=count)
        model = cast("Eagle3Head", runtime.load(build, info, directory, config.load_format))
        super().__init__(context, model, config.most, config.tree)
        ids = target_ids(directory, info.config.names, count, head.vocab_size)
        self._target_ids = None if ids is None else ids.to(context.device)
        runtime.watch(aux_layers(head, runtime.target.info.num_layers))


def _zeros(size: int, dtype: torch.dtype, device: torch.device, count: int) -> torch.Tensor:
    return torch.zeros(count, size, dtype=dtype, device=device)


def _runtime(context: DrafterContext) -> DraftRuntime:
    assert context.runtime is not None, "drafters that run a model are built by an engine"
    return context.runtime


def _check_size(key: str, size: int, runtime: DraftRuntime) -> None:
    needed = runtime.target.info.hidden_size
    if size != needed:
        raise ConfigError(
            f"config.json of the drafter: {key} is {size}; the target's hidden states have {needed}. A head works only with the "
            "target that it was trained for"
        )


def _names(directory: Path, load_format: str) -> frozenset[str]:
    return frozenset() if load_format == "dummy" else tensor_names(directory)


def fitted(tree: TreeShape, limits: IntArray) -> tuple[IntArray, IntArray]:
    """Return how wide and how deep trees can be if there are pages for ``limits [rows]`` drafts, at least 1 each.

    If there are few pages, trees become narrow before they become shallow. The keys of the nodes that the head runs on
    begin at the index of the text's last token.
    """
    places = limits + 1
    widths = np.clip(places // max(tree.depth - 1, 1), 1, tree.topk)
    depths = np.minimum(np.minimum(tree.depth, 1 + places // widths), limits)
    return widths.astype(np.int32), depths.astype(np.int32)


def _spread(found: torch.Tensor, rows: DraftRows) -> DraftTree:
    """Return the trees that ``best_of`` found for ``rows``, as a tree for all rows of the batch. Waits for the
    device."""
    drafts = found.cpu().numpy().astype(np.int32)
    most = drafts.shape[1] // 3
    spread = np.zeros((rows.total, drafts.shape[1]), np.int32)
    spread[rows.rows] = drafts
    lens, ids, parents, bits = np.split(spread, [1, 1 + most, 1 + 2 * most], 1)
    return DraftTree(ids, parents, lens[:, 0], bits.view(np.float32))
