"""Choose the tokens of a step from its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.inputs import depths, pack, unpack
from dovetail.engine.masks import MaskBuffers, mask_logits
from dovetail.engine.penalties import SlotText, TokenCounts, path_tokens, paths_of
from dovetail.engine.processors import RowProcessors
from dovetail.engine.settings import BLOCKED, RowSettings, expand
from dovetail.engine.verify import accept
from dovetail.ops.random import Floats, uniform
from dovetail.ops.sampling import greedy, sample
from dovetail.ops.transfer import to_device
from dovetail.types import ForwardOutput, LogitRows, Logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.types import AdmittedRequest, Batch, Int64Array, Masks


class Sampler:
    """Process logits, sample from them, verify drafts, and compute log-probabilities."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        counts: TokenCounts,
        processors: RowProcessors | None = None,
    ) -> None:
        """``counts`` must have an entry for every slot that a batch can have. ``processors`` are the logits processors that
        requests may name."""
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = sorted(eos_token_ids)
        self.counts = counts
        self.processors = processors or RowProcessors({})
        self.mask_buffers = MaskBuffers(device)
        self._settings: RowSettings | None = None
        self._rows_version = 0  # ``Batch.rows_version`` of the batch that the settings belong to

    def sample(self, batch: Batch, logits: torch.Tensor, masks: Masks | None = None) -> ForwardOutput:
        """Choose tokens from ``logits [logit rows, V]``, which may be overwritten."""
        settings = self.settings_of(batch)
        if settings.plain and batch.drafts is None:
            return ForwardOutput(greedy(logits)[:, None])
        layout = LogitRows.of(batch)
        raw = logits
        slots = self._penalised_slots(batch, layout, settings)
        errors: dict[int, str] = {}
        if not settings.plain:
            logits = self._processed(batch, logits, masks, layout, settings, slots, errors)
        tokens = self._draw(batch, logits, layout, settings)
        output = ForwardOutput(tokens[:, None]) if batch.drafts is None else self._verify(batch, tokens, layout)
        output.errors = errors
        if slots is not None:
            self._count(output, slots)
        if settings.logprobs:
            _add_logprobs(output, raw, tokens, layout, settings)
        return output

    def settings_of(self, batch: Batch) -> RowSettings:
        """Return the settings of the sampled rows of a batch. They are kept while the rows stay the same."""
        settings, version = self._settings, batch.rows_version
        if settings is not None and version and version == self._rows_version:
            return settings
        reqs = batch.sampled_reqs
        uids = tuple([r.uid for r in reqs])
        if settings is None or settings.uids != uids:
            settings = self._settings = RowSettings.of(reqs, self.vocab_size, self.device, self.eos_token_ids)
        self._rows_version = version
        return settings

    def _processed(
        self,
        batch: Batch,
        logits: torch.Tensor,
        masks: Masks | None,
        layout: LogitRows,
        settings: RowSettings,
        slots: torch.Tensor | None,
        errors: dict[int, str],
    ) -> torch.Tensor:
        """Return the logits with biases, penalties, logits processors, ``min_new_tokens`` and grammars applied, in
        float32 unless there is nothing to apply and kernels sample, which compute in float32. ``slots`` are the slots of
        the sampled rows if some of them have penalties. The errors of logits processors are added to ``errors``."""
        reqs = batch.sampled_reqs
        touched = settings.adjusted or settings.penalised or settings.processed or masks is not None
        if not touched and logits.device.type == "cuda":
            return logits
        logits = logits.float().clone() if touched and settings.logprobs else logits.float()
        for i in settings.adjusted:
            _add_bias(logits[layout.starts[i] : layout.starts[i] + layout.spans[i]], reqs[i].params.logit_bias)
        if slots is not None:
            self._penalise(batch, logits, layout, settings, slots)
        if settings.processed:
            errors |= self.processors.apply(batch, logits, layout, settings.processed)
        for i in settings.adjusted:
            self._block_ends(batch, logits, reqs[i], int(layout.rows[i]), int(layout.starts[i]))
        if masks is not None:
            mask_logits(logits, masks)
        return logits

    def _penalised_slots(self, batch: Batch, layout: LogitRows, settings: RowSettings) -> torch.Tensor | None:
        """Return the slots of the sampled rows, int64 on the device, or None if no row has penalties. Count the slots
        anew whose text the device does not know: extend rows hold prompts, also those of retracted requests, or tokens
        of a jump-forward."""
        if settings.penalties is None:
            return None
        reqs, texts = batch.sampled_reqs, list[SlotText]()
        for i in settings.penalised:
            row, req = int(layout.rows[i]), reqs[i]
            if row < batch.num_extend:
                end = int(batch.prefix_lens[row] + batch.extend_lens[row])
                prompt, output = req.token_ids[: req.prompt_len], req.token_ids[req.prompt_len : end]
                texts.append(SlotText(int(batch.slots[row]), prompt, output))
        self.counts.recount(texts)
        return to_device(batch.slots[layout.rows].astype(np.int64), self.device)

    def _penalise(
        self, batch: Batch, logits: torch.Tensor, layout: LogitRows, settings: RowSettings, slots: torch.Tensor
    ) -> None:
        assert settings.penalties is not None
        if batch.drafts is None:
            self.counts.apply(logits, slots, settings.penalties)
            return
        index = to_device(np.repeat(np.arange(len(layout.rows)), layout.spans), self.device)
        chosen = list(settings.penalised)
        paths = paths_of(layout.starts[chosen].tolist(), layout.rows[chosen].tolist(), batch.drafts)
        self.counts.apply(logits, slots[index], settings.penalties[index], paths)

    def _count(self, output: ForwardOutput, slots: torch.Tensor) -> None:
        """Count the new tokens of ``slots``, those of the sampled rows."""
        if output.accept_lens is None:
            self.counts.add(slots, output.token_ids[:, 0])
        else:
            self.counts.add_accepted(slots, output.token_ids, output.accept_lens)

    def _block_ends(self, batch: Batch, logits: torch.Tensor, req: AdmittedRequest, row: int, start: int) -> None:
        """Block the tokens that end the output, while ``min_new_tokens`` forbids it to end."""
        drafts, parents = batch.drafts.row(row) if batch.drafts is not None else ([], [])
        length = int(batch.prefix_lens[row] + batch.extend_lens[row]) - len(drafts)
        missing = req.params.min_new_tokens - (length - req.prompt_len)
        if missing > 0:
            view = logits[start : start + 1 + len(drafts)]
            ends = np.array([*self.eos_token_ids, *req.params.stop_token_ids], np.int64)
            blocked = to_device(ends, self.device)
            for node in range(-1, len(drafts)):
                if len(path_tokens(node, drafts, parents)) < missing:
                    view[node + 1].index_fill_(0, blocked, BLOCKED)

    def _draw(self, batch: Batch, logits: torch.Tensor, layout: LogitRows, settings: RowSettings) -> torch.Tensor:
        if settings.filters is None:
            return greedy(logits)
        filters, seeds = settings.filters, settings.seeds
        if batch.drafts is not None:
            index = np.repeat(np.arange(len(layout.rows)), layout.spans)
            filters, seeds = expand(filters, to_device(index, self.device)), seeds[index]
        return sample(logits, filters, to_device(uniform(seeds, _places(batch, layout)), self.device))

    def _verify(self, batch: Batch, tokens: torch.Tensor, layout: LogitRows) -> ForwardOutput:
        drafts = batch.drafts
        assert drafts is not None
        indptr = np.append(layout.starts, layout.starts[-1:] + layout.spans[-1:]).astype(np.int32)
        arrays = [indptr, drafts.token_ids[layout.rows]]
        if not drafts.is_chain:
            arrays.append(drafts.parents[layout.rows])
        ends, ids, *parents = unpack(to_device(pack(arrays), self.device), arrays)
        accepted = accept(tokens, ends, ids, parents[0] if parents else None)
        return ForwardOutput(accepted.tokens, accepted.lens, accepted.nodes)


