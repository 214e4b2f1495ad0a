"""Do both arms say the same? Asked before any speed is measured.

Two sound arms may differ by rounding, and rounding decides where the two best tokens are as likely as each other. So where the
greedy outputs of a request part, A's and B's log-probabilities of the two tokens are looked at, at that place, after the same
text: a *near tie* is within what rounding does, anything else is *real*. What rounding does is measured: arm A answers twice, the
second time with the requests in the opposite order, so that other requests share its steps. The limit is ``SLACK`` times the
largest shift seen there, and not less than ``FLOORS`` has for the dtype, as other kernels round elsewhere.

Both arms also read A's texts as prompts (teacher forcing), which brings the KL divergence and the share of places with the same
most likely token. A clear favourite of A that is not B's is real as well, and so is a KL beyond rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dovetail.bench.divergence import first_difference
from dovetail.experiment.likeness import Likeness, likeness, logprob_in
from dovetail.experiment.result import Divergence, GateRecord
from dovetail.experiment.trace import ForcedOutput, GreedyOutput
from dovetail.types import TokenLogprob

SLACK = 4.0
FLOORS: Mapping[str, tuple[float, float]] = {
    "float32": (0.005, 1e-5),
    "float16": (0.05, 1e-3),
    "bfloat16": (0.25, 1e-2),
}
"""By dtype of arm A's weights or KV pool, whichever is coarser: the margin (nats) and mean KL (nats per token) that are never
taken for a difference."""
COARSEST = (0.5, 2e-2)
"""Of 8 bits."""
CEILING = 1.0
"""A margin that no noise excuses, in nats: the better token is nearly three times as likely."""
MOST_SHOWN, SHOWN_TOKENS = 20, 8
"""Divergences that are told, and of each so many tokens."""


class ArmOutputs(msgspec.Struct, frozen=True):
    """What an arm said: to every compared call, and of A's texts. ``again`` and ``forced_again`` are A's second time. ``refused`` is
    why it could not answer; ``facts`` are what its engine says of itself."""

    answers: list[GreedyOutput] = []
    forced: list[ForcedOutput] = []
    again: list[GreedyOutput] = []
    forced_again: list[ForcedOutput] = []
    refused: str = ""
    facts: dict[str, str] = {}


def read_outputs(file: Path) -> ArmOutputs:
    """What the process of an arm has written."""
    return msgspec.msgpack.decode(file.read_bytes(), type=ArmOutputs)


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """Up to which ``margin`` (nats) a divergence is a near tie, and up to which mean ``kl`` (nats per token) texts are the same."""

    margin: float
    kl: float


def limits_of(a: ArmOutputs, dtypes: Sequence[str], near_tie: float | None = None) -> GateThresholds:
    """From A against itself; ``near_tie`` is the margin where a user sets it."""
    floor, floor_kl = max((FLOORS.get(dtype, COARSEST) for dtype in dtypes), default=COARSEST)
    noises = [likeness(_places(a.answers, a.again)), likeness(_forced(a.forced, a.forced_again))]
    shift, kl = max(noise.shift for noise in noises), max(noise.kl_mean for noise in noises)
    margin = min(max(floor, SLACK * shift), CEILING) if near_tie is None else near_tie
    return GateThresholds(margin, max(floor_kl, 10 * kl))


def judge(
    a: ArmOutputs,
    b: ArmOutputs,
    limits: GateThresholds,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    decode: Callable[[Sequence[int]], str] = str,
    allow: bool = False,
) -> GateRecord:
    """The gate's word. ``schemas`` are those of constrained calls; ``decode`` writes token ids as text; with ``allow``
    differences are told and let through."""
    if b.refused:
        return GateRecord(outcome="failed", reason=f"arm b could not answer: {b.refused}")
    shown = divergences(a.answers, b.answers, limits, decode)
    itself = divergences(a.answers, a.again, limits, decode)
    forced = likeness(_forced(a.forced, b.forced))
    near = sum(d.near_tie for d in shown)
    valid_a, valid_b = valid_outputs(a.answers, schemas), valid_outputs(b.answers, schemas)
    problems = [
        *_themselves(itself, a),
        *_parted(shown, len(a.answers)),
        *_forced_problems(forced, limits),
        *_along(likeness(_places(a.answers, b.answers)), limits),
        *_grammar_problems(valid_a, valid_b),
    ]
    return GateRecord(
        outcome=("allowed" if allow else "failed") if problems else "passed",
        reason="; ".join(problems) or _sameness(shown, a, limits),
        compared=len(a.answers),
        identical=len(a.answers) - len(shown),
        near_ties=near,
        real=len(shown) - near,
        aa_identical=len(a.again) - len(itself),
        kl_mean=forced.kl_mean,
        kl_max=forced.kl_max,
        top1=forced.top1,
        grammar_valid_a=valid_a,
        grammar_valid_b=valid_b,
        divergences=tuple(sorted(shown, key=lambda d: d.near_tie)[:MOST_SHOWN]),
    )


def divergences(
    first: Sequence[GreedyOutput],
    second: Sequence[GreedyOutput],
    limits: GateThresholds,
    decode: Callable[[Sequence[int]], str] = str,
) -> list[Divergence]:
    """Where the outputs of each call part, if they do."""
    found = []
    for a, b in zip(first, second, strict=True):
        place = first_difference(a.token_ids, b.token_ids)
        if place is not None:
            found.append(_divergence(a, b, place, limits, decode))
    return found


def _divergence(
    a: GreedyOutput, b: GreedyOutput, place: int, limits: GateThresholds, decode: Callable[[Sequence[int]], str]
) -> Divergence:
    """An output that ends where the other goes on has no token to compare there: it is real."""
    told = place < min(len(a.logprobs), len(b.logprobs))
    margin = _margin(a.logprobs[place], b.logprobs[place]) if told else None
    near = margin is not None and margin <= limits.margin
    return Divergence(
        call=a.id,
        position=place,
        a_text=decode(a.token_ids[place : place + SHOWN_TOKENS]),
        b_text=decode(b.token_ids[place : place + SHOWN_TOKENS]),
        margin=margin,
        near_tie=near,
    )


def _margin(a: TokenLogprob, b: TokenLogprob) -> float:
    """How far apart the two tokens are, in the arm where they are farther: in a near tie they are close in both."""
    ours, theirs = a.token_id, b.token_id
    return max(abs(logprob_in(x, ours) - logprob_in(x, theirs)) for x in (a, b))


def _places(first: Sequence[GreedyOutput], second: Sequence[GreedyOutput]) -> list[tuple[TokenLogprob, TokenLogprob]]:
    """The places at which both answers follow the same text: up to where they part, that one included."""
    found: list[tuple[TokenLogprob, TokenLogprob]] = []
    for a, b in zip(first, second, strict=True):
        place = first_difference(a.token_ids, b.token_ids)
        end = len(a.token_ids) if place is None else place + 1
        found += zip(a.logprobs[:end], b.logprobs[:end], strict=False)
    return found


def _forced(first: Sequence[ForcedOutput], second: Sequence[ForcedOutput]) -> list[tuple[TokenLogprob, TokenLogprob]]:
    """As far as both have read: contexts may end in different places."""
    return [pair for a, b in zip(first, second, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=False)]


def valid_outputs(answers: Sequence[GreedyOutput], schemas: Mapping[str, Mapping[str, Any]]) -> tuple[int, int] | None:
    """(valid, whole) of the constrained outputs that have come to their end; None where there is none. What was cut off at its
    length says nothing. Checked with ``jsonschema`` where it is installed, else as JSON alone."""
    ended = [(given.text, schemas[given.id]) for given in answers if given.id in schemas and given.ended]
    if not any(given.id in schemas for given in answers):
        return None
    return sum(_is_valid(text, schema) for text, schema in ended), len(ended)


def _is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    try:
        import jsonschema
    except ModuleNotFoundError:
        return True
    return jsonschema.Draft202012Validator(dict(schema)).is_valid(value)


def _themselves(itself: Sequence[Divergence], a: ArmOutputs) -> list[str]:
    real = sum(not d.near_tie for d in itself)
    return [f"arm a does not even agree with itself: {real} of {len(a.again)} outputs really differ"] if real else []


def _parted(shown: Sequence[Divergence], compared: int) -> list[str]:
    real = sum(not d.near_tie for d in shown)
    return [f"{real} of {compared} outputs really differ"] if real else []


def _forced_problems(found: Likeness, limits: GateThresholds) -> list[str]:
    problems = []
    if found.upset > limits.margin:
        problems.append(f"reading A's texts, B prefers another token where A's leads by up to {found.upset:.3g} nats")
    if found.kl_mean > limits.kl:
        problems.append(f"reading A's texts, KL is {found.kl_mean:.2g} nats a token (allowed: {limits.kl:.2g})")
    return problems


def _along(found: Likeness, limits: GateThresholds) -> list[str]:
    """The same while writing: these log-probabilities come of decode steps."""
    if found.kl_mean <= limits.kl:
        return []
    return [f"while writing the same text, KL is {found.kl_mean:.2g} nats a token (allowed: {limits.kl:.2g})"]


def _grammar_problems(a: tuple[int, int] | None, b: tuple[int, int] | None) -> list[str]:
    found = []
    for name, counts in (("a", a), ("b", b)):
        if counts is not None and counts[0] < counts[1]:
            found.append(f"{counts[1] - counts[0]} of {counts[1]} constrained outputs of arm {name} break their schema")
    return found


def _sameness(shown: Sequence[Divergence], a: ArmOutputs, limits: GateThresholds) -> str:
    if not shown:
        return f"all {len(a.answers)} outputs are the same"
    return f"{len(shown)} of {len(a.answers)} outputs part at a near tie (within {limits.margin:.3g} nats), none really"
