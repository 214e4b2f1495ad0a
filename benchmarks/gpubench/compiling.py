"""Measure the time between the tokens of running requests while a grammar compiles, compared with the same requests
alone."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass, field

import numpy as np

from dovetail import GrammarKind, GrammarSpec, SamplingParams
from dovetail.messages import AbortMsg, GenerateMsg, RequestFailed, TokenOutput
from gpubench.plan import Ids, Job, Measure
from gpubench.subject import TEMPERATURE, Subject


@dataclass
class Window:
    """Hold the times between tokens of all running requests, in milliseconds, and the number of seconds that were
    observed."""

    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def percentile(self, rank: float) -> float:
        """Return a percentile in milliseconds."""
        return float(np.percentile(self.gaps, rank))


def schema(number: int, members: int) -> GrammarSpec:
    """Return a schema that no other number gives.

    Every member has its own pattern, which is slow for backends that compute masks ahead.
    """
    patterns = {f"field_{i}_{number}": f"^[a-z]{{1,{20 + i % 7}}}-[0-9]{{2,{5 + i % 5}}}$" for i in range(members)}
    properties = {name: {"type": "string", "pattern": pattern} for name, pattern in patterns.items()}
    text = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(text))


def compiling(subject: Subject, job: Job, batch: int) -> list[Measure]:
    """Compare the 99th percentile of the time between tokens while a grammar compiles with that of equally long
    windows without one, in turns."""
    sizes, (members, least) = job.sizes, job.sizes.compile
    prompts = sizes.prompts(f"compiling {batch}", [sizes.decode_prompt] * batch)
    alone, beside = Window(), Window()
    watch(subject, prompts, schema(-1, members), Window(), 0.0)  # workers have started
    for number in range(job.repeats + 1):
        seconds = watch(subject, prompts, schema(number, members), beside, least)
        watch(subject, prompts, None, alone, seconds)
    facts = {
        f"{name}_p{rank}_ms": window.percentile(rank)
        for name, window in (("alone", alone), ("beside", beside))
        for rank in (50, 99)
    }
    ratio = beside.percentile(99) / alone.percentile(99)
    return [
        Measure("compile", f"bs {batch}", ratio, "ratio", [], {**facts, "seconds": beside.seconds, "ends": beside.ends})
    ]


_names = itertools.count()


def watch(subject: Subject, prompts: Ids, grammar: GrammarSpec | None, window: Window, seconds: float) -> float:
    """Let all prompts decode for ``seconds``, and until a request with ``grammar`` is answered; return how long that
    took."""
    loop, run = subject.llm.loop, next(_names)
    forever = SamplingParams(temperature=TEMPERATURE, ignore_eos=True)
    rids = [f"compiling-{run}-{i}" for i in range(len(prompts))]
    for i, (rid, prompt) in enumerate(zip(rids, prompts, strict=True)):
        loop.handle(GenerateMsg(rid, prompt, forever, i))
    last: dict[str, float] = {}
    while len(last) < len(rids):
        last.update({answer.rid: time.perf_counter() for answer in loop.step() if isinstance(answer, TokenOutput)})
    for _ in range(20):
        loop.step()
    last.clear()
    start, asked = time.perf_counter(), f"compiling-{run}-asked"
    if grammar is not None:
        loop.handle(GenerateMsg(asked, prompts[0], SamplingParams(max_new_tokens=2, grammar=grammar), 0))
    waiting, now = grammar is not None, start
    while waiting or now - start < seconds:
        answers, now = loop.step(), time.perf_counter()
        for answer in answers:
            if not isinstance(answer, TokenOutput | RequestFailed):
                continue
            if answer.rid != asked:
                if answer.rid in last:
                    window.gaps.append((now - last[answer.rid]) * 1e3)
                last[answer.rid] = now
            elif waiting:
                waiting = False
                window.ends.append(answer.message if isinstance(answer, RequestFailed) else "compiled")
                window.seconds.append(now - start)
    for rid in (*rids, asked):
        loop.handle(AbortMsg(rid))
    while loop.has_work:
        loop.step()
    return now - start
