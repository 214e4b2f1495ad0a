"""How many tokens a step of verification yields, greedily, on held-out prompts.

Greedy decoding with drafts says what decoding without them says. So the target says it all once, drafts are made behind every
place of it in one pass, and the steps are walked through: each ends at the first draft that is wrong, with the right token.
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
"""Prompts that are looked at together."""


class Spoken(NamedTuple):
    """Prompts of about one length with what the target said: from ``starts[i]`` up to ``ends[i]`` in row i of ``ids``."""

    suites: list[str]
    ids: Tensor
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens of a verify step, over all tokens and as the mean of the suites, and of each suite."""

    tokens_per_step: float
    mean_of_suites: float
    suites: dict[str, float]


def speak(target: Llama, prompts: Sequence[Prompt], limit: int) -> list[Spoken]:
    """The target's greedy replies, of up to ``limit`` tokens."""
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
        out.append(Spoken([prompt.suite for prompt in part], torch.from_numpy(ids).to(device), starts, ends))
    return out


@torch.no_grad()
def accepted(drafter: Drafter, target: Llama, spoken: Spoken) -> tuple[np.ndarray, np.ndarray]:
    """For every place of the replies but the last, counted from their starts: how many drafts behind it are right, int
    ``[B, A]``; and the number of such places ``[B]``."""
    counts = spoken.ends - spoken.starts - 1
    device = spoken.ids.device
    starts = torch.from_numpy(spoken.starts).to(device)[:, None]
    ends = torch.from_numpy(spoken.ends).to(device)[:, None]
    anchors = (starts + torch.arange(max(int(counts.max()), 1), device=device)).minimum(ends - 1)
    drafts = drafter.draft(target, View(spoken.ids, target.read(spoken.ids)[0]), anchors)
    places = anchors[..., None] + torch.arange(1, drafts.shape[-1] + 1, device=device)
    rows = torch.arange(len(places), device=device)[:, None, None]
    text = spoken.ids[rows, places.clamp(max=spoken.ids.shape[1] - 1)]
    right = (text == drafts) & (places < ends[..., None])
    return right.cumprod(dim=-1).sum(dim=-1).cpu().numpy(), counts


def measure(drafter: Drafter, target: Llama, replies: Sequence[Spoken]) -> Acceptance:
    """The mean over all steps of all replies. The first token of a reply comes with its prompt and counts for nothing."""
    tokens, steps = defaultdict[str, int](int), defaultdict[str, int](int)
    for spoken in replies:
        right, counts = accepted(drafter, target, spoken)
        for suite, row, count in zip(spoken.suites, right, counts.tolist(), strict=True):
            tokens[suite] += count
            steps[suite] += _steps(row, count)
    suites = {suite: tokens[suite] / steps[suite] for suite in tokens if steps[suite]}
    total = sum(tokens.values()) / max(sum(steps.values()), 1)
    return Acceptance(total, sum(suites.values()) / max(len(suites), 1), suites)


def _steps(right: np.ndarray, count: int) -> int:
    """Steps for ``count`` tokens, of which ``right[i]`` drafts behind the i-th are right."""
    at = steps = 0
    while at < count:
        at += min(int(right[at]) + 1, count - at)
        steps += 1
    return steps
