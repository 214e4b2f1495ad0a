"""Freeze the workload of an experiment: arm A answers it once, and then it does not depend on the arm that runs it.

In a frozen trace every prompt is token ids (the earlier answers in a chat are A's answers), and outputs have the length of A's
outputs: otherwise an arm that ends its outputs early would seem fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from dovetail.bench.offline import params_of
from dovetail.bench.prompts import CallPrompt, encoded, first_prompt, next_prompt
from dovetail.bench.records import LoadCall, Workload
from dovetail.errors import ConfigError
from dovetail.sampling_params import SamplingParams
from dovetail.types import FinishKind, TokenLogprob

if TYPE_CHECKING:
    from dovetail.llm import LLM, Output

TOP = 8
"""The number of most likely tokens that are compared at each position."""


class GreedyOutput(msgspec.Struct, frozen=True):
    """Hold the greedy output of a call. ``logprobs`` belong to its tokens, and are empty if they were not requested. ``ended`` is True if
    the model ended the output, and False if it reached its length limit."""

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    ended: bool
    logprobs: list[TokenLogprob] = []


class ForcedOutput(msgspec.Struct, frozen=True):
    """Hold an arm's log-probabilities of A's output tokens of a call, and of the most likely tokens at each position."""

    id: str
    logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class _Turn:
    """Hold a call and its prompt."""

    call: LoadCall
    prompt: CallPrompt


def record(llm: LLM, workload: Workload, compared: frozenset[str]) -> list[GreedyOutput]:
    """Return greedy answers to every call, in the workload's order; the ``compared`` ones have log-probabilities. Calls of one depth run
    together, and calls that continue an answer run after it. Raises ``RequestError`` if the engine refuses a call."""
    answers: dict[str, GreedyOutput] = {}
    prompts: dict[str, CallPrompt] = {}
    for generation in _generations(workload):
        turns = [_Turn(call, _prompt(call, prompts, answers)) for call in generation]
        prompts |= {turn.call.id: turn.prompt for turn in turns}
        found = llm.generate(
            [_ids(llm, turn.prompt) for turn in turns],
            [greedy(turn.call, logprobs=turn.call.id in compared) for turn in turns],
        )
        answers |= {turn.call.id: _answer(turn.call, out) for turn, out in zip(turns, found, strict=True)}
    return [answers[call.id] for call in workload.calls]


def answer(
    llm: LLM, calls: Sequence[LoadCall], prompts: Sequence[list[int]], *, backwards: bool = False
) -> list[GreedyOutput]:
    """Return greedy answers to known prompts, with log-probabilities. With ``backwards`` the requests are submitted in the opposite
    order: other requests then share a step, and the outputs differ by the arm's own noise."""
    order = range(len(calls))[:: -1 if backwards else 1]
    found = llm.generate([prompts[i] for i in order], [greedy(calls[i], logprobs=True) for i in order])
    given = [_answer(calls[i], out) for i, out in zip(order, found, strict=True)]
    return given[:: -1 if backwards else 1]


def force(llm: LLM, answers: Sequence[GreedyOutput], *, backwards: bool = False) -> list[ForcedOutput]:
    """Return the arm's log-probabilities of the texts of ``answers``. Each text is read as a prompt, up to the context length."""
    order = [answers[i] for i in range(len(answers))[:: -1 if backwards else 1]]
    params = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=TOP)
    longest = llm.loop.executor.info.context_len - 1
    texts = [[*given.prompt_ids, *given.token_ids][:longest] for given in order]
    found = llm.generate(texts, params)
    forced = [
        ForcedOutput(a.id, (out.prompt_logprobs or [])[len(a.prompt_ids) :])
        for a, out in zip(order, found, strict=True)
    ]
    return forced[:: -1 if backwards else 1]


def frozen_trace(workload: Workload, answers: Sequence[GreedyOutput]) -> Workload:
    """Return the workload with every prompt as token ids, and with outputs as long as the answers. Constrained outputs end where their
    grammar ends."""
    calls = tuple(_frozen(call, given) for call, given in zip(workload.calls, answers, strict=True))
    return workload.model_copy(update={"calls": calls})


def warm_up(trace: Workload, count: int) -> Workload:
    """Return the calls that run before the measurement: the first ones of the trace with reversed prompts, so that prefix cache and
    drafter have not seen the measured texts."""
    roots = [call for call in trace.calls if call.parent is None][:count]
    calls = [
        call.model_copy(update={"token_ids": (call.token_ids or ())[::-1], "arrival": 0.0, "json_schema": None})
        for call in roots
    ]
    return Workload(name="warm-up", calls=tuple(calls))


def greedy(call: LoadCall, *, logprobs: bool) -> SamplingParams:
    """Return the sampling params of a call whose output is compared: greedy, whatever the call sets."""
    params = params_of(call)
    return replace(params, temperature=0.0, top_p=1.0, top_k=0, logprobs=TOP if logprobs else None)


def _generations(workload: Workload) -> Iterator[list[LoadCall]]:
    """Yield the calls that do not continue another call, then the calls that continue these, and so on."""
    depth: dict[str, int] = {}
    for call in workload.calls:
        depth[call.id] = depth[call.parent] + 1 if call.continues and call.parent is not None else 0
    for level in range(max(depth.values(), default=-1) + 1):
        yield [call for call in workload.calls if depth[call.id] == level]


def _prompt(call: LoadCall, prompts: dict[str, CallPrompt], answers: dict[str, GreedyOutput]) -> CallPrompt:
    if not call.continues or call.parent is None:
        return first_prompt(call)
    before = answers[call.parent]
    return next_prompt(call, prompts[call.parent], before.text, before.token_ids)


def _ids(llm: LLM, prompt: CallPrompt) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if llm.tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer, but the workload's prompts are text; give a workload of token ids"
        )
    return encoded(prompt, llm.tokenizer)


def _answer(call: LoadCall, output: Output) -> GreedyOutput:
    ended = output.finish is not None and output.finish.kind is FinishKind.STOP
    return GreedyOutput(call.id, output.prompt_ids, output.token_ids, output.text, ended, output.logprobs)


def _frozen(call: LoadCall, given: GreedyOutput) -> LoadCall:
    update: dict[str, object] = {
        "token_ids": tuple(given.prompt_ids),
        "text": None,
        "messages": None,
        "tools": (),
        "continues": False,
    }
    if call.json_schema is None:
        sampling = call.sampling.model_copy(update={"ignore_eos": True, "stop": ()})
        update |= {"max_tokens": max(len(given.token_ids), 1), "sampling": sampling}
    return call.model_copy(update=update)
