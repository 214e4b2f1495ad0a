"""Make the calls of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dovetail.bench.arrivals import with_arrivals
from dovetail.bench.draws import Draws
from dovetail.bench.records import LoadCall, Workload
from dovetail.bench.specs import (
    AgentSpec,
    ArrivalSpec,
    AsGiven,
    ChatSpec,
    JsonlSpec,
    JsonSpec,
    QuestionsSpec,
    RandomSpec,
    SharedPrefixSpec,
    WorkloadSpec,
)
from dovetail.bench.workloads.fill import fill_of
from dovetail.bench.workloads.jsonl import read_calls
from dovetail.bench.workloads.questions import json_calls, question_calls
from dovetail.bench.workloads.vocabulary import PromptVocabulary


def make_workload(
    spec: WorkloadSpec, seed: int = 0, vocabulary: PromptVocabulary | None = None, arrivals: ArrivalSpec | None = None
) -> Workload:
    """Return the calls of ``spec``, which are always the same for a seed, a vocabulary and ``arrivals``.

    By default the calls keep their own times: all are due at once, except calls from a file that gives times.
    ``vocabulary`` is needed for random tokens. Raises ``ConfigError``.
    """
    calls = tuple(_calls(spec, seed, vocabulary))
    name = spec.path.stem if isinstance(spec, JsonlSpec) else spec.kind
    made = Workload(name=name, calls=calls, seed=seed, description={"workload": spec.model_dump(mode="json")})
    return with_arrivals(made, arrivals or AsGiven(), seed)


def with_roots(spec: WorkloadSpec, roots: int) -> WorkloadSpec:
    """Return the spec of the same kind of load with at least ``roots`` calls without a parent, for a run of a given length
    at a given rate.

    The spec of a file is returned unchanged, because its number of calls is fixed.
    """
    if isinstance(spec, JsonlSpec):
        return spec
    if isinstance(spec, SharedPrefixSpec):
        return spec.model_copy(update={"per_group": math.ceil(roots / spec.groups)})
    name = "conversations" if isinstance(spec, ChatSpec) else "programs" if isinstance(spec, AgentSpec) else "count"
    return spec.model_copy(update={name: roots})


def repeated(workload: Workload, roots: int) -> Workload:
    """Repeat the workload until it has at least ``roots`` calls without a parent.

    The ids of later repetitions end in ~2, ~3 and so on. Repeated prompts are found in a prefix cache.
    """
    calls, have, turn = list(workload.calls), sum(call.parent is None for call in workload.calls), 1
    each = have
    while have < roots:
        turn += 1
        have += each
        calls += [_renamed(call, f"~{turn}") for call in workload.calls]
    return workload.model_copy(update={"calls": tuple(calls)})


def _renamed(call: LoadCall, end: str) -> LoadCall:
    parent = None if call.parent is None else call.parent + end
    return call.model_copy(update={"id": call.id + end, "group": call.group + end, "parent": parent})


def _calls(spec: WorkloadSpec, seed: int, vocabulary: PromptVocabulary | None) -> list[LoadCall] | Iterator[LoadCall]:
    if isinstance(spec, JsonlSpec):
        return read_calls(spec)
    if isinstance(spec, JsonSpec):
        return json_calls(spec, seed)
    if isinstance(spec, QuestionsSpec):
        return question_calls(spec, seed)
    if isinstance(spec, RandomSpec):
        return _random(spec, seed, vocabulary)
    if isinstance(spec, SharedPrefixSpec):
        return _shared_prefix(spec, seed, vocabulary)
    if isinstance(spec, ChatSpec):
        return _chat(spec, seed, vocabulary)
    return _agent(spec, seed, vocabulary)


def _random(spec: RandomSpec, seed: int, vocabulary: PromptVocabulary | None) -> Iterator[LoadCall]:
    fill = fill_of(spec.content, vocabulary)
    for i in range(spec.count):
        draws, name = Draws(seed, "random", i), f"r{i}"
        prompt = fill.user(draws, draws.count(spec.input))
        yield fill.call(prompt, id=name, group=name, max_tokens=draws.count(spec.output))


def _shared_prefix(spec: SharedPrefixSpec, seed: int, vocabulary: PromptVocabulary | None) -> list[LoadCall]:
    fill, calls = fill_of(spec.content, vocabulary), list[LoadCall]()
    for g in range(spec.groups):
        draws = Draws(seed, "shared_prefix", g)
        prefix = fill.system(draws, draws.count(spec.prefix))
        for i in range(spec.per_group):
            prompt = prefix + fill.user(draws, draws.count(spec.suffix))
            calls.append(fill.call(prompt, id=f"g{g}.{i}", group=f"g{g}", max_tokens=draws.count(spec.output)))
    return Draws(seed, "shared_prefix", "order").shuffled(calls)


def _chat(spec: ChatSpec, seed: int, vocabulary: PromptVocabulary | None) -> Iterator[LoadCall]:
    fill = fill_of(spec.content, vocabulary)
    draws = Draws(seed, "chat", "system")
    system = fill.system(draws, draws.count(spec.system))
    for c in range(spec.conversations):
        draws = Draws(seed, "chat", c)
        for turn in range(draws.count(spec.turns)):
            question = fill.user(draws, draws.count(spec.user))
            fields = _turn(f"c{c}", turn, draws.seconds(spec.think))
            yield fill.call(question if turn else system + question, max_tokens=draws.count(spec.output), **fields)


def _agent(spec: AgentSpec, seed: int, vocabulary: PromptVocabulary | None) -> Iterator[LoadCall]:
    fill = fill_of(spec.content, vocabulary)
    draws = Draws(seed, "agent", "system")
    system = fill.system(draws, draws.count(spec.system))
    for p in range(spec.programs):
        draws = Draws(seed, "agent", p)
        for step in range(draws.count(spec.steps)):
            added = fill.user(draws, draws.count(spec.result if step else spec.task))
            fields = _turn(f"p{p}", step, draws.seconds(spec.think))
            yield fill.call(added if step else system + added, max_tokens=draws.count(spec.output), **fields)


def _turn(group: str, turn: int, think: float) -> dict[str, Any]:
    """Return the fields of a call that continues the previous call of its group, unless it is the first."""
    first: dict[str, Any] = {"id": f"{group}.{turn}", "group": group}
    return first if turn == 0 else {**first, "parent": f"{group}.{turn - 1}", "think": think, "continues": True}
