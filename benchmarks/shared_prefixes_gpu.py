"""Measure on one GPU what it saves to read a prefix that all rows share once: milliseconds per decode step with
``scheduler.shared_prefixes`` and without.

    python benchmarks/shared_prefixes_gpu.py [--model gemma-3-4b] [--rows 64] [--prefix 16384] [--own 100] [--json FILE]

The weights are random. All rows decode together in one engine, in which the levels of ``engine.sharing.PrefixSharing`` take turns, so
that ratios do not depend on the state of the device: prefixes are read by each row, once in the first cache group, and once in
layers with large windows too. Where prefixes are not read once, the engine leaves ``Batch.shared`` out as it does if the attention
backend finds that it does not pay; the order of the rows is the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dovetail
from dovetail.engine.sharing import PrefixSharing
from dovetail.generation.expansion import expand
from dovetail.registry.sharing import why_not_shared
from gpubench.models import shape, write

WAYS = ("read by each row", "read once in the first group", "read once, windows too")
"""Name the levels of sharing."""
WARM = 12
"""Steps before each measurement, in which the step of this kind is captured."""


class Rows:
    """Hold an engine in which all rows decode. ``saved`` has the level of each step, and the tokens that need not be read in a layer
    of the first cache group."""

    def __init__(self, llm: dovetail.LLM, rows: int, prefix: int, own: int, tokens: int, vocab: int) -> None:
        executor: Any = llm.loop.executor
        self._loop, self.engine = llm.loop, executor.rank.engine
        if not self.engine.shares_prefixes:
            raise SystemExit(f"decode rows do not read shared prefixes once: {why_not_shared(llm.resolved)}")
        self.saved: list[tuple[int, int]] = []
        self._sharing, launch = self.engine.sharing, self.engine.launch

        def watched(batch: Any) -> Any:
            launched = launch(batch)
            self.saved.append((0, 0) if batch.shared is None else (batch.shared.level, batch.shared.saved))
            return launched

        self.engine.launch = watched
        rng = np.random.default_rng(0)
        stem = rng.integers(10, vocab - 10, prefix).tolist()
        params = dovetail.SamplingParams(temperature=0.6, max_new_tokens=tokens, ignore_eos=True, seed=0)
        for row in range(rows):
            prompt = stem + rng.integers(10, vocab - 10, own).tolist()
            self._loop.handle(expand(prompt, params, [str(row)])[0])
        while len(self._loop.scheduler.decoding) < rows or self._loop.scheduler.prefilling:
            self._loop.step()

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the levels of sharing that the engine has."""
        return self._sharing.levels

    def milliseconds(self, steps: int, level: int) -> float:
        """Return the time of a step of this level."""
        self.engine.sharing = PrefixSharing(self._sharing.windows, self._sharing.order[:level])
        for _ in range(WARM):
            self._loop.step()
        start = time.perf_counter()
        for _ in range(steps):
            self._loop.step()
        return (time.perf_counter() - start) * 1e3 / steps


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield what is measured, with names."""
    steps = args.rounds * 3 * (args.steps + WARM) + 50
    with tempfile.TemporaryDirectory(prefix="dovetail-shared-") as folder:
        llm = dovetail.LLM(
            model={"path": str(write(args.model, Path(folder))), "load_format": "dummy"},
            device=args.device,
            grammar="none",
            memory={"kv_gib": args.kv_gib},
            scheduler={"max_running": args.rows},
            attention=args.attention,
        )
        rows = Rows(llm, args.rows, args.prefix, args.own, steps, shape(args.model)["vocab_size"])
        yield "attention", llm.resolved.attention_decode.spec.name
        found: dict[int, list[float]] = {level: [] for level in rows.levels}
        saved: dict[int, list[int]] = {level: [] for level in rows.levels}
        for _ in range(args.rounds):
            for level, times in found.items():
                begin = len(rows.saved)
                times.append(rows.milliseconds(args.steps, level))
                seen = rows.saved[begin + 1 :]  # a step may have been launched before
                saved[level] += [tokens for _, tokens in seen]
                if {each for each, _ in seen} != {level}:
                    raise SystemExit(f"steps had the levels {sorted({each for each, _ in seen})}, not {level}")
        for level, times in found.items():
            yield f"{WAYS[level]}, ms", times
            yield "  tokens not read", [min(saved[level]), max(saved[level])]
            yield "  times faster", statistics.median(found[0]) / statistics.median(times)
        yield (
            "graphs",
            sorted({(key.rows, key.shared) for key in rows.engine.graphs._graphs}) if rows.engine.graphs else [],
        )


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    add = parser.add_argument
    add("--model", default="gemma-3-4b")
    add("--rows", type=int, default=64)
    add("--prefix", type=int, default=16384)
    add("--own", type=int, default=100, help="tokens of each prompt after the prefix")
    add("--steps", type=int, default=40)
    add("--rounds", type=int, default=3)
    add("--kv-gib", type=float, default=16.0)
    add("--attention", default="auto")
    add("--device", default="auto")
    add("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    args = arguments()
    result: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{args.model}, {args.rows} rows that share {args.prefix} tokens, {result['device']}", flush=True)
    for name, value in measure(args):
        result[name] = value
        rounded = [round(each, 3) for each in value] if "ms" in name else value
        print(f"{name:24} {rounded}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({**result, "arguments": {k: str(v) for k, v in vars(args).items()}}, indent=1))


if __name__ == "__main__":
    main()
