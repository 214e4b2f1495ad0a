"""From logits to tokens: temperature, top-k, top-p, min-p, one uniform number a row.

On CUDA by kernels that neither sort nor wait for the device; ``sample_reference`` in torch elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling settings of ``n`` rows, on the logits' device. None where no row uses a setting.

    ``temperature`` float32 ``[n, 1]`` (0: greedy row), ``top_k`` int64 ``[n, 1]`` (vocabulary size: off), ``top_p`` and
    ``min_p`` float64 ``[n, 1]``. ``any_greedy`` says that some temperature is 0.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    any_greedy: bool = False


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The best token of each row of ``logits [n, V]``, int64 ``[n]``; of equals the first. Writes ``out`` where given."""
    if logits.device.type == "cuda":
        from dovetail.ops.triton.sampling import greedy as kernel

        return kernel(logits, out)
    best = _first_best(logits)
    return best if out is None else out.copy_(best)


def sample(
    logits: torch.Tensor, filters: Filters, uniform: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sample one token per row by inversion: the first whose cumulative probability exceeds ``uniform`` of the total.

    Probabilities are summed in the order of token ids, also behind filters: a row's token depends neither on what other
    rows filter nor on how nearly equal probabilities sort.

    ``logits [n, V]`` bfloat16, float16 or float32 (-inf where forbidden; computed in float32), ``uniform`` float64 ``[n]``
    in [0, 1). Returns int64 ``[n]``, which is ``out`` where given. Filters apply in the order top-k, top-p (on what top-k
    left, renormalised), min-p (relative to the best token); of equals the first stay. A token of probability 0 is never
    returned. On CUDA nothing waits for the device, and every tensor is read when the kernels run: a graph may be captured.
    """
    if logits.device.type == "cuda":
        from dovetail.ops.triton.sampling import sample as kernel

        return kernel(logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p, uniform, out)
    chosen = sample_reference(logits, filters, uniform)
    return chosen if out is None else out.copy_(chosen)


def sample_reference(logits: torch.Tensor, filters: Filters, uniform: torch.Tensor) -> torch.Tensor:
    """``sample`` in torch, by a full sort, on any device; in float64 if ``logits`` are."""
    temperature = filters.temperature
    if filters.any_greedy:
        temperature = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    probs = torch.softmax(logits / temperature, dim=-1)
    if not (filters.top_k is None and filters.top_p is None and filters.min_p is None):
        best, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        probs = torch.zeros_like(probs).scatter_(1, order, _filter(best, filters))
    chosen = _invert(probs, uniform)
    if filters.any_greedy:
        chosen = torch.where(filters.temperature[:, 0] == 0, _first_best(logits), chosen)
    return chosen


def _first_best(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":  # numpy compares in vectors, torch does not: 7 times as fast, 16 times in bfloat16
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(dim=-1)


def _filter(probs: torch.Tensor, filters: Filters) -> torch.Tensor:
    """``probs`` sorted downwards, with what the filters exclude set to 0. The best token always stays."""
    if filters.top_k is not None:
        rank = torch.arange(probs.shape[1], device=probs.device)
        probs = probs.masked_fill(rank >= filters.top_k, 0.0)
    if filters.top_p is not None:
        before = probs.cumsum(dim=-1, dtype=torch.float64)
        total = before[:, -1:].clone()
        before -= probs
        excluded = before >= filters.top_p * total
        excluded &= filters.top_p < 1
        excluded[:, 0] = False
        probs = probs.masked_fill(excluded, 0.0)
    if filters.min_p is not None:
        probs = probs.masked_fill(probs < filters.min_p * probs[:, :1], 0.0)
    return probs


def _invert(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # u * total may round up to total itself: the last token with any probability is meant then
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    last = last.clamp_(max=probs.shape[1] - 1)  # NaN compares with nothing; what is returned must still be a token
    return torch.minimum(index, last)
