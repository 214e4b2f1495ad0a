"""Measure how fast the engine runs programs: a fork against the same prompts sent as requests, and a batch over one
document.

    python benchmarks/language.py [--siblings 8] [--prefix 1024] [--new 8] [--questions 64] [--rounds 5] [--json FILE]

All arms send the same prompts (greedy, the same number of new tokens) to an engine in this process and take turns;
before each turn the prefix cache is emptied. ``fork.py`` measures the engine alone, and this benchmark measures
everything from the program on.

"At once" means that the engine waits until all requests have arrived, and that the clock starts then.

    one by one   cold requests one after another, the cache emptied before each
    at once      cold requests at once, on an engine without a prefix cache
    reuse        at once, automatic prefix reuse (scheduler.wait_for_prefix: false)
    waits        at once, automatic prefix reuse, and a request waits for a prefix that another is computing (the default)
    fork         s.fork(n): the siblings are a group (wait_for_prefix: true)

    rows         the questions at once, on an engine without a prefix cache
    run_batch    one run_batch: the common prefix of all rows is computed first
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dovetail as sgl

FORK_ARMS = ("one by one", "at once", "reuse", "waits", "fork")
BATCH_ARMS = ("rows", "run_batch")
ENGINES: dict[str, dict[str, Any]] = {
    "none": {"cache": "none"},
    "reuse": {"scheduler": {"wait_for_prefix": False}},
    "waits": {"scheduler": {"wait_for_prefix": True}},
}
ENGINE_OF = {"one by one": "waits", "at once": "none", "reuse": "reuse", "waits": "waits", "fork": "waits"}
ENGINE_OF |= {"rows": "none", "run_batch": "waits"}


@dataclass(frozen=True)
class Sample:
    """Hold one turn of one arm: its seconds, and the prompt tokens that were requested and that the engine computed."""

    seconds: float
    asked: int
    computed: int


@dataclass(frozen=True)
class Work:
    """Describe the work of every arm: continue ``prefix`` with each of ``ends``."""

    prefix: str
    ends: tuple[str, ...]
    new: int


@sgl.function
def request(s, prompt, new):
    """Run one prompt by itself."""
    s += prompt
    s += sgl.gen("x", max_tokens=new, temperature=0, ignore_eos=True)


@sgl.function
def forked(s, prefix, ends, new):
    """Run all ends as forks of one state."""
    s += prefix
    forks = s.fork(len(ends))
    for fork, end in zip(forks, ends, strict=True):
        fork += end
        fork += sgl.gen("x", max_tokens=new, temperature=0, ignore_eos=True)
    forks.join()


@sgl.function
def question(s, prefix, end, new):
    """Run one row of a batch."""
    s += prefix
    s += end
    s += sgl.gen("x", max_tokens=new, temperature=0, ignore_eos=True)


def main() -> None:
    """Run all arms and print two tables."""
    args = arguments()
    with engines(args) as found:
        words = Words(found["waits"], random.Random(0))
        forks = measure(found, FORK_ARMS, lambda: words.work(args.prefix, args.siblings, args.new), args.rounds)
        batch = measure(found, BATCH_ARMS, lambda: words.work(args.prefix, args.questions, args.new), args.rounds)
    print(f"{args.siblings} continuations of a prefix of {args.prefix} tokens, {args.new} new tokens each\n")
    print("\n".join(table(forks, "fork")))
    print(f"\n{args.questions} questions about a document of {args.prefix} tokens\n")
    print("\n".join(table(batch, "run_batch")))
    if args.json:
        text = {arm: [asdict(sample) for sample in samples] for arm, samples in {**forks, **batch}.items()}
        args.json.write_text(
            json.dumps({"settings": {**vars(args), "json": str(args.json)}, "samples": text}, indent=1)
        )


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Programs against the same prompts as requests.")
    for name, default in (("siblings", 8), ("prefix", 1024), ("new", 8), ("questions", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(given)


@contextmanager
def engines(args: argparse.Namespace) -> Iterator[dict[str, sgl.Runtime]]:
    """Create one runtime for each kind of prefix reuse."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(sgl.Runtime(args.model, device=args.device, **settings))
            for name, settings in ENGINES.items()
        }


