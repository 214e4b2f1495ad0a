"""Define what a soak counts and measures, and when it fails (``soak.py``)."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dovetail import LLM
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.types import FinishKind, TokenLogprob

MIB = 1 << 20
MOST_GROWTH_MIB = {"host": 16.0, "device": 16.0}
MOST_CHANGED = 0.02
REGEX = "[a-z ]{5,60}"


@dataclass
class Sent:
    """Hold a request and what has arrived for it."""

    kind: str
    msg: GenerateMsg
    tokens: list[int] = field(default_factory=list)
    logprobs: int = 0
    aborted: bool = False


@dataclass
class Tally:
    """Hold counts, and what was wrong."""

    sent: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    repeats: int = 0
    changed: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass
class Memory:
    """Hold the MiB in use, and the number of Python's objects."""

    host: float
    device: float
    objects: int


def faults(llm: LLM, sent: Sent, answer: TokenOutput) -> list[str]:
    """Return what is wrong with a request that has ended."""
    params, finish, count = sent.msg.params, answer.finish, len(sent.tokens)
    assert finish is not None
    if finish.kind is FinishKind.ABORT:
        return [] if sent.aborted else ["aborted without a request to abort"]
    found = []
    if finish.kind is FinishKind.ERROR:
        found.append(str(finish.message))
    if finish.kind is FinishKind.LENGTH and count != params.max_new_tokens:
        found.append(f"{count} tokens of {params.max_new_tokens}")
    if answer.completion_tokens != count:
        found.append(f"{count} tokens arrived, but {answer.completion_tokens} were reported")
    if params.logprobs is not None and sent.logprobs != count:
        found.append(f"{sent.logprobs} logprobs for {count} tokens")
    if params.ignore_eos and finish.kind is FinishKind.STOP:
        found.append("it stopped")
    if params.grammar is not None and finish.kind is FinishKind.STOP:
        assert llm.tokenizer is not None
        text = llm.tokenizer.decode(sent.tokens)
        if not re.fullmatch(REGEX, text):
            found.append(f"{text!r} breaks its grammar")
    return found


def memory(llm: LLM) -> Memory:
    """Return the memory in use now, after freed memory was returned."""
    gc.collect()
    if name := ctypes.util.find_library("c"):
        trim = getattr(ctypes.CDLL(name), "malloc_trim", None)  # glibc has it
        if trim is not None:
            trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    on_device = llm.loop.executor.rank.engine.device.type == "cuda"
    device = torch.cuda.memory_allocated() / MIB if on_device else 0.0
    return Memory(pages * 4096 / MIB, device, len(gc.get_objects()))


def judge(tally: Tally, rounds: list[Memory], retractions: int, float32: bool, grows: bool = True) -> list[str]:
    """Return every reason why the run fails. Requests whose memory does not grow need not be retracted."""
    problems = tally.wrong[:5] + ([f"and {len(tally.wrong) - 5} more"] if len(tally.wrong) > 5 else [])
    if tally.sent.total() != tally.ended.total():
        problems.append(f"{tally.sent.total()} requests were sent and {tally.ended.total()} ended")
    for name, most in MOST_GROWTH_MIB.items():
        grown = growth([getattr(found, name) for found in rounds])
        if grown > most:
            problems.append(f"{name} memory grew by {grown:.1f} MiB")
    never = [kind for kind in (FinishKind.LENGTH, FinishKind.STOP, FinishKind.ABORT) if not tally.ended[kind]]
    problems += [f"no request ended by {kind}" for kind in never]
    if grows and not retractions:
        problems.append("nothing was ever retracted")
    if float32 and tally.changed > MOST_CHANGED * tally.repeats:
        problems.append(f"{tally.changed} of {tally.repeats} repeated requests changed their tokens")
    return problems


def growth(values: list[float]) -> float:
    """Return the growth from the middle rounds to the last; until then libraries fill their bounded caches."""
    middle = len(values) // 2
    return statistics.median(values[-3:]) - statistics.median(values[middle - 2 : middle + 1])


def broken(entry: TokenLogprob, top: int) -> bool:
    """Return whether the entry cannot be a token's logprob with its ``top`` alternatives."""
    return entry.logprob is None or not math.isfinite(entry.logprob) or entry.logprob > 1e-4 or len(entry.top) != top
