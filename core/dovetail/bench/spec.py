"""Measure speculative decoding by method and workload: the number of accepted drafts and the effect on speed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.bench.divergence import first_difference
from dovetail.bench.prompts import encoded, first_prompt
from dovetail.errors import ConfigError
from dovetail.interfaces.api import Acceptance
from dovetail.llm import LLM, Output
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.bench.records import LoadCall
    from dovetail.config import Config


TOP = 5
"""The number of most likely tokens in which the two tokens of a divergence are looked up."""


@dataclass(frozen=True, slots=True)
class SpecRow:
    """Describe one method on one workload.

    ``acceptance_length`` is the average number of tokens that a request got from a step with drafts,
    ``tokens_per_step`` from any decode step. ``acceptance_rate`` is the accepted share of the draft tokens.
    ``draft_share`` is the share of the time that was spent in the drafter. ``speedup`` is relative to the first method,
    and ``same_outputs`` is the number of prompts whose output equals the first method's output.

    For greedy outputs that differ, ``divergence`` is the largest difference of log-probability, in nats, between the
    two tokens at which an output first differs from the output of the first method. If it is as small as rounding, both
    tokens are equally likely. It is None if no outputs differ or the two tokens cannot be compared.
    """

    method: str
    workload: str
    prompts: int
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    acceptance_length: float
    acceptance_rate: float
    tokens_per_step: float
    drafted: int
    accepted: int
    draft_share: float
    drafter_errors: int
    same_outputs: int
    divergence: float | None = None


def measure_methods(
    configs: Mapping[str, Config],
    workloads: Mapping[str, Sequence[LoadCall]],
    params: SamplingParams,
    batch: int,
    rounds: int = 1,
) -> Iterator[SpecRow]:
    """Measure every method in turn, each with its config in a separate engine.

    ``batch`` prompts run at a time, all with ``params``. If there are several rounds over the same prompts, the fastest
    round counts: drafters that learn have seen the outputs by then.
    """
    first: dict[str, tuple[list[Output], float]] = {}
    for method, config in configs.items():
        llm = LLM(config)
        try:
            for workload, calls in workloads.items():
                texts = [_encoded(llm, call) for call in calls]
                llm.generate(texts[:1], params)  # compile kernels and warm the caches of the machine
                runs = [_run(llm, method, workload, texts, params, batch) for _ in range(rounds)]
                outputs, row = max(runs, key=lambda run: run[1].tokens_per_second)
                reference, speed = first.setdefault(workload, (outputs, row.tokens_per_second))
                yield _compared(row, outputs, reference, speed, largest_divergence(llm, params, outputs, reference))
        finally:
            llm.close()


def _encoded(llm: LLM, call: LoadCall) -> list[int]:
    if call.token_ids is not None:
        return list(call.token_ids)
    if llm.tokenizer is None:
        raise ConfigError("this model has no tokenizer; its prompts must be token ids")
    return encoded(first_prompt(call), llm.tokenizer)


def _run(
    llm: LLM, method: str, workload: str, texts: Sequence[list[int]], params: SamplingParams, batch: int
) -> tuple[list[Output], SpecRow]:
    before, start, outputs = llm.loop.stats(), time.perf_counter(), list[Output]()
    for at in range(0, len(texts), batch):
        outputs += llm.generate(texts[at : at + batch], params)
    seconds, after = time.perf_counter() - start, llm.loop.stats()
    acceptance = Acceptance(
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
        after.verify_steps - before.verify_steps,
    )
    tokens = sum(len(output.token_ids) for output in outputs)
    decoded = tokens - len(outputs)  # the prompt's forward pass produces the first token of each output
    row = SpecRow(
        method=method,
        workload=workload,
        prompts=len(texts),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        speedup=1.0,
        acceptance_length=acceptance.length,
        acceptance_rate=acceptance.rate,
        tokens_per_step=decoded / max(decoded - acceptance.accepted, 1),
        drafted=acceptance.drafted,
        accepted=acceptance.accepted,
        draft_share=(after.draft_seconds - before.draft_seconds) / seconds,
        drafter_errors=after.drafter_errors - before.drafter_errors,
        same_outputs=0,
    )
    return outputs, row


def _compared(
    row: SpecRow, outputs: Sequence[Output], reference: Sequence[Output], speed: float, divergence: float | None
) -> SpecRow:
    same = sum(a.token_ids == b.token_ids for a, b in zip(outputs, reference, strict=True))
    return replace(row, same_outputs=same, speedup=row.tokens_per_second / speed, divergence=divergence)


def largest_divergence(
    llm: LLM, params: SamplingParams, outputs: Sequence[Output], reference: Sequence[Output]
) -> float | None:
    """Return the largest difference, in nats, between the log-probabilities of the two tokens at which an output first
    differs from its reference.

    The log-probabilities come from a forward pass of ``llm``. Return None if no outputs differ, if tokens are sampled,
    or if for some pair one of the two tokens is not among the ``TOP`` most likely or one output is a prefix of the
    other.
    """
    if not params.greedy:
        return None
    pairs = zip(outputs, reference, strict=True)
    found = [_divergence(llm, a, b) for a, b in pairs if a.token_ids != b.token_ids]
    known = [each for each in found if each is not None]
    return max(known) if known and len(known) == len(found) else None


def _divergence(llm: LLM, ours: Output, theirs: Output) -> float | None:
    at = first_difference(ours.token_ids, theirs.token_ids)
    if at is None or at >= min(len(ours.token_ids), len(theirs.token_ids)):
        return None
    params = SamplingParams(max_new_tokens=1, temperature=0.0, logprobs=TOP)
    [output] = llm.generate([ours.prompt_ids + ours.token_ids[:at]], params)
    likeliest = dict(output.logprobs[0].top)
    a, b = (likeliest.get(token) for token in (ours.token_ids[at], theirs.token_ids[at]))
    return abs(a - b) if a is not None and b is not None else None
