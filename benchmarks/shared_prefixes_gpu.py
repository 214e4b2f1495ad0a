"""Measure on one GPU what it saves to read a prefix that all rows share once: milliseconds per decode step with
``scheduler.shared_prefixes`` and without.

    python benchmarks/shared_prefixes_gpu.py [--model gemma-3-4b] [--rows 64] [--prefix 16384] [--json FILE]

The weights are random. All rows decode together in one engine, in which the two ways take turns, so that ratios do not depend on
the state of the device. Where prefixes are not read once, the engine leaves ``Batch.shared`` out as it does if the attention
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
from dovetail.generation.expansion import expand
from dovetail.registry.sharing import why_not_shared
from gpubench.models import shape, write

OWN = 100
"""The tokens of each prompt after the prefix."""
WARM = 12
"""Steps before each measurement, in which the step of this kind is captured."""


class Rows:
    """Hold an engine in which all rows decode. ``saved`` has the tokens that each step need not read in a layer of the first
    cache group."""

    def __init__(self, llm: dovetail.LLM, rows: int, prefix: int, tokens: int, vocab: int) -> None:
        executor: Any = llm.loop.executor
        self._loop, self.engine = llm.loop, executor.rank.engine
        if not self.engine.shares_prefixes:
            raise SystemExit(f"decode rows do not read shared prefixes once: {why_not_shared(llm.resolved)}")
        self.saved: list[int] = []
        launch = self.engine.launch

        def watched(batch: Any) -> Any:
            launched = launch(batch)
            self.saved.append(0 if batch.shared is None else batch.shared.saved)
            return launched

        self.engine.launch = watched
        rng = np.random.default_rng(0)
        stem = rng.integers(10, vocab - 10, prefix).tolist()
        params = dovetail.SamplingParams(temperature=0.6, max_new_tokens=tokens, ignore_eos=True, seed=0)
        for row in range(rows):
            prompt = stem + rng.integers(10, vocab - 10, OWN).tolist()
            self._loop.handle(expand(prompt, params, [str(row)])[0])
        while len(self._loop.scheduler.decoding) < rows or self._loop.scheduler.prefilling:
            self._loop.step()

    def milliseconds(self, steps: int, *, once: bool) -> float:
        """Return the time of a step. ``once``: prefixes are read once."""
        self.engine.shares_prefixes = once
        for _ in range(WARM):
            self._loop.step()
        start = time.perf_counter()
        for _ in range(steps):
            self._loop.step()
        return (time.perf_counter() - start) * 1e3 / steps


def measure(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield what is measured, with names."""
    steps = args.rounds * 2 * (args.steps + WARM) + 50
    with tempfile.TemporaryDirectory(prefix="dovetail-shared-") as folder:
        llm = dovetail.LLM(
            model={"path": str(write(args.model, Path(folder))), "load_format": "dummy"},
            device=args.device,
            grammar="none",
            memory={"kv_gib": args.kv_gib},
            scheduler={"max_running": args.rows},
            attention=args.attention,
        )
        rows = Rows(llm, args.rows, args.prefix, steps, shape(args.model)["vocab_size"])
        yield "attention", llm.resolved.attention_decode.spec.name
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.rounds):
            for once, times in found.items():
                begin = len(rows.saved)
                times.append(rows.milliseconds(args.steps, once=once))
                saved = set(rows.saved[begin + 1 :])  # a step may have been launched before
                least = (args.rows - 1) * (args.prefix - args.prefix % 16) if once else 0
                if min(saved) < least or (not once and max(saved) > 0):
                    raise SystemExit(
                        f"steps saved {sorted(saved)} tokens; expected: at least {least}, or 0 without sharing"
                    )
        yield "read once, ms", found[True]
        yield "read by each row, ms", found[False]
        yield "times faster", statistics.median(found[False]) / statistics.median(found[True])
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
