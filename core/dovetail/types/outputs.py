"""Define what a step produced: on the device, and on the host as the scheduler gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.types.arrays import FloatArray, Int64Array, IntArray

if TYPE_CHECKING:
    import torch


class Logprobs(NamedTuple):
    """Hold log-probabilities at ``n`` positions: of the chosen token ``[n]``, and of the ``m`` most likely ``[n, m]``
    with their token ids ``[n, m]``. If a request has ``token_ids_logprob``, there are more columns, and the last ones of
    its positions are those of these tokens."""

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


@dataclass(slots=True, eq=False)
class ForwardOutput:
    """Hold what one step produced, on the device until ``Engine.wait`` copies it to the host.

    ``token_ids`` is int64 ``[sampled rows, width]``: the first ``accept_lens[r]`` entries of each sampled row are its
    new tokens. All of them are accepted drafts except the last, which is the bonus token; the width is 1 without
    drafts. ``nodes`` are the tree nodes at which they were sampled. The log-probabilities of sampled row r begin at
    index ``logprob_start[r]``, one per node.
    """

    token_ids: torch.Tensor
    accept_lens: torch.Tensor | None = None  # int64 [sampled rows]; None: 1 for each row
    nodes: torch.Tensor | None = None  # int64 [sampled rows, width]; None: the root of each row
    logprobs: Logprobs | None = None
    logprob_start: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: Sequence[tuple[int, IntArray, Logprobs]] = ()  # (row, the prompt tokens scored, their logprobs)
    pooled: Sequence[tuple[int, torch.Tensor]] = ()  # (row, float32 [size]) of rows whose params have pooling
    errors: Mapping[int, str] = field(default_factory=dict)  # by sampled row: why its request must end
    on_host: ForwardOutput | None = None  # copies in host memory, complete once ``event`` has completed
    result: StepResult | None = None  # what the host reads of ``on_host``: views, complete once ``event`` has completed
    event: Any = None  # the device event for which the host waits, once per step


class HostLogprobs(NamedTuple):
    """Hold ``Logprobs`` on the host: float32 ``[n]``, float32 ``[n, m]`` and int64 ``[n, m]``."""

    chosen: FloatArray
    top: FloatArray
    top_ids: Int64Array


class StepResult(NamedTuple):
    """Hold what one step produced, on the host, as packed arrays.

    ``token_ids`` is int64 ``[sampled rows, width]``; the first ``accept_lens[r]`` entries of sampled row r are its new
    tokens (1 for each row if ``accept_lens`` is None). The log-probabilities of sampled row r begin at index
    ``logprob_start[r]``, one for each node of its draft tree, and ``nodes`` (int64 ``[sampled rows, width]``) are the
    nodes at which the tokens were sampled (None: the root of each row).
    """

    token_ids: Int64Array
    accept_lens: Int64Array | None = None
    nodes: Int64Array | None = None
    logprobs: HostLogprobs | None = None
    logprob_start: Mapping[int, int] = {}  # by sampled row
    prompt_logprobs: Sequence[tuple[int, IntArray, HostLogprobs]] = ()  # (row, the prompt tokens scored, theirs)
    pooled: Sequence[tuple[int, FloatArray]] = ()  # (row, sum over its chunk (kind mean) or the vector (other kinds))
    errors: Mapping[int, str] = {}  # by sampled row: why its request must end
