"""Compute the exact distribution of short outputs over a toy vocabulary, independently of the engine, and test whether
samples fit it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch

from dovetail.sampling_params import SamplingParams

Tokens = tuple[int, ...]
Logits = Callable[[Sequence[int]], np.ndarray]
"""A function that returns the model's logits, float64 ``[V]``, after a text."""


def next_token(
    logits: np.ndarray, prompt: Sequence[int], output: Tokens, params: SamplingParams, allowed: Collection[int] | None
) -> np.ndarray:
    """Return the probabilities of the next token: bias, penalties, mask, temperature, top-k, top-p and min-p, in this
    order."""
    scores = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in {*prompt, *output}:
        scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
    for token, count in Counter(output).items():
        scores[token] -= params.presence_penalty + count * params.frequency_penalty
    if allowed is not None:
        scores[[token for token in range(len(scores)) if token not in allowed]] = -np.inf
    probs = np.exp((scores - scores.max()) / params.temperature)
    return _filtered(probs / probs.sum(), params)


def _filtered(probs: np.ndarray, params: SamplingParams) -> np.ndarray:
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[: params.top_k] if params.top_k > 0 else order
    total, sum_before, nucleus = sum(probs[kept]), 0.0, []
    for token in kept:
        if sum_before < params.top_p * total:
            nucleus.append(token)
        sum_before += probs[token]
    out = np.zeros_like(probs)
    for token in nucleus:
        if probs[token] >= params.min_p * probs[order[0]]:
            out[token] = probs[token]
    return out / out.sum()


def joint(
    logits: Logits,
    prompt: Sequence[int],
    params: SamplingParams,
    count: int,
    allowed: Callable[[Tokens], Collection[int]] | None = None,
) -> dict[Tokens, float]:
    """Return the probability of each possible output of ``count`` tokens.

    ``allowed`` returns the tokens that a grammar allows after an output.
    """
    outputs: dict[Tokens, float] = {(): 1.0}
    for _ in range(count):
        longer: dict[Tokens, float] = {}
        for output, weight in outputs.items():
            mask = allowed(output) if allowed is not None else None
            probs = next_token(logits([*prompt, *output]), prompt, output, params, mask)
            longer |= {(*output, token): weight * p for token, p in enumerate(probs.tolist()) if p > 0}
        outputs = longer
    return outputs


def p_value(samples: Sequence[Tokens], expected: Mapping[Tokens, float]) -> float:
    """Run Pearson's chi-square test: return the probability of samples that are at least as far from ``expected``.

    Cells in which fewer than five samples are expected are joined to one. Returns 0 if there are samples that are
    impossible.
    """
    seen = Counter(samples)
    if not seen.keys() <= expected.keys():
        return 0.0
    cells = sorted(expected, key=lambda cell: expected[cell])
    wanted = np.array([expected[cell] for cell in cells]) * len(samples)
    got = np.array([seen[cell] for cell in cells], dtype=np.float64)
    rare = int(np.searchsorted(np.cumsum(wanted), 5.0)) + 1
    rare = max(rare, int((wanted < 5).sum()))
    wanted, got = (np.concatenate([[column[:rare].sum()], column[rare:]]) for column in (wanted, got))
    statistic, degrees = float(((got - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    if degrees == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()))


def texts(vocab_size: int, longest: int) -> list[Tokens]:
    """Return all texts of 0 to ``longest`` tokens."""
    return [text for n in range(longest + 1) for text in itertools.product(range(vocab_size), repeat=n)]