class Words:
    """Make random texts that never repeat."""

    def __init__(self, runtime: sgl.Runtime, rng: random.Random) -> None:
        self._tokenizer, self._rng = runtime.tokenizer, rng
        self._count = itertools.count()

    def work(self, prefix: int, ends: int, new: int) -> Work:
        """Return a prefix of ``prefix`` tokens and ``ends`` short ends."""
        text = self._text(prefix)
        return Work(text, tuple(f" Question {i}: {self._text(8)}" for i in range(ends)), new)

    def _text(self, tokens: int) -> str:
        assert self._tokenizer is not None
        text = f"{next(self._count)}:"
        while len(ids := self._tokenizer.encode(text)) < tokens:
            text += "".join(f" {self._rng.randrange(1000)}" for _ in range(1 + (tokens - len(ids)) // 4))
        return self._tokenizer.decode(ids[:tokens])


def measure(
    found: dict[str, sgl.Runtime], arms: tuple[str, ...], make: Callable[[], Work], rounds: int
) -> dict[str, list[Sample]]:
    """Return the samples of each arm; the first round of all arms is not counted."""
    samples: dict[str, list[Sample]] = {arm: [] for arm in arms}
    rng = random.Random(1)
    for turn in range(rounds + 1):
        work = make()
        for arm in rng.sample(arms, len(arms)):
            sample = run(arm, found[ENGINE_OF[arm]], work)
            if turn:
                samples[arm].append(sample)
    return samples


def run(arm: str, runtime: sgl.Runtime, work: Work) -> Sample:
    """Run one turn of one arm."""
    runtime.flush_cache()
    before, start = runtime.stats(), time.perf_counter()
    said, start = ARMS[arm](runtime, work, start)
    assert len(said) == len(work.ends)
    seconds, after = time.perf_counter() - start, runtime.stats()
    asked, cached = after.prompt_tokens - before.prompt_tokens, after.cached_tokens - before.cached_tokens
    return Sample(seconds, asked, asked - cached)


Said = tuple[list[str], float]
"""The outputs of the model, and when the clock started."""


def one_by_one(runtime: sgl.Runtime, work: Work, start: float) -> Said:
    """Run cold requests one after another."""
    said = []
    for end in work.ends:
        runtime.flush_cache()
        said.append(request.run(work.prefix + end, work.new, backend=runtime)["x"])
    return said, start


def at_once(runtime: sgl.Runtime, work: Work, start: float) -> Said:
    """Run requests without hints."""
    go, engine_thread = threading.Event(), runtime._engine_thread
    holds = threading.Thread(target=engine_thread.query, args=(lambda loop: go.wait(),))
    holds.start()
    with ThreadPoolExecutor(len(work.ends)) as pool:
        found = [pool.submit(request.run, work.prefix + end, work.new, backend=runtime) for end in work.ends]
        while engine_thread._inbox.qsize() < len(found):
            time.sleep(0.001)
        start = time.perf_counter()
        go.set()
        states = [each.result() for each in found]
    holds.join()
    return [state["x"] for state in states], start


def fork(runtime: sgl.Runtime, work: Work, start: float) -> Said:
    """Run siblings of one state."""
    return forked.run(work.prefix, work.ends, work.new, backend=runtime)["x"], start


def batch(runtime: sgl.Runtime, work: Work, start: float) -> Said:
    """Run rows of one program."""
    rows = [{"prefix": work.prefix, "end": end, "new": work.new} for end in work.ends]
    return [state["x"] for state in question.run_batch(rows, backend=runtime, num_threads=len(rows))], start


ARMS: dict[str, Callable[[sgl.Runtime, Work, float], Said]] = {
    "one by one": one_by_one,
    "at once": at_once,
    "reuse": at_once,
    "waits": at_once,
    "fork": fork,
    "rows": at_once,
    "run_batch": batch,
}


def table(samples: dict[str, list[Sample]], reference: str) -> list[str]:
    """Return medians by arm, and how many times as long as the reference each takes."""
    medians = {arm: statistics.median(sample.seconds for sample in found) for arm, found in samples.items()}
    lines = [
        f"| arm | ms | low to high | of {reference} | prompt tokens | of them computed |",
        "|---|---|---|---|---|---|",
    ]
    for arm, found in samples.items():
        times = [sample.seconds * 1e3 for sample in found]
        ratio = medians[arm] / medians[reference]
        spread = f"{min(times):.0f} to {max(times):.0f}"
        lines.append(
            f"| {arm} | {medians[arm] * 1e3:.0f} | {spread} | {ratio:.2f} | {found[-1].asked} | {found[-1].computed} |"
        )
    return lines


if __name__ == "__main__":
    main()
