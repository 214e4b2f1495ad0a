"""Draft with the target's own layers for further tokens: multi-token prediction as in DeepSeek-V3 (arXiv 2412.19437,
section 2.2), GLM-4.5, Qwen3-Next and MiMo."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces.speculative import DrafterContext
from dovetail.ops.transfer import to_device
from dovetail_speculative.hidden import DraftRows, HiddenDrafter
from dovetail_speculative.mtp_checkpoint import describe_mtp, target_layer
from dovetail_speculative.mtp_model import MtpModel
from dovetail_speculative.steps import chains

if TYPE_CHECKING:
    from dovetail.types import Batch, Committed, DraftTree, ForwardOutput, IntArray
    from dovetail_speculative.config import MtpConfig

SINGLE_LAYER_DRAFTS = 3
"""The default number of drafts with a single layer, which is applied to its own output."""


class MtpDrafter(HiddenDrafter):
    """Draft with layers that predict further tokens.

    A single layer makes all drafts. If there are several layers, each makes one draft: layer d at index i reads the
    token at i + 1 + d and the output of layer d - 1 at i.

    Layer d is d indices behind the first layer: a step that commits the tokens up to index i + 1 runs it up to index i
    - d. The last outputs of all layers are kept together.
    """

    def __init__(self, config: MtpConfig, context: DrafterContext) -> None:
        """Load the layers. Raises ``ConfigError`` if they are not implemented."""
        runtime = context.runtime
        assert runtime is not None, "drafters that run a model are built by an engine"
        target, directory = runtime.target.info, runtime.directory
        source = None if config.load_format == "dummy" else directory
        assert isinstance(runtime.target, nn.Module)
        info = describe_mtp(runtime.checkpoint, source, target, context.max_context, target_layer(runtime.target))
        runtime.watch([info.config.watch])
        count, layers = _num_draft_tokens(config, info.num_layers), info.num_layers
        one = layers == 1  # several layers are run by the host, one at a time
        size, accepted = layers * info.hidden_size, count if one else None
        super().__init__(context, runtime.create_cache(info), size, count, accepted=accepted, chains=one)
        build = partial(MtpModel, target=runtime.target)
        self._model = cast("MtpModel", runtime.load(build, info, directory, config.load_format))
        self._depth, self._size = info.num_layers, info.hidden_size
        self._floors = np.zeros(context.max_rows + 1, np.int32)  # by slot: the first index that was observed

    @property
    def tokens_ahead(self) -> int:
        """Return the number of layers: the last layer reads the token that is this number of indices ahead."""
        return self._depth

    def step(self, batch: Batch, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs side by side, each after the same token. See ``HiddenDrafter.step``."""
        outputs = [self._model.advance(0, batch, ids, hidden)]
        if self._depth == 1:
            return outputs[0]
        kept = self._outputs.index_select(0, to_device(batch.slots.astype(np.int64), self.device))
        earlier = to_device(_predecessors(batch.extend_lens), self.device)
        for depth in range(1, self._depth):
            before = torch.cat((kept[:, self._part(depth - 1)], outputs[-1])).index_select(0, earlier)
            rows = (batch.slots, batch.prefix_lens, batch.extend_lens)
            outputs.append(self._at_depth(depth, rows, ids, before))
        return torch.cat(outputs, -1)

    def _part(self, depth: int) -> slice:
        return slice(depth * self._size, (depth + 1) * self._size)

    def _at_depth(
        self, depth: int, rows: tuple[IntArray, IntArray, IntArray], ids: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run layer ``depth``, where ``rows`` are slots, first indices and counts of the first layer. Returns its
        outputs.

        The output is zero where the layer would begin before the first index that was observed: other requests may use
        the pages before that index.
        """
        slots, starts, counts = rows
        own_starts = starts - np.int32(depth)
        skipped = np.clip(self._floors[slots] - own_starts, 0, counts)
        own_starts, own_counts = own_starts + skipped, counts - skipped
        going = np.flatnonzero(own_counts)
        outputs = torch.zeros_like(hidden)
        if not len(going):
            return outputs
        own = self.cache.batch(slots[going], own_starts[going], own_counts[going])
        if not skipped.any():
            return self._model.advance(depth, own, ids, hidden)
        nth = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        taken = to_device(np.flatnonzero(nth >= np.repeat(skipped, counts)), self.device)
        return outputs.index_copy_(0, taken, self._model.advance(depth, own, ids[taken], hidden[taken]))

    def tokens(self, output: torch.Tensor) -> torch.Tensor:
        """See ``HiddenDrafter.tokens``."""
        return self._model.logits(output[:, : self._size].contiguous()).argmax(-1)

    def observe(self, batch: Batch, output: ForwardOutput, committed: Committed) -> None:
        """See ``HiddenDrafter.observe``."""
        for row in range(batch.num_extend):
            if batch.reqs[row].uid not in self._observed:
                self._floors[batch.slots[row]] = batch.prefix_lens[row]
        super().observe(batch, output, committed)

    def draft(self, rows: DraftRows, outputs: torch.Tensor) -> DraftTree | None:
        """Return chains. See ``HiddenDrafter.draft``.

        With several layers, the i-th layer makes the i-th draft of all rows. It writes no KV after the ends of their
        texts.
        """
        if self._depth == 1:
            return super().draft(rows, outputs)
        lens = np.minimum(rows.limits, self._num_draft_tokens)
        one, most = np.ones_like(rows.ends), int(lens.max())
        layer_outputs = [outputs[:, self._part(depth)].contiguous() for depth in range(most)]
        columns = [self.tokens(layer_outputs[0])]
        for step in range(1, most):
            at = (rows.slots, rows.ends + np.int32(step - 1), one)
            deeper = [self._at_depth(depth, at, columns[-1], layer_outputs[depth - 1]) for depth in range(step, most)]
            layer_outputs[step:] = deeper
            columns.append(self.tokens(layer_outputs[step]))
        drafts = torch.stack(columns, 1).cpu().numpy().astype(np.int32)
        return chains(rows.total, {row: drafts[i, : lens[i]] for i, row in enumerate(rows.rows)})


def _predecessors(counts: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return where the output before each token is (int64 ``[tokens]``), in a tensor of one kept output for each row and
    then the outputs of rows of ``counts`` tokens."""
    places = np.arange(int(counts.sum())) + len(counts) - 1
    firsts = np.cumsum(counts) - counts
    places[firsts] = np.arange(len(counts))
    return places.astype(np.int64)


def _num_draft_tokens(config: MtpConfig, num_layers: int) -> int:
    given = config.num_draft_tokens
    if num_layers == 1:
        return given or SINGLE_LAYER_DRAFTS
    if given is not None and given > num_layers:
        raise ConfigError(
            f"speculative.num_draft_tokens is {given}; the checkpoint has {num_layers} layers that predict further tokens, "
            f"each of which makes one draft; allowed: 1 to {num_layers}"
        )
    return given or num_layers
