"""Pool prompts of requests that generate no tokens: hidden states for embeddings, log-probabilities of labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.ops.transfer import to_device
from dovetail.sampling_params import PoolingKind

if TYPE_CHECKING:
    from dovetail.engine.row_logits import RowLogits
    from dovetail.types import AdmittedRequest, Batch

_MODE = "pooling_mode_"

LABEL_ROWS = 64
"""The number of prompts whose logits are in memory at one time."""


def pooled(logits: RowLogits, batch: Batch, hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the row and a float32 vector of each extend row whose request pools. For a mean, the vector is the sum
    over the tokens of this chunk. For the other kinds it is the complete result, and only the chunk that ends the
    prompt has one. ``hidden`` are the hidden states of all tokens of the batch, after the final norm."""
    found: list[tuple[int, torch.Tensor]] = []
    labelled: list[tuple[int, int]] = []
    end = 0
    for row in range(batch.num_extend):
        req, count = batch.reqs[row], int(batch.extend_lens[row])
        start, end = end, end + count
        pooling = req.params.pooling
        if pooling is None:
            continue
        if pooling.kind is PoolingKind.MEAN:
            found.append((row, hidden[start:end].float().sum(0)))
        elif int(batch.prefix_lens[row]) + count < req.prompt_len:
            continue
        elif pooling.kind is PoolingKind.LAST:
            found.append((row, hidden[end - 1].to(torch.float32, copy=True)))
        else:
            labelled.append((row, end - 1))
    for i in range(0, len(labelled), LABEL_ROWS):
        found += _label_logprobs(logits, batch, hidden, labelled[i : i + LABEL_ROWS])
    return found


def _label_logprobs(
    logits: RowLogits, batch: Batch, hidden: torch.Tensor, labelled: list[tuple[int, int]]
) -> list[tuple[int, torch.Tensor]]:
    """Return the row and the log-probabilities of its labels as the next token. ``labelled`` has (row, index in
    ``hidden`` of the last token of its prompt)."""
    ends = to_device(np.array([token for _, token in labelled], np.int64), hidden.device)
    rows = np.array([row for row, _ in labelled], np.int32)
    logprobs = torch.log_softmax(logits.of(batch, hidden.index_select(0, ends), rows).float(), dim=-1)
    return [
        (row, logprobs[i].index_select(0, _labels(batch.reqs[row], hidden.device)))
        for i, (row, _) in enumerate(labelled)
    ]


def _labels(req: AdmittedRequest, device: torch.device) -> torch.Tensor:
    assert req.params.pooling is not None
    return to_device(np.array(req.params.pooling.token_ids, np.int64), device)


def default_pooling(directory: Path) -> PoolingKind | None:
    """Return how the checkpoint pools, according to its file for Sentence Transformers (``1_Pooling/config.json``).
    Without this file return the last token, because only the last token has seen the whole text. Return None if the
    file requires a kind that is not implemented. Raises ``ConfigError``."""
    name = "1_Pooling/config.json"
    if not (directory / name).is_file():
        return PoolingKind.LAST
    given = read_json(directory, name)
    modes = {key.removeprefix(_MODE) for key, value in given.items() if key.startswith(_MODE) and value}
    return {frozenset({"lasttoken"}): PoolingKind.LAST, frozenset({"mean_tokens"}): PoolingKind.MEAN}.get(
        frozenset(modes or {given.get("pooling_mode", "")})
    )
