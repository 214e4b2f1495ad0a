"""Decide whether both arms generate the same outputs, before any speed is measured.

Two correct arms may differ by rounding, and rounding decides where the two best tokens are equally likely. Where the greedy outputs
of a request diverge, the gate therefore compares A's and B's log-probabilities of the two tokens at that position, after the same
text: a divergence is a *near tie* if the difference is within the effect of rounding, and *real* otherwise. The effect of rounding
is measured: arm A answers twice, the second time with the requests in the opposite order, so that other requests share its steps.
The limit is ``SLACK`` times the largest shift between these answers, and at least the value of ``FLOORS`` for the dtype, because
other kernels round differently.

Both arms also read A's texts as prompts (teacher forcing). This gives the KL divergence and the share of positions with the same
most likely token. The outputs also differ if A clearly prefers a token that B does not prefer, or if the KL exceeds rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dovetail.bench.divergence import first_difference
from dovetail.experiment.agreement import Agreement, agreement, logprob_in
from dovetail.experiment.result import Divergence, GateRecord
from dovetail.experiment.trace import ForcedOutput, GreedyOutput
from dovetail.types import TokenLogprob

SLACK = 4.0
FLOORS: Mapping[str, tuple[float, float]] = {
    "float32": (0.005, 1e-5),
    "float16": (0.05, 1e-3),
    "bfloat16": (0.25, 1e-2),
}
"""The margin (nats) and mean KL (nats per token) that never count as a difference, by the coarser dtype of arm A's weights and KV
pool."""
COARSEST = (0.5, 2e-2)
"""The values for 8-bit dtypes."""
CEILING = 1.0
"""The largest possible margin of a near tie, in nats. At a larger margin one token is nearly three times as likely as the other."""
MOST_SHOWN, SHOWN_TOKENS = 20, 8
"""The largest number of divergences in a report, and the number of tokens that are shown of each."""


class ArmOutputs(msgspec.Struct, frozen=True):
    """Hold the outputs of an arm: ``answers`` to every compared call, and ``forced`` for A's texts as prompts. ``again`` and
    ``forced_again`` are A's second answers. ``refused`` is the reason why the arm refused a call; ``facts`` are entries of its engine's info."""

    answers: list[GreedyOutput] = []
    forced: list[ForcedOutput] = []
    again: list[GreedyOutput] = []
    forced_again: list[ForcedOutput] = []
    refused: str = ""
    facts: dict[str, str] = {}


def read_outputs(file: Path) -> ArmOutputs:
    """Return the outputs that the process of an arm has written."""
    return msgspec.msgpack.decode(file.read_bytes(), type=ArmOutputs)


@dataclass(frozen=True, slots=True)
class GateThresholds:
    """Hold the largest ``margin`` (nats) of a near tie, and the largest mean ``kl`` (nats per token) that counts as equal."""

    margin: float
    kl: float


def thresholds_of(a: ArmOutputs, dtypes: Sequence[str], near_tie: float | None = None) -> GateThresholds:
    """Return the thresholds from a comparison of A with itself. ``near_tie`` is the margin if the user sets it."""
    floor, floor_kl = max((FLOORS.get(dtype, COARSEST) for dtype in dtypes), default=COARSEST)
    noises = [agreement(_common_positions(a.answers, a.again)), agreement(_forced(a.forced, a.forced_again))]
    shift, kl = max(noise.shift for noise in noises), max(noise.kl_mean for noise in noises)
    margin = min(max(floor, SLACK * shift), CEILING) if near_tie is None else near_tie
    return GateThresholds(margin, max(floor_kl, 10 * kl))


def evaluate_gate(
    a: ArmOutputs,
    b: ArmOutputs,
    limits: GateThresholds,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    decode: Callable[[Sequence[int]], str] = str,
    allow: bool = False,
) -> GateRecord:
    """Return the decision of the gate. ``schemas`` holds the JSON schema of each constrained call, by its id; ``decode`` turns token ids into text. With
    ``allow`` differences are reported and do not fail the gate."""
    if b.refused:
        return GateRecord(outcome="failed", reason=f"arm b refuses a call that arm a answers: {b.refused}")
    shown = divergences(a.answers, b.answers, limits, decode)
    itself = divergences(a.answers, a.again, limits, decode)
    forced = agreement(_forced(a.forced, b.forced))
    near = sum(d.near_tie for d in shown)
    valid_a, valid_b = valid_outputs(a.answers, schemas), valid_outputs(b.answers, schemas)
    problems = [
        *_self_problems(itself, a),
        *_divergence_problems(shown, len(a.answers)),
        *_forced_problems(forced, limits),
        *_decode_problems(agreement(_common_positions(a.answers, b.answers)), limits),
        *_grammar_problems(valid_a, valid_b),
    ]
    return GateRecord(
        outcome=("allowed" if allow else "failed") if problems else "passed",
        reason="; ".join(problems) or _pass_reason(shown, a, limits),
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
    """Return the first divergence of each call whose outputs differ."""
    found = []
    for a, b in zip(first, second, strict=True):
        place = first_difference(a.token_ids, b.token_ids)
        if place is not None:
            found.append(_divergence(a, b, place, limits, decode))
    return found


def _divergence(
    a: GreedyOutput, b: GreedyOutput, place: int, limits: GateThresholds, decode: Callable[[Sequence[int]], str]
) -> Divergence:
    """Describe a divergence. If one output ends where the other continues, there is no token to compare, and the divergence is real."""
    comparable = place < min(len(a.logprobs), len(b.logprobs))
    margin = _margin(a.logprobs[place], b.logprobs[place]) if comparable else None
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
    """Return the difference of the two tokens' log-probabilities, in the arm where this difference is larger, because it is small in
    both arms at a near tie."""
    ours, theirs = a.token_id, b.token_id
    return max(abs(logprob_in(x, ours) - logprob_in(x, theirs)) for x in (a, b))


def _common_positions(
    first: Sequence[GreedyOutput], second: Sequence[GreedyOutput]
) -> list[tuple[TokenLogprob, TokenLogprob]]:
    """Return the positions at which both answers follow the same text: all up to the first divergence, which is included."""
    found: list[tuple[TokenLogprob, TokenLogprob]] = []
    for a, b in zip(first, second, strict=True):
        place = first_difference(a.token_ids, b.token_ids)
        end = len(a.token_ids) if place is None else place + 1
        found += zip(a.logprobs[:end], b.logprobs[:end], strict=False)
    return found


def _forced(first: Sequence[ForcedOutput], second: Sequence[ForcedOutput]) -> list[tuple[TokenLogprob, TokenLogprob]]:
    """Return the positions that both arms have read. Their contexts may have different lengths."""
    return [pair for a, b in zip(first, second, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=False)]


def valid_outputs(answers: Sequence[GreedyOutput], schemas: Mapping[str, Mapping[str, Any]]) -> tuple[int, int] | None:
    """Return (valid, complete): the number of constrained outputs that the model ended and that are valid, and the number of those that
    it ended. Return None if no call is constrained. Outputs that were cut off at their length do not count. Validity is checked with ``jsonschema`` if it is installed,
    else as JSON only."""
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


def _self_problems(itself: Sequence[Divergence], a: ArmOutputs) -> list[str]:
    real = sum(not d.near_tie for d in itself)
    return [f"arm a differs from itself: {real} of {len(a.again)} outputs have a real difference"] if real else []


def _divergence_problems(shown: Sequence[Divergence], compared: int) -> list[str]:
    real = sum(not d.near_tie for d in shown)
    return [f"{real} of {compared} outputs have a real difference"] if real else []


def _forced_problems(found: Agreement, limits: GateThresholds) -> list[str]:
    problems = []
    if found.max_lead > limits.margin:
        problems.append(
            f"with A's texts as prompts, B prefers another token where A's leads by up to {found.max_lead:.3g} nats"
        )
    if found.kl_mean > limits.kl:
        problems.append(
            f"with A's texts as prompts, KL is {found.kl_mean:.2g} nats per token (allowed: {limits.kl:.2g})"
        )
    return problems


def _decode_problems(found: Agreement, limits: GateThresholds) -> list[str]:
    """Check the KL while both arms generate the same text: these log-probabilities come from decode steps."""
    if found.kl_mean <= limits.kl:
        return []
    return [f"while generating the same text, KL is {found.kl_mean:.2g} nats per token (allowed: {limits.kl:.2g})"]


def _grammar_problems(a: tuple[int, int] | None, b: tuple[int, int] | None) -> list[str]:
    found = []
    for name, counts in (("a", a), ("b", b)):
        if counts is not None and counts[0] < counts[1]:
            found.append(
                f"{counts[1] - counts[0]} of {counts[1]} constrained outputs of arm {name} violate their schema"
            )
    return found


def _pass_reason(shown: Sequence[Divergence], a: ArmOutputs, limits: GateThresholds) -> str:
    if not shown:
        return f"all {len(a.answers)} outputs are the same"
    return f"{len(shown)} of {len(a.answers)} outputs diverge, all at a near tie (within {limits.margin:.3g} nats)"
