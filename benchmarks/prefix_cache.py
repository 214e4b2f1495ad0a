"""Measure the cost of the radix tree in microseconds: by case, by nodes touched, by size of the tree.

Run: python benchmarks/prefix_cache.py [--tokens 32768] [--repeat 200] [--clock cpu]
Compare with another checkout, in turns: python benchmarks/prefix_cache.py --clock cpu --base CHECKOUT
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.interfaces.cache import CacheContext
from dovetail.types import IntArray
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache

VOCAB = 32000


def make_tokens(length: int, seed: int = 0) -> IntArray:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


class Filler:
    """Fill a cache with an unlimited supply of page numbers."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(RadixConfig(), CacheContext(page_size))
        self._next = 1

    def pages(self, tokens: IntArray) -> IntArray:
        """Return new pages for ``tokens``, ``[1, n]``."""
        count = len(tokens) // self.page_size
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)[None]

    def insert(self, tokens: IntArray) -> None:
        """Insert ``tokens`` with new pages."""
        self.cache.insert(tokens, self.pages(tokens))

    def insert_path(self, tokens: IntArray, num_nodes: int) -> None:
        """Insert ``tokens`` as a path of nodes, each of which has a second branch."""
        self.insert(tokens)
        step = len(tokens) // num_nodes // self.page_size * self.page_size
        for node in range(1, num_nodes):
            branch = tokens[: node * step + self.page_size].copy()
            branch[node * step :] += VOCAB
            self.insert(branch)

    def insert_leaves(self, count: int) -> None:
        """Insert ``count`` keys of one page that share nothing."""
        for first in range(count):
            self.insert(np.full(self.page_size, VOCAB + first, dtype=np.int32))


class Clock:
    """Select a clock in nanoseconds: wall time, or the CPU time of this thread, for a machine with other work."""

    now: Callable[[], int] = time.perf_counter_ns


def timed(call: Callable[..., object], arguments: Iterator[tuple[Any, ...]]) -> str:
    """Return the median and 99th percentile of ``call`` over ``arguments`` as text."""
    micros = []
    for args in arguments:
        start = Clock.now()
        call(*args)
        micros.append((Clock.now() - start) / 1e3)
    return f"{np.median(micros):9.1f} {np.percentile(micros, 99):9.1f}"


def row(page_size: int, what: str, cells: str) -> None:
    """Print one line of a table."""
    print(f"{page_size:9d}  {what:44s} {cells}")


def heading(title: str) -> None:
    """Print the head of a table."""
    print(f"\n{title}\npage size  {'':44s}    median       p99  (us)")


