"""What is made of prompts, instead of continuing them: hidden states for embeddings, log-probabilities of labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.ops.transfer import to_device
from dovetail.types import PoolingKind

if TYPE_CHECKING:
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.types import Batch

_MODE = "pooling_mode_"


def pooled(model: ModelArchitecture, batch: Batch, hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Of each extend row that pools: the row, and a float32 vector. That is, of a mean, the sum over the tokens of this
    chunk; of the others the whole, with the chunk that ends the prompt. ``hidden`` are the hidden states of all tokens of
    the batch, after the final norm."""
    found: list[tuple[int, torch.Tensor]] = []
    first = 0
    for row in range(batch.num_extend):
        req, count = batch.reqs[row], int(batch.extend_lens[row])
        pooling, own = req.params.pooling, hidden[first : first + count]
        first += count
        if pooling is None:
            continue
        if pooling.kind is PoolingKind.MEAN:
            found.append((row, own.float().sum(0)))
        elif int(batch.prefix_lens[row]) + count == req.prompt_len:
            last = own[-1:]
            if pooling.kind is PoolingKind.LABELS:
                found.append((row, _label_logprobs(model, last, pooling.token_ids)))
            else:
                found.append((row, last[0].to(torch.float32, copy=True)))
    return found


def _label_logprobs(model: ModelArchitecture, last: torch.Tensor, labels: tuple[int, ...]) -> torch.Tensor:
    logprobs = torch.log_softmax(model.logits(last)[0].float(), dim=-1)
    return logprobs[to_device(np.array(labels, np.int64), logprobs.device)]


def default_pooling(directory: Path) -> PoolingKind | None:
    """How the checkpoint's own file for Sentence Transformers (``1_Pooling/config.json``) pools; without one by the last
    token, which alone has seen the whole text. None where it asks for what is not implemented. Raises ``ConfigError``."""
    name = "1_Pooling/config.json"
    if not (directory / name).is_file():
        return PoolingKind.LAST
    given = read_json(directory, name)
    asked = {key.removeprefix(_MODE) for key, value in given.items() if key.startswith(_MODE) and value}
    return {frozenset({"lasttoken"}): PoolingKind.LAST, frozenset({"mean_tokens"}): PoolingKind.MEAN}.get(
        frozenset(asked or {given.get("pooling_mode", "")})
    )
