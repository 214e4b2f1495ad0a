"""Bring the output of a step to the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.ops.transfer import to_host
from dovetail.types import HostLogprobs, Logprobs, StepResult

if TYPE_CHECKING:
    from dovetail.types import ForwardOutput


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


def step_result(output: ForwardOutput) -> StepResult:
    """Return what the scheduler needs of an output in host memory."""
    lens, nodes, logprobs = output.accept_lens, output.nodes, output.logprobs
    tokens, accept_lens = output.token_ids.numpy(), None if lens is None else lens.numpy()
    if logprobs is None and not output.prompt_logprobs and not output.pooled and not output.errors:
        return StepResult(tokens, accept_lens)  # most steps: only log-probabilities need the nodes
    return StepResult(
        tokens,
        accept_lens,
        None if nodes is None else nodes.numpy(),
        None if logprobs is None else _on_host(logprobs),
        output.logprob_start,
        [(row, ids, _on_host(scored)) for row, ids, scored in output.prompt_logprobs],
        [(row, vector.numpy()) for row, vector in output.pooled],
        output.errors,
    )


def _on_host(logprobs: Logprobs) -> HostLogprobs:
    return HostLogprobs(*(column.numpy() for column in logprobs))