def cases(page_size: int, length: int, repeat: int) -> None:
    """Match, insert and evict a long prompt."""
    tokens = make_tokens(length)
    for num_nodes in (1, 64):
        filler = Filler(page_size)
        filler.insert_path(tokens, num_nodes)
        row(page_size, f"match, {num_nodes} nodes", timed(filler.cache.match, ((tokens,) for _ in range(repeat))))
        pages = filler.pages(tokens)
        row(
            page_size,
            f"insert again, {num_nodes} nodes",
            timed(filler.cache.insert, ((tokens, pages) for _ in range(repeat))),
        )
        last = filler.cache.match(tokens).handle
        row(page_size, f"lock, {num_nodes} nodes", timed(filler.cache.lock, ((last,) for _ in range(repeat))))
        row(page_size, f"unlock, {num_nodes} nodes", timed(filler.cache.unlock, ((last,) for _ in range(repeat))))
        row(page_size, f"insert, differs in the last page, {num_nodes} nodes", inserts(filler, tokens, repeat))
    filler = Filler(page_size)
    row(page_size, "insert, all new", inserts(filler, tokens, repeat, fresh=True))
    row(page_size, "match, differs in the first page", matches_nothing(filler, tokens, repeat))
    row(page_size, "evict 2048 tokens", timed(filler.cache.evict, (((2048 // page_size,),) for _ in range(repeat))))
    row(page_size, "evict 1 page", timed(filler.cache.evict, (((1,),) for _ in range(repeat))))


def inserts(filler: Filler, tokens: IntArray, repeat: int, fresh: bool = False) -> str:
    """Insert keys that are new in their last page, or in all pages."""

    def keys() -> Iterator[tuple[IntArray, IntArray]]:
        for index in range(repeat):
            key = tokens.copy()
            key[0 if fresh else -filler.page_size] = 2 * VOCAB + index
            yield key, filler.pages(key)

    return timed(filler.cache.insert, keys())


def matches_nothing(filler: Filler, tokens: IntArray, repeat: int) -> str:
    """Match a key whose first page is unknown."""
    other = tokens.copy()
    other[0] = -1
    return timed(filler.cache.match, ((other,) for _ in range(repeat)))


def by_nodes(page_size: int, length: int, repeat: int) -> None:
    """Measure the same prompt, divided into an increasing number of nodes."""
    tokens = make_tokens(length)
    for num_nodes in (1, 4, 16, 64, 256, 1024):
        filler = Filler(page_size)
        filler.insert_path(tokens, num_nodes)
        row(
            page_size,
            f"match, {num_nodes} nodes touched",
            timed(filler.cache.match, ((tokens,) for _ in range(repeat))),
        )


def by_size(page_size: int, length: int, repeat: int) -> None:
    """Measure the same prompt in trees of increasing size."""
    tokens = make_tokens(length)
    for num_leaves in (100, 1000, 10000, 100000):
        filler = Filler(page_size)
        filler.insert_leaves(num_leaves)
        filler.insert_path(tokens, 64)
        row(
            page_size,
            f"match, {num_leaves} other leaves",
            timed(filler.cache.match, ((tokens,) for _ in range(repeat))),
        )
        row(page_size, f"insert, {num_leaves} other leaves", inserts(filler, tokens, repeat))
        few = min(repeat, 100)
        row(
            page_size,
            f"evict 1 page, {num_leaves} other leaves",
            timed(filler.cache.evict, (((1,),) for _ in range(few))),
        )


ROW = re.compile(r"^ *(\d+)  (.*?) +([\d.]+) +[\d.]+$")


def medians(checkout: Path, arguments: list[str]) -> dict[tuple[str, str], float]:
    """Run the benchmark of a checkout with its own code, and return the median of each line."""
    paths = os.pathsep.join(str(checkout / part) for part in ("core", "plugins/cache"))
    command = [sys.executable, str(checkout / "benchmarks" / "prefix_cache.py"), *arguments]
    output = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": paths}, text=True)
    found = (ROW.match(line) for line in output.splitlines())
    return {(match[1], match[2].strip()): float(match[3]) for match in found if match}


def compare(base: Path, arguments: list[str], rounds: int) -> None:
    """Print the ratio of this checkout's times to those of ``base``. Both run in turns; the least median counts."""
    own = Path(__file__).parents[1]
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(medians(base, arguments))
        ours.append(medians(own, arguments))
    print(f"page size  {'':44s}      base      here  (us)   ratio")
    for line in ours[0]:
        least = [min(run[line] for run in runs if line in run) for runs in (theirs, ours)]
        print(f"{line[0]:>9s}  {line[1]:44s} {least[0]:9.1f} {least[1]:9.1f}        {least[1] / least[0]:5.3f}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the prompt")
    parser.add_argument("--repeat", type=int, default=200, help="calls per line")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu does not count the time of other work"
    )
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each checkout with --base")
    args = parser.parse_args()
    if args.base is not None:
        shared = ["--tokens", str(args.tokens), "--repeat", str(args.repeat), "--clock", args.clock]
        compare(args.base, shared, args.rounds)
        return
    if args.clock == "cpu":
        Clock.now = time.thread_time_ns
    tables = {f"A prompt of {args.tokens} tokens": cases, "By nodes touched": by_nodes, "By size of the tree": by_size}
    for title, table in tables.items():
        heading(title)
        for page_size in (1, 16):
            table(page_size, args.tokens, args.repeat)


if __name__ == "__main__":
    main()
