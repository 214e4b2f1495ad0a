"""Compare jump-forward decoding on and off on the character-sheet task: forward passes, latency, and where the texts
diverge.

    python benchmarks/jump_forward.py [--prompts 200] [--backend xgrammar] [--model tiny]

Requests run one at a time, greedily, with the two arms in turns. If two texts differ, the span in which their tokens
first diverge is shown for each arm: the same text in other tokens, after which the model continues freely.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail import LLM, SamplingParams
from dovetail.sampling_params import GrammarKind, GrammarSpec

SHEET = (
    r'\{"name": "[A-Za-z ]{1,20}", "class": "[a-z]{1,12}", "level": [0-9]{1,2}, "hp": [0-9]{1,3}, '
    r'"items": \["[a-z ]{1,15}"(, "[a-z ]{1,15}"){0,3}\]\}'
)
NAMES = ("Bella", "Omar", "Tilda", "Grim", "Wanda", "Pip", "Ragnar", "Lin", "Sable", "Hugo")
CLASSES = ("wizard", "knight", "thief", "ranger", "bard")
ITEMS = ("a staff and a map", "a sword and a shield", "a rope, a lamp and a knife", "a bow")


@dataclass(frozen=True)
class Sample:
    """Describe one request in one arm."""

    token_ids: Sequence[int]
    text: str
    steps: int
    seconds: float
    jumped: int


def prompts(count: int) -> list[str]:
    """Return descriptions of heroes, all different."""
    return [
        f"Write a character sheet in JSON: {NAMES[i % 10]} is a level {1 + i % 19} {CLASSES[i // 10 % 5]} with "
        f"{20 + i} hp. {NAMES[i % 10]} carries {ITEMS[i // 50 % 4]}."
        for i in range(count)
    ]


def run(llm: LLM, prompt: str) -> Sample:
    """Run one greedy request."""
    grammar = GrammarSpec(GrammarKind.REGEX, SHEET)
    before, start = llm.loop.stats(), time.perf_counter()
    output = llm.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=160, grammar=grammar))[0]
    seconds, after = time.perf_counter() - start, llm.loop.stats()
    jumped = after.jumped_tokens - before.jumped_tokens
    return Sample(output.token_ids, output.text, after.steps - before.steps, seconds, jumped)


def divergence(llm: LLM, off: Sample, on: Sample) -> str:
    """Return the tokens of both arms from where they first differ up to where both have written the same text again."""
    vocabulary = llm.tokenizer.token_bytes if llm.tokenizer else ()
    a, b = ([vocabulary[token] or b"" for token in sample.token_ids] for sample in (off, on))
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    stop = next(
        (
            (i, j)
            for i in range(at + 1, len(a))
            for j in range(at + 1, len(b))
            if b"".join(a[at:i]) == b"".join(b[at:j])
        ),
        (at + 3, at + 3),
    )
    return f"`{'·'.join(_text(p) for p in a[at : stop[0]])}` / `{'·'.join(_text(p) for p in b[at : stop[1]])}`"


def _text(part: bytes) -> str:
    return part.decode(errors="replace")


def table(llm: LLM, overlap: bool, off: Sequence[Sample], on: Sequence[Sample]) -> str:
    """Return a row of the table, and a line for each difference."""
    ratio = sum(s.steps for s in off) / sum(s.steps for s in on)
    latency = statistics.median(a.seconds / b.seconds for a, b in zip(off, on, strict=True))
    same = sum(a.text == b.text for a, b in zip(off, on, strict=True))
    jumped = sum(s.jumped for s in on) / sum(len(s.token_ids) for s in on)
    row = (
        f"| {'on' if overlap else 'off'} | {statistics.mean(s.steps for s in off):.1f} | "
        f"{statistics.mean(s.steps for s in on):.1f} | {ratio:.2f} | {latency:.2f} | {jumped:.0%} | {same} of {len(off)} |"
    )
    differing = [divergence(llm, a, b) for a, b in zip(off, on, strict=True) if a.text != b.text]
    return "\n".join([row, *(f"  {line}" for line in differing)])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--backend", default="xgrammar")
    parser.add_argument("--model", default="tiny")
    chosen = parser.parse_args()
    write = sys.stdout.write
    write("| overlap | passes, off | passes, on | ratio | latency ratio (median) | tokens jumped | same text |\n")
    write("|---|---|---|---|---|---|---|\n")
    for overlap in (False, True):
        arms = [
            LLM(
                chosen.model,
                device="cpu",
                grammar={"backend": chosen.backend, "jump_forward": jump},
                scheduler={"overlap": overlap},
            )
            for jump in (False, True)
        ]
        for arm in arms:
            run(arm, "Write a character sheet in JSON: Ada is a level 3 bard.")
        pairs: list[list[Sample]] = [[], []]
        for i, prompt in enumerate(prompts(chosen.prompts)):
            for arm in (0, 1) if i % 2 else (1, 0):
                pairs[arm].append(run(arms[arm], prompt))
        write(table(arms[0], overlap, *pairs) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
