"""Training texts on the device, and batches drawn from them."""

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
"""Places of the rows of a batch; a text goes where it fits."""


class View(NamedTuple):
    """Texts ``ids [B, L]`` with what the target thinks of them: see ``Llama.read``."""

    ids: Tensor
    states: list[Tensor]


class Goals(NamedTuple):
    """What is right behind anchors, for drafts 0 to T - 1."""

    labels: Tensor
    """The text's own tokens, ``[B, A, T]``."""
    states: Tensor
    """The target's final hidden states that predict them, ``[B, A, T, D]``."""
    weights: Tensor
    """``[B, A, T]``: 0 behind the end of what the target says."""


class Sample(NamedTuple):
    """Rows of texts. An anchor (``[B, A]``) is the last known token; drafts stand at the places behind it."""

    view: View
    learn: Tensor
    anchors: Tensor

    def goals(self, drafts: int, decay: float) -> Goals:
        """Draft t weighs ``decay ** t``."""
        places = self.anchors[..., None] + torch.arange(1, drafts + 1, device=self.anchors.device)
        inside = places < self.view.ids.shape[1]
        places = places.clamp(max=self.view.ids.shape[1] - 1)
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        said = (self.learn[rows, places] & inside).float().cumprod(dim=-1)
        faded = decay ** torch.arange(drafts, device=places.device)
        return Goals(self.view.ids[rows, places], self.view.states[-1][rows, places - 1], said * faded)


class Bucket(NamedTuple):
    """Texts of about one length, padded: ``ids`` int16 ``[N, L]``, ``learn`` bool ``[N, L]``."""

    ids: Tensor
    learn: Tensor


class Texts:
    """All training texts. ``batch_tokens`` enter the target at a time, with ``batch_anchors`` among them."""

    def __init__(
        self, target: Llama, texts: Sequence[np.ndarray], batch_tokens: int, batch_anchors: int, seed: int
    ) -> None:
        """``texts`` carry the flag LEARN."""
        self.target, self.batch_tokens, self.batch_anchors = target, batch_tokens, batch_anchors
        self.device = target.device
        buckets = [_bucket(texts, low, high) for low, high in zip((0, *LENGTHS), LENGTHS, strict=False)]
        self.buckets = [Bucket(*(x.to(self.device) for x in bucket)) for bucket in buckets if bucket]
        self.sizes = [float(bucket.learn.sum()) for bucket in self.buckets]
        self.rng, self.random = Random(seed), torch.Generator(self.device).manual_seed(seed)

    def counts(self) -> np.ndarray:
        """How often the target says each token."""
        total = sum(torch.bincount(b.ids[b.learn].long(), minlength=self.target.vocab_size) for b in self.buckets)
        assert isinstance(total, Tensor)
        return total.cpu().numpy()

    @torch.no_grad()
    def sample(self) -> Sample:
        """A batch of one length."""
        bucket = self.rng.choices(self.buckets, self.sizes)[0]
        length = bucket.ids.shape[1]
        rows = max(1, self.batch_tokens // length)
        chosen = torch.randint(len(bucket.ids), (rows,), device=self.device, generator=self.random)
        ids, learn = bucket.ids[chosen].long(), bucket.learn[chosen]
        valid = learn[:, 2:].float()  # an anchor needs a token before it and one behind it
        each = max(1, self.batch_anchors // rows)
        anchors = torch.multinomial(valid, each, replacement=True, generator=self.random) + 1
        return Sample(View(ids, self.target.read(ids)[0]), learn, anchors)


def _bucket(texts: Sequence[np.ndarray], low: int, high: int) -> Bucket | None:
    """Texts of more than ``low`` and up to ``high`` tokens, if there are any."""
    mine = [text for text in texts if low < len(text) <= high and (text[2:] & LEARN).any()]
    if not mine:
        return None
    table = np.zeros((len(mine), high), np.uint16)
    for row, text in zip(table, mine, strict=True):
        row[: len(text)] = text
    return Bucket(torch.from_numpy((table & ID_MASK).astype(np.int16)), torch.from_numpy((table & LEARN) > 0))
