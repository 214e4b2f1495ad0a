"""Hold the training texts on the device, and draw batches from them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from tools.speculative.llama import Llama
from tools.tiny.make_data import ID_MASK, LEARN
from torch import Tensor

LENGTHS = (96, 192, 384, 768, 2048)
"""Row lengths of batches. A text is in the batch with the smallest length that it fits into."""


class View(NamedTuple):
    """Hold texts ``ids [B, L]`` with the target's states of them: see ``Llama.read``."""

    ids: Tensor
    states: list[Tensor]


class Goals(NamedTuple):
    """Hold the goals of drafts 0 to T - 1 after anchors."""

    labels: Tensor
    """The text's own tokens, ``[B, A, T]``."""
    states: Tensor
    """The target's final hidden states that predict them, ``[B, A, T, D]``."""
    weights: Tensor
    """``[B, A, T]``: 0 after the end of the target's text."""


class Sample(NamedTuple):
    """Hold rows of texts. An anchor (``[B, A]``) is the last known token; drafts are at the positions after it."""

    view: View
    learn: Tensor
    anchors: Tensor

    def goals(self, drafts: int, decay: float) -> Goals:
        """Return the goals of ``drafts`` drafts after each anchor; draft t has the weight ``decay ** t``."""
        places = self.anchors[..., None] + torch.arange(1, drafts + 1, device=self.anchors.device)
        inside = places < self.view.ids.shape[1]
        places = places.clamp(max=self.view.ids.shape[1] - 1)
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        said = (self.learn[rows, places] & inside).float().cumprod(dim=-1)
        faded = decay ** torch.arange(drafts, device=places.device)
        return Goals(self.view.ids[rows, places], self.view.states[-1][rows, places - 1], said * faded)


class Bucket(NamedTuple):
    """Hold padded texts of similar length: ``ids`` int16 ``[N, L]``, ``learn`` bool ``[N, L]``."""

    ids: Tensor
    learn: Tensor


class Texts:
    """Hold all training texts. A batch has about ``batch_tokens`` tokens and ``batch_anchors`` anchors."""

    def __init__(
        self, target: Llama, texts: Sequence[np.ndarray], batch_tokens: int, batch_anchors: int, seed: int
    ) -> None:
        """Group ``texts`` by length. Their tokens have the flag LEARN."""
        self.target, self.batch_tokens, self.batch_anchors = target, batch_tokens, batch_anchors
        self.device = target.device
        buckets = [_bucket(texts, low, high) for low, high in zip((0, *LENGTHS), LENGTHS, strict=False)]
        self.buckets = [Bucket(*(x.to(self.device) for x in bucket)) for bucket in buckets if bucket]
        self.sizes = [float(bucket.learn.sum()) for bucket in self.buckets]
        self.rng, self.random = Random(seed), torch.Generator(self.device).manual_seed(seed)

    def counts(self) -> np.ndarray:
        """Return how often each token occurs in the target's texts."""
        total = sum(torch.bincount(b.ids[b.learn].long(), minlength=self.target.vocab_size) for b in self.buckets)
        assert isinstance(total, Tensor)
        return total.cpu().numpy()

    @torch.no_grad()
    def sample(self) -> Sample:
        """Draw a batch of one row length."""
        bucket = self.rng.choices(self.buckets, self.sizes)[0]
        length = bucket.ids.shape[1]
        rows = max(1, self.batch_tokens // length)
        chosen = torch.randint(len(bucket.ids), (rows,), device=self.device, generator=self.random)
        ids, learn = bucket.ids[chosen].long(), bucket.learn[chosen]
        valid = learn[:, 2:].float()  # an anchor needs a token before it and one after it
        each = max(1, self.batch_anchors // rows)
        anchors = torch.multinomial(valid, each, replacement=True, generator=self.random) + 1
        return Sample(View(ids, self.target.read(ids)[0]), learn, anchors)


def _bucket(texts: Sequence[np.ndarray], low: int, high: int) -> Bucket | None:
    """Return the texts of more than ``low`` and at most ``high`` tokens, or None if there are none."""
    mine = [text for text in texts if low < len(text) <= high and (text[2:] & LEARN).any()]
    if not mine:
        return None
    table = np.zeros((len(mine), high), np.uint16)
    for row, text in zip(table, mine, strict=True):
        row[: len(text)] = text
    return Bucket(torch.from_numpy((table & ID_MASK).astype(np.int16)), torch.from_numpy((table & LEARN) > 0))
