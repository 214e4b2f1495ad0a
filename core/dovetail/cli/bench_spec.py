"""Define ``dovetail bench spec``, which measures speculative decoding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.sources import FileOptions, Json, Model, Sets, load, shortcuts

if TYPE_CHECKING:
    from dovetail.bench.records import LoadCall
    from dovetail.bench.spec import SpecRow
    from dovetail.config import Config


def spec(
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    methods: Annotated[
        str, typer.Option(help="Drafters separated by commas; the others are compared with the first.")
    ] = "none,ngram",
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Topics separated by commas: facts, arithmetic, extraction, sorting, tools, copy. All by default.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Use this JSONL file instead, with {"prompt": text} or {"messages": [...]}; docs/bench.md has the format.'
        ),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="The number of prompts of each workload.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="The number of prompts that run at the same time.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=1, help="The number of rounds over the same prompts; the fastest counts.")
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="The maximum number of tokens of each output.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The seed of the prompts and of sampling.")] = 0,
    adaptive: Annotated[
        bool,
        typer.Option(
            "--adaptive",
            help="Use drafters only while they increase the speed, as a server does; otherwise use them in every step.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure speculative decoding: accepted drafts and tokens per second, by method and workload. One engine runs
    after the other."""
    given = [*(sets or ()), *shortcuts({"model.path": model})]
    given.append(f"scheduler.draft={'adaptive' if adaptive else 'always'}")
    configs = {name: _config(files, given, name) for name in _names(methods)}
    from dovetail.bench.spec import measure_methods
    from dovetail.sampling_params import SamplingParams

    chosen = _workloads(_names(workloads or ""), prompts, count, seed)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    rows = list(measure_methods(configs, chosen, params, batch, rounds))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        _print(rows)


def _workloads(topics: list[str], file: Path | None, count: int, seed: int) -> dict[str, tuple[LoadCall, ...]]:
    from dovetail.bench.specs import TOPICS, JsonlSpec, parse_workload
    from dovetail.bench.workloads import make_workload
    from dovetail.errors import ConfigError

    if file is not None:
        return {file.stem: make_workload(JsonlSpec(path=file)).calls}
    for name in topics:
        if name not in TOPICS:
            raise ConfigError(f"workload {name!r} is unknown; allowed: {', '.join(TOPICS)}")
    specs = {name: parse_workload(f"{{kind: questions, topic: {name}, count: {count}}}") for name in topics or TOPICS}
    return {name: make_workload(spec, seed).calls for name, spec in specs.items()}


def _names(text: str) -> list[str]:
    """Return the names between commas, each once."""
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _config(files: list[Path] | None, sets: list[str], method: str) -> Config:
    """Return the config with this drafter, keeping the config's settings of that drafter.

    A method that cannot run is rejected here, before any method is measured.
    """
    from dovetail.registry import Machine, resolve

    config, registry = load(files, sets)
    if [candidate.kind for candidate in config.speculative.candidates] != [method]:
        others = [text for text in sets if not text.startswith("speculative")]
        config, registry = load(files, [*others, f"speculative={method}"])
    resolve(config, registry, Machine.detect(config.device))
    return config


def _print(rows: list[SpecRow]) -> None:
    from dovetail.cli.tables import add, console, table

    titles = "method", "workload", "length", "accepted", "per step", "tokens/s", "speed-up", "same"
    grid = table(*titles)  # short enough that no title wraps in 80 columns
    for index, row in enumerate(rows):
        drafted = row.drafted > 0
        if index and rows[index - 1].method != row.method:
            grid.add_section()
        add(
            grid,
            row.method,
            row.workload,
            f"{row.acceptance_length:.2f}" if drafted else "-",
            f"{row.acceptance_rate:.0%}" if drafted else "-",
            f"{row.tokens_per_step:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{row.speedup:.2f}",
            f"{row.same_outputs}/{row.prompts}",
        )
    console().print(grid)
    diverged = [row.divergence for row in rows if row.same_outputs < row.prompts]
    known = [each for each in diverged if each is not None]
    if known and len(known) == len(diverged):
        console().print(
            f"where outputs diverge, the log-probabilities of the two tokens differ by at most {max(known):.2g} nats"
        )
    failed = {row.method: sum(r.drafter_errors for r in rows if r.method == row.method) for row in rows}
    for method, errors in failed.items():
        if errors:
            console().print(f"{method} failed {errors} times; its requests continued without drafts", style="red")
