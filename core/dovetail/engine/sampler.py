"""From the logits of a step to its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.engine.inputs import depths
from dovetail.engine.masks import mask_logits
from dovetail.engine.penalties import Penalties, draft_rows, path_tokens
from dovetail.engine.settings import RowSettings, expand
from dovetail.engine.verify import accept
from dovetail.ops.random import uniform
from dovetail.ops.sampling import sample
from dovetail.types import ForwardOutput, Logprobs

if TYPE_CHECKING:
    from dovetail.types import Batch, IntArray, Req


class Sampler:
    """Logit processing, sampling, verification of drafts, log-probabilities.

    Logit rows are the sampled rows of a batch in order, each with one row of logits, or one for each node of its draft
    tree (the root first).
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.eos_token_ids = sorted(eos_token_ids)
        self.penalties = Penalties(vocab_size, device)
        self._settings: RowSettings | None = None

    def sample(self, batch: Batch, logits: torch.Tensor) -> ForwardOutput:
        """Choose tokens from ``logits [logit rows, V]``, which may be overwritten."""
        rows = np.flatnonzero(batch.samples)
        reqs = [batch.reqs[r] for r in rows] if len(rows) < len(batch.reqs) else batch.reqs
        settings = self._settings_of(reqs)
        spans = np.ones(len(rows), np.int64) if batch.drafts is None else 1 + batch.drafts.lens[rows].astype(np.int64)
        starts = np.cumsum(spans) - spans
        raw = logits
        if settings.plain:
            tokens = logits.argmax(dim=-1)
        else:
            logits = self._processed(batch, logits, reqs, rows, starts, settings)
            tokens = self._draw(batch, logits, settings, rows, spans)
        output = self._verify(batch, tokens, rows, spans, starts)
        if settings.logprobs:
            self._add_logprobs(output, raw, tokens, settings, spans, starts)
        return output

    def _settings_of(self, reqs: list[Req]) -> RowSettings:
        uids = tuple([r.uid for r in reqs])
        if self._settings is None or self._settings.uids != uids:
            self._settings = RowSettings.of(reqs, self.vocab_size, self.device)
            self.penalties.forget_all_but(set(uids))
        return self._settings

    def _processed(
        self,
        batch: Batch,
        logits: torch.Tensor,
        reqs: list[Req],
        rows: IntArray,
        starts: IntArray,
        settings: RowSettings,
    ) -> torch.Tensor:
        """Logits in float32 with penalties, biases, ``min_new_tokens`` and grammars applied."""
        touched = settings.adjusted or settings.constrained
        logits = logits.float().clone() if touched and settings.logprobs else logits.float()
        for i in settings.adjusted:
            self._adjust(batch, logits, reqs[i], int(rows[i]), int(starts[i]))
        live = [(int(starts[i]), int(rows[i]), reqs[i]) for i in settings.constrained if reqs[i].finish is None]
        if live:
            mask_logits(logits, batch, live)
        return logits

    def _adjust(self, batch: Batch, logits: torch.Tensor, req: Req, row: int, start: int) -> None:
        drafts, parents = draft_rows(batch.drafts, row)
        length = int(batch.prefix_lens[row] + batch.extend_lens[row]) - len(drafts)
        view = logits[start : start + 1 + len(drafts)]
        if req.params.penalised:
            first = batch.input_ids[int(batch.extend_lens[: row + 1].sum()) - len(drafts) - 1].reshape(1)
            self.penalties.apply(view, req, length, first, drafts, parents)
        missing = req.params.min_new_tokens - (length - req.prompt_len)
        if missing > 0:
            blocked = [*self.eos_token_ids, *req.params.stop_token_ids]
            for node in range(-1, len(drafts)):
                if len(path_tokens(node, drafts, parents)) < missing:
                    view[node + 1, blocked] = float("-inf")

    def _draw(
        self, batch: Batch, logits: torch.Tensor, settings: RowSettings, rows: IntArray, spans: IntArray
    ) -> torch.Tensor:
        if settings.filters is None:
            return logits.argmax(dim=-1)
        filters, seeds = settings.filters, settings.seeds
        if batch.drafts is None:
            places = (batch.prefix_lens + batch.extend_lens)[rows]
        else:
            index = np.repeat(np.arange(len(rows)), spans)
            filters, seeds = expand(filters, torch.from_numpy(index).to(self.device)), seeds[index]
            places = _node_places(batch, rows, spans)
        numbers = torch.from_numpy(uniform(seeds, places)).to(self.device)
        return sample(logits, filters, numbers)

    def _verify(
        self, batch: Batch, tokens: torch.Tensor, rows: IntArray, spans: IntArray, starts: IntArray
    ) -> ForwardOutput:
        if batch.drafts is None:
            return ForwardOutput(tokens[:, None])
        width = batch.drafts.token_ids.shape[1]
        # nodes that a row does not have read its root: they are never accepted
        index = starts[:, None] + np.where(np.arange(width + 1) < spans[:, None], np.arange(width + 1), 0)
        grid = tokens[torch.from_numpy(index).to(self.device)]
        trees = (batch.drafts.token_ids, batch.drafts.parents, batch.drafts.lens)
        ids, parents, lens = (torch.from_numpy(a[rows].astype(np.int64)).to(self.device) for a in trees)
        accepted = accept(grid, ids, parents, lens)
        return ForwardOutput(accepted.tokens, accepted.lens, accepted.nodes)

    @staticmethod
    def _add_logprobs(
        output: ForwardOutput,
        raw: torch.Tensor,
        tokens: torch.Tensor,
        settings: RowSettings,
        spans: IntArray,
        starts: IntArray,
    ) -> None:
        index = np.concatenate([np.arange(starts[i], starts[i] + spans[i]) for i in settings.logprobs])
        picked = torch.from_numpy(index).to(raw.device)
        output.logprobs = logprobs_of(raw[picked], tokens[picked], settings.top_logprobs)
        ends = np.cumsum([spans[i] for i in settings.logprobs])
        output.logprob_start = {i: int(end - spans[i]) for i, end in zip(settings.logprobs, ends, strict=True)}


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Logprobs:
    """Log-probabilities of ``tokens [n]`` and of the ``top`` best, under ``logits [n, V]`` as they are."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    best = logp.topk(min(top, logp.shape[1]), dim=-1)
    return Logprobs(logp.gather(1, tokens[:, None])[:, 0], best.values, best.indices)


def _node_places(batch: Batch, rows: IntArray, spans: IntArray) -> IntArray:
    """The place in its text of the token sampled at each logit row: it names the random number."""
    drafts = batch.drafts
    assert drafts is not None
    length = (batch.prefix_lens + batch.extend_lens - drafts.lens)[rows]
    depth = depths(batch)
    return np.concatenate(
        [
            n + (depth[r, :s] if r >= batch.num_extend else np.zeros(1, np.int32))
            for r, n, s in zip(rows, length, spans, strict=True)
        ]
    )
