"""Measure a fork: siblings that continue one prefix, as a group and as requests without hints.

    python benchmarks/fork.py [--siblings 8] [--prefix 1024] [--suffix 16] [--new 16] [--rounds 7] [--model tiny] [--cpu-time]

All siblings arrive at once. Each arm has different prefixes, the arms take turns, and a prefix is never used twice.

    cold     every sibling in a separate namespace: nothing is shared
    reuse    only the prefix cache finds what is already computed (scheduler.wait_for_prefix: false)
    waits    as ``reuse``, and a request waits for a prefix that another request is computing (wait_for_prefix: true)
    group    the siblings are a group (wait_for_prefix: false)
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail import LLM, SamplingParams
from dovetail.messages import GenerateMsg, TokenOutput

ARMS = ("cold", "reuse", "waits", "group")
WARM_UP = 2
"""The number of rounds that are not counted."""


@dataclass(frozen=True)
class Sample:
    """Hold one fork in one arm: seconds until the last sibling had its first token, and its last; and what the
    engine computed."""

    first: float
    last: float
    computed: int
    steps: int


def main() -> None:
    """Run all arms and print a table."""
    args = arguments()
    clock = time.process_time if args.cpu_time else time.perf_counter
    engines = {wait: build(args.model, args.prefix, args.siblings, wait) for wait in (False, True)}
    samples: dict[str, list[Sample]] = {arm: [] for arm in ARMS}
    rng = random.Random(0)
    for turn in range(args.rounds + WARM_UP):
        for arm in rng.sample(ARMS, len(ARMS)):
            llm = engines[arm == "waits"]
            sample = run(llm, fork(arm, turn, rng, args), clock)
            if turn >= WARM_UP:
                samples[arm].append(sample)
    print("\n".join(table(samples)))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="A fork as a group, and as separate requests.")
    for name, default in (("siblings", 8), ("prefix", 1024), ("suffix", 16), ("new", 16), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, for a machine with other work")
    return parser.parse_args()


def build(model: str, prefix: int, siblings: int, wait: bool) -> LLM:
    """Build an engine with a pool for about ten forks without any sharing."""
    memory = {"num_pages": 1 + 10 * siblings * (prefix + 512) // 16}
    return LLM(model, device="cpu", grammar="none", memory=memory, scheduler={"wait_for_prefix": wait})


def fork(arm: str, turn: int, rng: random.Random, args: argparse.Namespace) -> list[GenerateMsg]:
    """Return the messages of one fork over a new prefix."""
    params = SamplingParams(max_new_tokens=args.new, temperature=0.0, ignore_eos=True)
    name = f"{arm}-{turn}"
    prefix = random_ids(rng, args.prefix)
    return [
        GenerateMsg(
            f"{name}-{i}",
            prefix + random_ids(rng, args.suffix),
            params,
            i,
            namespace=f"{name}-{i}" if arm == "cold" else "",
            group=name if arm == "group" else "",
            group_size=args.siblings if arm == "group" else 1,
        )
        for i in range(args.siblings)
    ]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return tokens that every vocabulary has."""
    return [rng.randrange(5, 200) for _ in range(count)]


def run(llm: LLM, msgs: Sequence[GenerateMsg], clock: Callable[[], float]) -> Sample:
    """Send all messages, and step until all have ended."""
    loop, first = llm.loop, {}
    before, start = loop.stats(), clock()
    for msg in msgs:
        loop.handle(msg)
    while loop.has_work:
        answers = loop.step()
        for answer in answers:
            assert isinstance(answer, TokenOutput), answer
            first.setdefault(answer.rid, clock() - start)
    last, after = clock() - start, loop.stats()
    asked, found = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
    return Sample(max(first.values()), last, asked - found, after.steps - before.steps)


def table(samples: dict[str, list[Sample]]) -> list[str]:
    """Return medians by arm, and how many times as long as the group each takes."""
    medians = {arm: statistics.median(sample.last for sample in found) for arm, found in samples.items()}
    lines = [
        "| arm | first tokens, ms | all tokens, ms | of the group's | prompt tokens computed | steps |",
        "|---|---|---|---|---|---|",
    ]
    for arm, found in samples.items():
        first = statistics.median(sample.first for sample in found)
        ratio = medians[arm] / medians["group"]
        computed, steps = found[-1].computed, found[-1].steps
        lines.append(f"| {arm} | {first * 1e3:.1f} | {medians[arm] * 1e3:.1f} | {ratio:.2f} | {computed} | {steps} |")
    return lines


if __name__ == "__main__":
    main()
