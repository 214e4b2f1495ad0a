"""Bring the output of a step to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.ops.transfer import to_host
from dovetail.types import ForwardOutput, HostOutput, Logprobs, TokenLogprob

if TYPE_CHECKING:
    from dovetail.types import Batch


def fetched(output: ForwardOutput) -> ForwardOutput:
    """Start to copy everything that the host reads, and return the copies. They are complete once the step's event has
    completed."""

    def fetch(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else to_host(tensor)

    def fetch_all(logprobs: Logprobs) -> Logprobs:
        return Logprobs(*map(to_host, logprobs))

    return replace(
        output,
        token_ids=to_host(output.token_ids),
        accept_lens=fetch(output.accept_lens),
        nodes=fetch(output.nodes),
        logprobs=None if output.logprobs is None else fetch_all(output.logprobs),
        prompt_logprobs=[(row, ids, fetch_all(lp)) for row, ids, lp in output.prompt_logprobs],
        pooled=[(row, to_host(vector)) for row, vector in output.pooled],
    )


def host_output(batch: Batch, output: ForwardOutput) -> HostOutput:
    """Return what the scheduler needs from an output in host memory."""
    tokens = output.token_ids.tolist()
    if output.accept_lens is not None:
        tokens = [row[:n] for row, n in zip(tokens, output.accept_lens.tolist(), strict=True)]
    if output.logprobs is None and not output.prompt_logprobs and not output.pooled:
        return HostOutput(tokens)
    logprobs = None if output.logprobs is None else _logprob_rows(batch, output, tokens)
    prompt = {row: _entries(next_ids.tolist(), lp) for row, next_ids, lp in output.prompt_logprobs}
    return HostOutput(tokens, logprobs, prompt, {row: vector.numpy() for row, vector in output.pooled})


def _entries(tokens: list[int], logprobs: Logprobs) -> list[TokenLogprob]:
    chosen, top, ids = (column.tolist() for column in logprobs)
    return [TokenLogprob(token, chosen[i], tuple(zip(ids[i], top[i], strict=True))) for i, token in enumerate(tokens)]


def _logprob_rows(batch: Batch, output: ForwardOutput, tokens: list[list[int]]) -> list[list[TokenLogprob]]:
    assert output.logprobs is not None
    chosen, top, ids = (column.tolist() for column in output.logprobs)
    nodes = None if output.nodes is None else output.nodes.tolist()
    reqs = batch.sampled_reqs
    rows: list[list[TokenLogprob]] = [[] for _ in tokens]
    for row, start in output.logprob_start.items():
        count = reqs[row].params.logprobs
        for j, token in enumerate(tokens[row]):
            i = start + (nodes[row][j] if nodes is not None else 0)
            rows[row].append(TokenLogprob(token, chosen[i], tuple(zip(ids[i][:count], top[i][:count], strict=True))))
    return rows
