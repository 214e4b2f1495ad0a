"""Measure what token masks cost a step: filling them for the constrained rows of a batch of 64, and applying them to
the logits.

    python benchmarks/masks.py [--engines xgrammar,llguidance] [--vocabulary 4096,131072] [--device cuda] [--json FILE]

Every constrained row is at some position of its own JSON text under one schema, and advances by one token per step. The
table shows the median and the 99th percentile over the steps, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dovetail.interfaces.grammar import GrammarBackend, GrammarContext, Matcher
from dovetail.ops.bitmask import apply_bitmask, bitmask_width
from dovetail.ops.transfer import to_device
from dovetail.registry.specs import ComponentKind
from dovetail.registry.targets import load_attribute
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.tokenizer import Tokenizer
from grammarbench.runner import TINY, engine_names, registry
from grammarbench.vocabulary import tokenizer_of

BATCH, STEPS = 64, 60
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": COLOURS},
        "friends": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "since": {"type": "integer"}},
                "required": ["name", "since"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "age", "colour", "friends"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Hold the cost of one step's masks in microseconds."""

    engine: str
    vocabulary: int
    rows: int
    compile_ms: float
    fill: float
    fill_p99: float
    apply: float


def text_of(source: random.Random) -> str:
    """Return a random JSON text under the schema."""
    word = lambda: "".join(source.choices("abcdefghij klmnop", k=source.randint(3, 12))).strip() or "x"  # noqa: E731
    friends = [{"name": word(), "since": source.randint(1900, 2030)} for _ in range(8)]
    value = {"name": word(), "age": source.randint(0, 150), "colour": source.choice(COLOURS), "friends": friends}
    return json.dumps(value, separators=(",", ":"))


def build(name: str, tokenizer: Tokenizer, width: int) -> GrammarBackend:
    """Build the engine under its default config."""
    plugins = registry()
    component = plugins.get(ComponentKind.GRAMMAR, name)
    config = plugins.config_class(ComponentKind.GRAMMAR, name).model_validate({"kind": name})
    context = GrammarContext(width, tokenizer.token_bytes, tokenizer.eos_token_ids, tokenizer.json)
    return load_attribute(component.spec.target, component.label)(config, context)


def advance(matchers: Sequence[Matcher], texts: Sequence[Sequence[int]], place: int) -> None:
    """Let every row accept the next token of its text."""
    for matcher, ids in zip(matchers, texts, strict=True):
        assert matcher.accept(ids[place])


def microseconds(start: float) -> float:
    """Return the microseconds since ``start``."""
    return (time.perf_counter() - start) * 1e6


def measure(name: str, tokenizer: Tokenizer, device: torch.device) -> Iterator[Cost]:
    """Measure one engine with 1 and with 64 constrained rows."""
    width = -(-tokenizer.vocab_size // 64) * 64
    backend = build(name, tokenizer, width)
    start = time.perf_counter()
    compiled = backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    seconds = time.perf_counter() - start
    source = random.Random("masks")
    texts = [tokenizer.encode(text_of(source), add_special_tokens=False) for _ in range(BATCH)]
    for rows in (1, BATCH):
        matchers = [compiled.matcher() for _ in range(rows)]
        bitmask, logits = np.zeros((rows, bitmask_width(width)), np.int32), torch.zeros(BATCH, width, device=device)
        fills, applies = [], []
        for place in range(min(STEPS, *map(len, texts)) - 1):
            start = time.perf_counter()
            backend.fill_bitmasks(matchers, bitmask, range(rows))
            fills.append(microseconds(start))
            start = time.perf_counter()
            apply_bitmask(logits, to_device(bitmask, device), to_device(np.arange(rows), device))
            if device.type == "cuda":
                torch.cuda.synchronize()
            applies.append(microseconds(start))
            advance(matchers, texts[:rows], place)
        p99 = statistics.quantiles(fills, n=100)[98]
        yield Cost(name, width, rows, seconds * 1e3, statistics.median(fills), p99, statistics.median(applies))


def table(costs: Sequence[Cost]) -> Table:
    """Return the table that is printed."""
    out = Table(title=f"masks of a step with this number of constrained rows of {BATCH}, microseconds")
    for column in ("vocabulary", "engine", "rows", "compile ms", "fill", "fill p99", "apply"):
        out.add_column(column, justify="left" if column == "engine" else "right", no_wrap=True)
    for c in costs:
        numbers = (f"{c.compile_ms:.0f}", *(f"{x:,.0f}" for x in (c.fill, c.fill_p99, c.apply)))
        out.add_row(f"{c.vocabulary:,}", c.engine, str(c.rows), *numbers)
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(engine_names()))
    parser.add_argument("--vocabulary", default="4096,131072", help="sizes")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tiny, costs = Tokenizer.from_dir(TINY), list[Cost]()
    for size in map(int, args.vocabulary.split(",")):
        tokenizer = tokenizer_of(tiny, size)
        for name in args.engines.split(","):
            costs += measure(name, tokenizer, torch.device(args.device))
    Console().print(table(costs))
    if args.json:
        args.json.write_text(json.dumps([asdict(c) for c in costs], indent=1))


if __name__ == "__main__":
    main()
