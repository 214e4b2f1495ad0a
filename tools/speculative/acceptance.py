"""Measure how many tokens a verify step yields under greedy decoding on held-out prompts.

Greedy decoding with drafts returns the same text as decoding without drafts. Therefore the target generates each reply
once, drafts are made after every position of it in one pass, and the verify steps are simulated: each ends at the first
wrong draft, with the right token in its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tools.speculative.drafter import Drafter
from tools.speculative.llama import Llama
from tools.speculative.prompts import Prompt
from tools.speculative.texts import View
from torch import Tensor

AT_ONCE = 24
"""Number of prompts in one batch."""


class ReplyBatch(NamedTuple):
    """Hold prompts of similar length with the target's replies: the reply of row i is ``ids[i, starts[i]:ends[i]]``."""

    suites: list[str]
    ids: Tensor
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Hold the tokens per verify step: over all tokens, as the mean of the suites, and of each suite."""

    tokens_per_step: float
    mean_of_suites: float
    suites: dict[str, float]


def greedy_replies(target: Llama, prompts: Sequence[Prompt], limit: int) -> list[ReplyBatch]:
    """Return the target's greedy replies of up to ``limit`` tokens."""
    device, random = target.device, torch.Generator()
    order = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    out = []
    for part in (order[i : i + AT_ONCE] for i in range(0, len(order), AT_ONCE)):
        texts = target.continue_texts([prompt.tokens for prompt in part], limit, 0.0, random)
        ends = np.array([len(text) for text in texts])
        ids = np.zeros((len(texts), ends.max()), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = text
        starts = np.array([len(prompt.tokens) for prompt in part])
        out.append(ReplyBatch([prompt.suite for prompt in part], torch.from_numpy(ids).to(device), starts, ends))
    return out


@torch.no_grad()
def accepted(drafter: Drafter, target: Llama, batch: ReplyBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of right drafts after every position of the replies except the last, counted from their starts,
    int ``[B, A]``, and the number of these positions ``[B]``."""
    counts = batch.ends - batch.starts - 1
    device = batch.ids.device
    starts = torch.from_numpy(batch.starts).to(device)[:, None]
    ends = torch.from_numpy(batch.ends).to(device)[:, None]
    anchors = (starts + torch.arange(max(int(counts.max()), 1), device=device)).minimum(ends - 1)
    drafts = drafter.draft(target, View(batch.ids, target.read(batch.ids)[0]), anchors)
    places = anchors[..., None] + torch.arange(1, drafts.shape[-1] + 1, device=device)
    rows = torch.arange(len(places), device=device)[:, None, None]
    text = batch.ids[rows, places.clamp(max=batch.ids.shape[1] - 1)]
    right = (text == drafts) & (places < ends[..., None])
    return right.cumprod(dim=-1).sum(dim=-1).cpu().numpy(), counts


def measure(drafter: Drafter, target: Llama, replies: Sequence[ReplyBatch]) -> Acceptance:
    """Return the mean over all steps of all replies. The first token of a reply is computed with its prompt and does
    not count."""
    tokens, steps = defaultdict[str, int](int), defaultdict[str, int](int)
    for batch in replies:
        right, counts = accepted(drafter, target, batch)
        for suite, row, count in zip(batch.suites, right, counts.tolist(), strict=True):
            tokens[suite] += count
            steps[suite] += _steps(row, count)
    suites = {suite: tokens[suite] / steps[suite] for suite in tokens if steps[suite]}
    total = sum(tokens.values()) / max(sum(steps.values()), 1)
    return Acceptance(total, sum(suites.values()) / max(len(suites), 1), suites)


def _steps(right: np.ndarray, count: int) -> int:
    """Return the number of verify steps for ``count`` tokens, where ``right[i]`` drafts after the i-th token are right."""
    at = steps = 0
    while at < count:
        at += min(int(right[at]) + 1, count - at)
        steps += 1
    return steps