def _add_bias(logits: torch.Tensor, biases: Mapping[int, float] | None) -> None:
    """Add ``biases`` to each row of ``logits [n, V]``, in place."""
    if biases:
        tokens = to_device(np.array(list(biases), np.int64), logits.device)
        values = to_device(np.array(list(biases.values()), np.float32), logits.device)
        logits.index_add_(1, tokens, values.expand(len(logits), -1))


def decode_numbers(batch: Batch, settings: RowSettings) -> Floats | None:
    """Return the random numbers of a decode batch, float64 ``[rows]``, or None if every row is greedy."""
    if settings.filters is None:
        return None
    return uniform(settings.seeds, batch.prefix_lens.astype(np.int64) + 1)


def verify_numbers(batch: Batch, settings: RowSettings) -> Floats | None:
    """Return the random numbers of a batch of verify rows, float64 ``[tokens]``, or None if every row is greedy."""
    if settings.filters is None:
        return None
    layout = LogitRows.of(batch)
    return uniform(np.repeat(settings.seeds, layout.spans), _places(batch, layout))


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, top: int, given: torch.Tensor | None = None) -> Logprobs:
    """Return the log-probabilities of ``tokens [n]``, of the ``top`` most likely tokens and, in the last columns, of the
    tokens ``given [n, m]``, computed from the unprocessed ``logits [n, V]``."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    best = logp.topk(min(top, logp.shape[1]), dim=-1)
    values, ids = best.values, best.indices
    if given is not None:
        values, ids = torch.cat([values, logp.gather(1, given)], 1), torch.cat([ids, given], 1)
    return Logprobs(logp.gather(1, tokens[:, None])[:, 0], values, ids)


def _add_logprobs(
    output: ForwardOutput, raw: torch.Tensor, tokens: torch.Tensor, layout: LogitRows, settings: RowSettings
) -> None:
    spans = layout.spans[list(settings.logprobs)]
    ends = np.cumsum(spans)
    firsts = layout.starts[list(settings.logprobs)]
    index = np.concatenate([np.arange(first, first + span) for first, span in zip(firsts, spans, strict=True)])
    picked = to_device(index, raw.device)
    given = None
    if settings.scored is not None:
        given = to_device(np.repeat(settings.scored, spans, axis=0), raw.device)
    output.logprobs = logprobs_of(raw[picked], tokens[picked], settings.top_logprobs, given)
    output.logprob_start = dict(zip(settings.logprobs, (ends - spans).tolist(), strict=True))


def _places(batch: Batch, layout: LogitRows) -> Int64Array:
    """Return, for each row of logits, the index that the sampled token has in its request. The token's random number
    depends on this index."""
    lens = (batch.prefix_lens + batch.extend_lens).astype(np.int64)
    if batch.drafts is None:
        return lens[layout.rows]
    roots = (lens - batch.drafts.lens)[layout.rows]
    depth = depths(batch)
    extend = layout.rows < batch.num_extend
    below = [
        depth[r, :s] if not e else depth[r, :1] * 0 for r, s, e in zip(layout.rows, layout.spans, extend, strict=True)
    ]
    return np.repeat(roots, layout.spans) + np.concatenate(below)
